"""A Trainer of transformers whose training batches tdcopier prefetches."""

import os
import tempfile
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainingArguments

import tdcopier


class PrefetchedLoader:
    """A loader of the Trainer, whose batches are copied ahead of the loop."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        loader.device = None  # otherwise Accelerate moves each batch, leaf by leaf
        self._loader = loader
        self._batches = tdcopier.prefetch(loader, device)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:  # dataset, batch_sampler, set_epoch, ...
        return getattr(self._loader, name)


class PrefetchingTrainer(Trainer):
    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = super().get_train_dataloader()
        return cast(DataLoader[Any], PrefetchedLoader(loader, self.args.device))


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(inputs)
        return {"loss": (found - labels).square().mean(), "found": found}


def main() -> None:
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        os.environ["ACCELERATE_TORCH_DEVICE"] = "sim:0"
    rows = torch.randn(256, 3)
    samples: Any = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            folder,
            learning_rate=0.1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,  # tdcopier stages the batches itself
        )
        trainer = PrefetchingTrainer(Line(), options, train_dataset=samples)
        trainer.remove_callback(PrinterCallback)
        print(f"{options.device}: loss {trainer.train().training_loss:.3f}")


if __name__ == "__main__":
    main()
