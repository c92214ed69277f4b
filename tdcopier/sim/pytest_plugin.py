"""Pytest plugin for the simulated device: a fixture, and tests that run in many orders of events.

To use it, name it in a ``conftest.py``::

    pytest_plugins = ["tdcopier.sim.pytest_plugin"]

``sim``
    A fixture: the module ``tdcopier.sim``, enabled. While the test runs, memory is poisoned when it
    is freed, and hazards and leaks are detected. The test fails if any are found.
``@pytest.mark.schedules(n)``
    Runs the test ``n`` times, each in a schedule of its own (:func:`tdcopier.sim.schedule`), with
    seeds from 0. Its fixtures are made only once. A failure names its seed.
``--sim-seed=N``
    Use only this seed for all marked tests.
``--sim-schedules=N``
    Use this number of seeds instead of that in the marks, for example for a longer run.
``--sim-timeout=S``
    How many seconds a thread may take from one call of the device to the next; 30 by default.
``--sim-devices=N``
    The number of devices; 2 by default.

The simulated device becomes the ``torch.accelerator`` of the whole process, so run these tests in a
process of their own, for example ``pytest tests/without_gpu``, apart from tests that use CUDA.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import ModuleType

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sim", "the simulated device of tdcopier")
    group.addoption("--sim-seed", type=int, help="run marked tests with this seed only")
    group.addoption("--sim-schedules", type=int, help="number of seeds for each marked test")
    group.addoption(
        "--sim-timeout", type=float, default=30.0, help="seconds that a thread may stand still"
    )
    group.addoption("--sim-devices", type=int, default=2, help="how many devices there are")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "schedules(n): run the test in n orders of events of the simulated device"
    )


def _enabled(config: pytest.Config) -> ModuleType:
    import torch

    from tdcopier import sim

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.fail(
            "tests of the simulated device need a process of their own, and in this one CUDA is in "
            "use already: run them apart from the tests for CUDA",
            pytrace=False,
        )
    sim.enable(devices=config.getoption("--sim-devices"))
    return sim


@contextlib.contextmanager
def _watched(sim: ModuleType) -> Iterator[None]:
    with sim.poison(), sim.detect(leaks=True):
        yield


@pytest.fixture(name="sim")
def _sim(request: pytest.FixtureRequest) -> ModuleType:
    """Return `tdcopier.sim`, enabled; hazards are detected while the test itself runs."""
    return _enabled(request.config)


def _seeds(config: pytest.Config, marker: pytest.Mark) -> range:
    seed = config.getoption("--sim-seed")
    if seed is not None:
        return range(seed, seed + 1)
    count = config.getoption("--sim-schedules")
    if count is None:
        values = [*marker.args, *marker.kwargs.values()]
        count = values[0] if len(values) == 1 and set(marker.kwargs) <= {"n"} else None
    if not isinstance(count, int) or count < 1:
        pytest.fail(
            f"schedules wants the number of seeds, which must be positive, got {count!r}",
            pytrace=False,
        )
    return range(count)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test with the detectors on; run a marked one once per seed until one fails."""
    marker = pyfuncitem.get_closest_marker("schedules")
    if marker is None and "sim" not in pyfuncitem.fixturenames:
        return None
    if inspect.iscoroutinefunction(pyfuncitem.obj) or inspect.isasyncgenfunction(pyfuncitem.obj):
        pytest.fail("a test of the simulated device cannot be an async function", pytrace=False)
    sim = _enabled(pyfuncitem.config)
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    if marker is None:
        with _watched(sim):
            pyfuncitem.obj(**arguments)
        return True
    timeout_s = pyfuncitem.config.getoption("--sim-timeout")
    for seed in _seeds(pyfuncitem.config, marker):
        try:
            with _watched(sim), sim.schedule(seed, timeout_s=timeout_s):
                pyfuncitem.obj(**arguments)
        except (Exception, pytest.fail.Exception) as error:
            pyfuncitem.add_report_section("call", "sim", f"failed with --sim-seed={seed}")
            if hasattr(error, "add_note"):
                error.add_note(f"to see it again: pytest '{pyfuncitem.nodeid}' --sim-seed={seed}")
            raise
    return True
