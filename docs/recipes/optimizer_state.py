"""An optimizer's state in host memory: refreshed again and again, and restored from there."""

import copy
from typing import Any

import torch
from torch import nn

import tdcopier


class HostState:
    """A copy of the state in host memory that is allocated once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state; call this after the first step, which makes the optimizer's tensors."""
        self.optimizer = optimizer
        # deepcopy, because copy() reuses tensors that are on the host already, such as Adam's step.
        self.state = copy.deepcopy(tdcopier.copy(optimizer.state_dict(), "cpu"))

    def refresh(self) -> tdcopier.AsyncCopyHandle[dict[str, Any]]:
        """Start to copy the state as it is now; read `self.state` after `get()` of the handle."""
        state = self.optimizer.state_dict()
        handle = tdcopier.start_copy_into(state, self.state, copy_opaque=True)
        handle.wait_staged()  # the optimizer may change its tensors from now on
        return handle

    def restore(self) -> None:
        """Give the optimizer the copied state."""
        # deepcopy, because the optimizer keeps tensors that it need not move.
        self.optimizer.load_state_dict(copy.deepcopy(self.state))


def main() -> None:
    device = "cuda"
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        device = "sim"
    model = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    inputs = torch.randn(32, 64, device=device)
    for step in range(3):
        model(inputs).square().mean().backward()
        optimizer.step()
        if step == 0:
            host = HostState(optimizer)
    stats = host.refresh().stats
    host.restore()
    print(f"{device}: refreshed {stats.packed_leaves} tensors")


if __name__ == "__main__":
    main()
