"""Trains with the loaders of Accelerate, Lightning and transformers, which move batches themselves.

Each is measured with torch's pinned batches and with packed ones: the only difference is
`tdcopier.packed` around the collate function.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from tool.measure import Bench
from tool.target_forms import Target, at_most, count_wrong, none
from torch.utils.data import SequentialSampler

from trainers import benchmark
from trainers.ways import RESIDENT, WAYS, Source, Way

FRAMEWORKS = ("accelerate", "lightning", "transformers")
PACKED = "_packed"
TRAINERS, ON_SIM = ("maskrcnn", "ssd"), ("loop_images",)
MAX_STEP = 1.02
MAX_FAULTS = 50
"""A step with more reads slabs that could not be pinned."""


def _accelerate(source: Source, is_packed: bool) -> Iterator[Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    _take_device(source.device)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    loader = source.loader(pin_memory=True, is_packed=is_packed)
    return iter(accelerator.prepare_data_loader(loader, device_placement=True))


def _lightning(source: Source, is_packed: bool) -> Iterator[Any]:
    """Move batches by the function that Lightning's trainers and its Fabric call."""
    from lightning.fabric.utilities import move_data_to_device

    loader = iter(source.loader(pin_memory=True, is_packed=is_packed))
    return (move_data_to_device(batch, source.device) for batch in loader)


def _transformers(source: Source, is_packed: bool) -> Iterator[Any]:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **options: Any) -> SequentialSampler:
            return SequentialSampler(source.data.dataset)  # type: ignore[arg-type]

    _take_device(source.device)
    assert source.data.batch_size is not None
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is written: it does not train
        per_device_train_batch_size=source.data.batch_size,
        dataloader_num_workers=source.workers,
        dataloader_persistent_workers=source.workers > 0,
        dataloader_pin_memory=True,
        remove_unused_columns=False,
        report_to="none",
        accelerator_config={"non_blocking": True},
    )
    arguments._n_gpu = 1  # else its batches are as many times larger as there are GPUs
    trainer = InOrder(
        model=torch.nn.Linear(1, 1),
        args=arguments,
        data_collator=source.collate(is_packed=is_packed),
        train_dataset=source.data.dataset,
    )
    return iter(trainer.get_train_dataloader())


def _take_device(device: torch.device) -> None:
    """Let Accelerate use a device that it would not choose itself."""
    if device.type != "cuda":
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)


_OPENERS = dict(zip(FRAMEWORKS, (_accelerate, _lightning, _transformers), strict=True))
OF_FRAMEWORKS: dict[str, Way] = {
    name + (PACKED if is_packed else ""): Way(partial(opener, is_packed=is_packed), True)
    for name, opener in _OPENERS.items()
    for is_packed in (False, True)
}


def run(bench: Bench) -> dict[str, Any]:
    """Run the trainers with each framework's loader."""
    ways = {RESIDENT: WAYS[RESIDENT], **OF_FRAMEWORKS}
    options = benchmark.Options(
        TRAINERS, ways, 40, 2.0, first_batches=0, references=(RESIDENT, *FRAMEWORKS)
    )
    if not bench.is_real:
        steps = {"untimed": 1, "timed": 2, "pause_s": 0.01}
        options = options._replace(trainers=ON_SIM, rounds=2, workers=1, steps=steps, small=True)
    elif bench.repeats <= benchmark.QUICK_REPEATS:
        options = options._replace(rounds=2, minutes=1.0)
    found = benchmark.run_with(bench.device, options, bench.progress)
    return {**found, "what": "Training loops over the loaders of frameworks: time of a step"}


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong(result["trainers"].values())
    yield none("batches that differ from the dataset's, all trainers and ways", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["trainers"].items():
        for framework in FRAMEWORKS:
            over = found["over"][framework][framework + PACKED]["high"]
            what = f"{name}, {framework}, packed over pinned: step, upper end of the interval"
            yield at_most(what, over, MAX_STEP)
            faults = found["per_step"][framework + PACKED]["minor_faults"]
            yield at_most(f"{name}, {framework}, packed: page faults of a step", faults, MAX_FAULTS)
