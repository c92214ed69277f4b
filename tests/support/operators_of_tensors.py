"""Methods of tensors, random numbers and training steps, as small programs for any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from operator_inputs import Inputs, Program
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def _steps(make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> Program:
    """Takes three steps of an optimizer. The parameters are the result."""

    def program(i: Inputs) -> Any:
        model = i.module(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
        optimizer = make(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(i.rand(5, 3, grad=False)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        result = [parameter.detach().clone() for parameter in model.parameters()]
        i.leaves.clear()  # their gradients are those of the last step
        return result

    return program


def _changed(change: Callable[[torch.Tensor, Inputs], Any], *shape: int) -> Program:
    """Changes a tensor that autograd knows, in place."""

    def program(i: Inputs) -> torch.Tensor:
        made = i.rand(*shape) * 1
        change(made, i)
        return made

    return program


def _embedding_sparse(i: Inputs) -> Any:
    weight = i.module(lambda: nn.Embedding(10, 3, sparse=True))
    optimizer = torch.optim.SparseAdam(weight.parameters(), lr=0.1)
    weight(torch.tensor([1, 5, 5], device=i.device)).sum().backward()
    optimizer.step()
    gradient = weight.weight.grad
    i.leaves.clear()
    return [weight.weight.detach().clone(), gradient.to_dense()]


def _scaled_steps(i: Inputs) -> Any:
    model = i.module(lambda: nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(i.device.split(":")[0], init_scale=8.0, growth_interval=1)
    for value in (1.0, float("inf"), 2.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 3), value, device=i.device)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    i.leaves.clear()
    return [
        *[leaf.detach().clone() for leaf in model.parameters()],
        torch.tensor(scaler.get_scale(), device=i.device),
    ]


def _solve(i: Inputs) -> Any:
    matrix = i.rand(3, 3, 3) + 3 * torch.eye(3, device=i.device)
    symmetric = matrix @ matrix.mT
    return [
        torch.linalg.inv(matrix),
        torch.linalg.solve(matrix, i.rand(3, 3, 2)),
        torch.linalg.svdvals(matrix),
        torch.linalg.cholesky(symmetric),
        torch.linalg.eigvalsh(symmetric),
        torch.linalg.det(matrix),
        torch.linalg.norm(matrix),
        torch.linalg.qr(matrix).R.abs(),
        torch.linalg.lstsq(matrix, i.rand(3, 3, 2)).solution,
        torch.linalg.pinv(matrix),
        torch.linalg.matrix_exp(matrix / 8),
    ]


def _compressed(part: torch.Tensor, i: Inputs) -> Any:
    return [
        part.to_dense(),
        part @ i.rand(4, 2, grad=False),
        part.values(),
        (part * 2).to_dense(),
        part.to_sparse().coalesce().indices(),
    ]


PROGRAMS: dict[str, Program] = {
    # ---- arithmetic and reductions
    "a host's number first": lambda i: [
        torch.tensor(2.0) * i.rand(3),
        torch.tensor(1.0) - i.rand(3),
    ],
    "matmul": lambda i: [
        i.rand(2, 3, 4) @ i.rand(4, 2),
        torch.addmm(i.rand(3), i.rand(2, 4), i.rand(4, 3)),
    ],
    "einsum": lambda i: torch.einsum("bij,bjk,k->bi", i.rand(2, 3, 4), i.rand(2, 4, 5), i.rand(5)),
    "cumulative": lambda i: [
        i.rand(3, 4).cumsum(1),
        i.rand(3, 4).cumprod(0),
        i.rand(3, 4).cummax(1),
        i.rand(3, 4).logcumsumexp(1),
        i.rand(3, 4).logsumexp(1),
        i.rand(3, 4).diff(),
    ],
    "sorted": lambda i: [
        i.rand(3, 5).sort(1, descending=True),
        i.rand(3, 5).topk(2),
        i.rand(3, 5).median(1),
        i.rand(3, 5).kthvalue(2),
        i.rand(9).quantile(0.3),
        i.rand(3, 5).argsort(1),
        i.rand(3, 5).max(1),
        i.rand(5).argmax(),
        i.rand(3, 5).mode(1),
        torch.searchsorted(i.rand(5).detach().sort()[0], i.rand(3)),
        torch.bucketize(i.rand(3), torch.linspace(0, 1, 4, device=i.device)),
    ],
    "chosen": lambda i: [
        torch.where(i.bools(3, 4), i.rand(3, 4), i.rand(3, 4)),
        i.rand(3, 4).clamp(0.2, 0.8),
        torch.minimum(i.rand(3), i.rand(3)),
        torch.lerp(i.rand(3), i.rand(3), 0.3),
        i.rand(3, 4).masked_fill(i.bools(3, 4), 5.0),
        torch.isclose(i.rand(3), i.rand(3)),
        torch.cdist(i.rand(3, 4), i.rand(2, 4)),
        torch.aminmax(i.rand(3, 4).detach(), dim=1),
    ],
    "linear algebra": _solve,
    "fft": lambda i: [
        torch.fft.fft(i.rand(8)).abs(),
        torch.fft.irfft(torch.fft.rfft(i.rand(2, 8))),
        torch.fft.fftshift(torch.fft.fft2(i.rand(4, 4))).real,
        torch.stft(
            i.rand(64), 16, window=torch.hann_window(16, device=i.device), return_complex=True
        ).abs(),
    ],
    "counted": lambda i: [
        torch.bincount(i.ints(4, 9)),
        torch.histc(i.rand(20, grad=False), 5, 0, 1.2),
        i.bools(3, 4).count_nonzero(),
    ],
    "complex": lambda i: torch.view_as_real(torch.complex(i.rand(3), i.rand(3)).conj() * (1 + 2j)),
    # ---- indexing, and shapes that depend on data
    "unique": lambda i: [
        torch.unique(i.ints(4, 9), return_inverse=True, return_counts=True),
        torch.unique_consecutive(i.ints(2, 9)),
        torch.unique(i.ints(2, 6, 2), dim=0),
    ],
    "nonzero": lambda i: [i.bools(3, 4).nonzero(), i.bools(5).nonzero(as_tuple=True)],
    "masked_select": lambda i: [i.rand(3, 4)[i.bools(3, 4)], i.rand(5).masked_select(i.bools(5))],
    "gather": lambda i: [
        i.rand(3, 4).gather(1, i.ints(4, 3, 2)),
        i.rand(5, 2).index_select(0, i.ints(5, 3)),
        i.rand(4, 3)[i.ints(4, 2), i.ints(3, 2)],
        i.rand(3, 4).take_along_dim(i.ints(4, 3, 1), 1),
        i.rand(6).take(i.ints(6, 3)),
        i.rand(2, 3).repeat_interleave(2, 1),
        i.rand(2, 3).flip(1).roll(1, 0),
    ],
    "scatter_": _changed(lambda x, i: x.scatter_(1, i.ints(4, 3, 1), i.rand(3, 1)), 3, 4),
    "scatter_add_": _changed(lambda x, i: x.scatter_add_(1, i.ints(4, 3, 2), i.rand(3, 2)), 3, 4),
    "scatter_reduce_": _changed(
        lambda x, i: x.scatter_reduce_(1, i.ints(4, 3, 2), i.rand(3, 2), "amax"), 3, 4
    ),
    "index_add_": _changed(lambda x, i: x.index_add_(0, i.ints(4, 3), i.rand(3, 2)), 4, 2),
    "index_copy_": _changed(
        lambda x, i: x.index_copy_(0, torch.tensor([2, 0], device=i.device), i.rand(2, 2)), 4, 2
    ),
    "index_put_": _changed(
        lambda x, i: x.index_put_((i.ints(4, 3),), i.rand(3, 2), accumulate=True), 4, 2
    ),
    "index_fill_": _changed(lambda x, i: x.index_fill_(0, i.ints(4, 2), 3.0), 4, 2),
    "masked_scatter_": _changed(lambda x, i: x.masked_scatter_(i.bools(4, 2), i.rand(4, 2)), 4, 2),
    "a slice is changed": _changed(lambda x, i: x[:, 1:].mul_(2).add_(i.rand(4, 2)), 4, 3),
    "swapped, stacked": lambda i: [
        torch.cat([i.rand(2, 3), i.rand(1, 3)]),
        torch.stack([i.rand(2), i.rand(2)], 1),
        torch.block_diag(i.rand(2, 2), i.rand(1, 3)),
        torch.kron(i.rand(2, 2), i.rand(2, 2)),
        i.rand(2, 3, 4).permute(2, 0, 1).flatten(1),
        i.rand(2, 3).tile(2, 2),
        i.rand(4, 4).diagonal(),
        torch.meshgrid(i.rand(2), i.rand(3), indexing="ij"),
        torch.cartesian_prod(i.rand(2), i.rand(2)),
        i.rand(2, 6).unflatten(1, (2, 3)).movedim(0, 2),
        torch.tensor_split(i.rand(7), 3),
    ],
    "out=": lambda i: [
        torch.add(i.rand(3, grad=False), 1, out=torch.empty(3, device=i.device)),
        torch.matmul(
            i.rand(2, 3, grad=False), i.rand(3, 2, grad=False), out=torch.empty(0, device=i.device)
        ),
        torch.topk(
            i.rand(5, grad=False),
            2,
            out=(
                torch.empty(0, device=i.device),
                torch.empty(0, device=i.device, dtype=torch.long),
            ),
        ),
    ],
    # ---- random
    "dropout": lambda i: [F.dropout(i.rand(20), 0.4), F.dropout2d(i.rand(2, 8, 2, 2), 0.4)],
    "feature_alpha_dropout": lambda i: F.alpha_dropout(i.rand(20), 0.4),
    "rrelu": lambda i: F.rrelu(i.rand(20) - 0.5, training=True),
    "drawn": lambda i: [
        torch.rand(3, device=i.device),
        torch.randn(3, device=i.device),
        torch.randint(9, (3,), device=i.device),
        torch.randperm(9, device=i.device),
        torch.bernoulli(i.rand(9, grad=False) / 2),
        torch.multinomial(i.rand(9, grad=False), 4),
        torch.normal(i.rand(3, grad=False), 0.1),
        torch.poisson(i.rand(5, grad=False) * 9),
        torch.empty(5, device=i.device).exponential_(),
        torch.randn_like(i.rand(3)),
    ],
    "drawn with a generator": lambda i: [
        torch.rand(3, device=i.device, generator=i.generator()),
        torch.randn(3, device=i.device, generator=i.generator()),
        torch.randint(9, (3,), device=i.device, generator=i.generator()),
        torch.randperm(9, device=i.device, generator=i.generator()),
        torch.bernoulli(i.rand(9, grad=False) / 2, generator=i.generator()),
        torch.multinomial(i.rand(9, grad=False), 4, generator=i.generator()),
        torch.empty(5, device=i.device).uniform_(-1, 1, generator=i.generator()),
        nn.init.orthogonal_(torch.empty(3, 3, device=i.device), generator=i.generator()),
    ],
    "made": lambda i: [
        torch.arange(5, device=i.device),
        torch.linspace(0, 1, 4, device=i.device),
        torch.eye(3, device=i.device),
        torch.full((2,), 7, device=i.device),
        torch.tril_indices(3, 3, device=i.device),
        torch.ones_like(i.rand(2)).new_zeros(3),
        torch.complex(*[i.rand(2, grad=False) for _ in range(2)]),
        torch.hamming_window(4, device=i.device),
    ],
    "distributions": lambda i: [
        torch.distributions.Normal(i.rand(3), i.rand(3)).rsample(),
        torch.distributions.Categorical(logits=i.rand(2, 3)).sample(),
        torch.distributions.Beta(i.rand(3), i.rand(3)).log_prob(i.rand(3) / 2),
        torch.distributions.kl_divergence(
            torch.distributions.Normal(i.rand(3), i.rand(3)),
            torch.distributions.Normal(i.rand(3), i.rand(3)),
        ),
        torch.distributions.MultivariateNormal(i.rand(2), torch.eye(2, device=i.device)).log_prob(
            i.rand(2)
        ),
    ],
    # ---- training
    **{
        f"{kind.__name__}{options}": _steps(
            lambda parameters, kind=kind, options=options: kind(parameters, lr=0.05, **options)
        )
        for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
        for options in ({}, {"foreach": True}, {"fused": True})
    },
    "SGD with momentum": _steps(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    "RMSprop": _steps(lambda p: torch.optim.RMSprop(p, 0.1, foreach=True)),
    "NAdam": _steps(lambda p: torch.optim.NAdam(p, 0.1)),
    "GradScaler": _scaled_steps,
    "checkpoint": lambda i: checkpoint(
        i.module(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3))),
        i.rand(5, 3),
        use_reentrant=False,
    ),
    "checkpoint, reentrant": lambda i: checkpoint(
        i.module(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3))),
        i.rand(5, 3),
        use_reentrant=True,
    ),
    "forward mode": lambda i: torch.func.jvp(
        lambda x: F.gelu(x) @ x.mT, (i.rand(3, 3, grad=False),), (i.rand(3, 3, grad=False),)
    ),
    "vmap of grad": lambda i: torch.func.vmap(torch.func.grad(lambda x: (x**3).sum()))(
        i.rand(3, 2, grad=False)
    ),
    "foreach": lambda i: [
        torch._foreach_add([i.rand(2), i.rand(3)], 1.0),
        torch._foreach_norm([i.rand(2), i.rand(3)]),
        torch._foreach_lerp([i.rand(2)], [i.rand(2)], 0.5),
    ],
    "nested, jagged": lambda i: (
        torch.nested.nested_tensor(
            [i.rand(2, 3, grad=False), i.rand(4, 3, grad=False)], layout=torch.jagged
        )
        .mul(2)
        .values()
    ),
    # ---- sparse
    "embedding, sparse gradient": _embedding_sparse,
    "sparse COO": lambda i: [
        (i.rand(3, 3) * torch.eye(3, device=i.device)).to_sparse().to_dense(),
        torch.sparse.mm(torch.eye(3, device=i.device).to_sparse(), i.rand(3, 2)),
        torch.sparse_coo_tensor([[0, 1, 1], [1, 0, 0]], i.rand(3), (2, 2), device=i.device)
        .coalesce()
        .values(),
        torch.sparse.sum(torch.eye(3, device=i.device).to_sparse() * 2),
        (
            torch.eye(3, device=i.device).to_sparse() + torch.eye(3, device=i.device).to_sparse()
        ).to_dense(),
    ],
    "sparse CSR": lambda i: _compressed(i.rand(4, 4).tril().to_sparse_csr(), i),
    "sparse CSC": lambda i: _compressed(i.rand(4, 4, grad=False).tril().to_sparse_csc(), i),
    "sparse BSR": lambda i: _compressed(i.rand(4, 4, grad=False).tril().to_sparse_bsr((2, 2)), i),
}
