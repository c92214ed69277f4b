"""Recipes for the loops of Accelerate, Fabric, Lightning and transformers train as without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from libraries import library
from recipe_stand_ins import Accelerator, stand_in_for_accelerate
from recipe_support import assert_all_packed, recipe
from torch.utils.data import DataLoader, TensorDataset

Regression = tuple[torch.nn.Module, torch.optim.Optimizer, DataLoader]


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    return inputs, inputs @ torch.tensor([[1.0], [2.0], [3.0]])


def regression(device: str | torch.device) -> Regression:
    """Makes the optimizer after moving the model: not all devices keep its parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, DataLoader(TensorDataset(*samples()), batch_size=16)


def plain_means(device: str | torch.device, epochs: int) -> list[float]:
    """Returns the losses of the same loop without a library and without tdcopier."""
    model, optimizer, loader = regression(device)
    means = []
    for _ in range(epochs):
        losses = []
        for inputs, labels in loader:
            loss = (model(inputs.to(device)) - labels.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        means.append(torch.stack(losses).mean().item())
    assert means[-1] < means[0] / 4
    return means


def weights(model: torch.nn.Module) -> list[list[float]]:
    return [parameter.flatten().tolist() for parameter in model.parameters()]


@pytest.fixture
def accelerate_on(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Makes Accelerate, which transformers uses too, choose the test's device."""
    state = library("accelerate.state")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", device)
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


# ---- Accelerate ----------------------------------------------------------------------------------


def test_the_loop_of_accelerate_trains_as_the_same_loop_by_hand(
    accelerate_on, device, prefetchers, prefetched
):
    module = recipe("accelerate_loop")
    accelerator = module.Accelerator()
    assert accelerator.device == torch.device(device)
    means = module.train(accelerator, *regression(device), epochs=3)
    assert means == plain_means(device, epochs=3)
    assert [prefetcher.stats.batches for prefetcher in prefetchers] == [3 * 4]
    assert_all_packed(prefetched, [2] * 12)


def test_accelerate_is_told_to_leave_batches_where_they_are(device, monkeypatch, prefetched):
    stand_in_for_accelerate(monkeypatch)
    accelerator = Accelerator(device)
    means = recipe("accelerate_loop").train(accelerator, *regression(device), epochs=3)
    assert accelerator.places_batches == [False]
    assert means == plain_means(device, epochs=3)
    assert_all_packed(prefetched, [2] * 12)


# ---- Lightning -----------------------------------------------------------------------------------


def test_the_loop_of_fabric_trains_as_the_same_loop_by_hand(device, prefetched):
    module = recipe("fabric_loop")
    strategy = module.SingleDeviceStrategy(torch.device(device), module.Simulated())
    model, _, loader = regression("cpu")
    means = module.train(module.Fabric(strategy=strategy), model, loader, epochs=3)
    assert means == plain_means(device, epochs=3)
    assert_all_packed(prefetched, [2] * 12)


@pytest.mark.filterwarnings("ignore:::lightning")
def test_a_lightning_module_trains_the_same_with_packed_batches(device, copies):
    module = recipe("lightning_module")

    class Plain(module.Line):
        transfer_batch_to_device = module.LightningModule.transfer_batch_to_device

    inputs, labels = samples()
    rows = [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]
    trained = []
    for kind in (module.Line, Plain):
        torch.manual_seed(0)
        trained.append(kind())
        before = weights(trained[-1])
        module.fit(torch.device(device), trained[-1], DataLoader(rows, batch_size=16))
    assert weights(trained[0]) == weights(trained[1]) != before
    assert_all_packed(copies, [2] * 12)


# ---- transformers --------------------------------------------------------------------------------


@pytest.fixture
def trained(accelerate_on: None, device: str, tmp_path: Path) -> Callable[..., Any]:
    module = recipe("transformers_trainer")
    inputs, labels = samples()
    rows = [{"inputs": row, "labels": label} for row, label in zip(inputs, labels, strict=True)]

    per_device = 16 // max(torch.cuda.device_count(), 1)  # the Trainer uses all GPUs

    def train(kind: str, *, resumed: bool = False, **more: Any) -> Any:
        options = module.TrainingArguments(
            str(tmp_path),
            learning_rate=0.1,
            per_device_train_batch_size=per_device,
            per_device_eval_batch_size=per_device,
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **{"save_strategy": "no", **more},
        )
        assert options.device == torch.device(device)
        torch.manual_seed(0)
        trainer = getattr(module, kind)(
            module.Line(), options, train_dataset=rows, eval_dataset=rows[:40]
        )
        trainer.remove_callback(module.PrinterCallback)
        trainer.train(resume_from_checkpoint=resumed)
        return trainer

    return train


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_trainer_of_transformers_trains_and_evaluates_the_same(
    trained, prefetched, accumulated
):
    more = {"num_train_epochs": 3, "gradient_accumulation_steps": accumulated}
    ours, plain = trained("PrefetchingTrainer", **more), trained("Trainer", **more)
    assert weights(ours.model) == weights(plain.model)
    assert losses(ours) == losses(plain)
    assert len(losses(ours)) == ours.state.global_step == (12 if accumulated == 1 else 6)
    assert losses(ours)[-1] < losses(ours)[0]
    found, wanted = ours.predict(ours.eval_dataset), plain.predict(plain.eval_dataset)
    assert found.predictions.shape == (40, 1)
    assert (found.predictions == wanted.predictions).all()
    assert_all_packed(prefetched, [2] * 12)


def test_a_trainer_that_ends_within_an_epoch_has_trained_the_same(trained, prefetched):
    ours, plain = trained("PrefetchingTrainer", max_steps=2), trained("Trainer", max_steps=2)
    assert weights(ours.model) == weights(plain.model)
    assert ours.state.global_step == 2
    assert 2 <= len(prefetched) <= 4


@pytest.mark.filterwarnings("ignore:::transformers")
def test_a_trainer_that_resumes_within_an_epoch_trains_the_same(trained, prefetched):
    """The rest of that epoch is read without the prefetcher, since it needs another loader."""
    trained("Trainer", max_steps=2, save_strategy="steps", save_steps=2)
    ours = trained("PrefetchingTrainer", num_train_epochs=3, resumed=True)
    assert len(prefetched) == 2 * 4
    plain = trained("Trainer", num_train_epochs=3, resumed=True)
    assert weights(ours.model) == weights(plain.model)
    assert ours.state.global_step == 12
