"""With a torch that is built for a device which the machine does not have, the host's side works.

So it is on laptops, login nodes and CI runners, where PyPI's torch is a CUDA build. Each program
is a process of its own, because torch finds its accelerator once.
"""

from __future__ import annotations

import textwrap

import pytest
import torch
from support import run_python
from torch.utils import backend_registration

IS_CUDA_BUILD = torch.backends.cuda.is_built()
HAS_BACKENDS_IN_PYTHON = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")

ABSENT = """
    from types import ModuleType
    from torch._C import _acc
    from torch.utils import backend_registration

    class Hooks(_acc.PrivateUse1Hooks):
        def is_available(self):
            return False

        def has_primary_context(self, index):
            raise RuntimeError("there is no device")

        def is_built(self):
            return True

    class Guard(_acc.DeviceGuard):  # whatever else a device is asked for fails
        def type_(self):
            return torch._C._autograd.DeviceType.PrivateUse1

    module = ModuleType("torch.absent")
    for name in {names!r}:
        setattr(module, name, lambda: False)
    backend_registration._setup_privateuseone_for_python_backend(
        "absent", module, Hooks(), Guard()
    )
"""
"""Registers a backend that is built, not available. Its module need not have `is_initialized`."""

MACHINES = {
    "cuda": pytest.param(
        "",
        "cuda",
        marks=pytest.mark.skipif(not IS_CUDA_BUILD, reason="needs a torch built for CUDA"),
    ),
    **{
        f"absent, {title}": pytest.param(
            ABSENT.format(names=names),
            "absent",
            marks=pytest.mark.skipif(
                not HAS_BACKENDS_IN_PYTHON, reason="this torch takes no backends in Python"
            ),
        )
        for title, names in (
            ("which says so", ["is_available", "device_count", "is_initialized"]),
            ("which says little", ["is_available", "device_count"]),
        )
    },
}
on_each_machine = pytest.mark.parametrize(
    ("begin", "kind"), list(MACHINES.values()), ids=list(MACHINES)
)


def run(begin: str, kind: str, program: str) -> None:
    """Runs a program on a machine without its device."""
    check = f"""
        accelerator = torch.accelerator.current_accelerator()
        assert (accelerator.type, torch.accelerator.is_available()) == ({kind!r}, False)
        kind = {kind!r}
        import tdcopier
        from tdcopier import _C
    """
    parts = ("import torch", begin, check, program, "assert not torch.cuda.is_initialized()")
    run_python("\n".join(map(textwrap.dedent, parts)), CUDA_VISIBLE_DEVICES="")


@on_each_machine
def test_copies_gathers_and_prefetchers_on_the_host_work(begin, kind):
    run(
        begin,
        kind,
        """
        for rows in (torch.arange(8), torch.randn(50_000, 16)):
            index = torch.randint(0, len(rows), (40_000,))
            for handle in (
                tdcopier.start_gather([rows], index, "cpu"),
                tdcopier.start_gather([rows], index, "cpu", use_background_thread=False),
            ):
                (gathered,) = handle.wait()
                assert torch.equal(gathered, rows[index])
                assert not gathered.is_pinned()
                assert handle.stats.fallbacks == 0
            table = torch.zeros_like(rows)
            tdcopier.start_scatter([rows[3:5]], [table], torch.tensor([1, 2])).get()
            assert torch.equal(table[1:3], rows[3:5])
            filled = torch.zeros_like(rows)
            tdcopier.start_copy_into([rows], [filled]).wait()
            assert torch.equal(filled, rows)
            assert tdcopier.copy([rows], "cpu")[0] is rows
            prepared = tdcopier.prepare([rows], "cpu")
            assert prepared.start_copy([rows]).get()[0] is rows
            for threaded in (True, False):
                (batch,) = tdcopier.prefetch([[rows]], "cpu", threaded=threaded)
                assert batch[0] is rows
        assert torch.equal(tdcopier.collate([torch.ones(2), torch.zeros(2)])[1], torch.zeros(2))
        """,
    )


@on_each_machine
def test_the_engine_takes_copies_to_the_host(begin, kind):
    """It asked CUDA for its current device, so the backend left TensorDict's calls alone."""
    run(begin, kind, 'assert _C.engine_takes("cpu")')


@on_each_machine
def test_what_is_asked_of_the_device_raises_and_leaves_the_process_usable(begin, kind):
    """The absent backend has a device that fails at once; settling visits what is left of it."""
    run(
        begin,
        kind,
        """
        for ask in (
            lambda: tdcopier.copy([torch.ones(3)], kind),
            lambda: tdcopier.copy([torch.ones(3)], f"{kind}:0"),
            lambda: tdcopier.start_gather([torch.ones(3)], torch.tensor([1]), kind).get(),
            lambda: list(tdcopier.prefetch([[torch.ones(3)]], kind)),
        ):
            try:
                ask()
            except ValueError as error:
                assert "does not exist: this machine has 0 cuda device(s)" in str(error), error
            except RuntimeError as error:
                assert kind == "absent", error
            else:
                raise AssertionError("a copy to a device that is not there")
        _C.testing.settle()
        _C.testing.drop_staging()
        missing = tdcopier.info()["missing_devices"]
        assert missing[kind] == f"torch sees no {kind} device", missing
        assert tdcopier.info(make_contexts=True)["devices"] == []
        """,
    )


@on_each_machine
def test_a_packed_storage_is_sampled_on_the_host(begin, kind):
    pytest.importorskip("torchrl")
    run(
        begin,
        kind,
        """
        import warnings
        warnings.simplefilter("default")  # torchrl's imports have some
        from tensordict import TensorDict
        from torchrl.data import TensorDictReplayBuffer
        from tdcopier.torchrl import PackedLazyTensorStorage, ToDevice

        storage = PackedLazyTensorStorage(16)
        buffer = TensorDictReplayBuffer(storage=storage, batch_size=4, transform=ToDevice("cpu"))
        buffer.extend(TensorDict({"x": torch.arange(8.0)}, [8]))
        batch = buffer.sample()
        assert torch.equal(batch["x"], batch["index"].float())
        """,
    )
