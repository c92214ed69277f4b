"""Layers, losses and activations, each as a small program for any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from operator_inputs import Inputs, Program, applied, of_one, twice_differentiated
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def _binary(loss: Callable[..., torch.Tensor], **options: Any) -> Program:
    """Applies a loss to an input and a target of the same shape."""
    return lambda i: loss(i.rand(4, 3), i.rand(4, 3), **options)


def _classes(loss: Callable[..., torch.Tensor], **options: Any) -> Program:
    return lambda i: loss(i.rand(4, 3), i.ints(3, 4), **options)


def _lstm_packed(i: Inputs) -> Any:
    packed = pack_padded_sequence(i.rand(5, 3, 4), torch.tensor([5, 3, 2]))
    result, state = i.module(lambda: nn.LSTM(4, 6))(packed)
    return [pad_packed_sequence(result)[0], state]


PROGRAMS: dict[str, Program] = {
    # ---- convolutions
    "conv1d": lambda i: F.conv1d(i.rand(2, 3, 9), i.rand(4, 3, 3), i.rand(4), stride=2),
    "conv2d": lambda i: F.conv2d(i.rand(2, 3, 8, 7), i.rand(4, 3, 3, 3), i.rand(4), padding=1),
    "conv2d, no bias": lambda i: F.conv2d(i.rand(2, 3, 8, 7), i.rand(4, 3, 3, 3), padding="same"),
    "conv2d, grouped": lambda i: F.conv2d(i.rand(2, 4, 6, 6), i.rand(8, 1, 3, 3), groups=4),
    "conv2d, dilated": lambda i: F.conv2d(i.rand(3, 8, 8), i.rand(4, 3, 3, 3), dilation=2),
    "conv2d, channels_last": lambda i: F.conv2d(
        i.rand(2, 3, 8, 8).to(memory_format=torch.channels_last), i.rand(4, 3, 3, 3)
    ),
    "conv3d": lambda i: F.conv3d(i.rand(1, 2, 4, 5, 5), i.rand(3, 2, 2, 2, 2), i.rand(3)),
    "conv_transpose1d": lambda i: F.conv_transpose1d(i.rand(2, 3, 5), i.rand(3, 4, 3), i.rand(4)),
    "conv_transpose2d": lambda i: F.conv_transpose2d(
        i.rand(2, 3, 5, 5), i.rand(3, 4, 3, 3), stride=2
    ),
    "conv_transpose3d": lambda i: F.conv_transpose3d(i.rand(1, 2, 3, 3, 3), i.rand(2, 2, 2, 2, 2)),
    "conv2d, of no elements": lambda i: F.conv2d(i.rand(0, 3, 8, 8), i.rand(4, 3, 3, 3)),
    "conv2d, twice differentiated": twice_differentiated(lambda: nn.Conv2d(2, 3, 3), 1, 2, 5, 5),
    "unfold, fold": lambda i: F.fold(F.unfold(i.rand(1, 2, 6, 6), 3), (6, 6), 3),
    "pixel_shuffle": lambda i: F.pixel_unshuffle(F.pixel_shuffle(i.rand(1, 8, 3, 3), 2), 2),
    # ---- normalisation
    "batch_norm1d": applied(lambda: nn.BatchNorm1d(4), 6, 4),
    "batch_norm2d": applied(lambda: nn.BatchNorm2d(3), 2, 3, 5, 5),
    "batch_norm2d, eval": applied(lambda: nn.BatchNorm2d(3).eval(), 2, 3, 5, 5),
    "group_norm": applied(lambda: nn.GroupNorm(2, 4), 2, 4, 5, 5),
    "instance_norm": applied(lambda: nn.InstanceNorm2d(3, affine=True), 2, 3, 5, 5),
    "layer_norm": applied(lambda: nn.LayerNorm(6), 2, 4, 6),
    "rms_norm": applied(lambda: nn.RMSNorm(6), 2, 4, 6),
    "local_response_norm": of_one(F.local_response_norm, 2, 5, 3, 3, size=3),
    "normalize": of_one(F.normalize),
    "weight_norm": applied(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), 2, 3),
    "spectral_norm": applied(
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), 2, 3
    ),
    # ---- pooling and sampling
    "max_pool1d": of_one(F.max_pool1d, 2, 3, 8, kernel_size=2),
    "max_pool2d, indices": lambda i: F.max_pool2d(i.rand(2, 3, 8, 8), 2, return_indices=True),
    "max_unpool2d": lambda i: F.max_unpool2d(
        *F.max_pool2d(i.rand(2, 3, 8, 8), 2, return_indices=True), 2
    ),
    "max_pool3d": of_one(F.max_pool3d, 1, 2, 4, 4, 4, kernel_size=2),
    "avg_pool1d": of_one(F.avg_pool1d, 2, 3, 8, kernel_size=2),
    "avg_pool2d": of_one(F.avg_pool2d, 2, 3, 8, 8, kernel_size=2),
    "avg_pool3d": of_one(F.avg_pool3d, 1, 2, 4, 4, 4, kernel_size=2),
    "adaptive_avg_pool2d": of_one(F.adaptive_avg_pool2d, 2, 3, 7, 7, output_size=(2, 3)),
    "adaptive_max_pool2d": of_one(F.adaptive_max_pool2d, 2, 3, 7, 7, output_size=2),
    "lp_pool2d": of_one(F.lp_pool2d, 2, 3, 8, 8, norm_type=2.0, kernel_size=2),
    **{
        f"interpolate, {mode}": of_one(F.interpolate, 2, 3, 6, 6, scale_factor=1.5, mode=mode)
        for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
    },
    "interpolate, antialiased": of_one(
        F.interpolate, 2, 3, 6, 6, size=(3, 4), mode="bilinear", antialias=True
    ),
    "grid_sample": lambda i: F.grid_sample(
        i.rand(2, 3, 5, 5), i.rand(2, 4, 4, 2) * 2 - 1.2, align_corners=False
    ),
    "affine_grid": lambda i: F.affine_grid(i.rand(2, 2, 3), [2, 3, 4, 4], align_corners=True),
    **{
        f"pad, {mode}": of_one(F.pad, 1, 2, 5, 5, pad=(1, 2, 2, 1), mode=mode)
        for mode in ("constant", "reflect", "replicate", "circular")
    },
    # ---- embeddings, recurrence, attention
    "embedding": lambda i: F.embedding(i.ints(7, 3, 2), i.rand(7, 4), padding_idx=0),
    **{
        f"embedding_bag, {mode}": lambda i, mode=mode: F.embedding_bag(
            i.ints(7, 6), i.rand(7, 4), torch.tensor([0, 2, 2], device=i.device), mode=mode
        )
        for mode in ("sum", "mean", "max")
    },
    "one_hot": lambda i: F.one_hot(i.ints(5, 3), 5),
    "rnn": applied(lambda: nn.RNN(3, 4, 2), 5, 2, 3),
    "lstm": applied(lambda: nn.LSTM(3, 4, 2, batch_first=True), 2, 5, 3),
    "lstm, both directions, projected": applied(
        lambda: nn.LSTM(3, 4, bidirectional=True, proj_size=2), 5, 2, 3
    ),
    "lstm, no bias": applied(lambda: nn.LSTM(3, 4, bias=False), 5, 2, 3),
    "lstm, packed": _lstm_packed,
    "lstm, state given": lambda i: i.module(lambda: nn.LSTM(3, 4))(
        i.rand(5, 2, 3), (i.rand(1, 2, 4), i.rand(1, 2, 4))
    ),
    "lstm, only its memory used": lambda i: i.module(lambda: nn.LSTM(3, 4))(i.rand(5, 2, 3))[1][1],
    "lstm, twice differentiated": twice_differentiated(lambda: nn.LSTM(3, 4), 4, 2, 3),
    "lstm cell": lambda i: i.module(lambda: nn.LSTMCell(3, 4))(i.rand(2, 3)),
    "gru": applied(lambda: nn.GRU(3, 4, 2, batch_first=True), 2, 5, 3),
    "gru, both directions": applied(lambda: nn.GRU(3, 4, bidirectional=True), 5, 2, 3),
    "gru, no bias": applied(lambda: nn.GRU(3, 4, bias=False), 5, 2, 3),
    "gru, twice differentiated": twice_differentiated(lambda: nn.GRU(3, 4), 4, 2, 3),
    "gru cell": lambda i: i.module(lambda: nn.GRUCell(3, 4))(i.rand(2, 3), i.rand(2, 4)),
    "transformer layer": applied(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, 5, 8
    ),
    "transformer layer, eval": applied(
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False),
        2,
        5,
        8,
    ),
    "multihead attention": lambda i: i.module(lambda: nn.MultiheadAttention(8, 2))(
        *[i.rand(5, 2, 8) for _ in range(3)]
    ),
    "attention": lambda i: F.scaled_dot_product_attention(*[i.rand(1, 2, 5, 8) for _ in range(3)]),
    "attention, causal": lambda i: F.scaled_dot_product_attention(
        *[i.rand(1, 2, 5, 8) for _ in range(3)], is_causal=True
    ),
    "attention, masked": lambda i: F.scaled_dot_product_attention(
        *[i.rand(1, 2, 5, 8) for _ in range(3)],
        attn_mask=torch.ones(5, 5, device=i.device).tril().bool(),
    ),
    # ---- activations
    **{
        function.__name__: of_one(function)
        for function in (
            F.relu,
            F.leaky_relu,
            F.elu,
            F.selu,
            F.gelu,
            F.silu,
            F.mish,
            F.softplus,
            F.hardtanh,
            F.hardswish,
            F.hardsigmoid,
            F.softsign,
            F.logsigmoid,
            torch.sigmoid,
            torch.tanh,
            torch.erf,
            torch.exp,
            torch.expm1,
            torch.log,
            torch.log1p,
            torch.sqrt,
            torch.rsqrt,
            torch.lgamma,
            torch.digamma,
            torch.sin,
            torch.atan,
            torch.reciprocal,
            torch.logit,
            torch.round,
            torch.frac,
            torch.square,
            torch.std,
            torch.var,
            torch.prod,
            torch.amax,
            torch.triu,
            torch.nan_to_num,
            torch.cov,
            torch.corrcoef,
            torch.pdist,
        )
    },
    "softmax": lambda i: [F.softmax(i.rand(3, 4), 1), F.log_softmax(i.rand(3, 4), 0)],
    "gumbel_softmax": lambda i: F.gumbel_softmax(i.rand(3, 4), hard=True),
    "glu, prelu": lambda i: [F.glu(i.rand(2, 4)), F.prelu(i.rand(2, 3) - 0.5, i.rand(3))],
    # ---- losses
    **{
        f"{loss.__name__}, {reduction}": _binary(loss, reduction=reduction)
        for loss in (
            F.mse_loss,
            F.l1_loss,
            F.smooth_l1_loss,
            F.huber_loss,
            F.poisson_nll_loss,
            F.binary_cross_entropy_with_logits,
        )
        for reduction in ("none", "mean", "sum")
    },
    "soft_margin_loss": lambda i: F.soft_margin_loss(i.rand(3, 4), i.bools(3, 4) * 2.0 - 1),
    "kl_div": _binary(F.kl_div, reduction="batchmean"),
    "binary_cross_entropy": lambda i: F.binary_cross_entropy(
        i.rand(3, 2).sigmoid(), i.bools(3, 2).float(), i.rand(3, 2, grad=False)
    ),
    "cross_entropy": _classes(F.cross_entropy, label_smoothing=0.1),
    "cross_entropy, images": lambda i: F.cross_entropy(
        i.rand(2, 3, 4, 4), i.ints(3, 2, 4, 4), i.rand(3, grad=False), ignore_index=1
    ),
    "cross_entropy, probabilities": lambda i: F.cross_entropy(
        i.rand(3, 4), i.rand(3, 4, grad=False)
    ),
    "nll_loss": lambda i: F.nll_loss(i.rand(4, 3).log_softmax(1), i.ints(3, 4)),
    "multi_margin_loss": _classes(F.multi_margin_loss),
    "multilabel_margin_loss": lambda i: F.multilabel_margin_loss(i.rand(3, 4), i.ints(4, 3, 4)),
    "multilabel_soft_margin_loss": lambda i: F.multilabel_soft_margin_loss(
        i.rand(3, 4), i.bools(3, 4).float()
    ),
    "ctc_loss": lambda i: F.ctc_loss(
        i.rand(6, 2, 5).log_softmax(2),
        i.ints(4, 2, 3) + 1,
        torch.tensor([6, 5]),
        torch.tensor([3, 2]),
    ),
    "gaussian_nll_loss": lambda i: F.gaussian_nll_loss(*[i.rand(3, 4) for _ in range(3)]),
    "cosine losses": lambda i: [
        F.cosine_embedding_loss(i.rand(3, 4), i.rand(3, 4), torch.ones(3, device=i.device)),
        F.cosine_similarity(i.rand(3, 4), i.rand(3, 4)),
        F.hinge_embedding_loss(i.rand(3), torch.ones(3, device=i.device)),
        F.margin_ranking_loss(i.rand(3), i.rand(3), torch.ones(3, device=i.device)),
        F.triplet_margin_loss(i.rand(3, 4), i.rand(3, 4), i.rand(3, 4)),
        F.pairwise_distance(i.rand(3, 4), i.rand(3, 4)),
    ],
}
