"""A loop with Lightning's Fabric over batches that tdcopier prefetches."""

from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators.cpu import CPUAccelerator
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tdcopier


def train(
    fabric: Fabric,
    layer: nn.Module,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    epochs: int = 1,
) -> list[float]:
    """Train on (inputs, labels); return the mean loss of each epoch."""
    model = fabric.setup_module(layer)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = fabric.setup_optimizers(optimizer)
    # Otherwise Fabric moves each batch itself, leaf by leaf.
    on_host = fabric.setup_dataloaders(loader, move_to_device=False)
    means = []
    with tdcopier.prefetch(on_host, fabric.device) as batches:
        for _ in range(epochs):
            losses = []
            for inputs, labels in batches:  # each epoch is one pass
                loss = (model(inputs) - labels).square().mean()
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                losses.append(loss.detach())
            means.append(torch.stack(losses).mean().item())
    return means


class Simulated(CPUAccelerator):
    def setup_device(self, device: torch.device) -> None:
        """Accept the simulated device."""


def main() -> None:
    if torch.cuda.is_available():
        fabric = Fabric(accelerator="cuda", devices=1)
    else:
        from tdcopier import sim

        sim.enable()
        device = torch.device("sim:0")
        fabric = Fabric(strategy=SingleDeviceStrategy(device, Simulated()))
    inputs = torch.randn(256, 3)
    labels = inputs.sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=16)
    means = train(fabric, nn.Linear(3, 1), loader, epochs=3)
    print(f"{fabric.device}: loss {means[0]:.3f}, then {means[-1]:.3f}")


if __name__ == "__main__":
    main()
