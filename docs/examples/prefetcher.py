"""Sends batches to the accelerator through two pinned buffers in turn."""

from __future__ import annotations

import torch


class Prefetcher:
    """Copies on a stream of its own, to any accelerator of torch."""

    def __init__(
        self,
        elements: int,
        device: torch.device | str,
        *,
        careful: bool = True,
    ) -> None:
        self.device = torch.device(device)
        self.stream = torch.Stream(self.device)
        self.buffers = [torch.empty(elements).pin_memory() for _ in range(2)]
        self.read: list[torch.Event | None] = [None, None]
        self.turn = 0
        self.careful = careful

    def send(self, batch: torch.Tensor) -> torch.Tensor:
        turn, self.turn = self.turn, 1 - self.turn
        read = self.read[turn]
        if self.careful and read is not None:
            read.synchronize()  # the device may still be reading the buffer
        self.buffers[turn].copy_(batch)

        consumer = torch.accelerator.current_stream(self.device)
        with self.stream:
            moved = self.buffers[turn].to(self.device, non_blocking=True)
            self.read[turn] = self.stream.record_event()
        consumer.wait_event(self.read[turn])
        moved.record_stream(consumer)  # it was allocated for the other stream
        return moved
