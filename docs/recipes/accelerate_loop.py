"""A loop with Accelerate over batches that tdcopier prefetches."""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tdcopier


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[torch.Tensor, ...]],
    epochs: int = 1,
) -> list[float]:
    """Train on (inputs, labels); return the mean loss of each epoch."""
    model, optimizer = accelerator.prepare(model, optimizer)
    # Otherwise Accelerate moves each batch itself, leaf by leaf.
    loader = accelerator.prepare_data_loader(loader, device_placement=False)
    batches = tdcopier.prefetch(loader, accelerator.device)

    means = []
    for _ in range(epochs):
        losses = []
        for inputs, labels in batches:  # each epoch is one pass
            loss = (model(inputs) - labels).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.detach())  # read at the end, without a wait
        means.append(torch.stack(losses).mean().item())
    batches.close()
    return means


def main() -> None:
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        os.environ["ACCELERATE_TORCH_DEVICE"] = "sim:0"
    accelerator = Accelerator()
    inputs = torch.randn(256, 3)
    labels = inputs.sum(1, keepdim=True)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=16)
    model = nn.Linear(3, 1).to(accelerator.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    means = train(accelerator, model, optimizer, loader, epochs=3)
    print(f"{accelerator.device}: loss {means[0]:.3f}, then {means[-1]:.3f}")


if __name__ == "__main__":
    main()
