"""Operators of models and learners, forwards and backwards, against the same on the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import operators_of_models
import operators_of_tensors
import pytest
import torch
from each_case import together
from operator_inputs import Inputs, Program
from sim_support import fresh as fresh

pytestmark = pytest.mark.sim

PROGRAMS = operators_of_models.PROGRAMS | operators_of_tensors.PROGRAMS


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_of(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_of(part)


def run(program: Program, device: str) -> tuple[list[Any], list[Any], set[str]]:
    """Returns tensors: outputs and inputs afterwards; gradients of squared outputs; warnings."""
    torch.manual_seed(3)
    inputs = Inputs(device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        outputs = list(tensors_of(program(inputs)))
        roots = [output for output in outputs if output.requires_grad]
        if roots:
            torch.stack([root.square().sum() for root in roots]).sum().backward()
    return (
        [*outputs, *inputs.leaves, *inputs.others],
        [leaf.grad for leaf in inputs.leaves],
        {str(one.message) for one in told},
    )


@pytest.fixture(autouse=True)
def every_warning() -> Iterator[None]:
    """Makes torch repeat warnings that it gives once in a process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(before)


@together("name", PROGRAMS)
def test_it_does_as_on_the_host(sim: ModuleType, name: str) -> None:
    expected, expected_gradients, expected_told = run(PROGRAMS[name], "cpu")
    results, gradients, told = run(PROGRAMS[name], "sim:1")
    assert {str(output.device) for output in results} == {"sim:1"}
    for output, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(output.cpu(), wanted)
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        assert (gradient is None) == (wanted is None)
        if gradient is not None:
            assert gradient.device == torch.device("sim:1")
            torch.testing.assert_close(gradient.cpu(), wanted)
    assert told <= expected_told
