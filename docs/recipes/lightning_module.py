"""A LightningModule whose batches travel packed."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators.cpu import CPUAccelerator
from lightning.pytorch.strategies.single_device import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

import tdcopier


class Packed(LightningModule):
    """Trains, validates, tests and predicts with batches that travel packed."""

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        return tdcopier.start_copy(batch, device).wait()


class Line(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        found: torch.Tensor = self.layer(batch["inputs"])
        loss = (found - batch["labels"]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Simulated(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        """Accept the simulated device."""


def fit(device: torch.device, model: LightningModule, loader: Any) -> Trainer:
    accelerator = "cuda" if device.type == "cuda" else Simulated()
    trainer = Trainer(
        max_epochs=3,
        accelerator=accelerator,
        strategy=SingleDeviceStrategy(device),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return trainer


def main() -> None:
    device = torch.device("cuda:0")
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        device = torch.device("sim:0")
    rows = torch.randn(256, 3)
    samples: Any = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in rows]
    trainer = fit(device, Line(), DataLoader(samples, batch_size=16))
    print(f"{device}: loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
