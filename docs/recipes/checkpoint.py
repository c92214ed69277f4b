"""A checkpoint that is copied to the host while the device computes gradients."""

import os
import tempfile

import torch
from torch import nn

import tdcopier


def step_and_save(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, path: str
) -> None:
    """Make a step of training; save the state before it."""
    loss = model(inputs).square().mean()
    optimizer.zero_grad()

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    copying = tdcopier.start_copy(state, "cpu")
    loss.backward()  # changes gradients only, and forward() may change buffers
    torch.save(copying.get(), path)

    optimizer.step()  # changes parameters, and Adam's counters on the host


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, path: str, device: str) -> None:
    """Load what `step_and_save` has saved."""
    state = torch.load(path, mmap=True)  # read by tdcopier, from the file
    model.load_state_dict(tdcopier.copy(state["model"], device))
    optimizer.load_state_dict(state["optimizer"])


def main() -> None:
    device = "cuda"
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        device = "sim"
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)]).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(32, 64, device=device)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "state.pt")
        for _ in range(3):
            step_and_save(model, optimizer, inputs, path)
        restore(model, optimizer, path, device)
        print(f"{device}: saved and restored {os.path.getsize(path)} bytes")


if __name__ == "__main__":
    main()
