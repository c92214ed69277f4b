"""The models of the trainers, and a step of each as its projects write it.

The learning rate is 0, so weights stay equal, and with them the work of a step: all ways of getting
a batch compute the same. The optimizer does all its work nevertheless. Weights are random.
torchvision and scipy are imported where they are used, since the loops do without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[Any], None]
SEED = 11
QUERIES, NO_OBJECT = 100, 91


# ---- torchvision's detection models --------------------------------------------------------------


def maskrcnn(device: torch.device, *, small: bool = False) -> Step:
    """Mask R-CNN with a ResNet-50, at the size of its images, as torchvision's reference trains."""
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    torch.manual_seed(SEED)
    size = {"min_size": 64, "max_size": 96} if small else {}
    return _detector(maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, **size), device)


def ssd(device: torch.device, *, small: bool = False) -> Step:
    """SSDlite with a MobileNet, which always scales images to 320 x 320."""
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    torch.manual_seed(SEED)
    return _detector(ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None), device)


def _detector(model: nn.Module, device: torch.device) -> Step:
    model.to(device).train()
    optimizer = _sgd(model)

    def step(batch: Any) -> None:
        images, targets = batch
        losses = model(images, targets)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4)


# ---- a small DETR --------------------------------------------------------------------------------


class Detr(nn.Module):
    """A ResNet-50, a small transformer, and heads for classes and boxes of a hundred queries."""

    def __init__(self, width: int = 256, layers: int = 3) -> None:
        from torchvision.models import resnet50

        super().__init__()
        body = resnet50(weights=None)
        self.body = nn.Sequential(*list(body.children())[:-2])
        self.narrow = nn.Conv2d(2048, width, 1)
        self.rows, self.columns = (nn.Embedding(64, width // 2) for _ in range(2))
        self.queries = nn.Embedding(QUERIES, width)
        self.transformer = nn.Transformer(
            width, 8, layers, layers, 4 * width, dropout=0.0, batch_first=True
        )
        self.classes = nn.Linear(width, NO_OBJECT + 1)
        self.boxes = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, images: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.narrow(self.body(images.tensors))
        height, width = found.shape[-2:]
        padded = F.interpolate(images.mask[:, None].float(), size=(height, width))[:, 0].bool()
        down, across = (torch.arange(n, device=found.device) for n in (height, width))
        places = torch.cat(
            [
                self.columns(across)[None].expand(height, -1, -1),
                self.rows(down)[:, None].expand(-1, width, -1),
            ],
            dim=-1,
        )
        memory = (found + places.permute(2, 0, 1)).flatten(2).transpose(1, 2)
        padded = padded.flatten(1)
        queries = self.queries.weight[None].expand(len(memory), -1, -1)
        decoded = self.transformer(
            memory, queries, src_key_padding_mask=padded, memory_key_padding_mask=padded
        )
        return self.classes(decoded), self.boxes(decoded).sigmoid()


def _corners(boxes: torch.Tensor) -> torch.Tensor:
    """Return x0, y0, x1, y1 of boxes that have a centre and a size."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([centre - size / 2, centre + size / 2], dim=-1)


@torch.no_grad()
def _matched(logits: torch.Tensor, boxes: torch.Tensor, targets: Any) -> list[Any]:
    """Assign objects to queries, by the Hungarian method on the host, for each image."""
    from scipy.optimize import linear_sum_assignment
    from torchvision.ops import generalized_box_iou

    labels = torch.cat([target["labels"] for target in targets])
    wanted = torch.cat([target["boxes"] for target in targets])
    chosen = boxes.flatten(0, 1)
    cost = 5.0 * torch.cdist(chosen, wanted, p=1)
    cost -= logits.softmax(-1).flatten(0, 1)[:, labels]
    cost -= 2.0 * generalized_box_iou(_corners(chosen), _corners(wanted))
    on_host = cost.view(len(boxes), QUERIES, -1).cpu()
    parts = on_host.split([len(target["boxes"]) for target in targets], dim=-1)
    pairs = [linear_sum_assignment(part[image]) for image, part in enumerate(parts)]
    return [tuple(torch.as_tensor(side, device=boxes.device) for side in pair) for pair in pairs]


def _detr_loss(logits: torch.Tensor, boxes: torch.Tensor, targets: Any) -> torch.Tensor:
    from torchvision.ops import generalized_box_iou

    pairs = _matched(logits, boxes, targets)
    classes = torch.full(logits.shape[:2], NO_OBJECT, device=logits.device)
    for image, (queries, objects) in enumerate(pairs):
        classes[image, queries] = targets[image]["labels"][objects]
    found = torch.cat([boxes[image, queries] for image, (queries, _) in enumerate(pairs)])
    wanted = torch.cat(
        [target["boxes"][objects] for target, (_, objects) in zip(targets, pairs, strict=True)]
    )
    weight = torch.ones(NO_OBJECT + 1, device=logits.device)
    weight[NO_OBJECT] = 0.1
    overlap = generalized_box_iou(_corners(found), _corners(wanted)).diagonal()
    return (
        F.cross_entropy(logits.transpose(1, 2), classes, weight)
        + 5.0 * F.l1_loss(found, wanted)
        + 2.0 * (1.0 - overlap).mean()
    )


def detr(device: torch.device, *, small: bool = False) -> Step:
    torch.manual_seed(SEED)
    model = Detr(layers=1 if small else 3).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def step(batch: Any) -> None:
        images, targets = batch
        loss = _detr_loss(*model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        loss.item()

    return step


# ---- a learner of deep Q-learning ----------------------------------------------------------------


def _q_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, stride=2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 6),
    )


def dqn(device: torch.device, *, small: bool = False) -> Step:
    torch.manual_seed(SEED)
    network, target = _q_network().to(device), _q_network().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.0)

    def step(batch: Any) -> None:
        with torch.no_grad():
            best = target(batch["next_obs"].float() / 255.0).amax(1)
            wanted = batch["reward"] + 0.99 * best * (~batch["done"]).float()
        values = network(batch["obs"].float() / 255.0)
        chosen = values.gather(1, batch["action"][:, None])[:, 0]
        loss = F.smooth_l1_loss(chosen, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step
