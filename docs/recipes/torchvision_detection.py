"""Detection samples of torchvision v2: copied as bytes, transformed on the device."""

from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxes, Image, Mask

import tdcopier

Sample = dict[str, torch.Tensor]
# The device makes the floats, so four times fewer bytes are sent.
ON_DEVICE = v2.Compose(
    [
        v2.ToDtype({Image: torch.float32, "others": None}, scale=True),
        v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)


class Shapes(Dataset[Sample]):
    """Random images, each with one to eight rectangles."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.on_host = v2.RandomHorizontalFlip(1.0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        count, size = 1 + index % 8, (64, 96)
        corners = torch.rand(count, 2) * 32
        boxes = torch.cat([corners, corners + 16], dim=1)
        sample = {
            "image": Image(torch.randint(256, (3, *size), dtype=torch.uint8)),
            "boxes": BoundingBoxes(boxes, format="XYXY", canvas_size=size),
            "masks": Mask(torch.randint(2, (count, *size), dtype=torch.uint8)),
            "labels": torch.randint(90, (count,)),
        }
        flipped: Sample = self.on_host(sample)
        return flipped


def batches(dataset: Dataset[Sample], device: str) -> Iterator[list[Sample]]:
    """Yield lists of samples, which differ in size, on the device."""
    loader = DataLoader(dataset, batch_size=8, collate_fn=list)
    with tdcopier.prefetch(loader, device) as copied:
        for samples in copied:
            yield ON_DEVICE(samples)


def main() -> None:
    device = "cuda"
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        device = "sim"
    boxes = sum(len(sample["boxes"]) for batch in batches(Shapes(64), device) for sample in batch)
    print(f"{device}: {boxes} boxes")


if __name__ == "__main__":
    main()
