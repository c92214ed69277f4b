"""A perception model trains on the simulated device, and mistakes around it are found."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from sim_support import fresh as fresh
from sim_support import hazards_of, pinned
from torch import nn
from torch.nn import functional as F

import tdcopier

pytestmark = pytest.mark.sim


class Detector(nn.Module):
    """Predicts a class and a box for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.classes = nn.Linear(32, 5)
        self.boxes = nn.Linear(32, 4)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.backbone(images).flatten(1)
        return self.classes(features), self.boxes(features)


def batches() -> list[dict[str, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(0)
    return [
        {
            "images": torch.rand(4, 3, 16, 16, generator=numbers),
            "labels": torch.randint(5, (4,), generator=numbers),
            "boxes": torch.rand(4, 4, generator=numbers),
        }
        for _ in range(3)
    ]


def train(device: str, make: type[torch.optim.Optimizer], low: torch.dtype | None) -> list[float]:
    """Returns the losses, and the sum of the weights at the end."""
    torch.manual_seed(1)
    model = Detector().to(device)
    optimizer = make(model.parameters(), lr=0.05)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, enabled=low is torch.float16)
    losses = []
    for batch in tdcopier.prefetch(batches(), device):
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=low, enabled=low is not None):
            logits, boxes = model(batch["images"])
            assert logits.dtype == (low or torch.float32)
            loss = F.cross_entropy(logits.float(), batch["labels"])
            loss = loss + F.smooth_l1_loss(boxes.float(), batch["boxes"])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return [*losses, sum(part.sum().item() for part in model.state_dict().values())]


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_training_gives_the_losses_of_the_host(
    sim: ModuleType, make: type[torch.optim.Optimizer], low: torch.dtype | None
) -> None:
    with sim.poison(), sim.detect():
        losses = train("sim:0", make, low)
    tolerance = 1e-5 if low is None else 2e-2
    assert losses == pytest.approx(train("cpu", make, low), rel=tolerance)


def test_autocast_chooses_as_on_cuda(sim: ModuleType) -> None:
    a = torch.rand(2, 3, device="sim")
    image = torch.rand(1, 3, 4, 4, device="sim")
    weight = torch.rand(2, 3, 2, 2, device="sim")
    cell = nn.LSTM(3, 4).to("sim")
    with torch.autocast("sim"):
        assert (a @ a.t()).dtype == torch.float16
        assert F.conv2d(image, weight).dtype == torch.float16
        assert cell(a)[0].dtype == torch.float16
        assert a.half().softmax(1).dtype == torch.float32
        assert F.mse_loss(a.half(), a.half()).dtype == torch.float32
        assert torch.addcmul(a, a.half(), a.half()).dtype == torch.float32
        assert torch.norm(a.half()).dtype == torch.float32
        assert (a + a).dtype == torch.float32
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(a, a)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a.t()).dtype == torch.float32
    with torch.autocast("sim"):
        assert (torch.rand(2, 2) @ torch.rand(2, 2)).dtype == torch.float32


def unready(sim: ModuleType, consume: Callable[[torch.Tensor], object]) -> str:
    """Uses a batch without waiting for the stream that copies it. Returns what is found."""
    source = torch.rand(1, 3, 8, 8).pin_memory()
    side = torch.sim.Stream()

    def program() -> None:
        with torch.sim.stream(side):
            images = source.to("sim", non_blocking=True)
        images.record_stream(torch.sim.current_stream())
        consume(images)

    return " ".join(hazard.message for hazard in hazards_of(sim, program))


@pytest.mark.hazardous
def test_a_batch_that_is_used_too_early_is_found_in_any_operator(sim: ModuleType) -> None:
    conv = nn.Conv2d(3, 4, 3).to("sim")
    lstm = nn.LSTM(8, 4).to("sim")
    assert "the operator aten::convolution" in unready(sim, conv)
    assert "the operator aten::" in unready(sim, lambda images: lstm(images[0]))
    assert "the operator aten::mse_loss" in unready(sim, lambda x: F.mse_loss(x, x))
    assert "the operator aten::_to_sparse" in unready(sim, lambda x: x.to_sparse())


def test_operators_are_no_transfers(sim: ModuleType) -> None:
    conv = nn.Conv2d(3, 4, 3).to("sim")
    lstm = nn.LSTM(8, 4).to("sim")
    images = torch.rand(1, 3, 8, 8, device="sim", requires_grad=True)
    sparse = torch.eye(3, device="sim").to_sparse()
    sim.reset_counts()
    (conv(images).sum() + lstm(images[0])[0].sum()).backward()
    torch.sparse.mm(sparse, sparse.to_dense())
    counts = sim.counts()
    assert (counts.h2d.transfers, counts.d2h.transfers, counts.d2d.transfers) == (0, 0, 0)
    conv(pinned(*[0.5] * 48).view(1, 3, 4, 4).to("sim", non_blocking=True)).cpu()
    assert (sim.counts().h2d.transfers, sim.counts().d2h.transfers) == (1, 1)


def test_a_backward_waits_for_no_other_stream_and_runs_on_that_of_its_forward(
    sim: ModuleType,
) -> None:
    conv = nn.Conv2d(1, 1, 1, bias=False).to("sim")
    side = torch.sim.Stream()
    with sim.hold(), torch.sim.stream(side):
        image = torch.full((1, 1, 2, 2), 3.0).pin_memory().to("sim", non_blocking=True)
        conv(image).sum().backward()
        gradient = conv.weight.grad.cpu()
    assert gradient.item() == 12


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr"])
def test_sparse_leaves_travel_both_ways(sim: ModuleType, layout: str) -> None:
    dense = torch.eye(4) * torch.arange(1.0, 5.0)
    part = {
        "coo": dense.to_sparse,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
    }[layout]()
    tree = {"map": part, "label": torch.ones(2)}
    there = tdcopier.copy(tree, "sim:1")
    assert there["map"].layout == part.layout
    assert there["map"].device == there["map"].values().device == torch.device("sim:1")
    assert torch.equal(there["map"].to_dense().cpu(), dense)
    back = tdcopier.copy(there, "cpu")
    assert back["map"].layout == part.layout
    assert torch.equal(back["map"].to_dense(), dense)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_the_parts_of_a_sparse_tensor_share_its_memory(sim: ModuleType) -> None:
    coo = torch.eye(3).to_sparse().to("sim")
    csr = torch.eye(3).to_sparse_csr().to("sim")
    coo._values().mul_(2)
    csr.values().mul_(3)
    assert torch.equal(coo.to_dense().cpu(), 2 * torch.eye(3))
    assert torch.equal(csr.to_dense().cpu(), 3 * torch.eye(3))
    assert coo.is_coalesced()


def test_operators_in_a_schedule_give_the_same_values(sim: ModuleType) -> None:
    conv = nn.Conv2d(3, 2, 3).to("sim")
    image = torch.rand(1, 3, 5, 5)
    wanted = conv(image.to("sim")).cpu()
    for seed in range(5):
        with sim.schedule(seed):
            got = conv(image.pin_memory().to("sim", non_blocking=True)).cpu()
        assert torch.equal(got, wanted)
