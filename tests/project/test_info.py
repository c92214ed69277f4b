"""The output of `tdcopier.info` and `python -m tdcopier info`, which no question makes fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import run_module, run_python

import tdcopier
from tdcopier import _C
from tdcopier._commands import info_facts as _info
from tdcopier._commands.info import as_text, main


def test_a_shell_starts_the_command():
    # Other tests run it in a process forked from one with more modules, which it might lack here.
    command = [sys.executable, "-W", "error", "-m", "tdcopier", "info", "--json"]
    found = json.loads(subprocess.check_output(command))
    assert found["versions"] == tdcopier.info()["versions"]


def printed_by(*arguments: str, **environment: str) -> str:
    """Returns the output of the command, run in a process of its own."""
    done = run_module("tdcopier", "info", *arguments, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def of_device(device: str) -> _info.DeviceInfo:
    return next(each for each in tdcopier.info()["devices"] if each["device"] == device)


def test_versions_are_those_of_this_process():
    versions = tdcopier.info()["versions"]
    assert versions["tdcopier"] == tdcopier.__version__
    assert versions["torch"] == torch.__version__
    assert versions["python"] == sys.version.split()[0]
    assert isinstance(versions["numpy"], str)
    assert isinstance(versions["tensordict"], str)


def test_limits_are_those_in_force():
    limits = tdcopier.info()["limits"]
    assert limits == {
        "staging_limit_bytes": _C.DEFAULT_STAGING_LIMIT_BYTES,
        "staging_buffer_bytes": _C.STAGING_BUFFER_BYTES,
        "pinned_limit_bytes": tdcopier.pinned.usage().limit_bytes,
        "slab_limit_bytes": 2 << 30,
        "run_ahead_batches": 4,
        "inline_bytes": _C.MAX_INLINE_BYTES,
        "straight_bytes": _C.MAX_STRAIGHT_BYTES,
    }
    tdcopier.limits.set_staging_bytes(3 * _C.STAGING_BUFFER_BYTES)
    tdcopier.limits.set_run_ahead(7)
    pinned_limit_bytes = limits["pinned_limit_bytes"]
    tdcopier.limits.set_pinned_bytes(1 << 30)
    limits = tdcopier.info()["limits"]
    tdcopier.limits.set_pinned_bytes(pinned_limit_bytes)
    assert limits["staging_limit_bytes"] == 3 * _C.STAGING_BUFFER_BYTES
    assert limits["run_ahead_batches"] == 7
    assert limits["pinned_limit_bytes"] == 1 << 30


def test_a_limit_that_is_refused_is_not_in_force():
    with pytest.raises(ValueError, match="at least"):
        tdcopier.limits.set_staging_bytes(1)
    with pytest.raises(ValueError, match="at least"):
        tdcopier.limits.set_run_ahead(0)
    limits = tdcopier.info()["limits"]
    assert limits["staging_limit_bytes"] == _C.DEFAULT_STAGING_LIMIT_BYTES
    assert limits["run_ahead_batches"] == 4


@pytest.mark.sim
def test_each_device_has_the_staging_that_it_holds_and_its_gather(device, other_device):
    tdcopier.copy(torch.zeros(3 * _C.STAGING_BUFFER_BYTES, dtype=torch.uint8), device)
    for each in (device, other_device):
        found = of_device(each)
        assert found["staging_bytes"] == tdcopier.pinned.staging_bytes(each)
        assert found["gather"] == (
            "torch._foreach_copy_, without the kernel: it needs a CUDA device"
        )
        assert found["name"] == "simulated"
    assert of_device(device)["staging_bytes"] > 0


@pytest.mark.cuda
def test_a_cuda_device_has_a_name_a_size_and_an_address(device):
    found = of_device(device)
    assert found["name"] == torch.cuda.get_device_name(device)
    assert found["memory_bytes"] == torch.cuda.get_device_properties(device).total_memory
    assert isinstance(found["pci_address"], str)
    assert isinstance(tdcopier.info()["versions"]["driver"], str)


@pytest.mark.cuda
def test_asking_makes_no_context_unless_told_to_on_a_cuda_device():
    printed = run_python("""
        import torch, tdcopier
        def contexts():
            return [torch._C._cuda_hasPrimaryContext(i) for i in range(torch.cuda.device_count())]
        found = tdcopier.info()["devices"]
        assert [each["staging_bytes"] for each in found] == [0] * len(found)
        assert ["unknown" in each["gather"] for each in found] == [True] * len(found)
        assert not any(contexts())
        found = tdcopier.info(make_contexts=True)["devices"]
        assert all(contexts())
        print({each["gather"] for each in found})
    """)
    assert printed.strip() == "{'one kernel'}"


def on_a_made_up_gpu(monkeypatch, **properties: object) -> None:
    """Makes torch report one CUDA device, as far as the command asks."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties)
    )
    monkeypatch.setattr(_info, "_has_context", lambda device: device.type != "cuda")


@pytest.mark.sim
def test_a_gpu_is_described_by_torch_and_its_link_by_the_system(monkeypatch, tmp_path: Path):
    on_a_made_up_gpu(
        monkeypatch,
        name="NVIDIA Example",
        total_memory=3 << 30,
        pci_domain_id=0,
        pci_bus_id=0x1B,
        pci_device_id=2,
    )
    folder = tmp_path / "0000:1b:02.0"
    folder.mkdir()
    for name, text in {
        "current_link_speed": "2.5 GT/s PCIe",
        "current_link_width": "8",
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "16",
    }.items():
        (folder / name).write_text(text + "\n")
    monkeypatch.setattr(_info, "_PCI_DEVICES", tmp_path)
    assert of_device("cuda:0") == {
        "device": "cuda:0",
        "name": "NVIDIA Example",
        "memory_bytes": 3 << 30,
        "pci_address": "0000:1b:02.0",
        "pci_link": "2.5 GT/s PCIe x8 now, at most 32.0 GT/s PCIe x16",
        "staging_bytes": 0,
        "gather": {"unknown": "this process has not initialised the device"},
    }


@pytest.mark.sim
@pytest.mark.parametrize(
    ("lack", "gather"),
    [
        ("", "one kernel"),
        ("it is off", "torch._foreach_copy_, without the kernel: it is off"),
    ],
)
def test_the_gather_of_a_gpu_is_the_kernel_or_says_what_the_kernel_lacks(
    monkeypatch, capsys, lack, gather
):
    on_a_made_up_gpu(monkeypatch)
    monkeypatch.setattr(_C, "why_no_segment_kernel", lambda device: lack)
    [found] = (d for d in tdcopier.info(make_contexts=True)["devices"] if d["device"] == "cuda:0")
    assert found["gather"] == gather
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"][0]["gather"] == gather
    assert main(["--json", "--no-contexts"]) == 0
    assert "unknown" in json.loads(capsys.readouterr().out)["devices"][0]["gather"]


@pytest.mark.sim
def test_what_torch_and_the_system_do_not_tell_of_a_gpu_says_so(monkeypatch, tmp_path: Path):
    on_a_made_up_gpu(monkeypatch, name="NVIDIA Example", total_memory=1)
    assert of_device("cuda:0")["pci_address"] == {
        "unknown": "torch does not report it for cuda devices"
    }
    on_a_made_up_gpu(monkeypatch, pci_domain_id=0, pci_bus_id=1, pci_device_id=2)
    monkeypatch.setattr(_info, "_PCI_DEVICES", tmp_path)
    found = of_device("cuda:0")
    assert found["pci_link"]["unknown"].startswith("the system does not report it: ")
    assert found["name"]["unknown"].startswith("AttributeError: ")


@pytest.mark.sim
def test_a_gpu_that_cannot_be_asked_fails_its_own_lines_only(monkeypatch):
    def fail(device: object) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.\nUse spawn.")

    on_a_made_up_gpu(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    monkeypatch.setattr(_info, "_has_context", fail)
    found = of_device("cuda:0")
    why = {"unknown": "RuntimeError: Cannot re-initialize CUDA in forked subprocess."}
    names = ("name", "memory_bytes", "pci_address", "pci_link", "staging_bytes")
    assert [found[name] for name in names] == [why] * 5
    assert f"  name         unknown: {why['unknown']}\n" in as_text(tdcopier.info())


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\nGCC",
            "535.183.01",
        ),
        ("NVRM version: Open Kernel Module for x86_64  580.95  Release Build\nGCC", "580.95"),
    ],
)
def test_the_driver_is_what_the_kernel_says(monkeypatch, tmp_path: Path, text, version):
    monkeypatch.setattr(_info, "_DRIVER_FILE", tmp_path / "version")
    (tmp_path / "version").write_text(text)
    assert tdcopier.info()["versions"]["driver"] == version


@pytest.mark.parametrize(
    ("command", "driver"),
    [
        (("echo", "580.1"), "580.1"),
        (("no-such-command",), {"unknown": "there is neither {file} nor nvidia-smi"}),
        (("true",), {"unknown": "IndexError: list index out of range"}),
    ],
)
def test_without_the_kernels_word_nvidia_smi_is_asked(monkeypatch, tmp_path: Path, command, driver):
    file = tmp_path / "none"
    monkeypatch.setattr(_info, "_DRIVER_FILE", file)
    monkeypatch.setattr(_info, "_NVIDIA_SMI", command)
    if isinstance(driver, dict):
        driver = {"unknown": driver["unknown"].format(file=file)}
    assert tdcopier.info()["versions"]["driver"] == driver


def test_a_package_that_is_not_there_is_none_and_one_without_metadata_says_so(
    monkeypatch, tmp_path: Path
):
    assert _info._version("no_such_package") is None
    (tmp_path / "bare_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert _info._asked(lambda: _info._version("bare_package")) == {
        "unknown": "bare_package can be imported, but has no metadata"
    }


def test_the_switches_of_the_tensordict_backend_are_told():
    def told() -> tuple[bool, bool]:
        switches = tdcopier.info()["switches"]
        return (
            switches["tensordict_backend_installed"],
            switches["tensordict_backend_here"],
        )

    assert told() == (False, False)
    with tdcopier.tensordict.backend():
        assert told() == (False, True)
    tdcopier.tensordict.install_backend()
    try:
        assert told() == (True, False)
    finally:
        tdcopier.tensordict.remove_backend()
    assert told() == (False, False)


def test_the_workers_that_a_large_copy_makes_are_as_many_as_were_wanted(device):
    printed = run_python(
        f"""
        import torch, tdcopier
        if {device!r}.startswith("sim"):
            from tdcopier import sim
            sim.enable()
        before = tdcopier.info()["workers"]
        tdcopier.copy(torch.zeros(1 << 20), {device!r})
        running = 0
        while running < before["wanted"]:  # a worker takes its name when it first runs
            running = tdcopier.info()["workers"]["running"]
        print(before["running"], running)
        """
    )
    assert printed.split() == ["0", str(_C.default_worker_count())]


@pytest.mark.parametrize(("said", "is_shared"), [("100000", True), ("several", False)])
def test_processes_of_one_launcher_want_fewer_workers_each(monkeypatch, said, is_shared):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = tdcopier.info()["workers"]["wanted"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)
    assert tdcopier.info()["workers"]["wanted"] == (1 if is_shared else alone)


def test_variables_that_are_set_are_told_and_others_not(monkeypatch):
    monkeypatch.setenv("TDCOPIER_STAGING_LIMIT_BYTES", "8388608")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("SECRET_OF_SOMEBODY_ELSE", "1")
    monkeypatch.delenv("TDCOPIER_CHECK", raising=False)
    environment = tdcopier.info()["environment"]
    assert environment["TDCOPIER_STAGING_LIMIT_BYTES"] == "8388608"
    assert environment["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "TDCOPIER_CHECK" not in environment
    assert "SECRET_OF_SOMEBODY_ELSE" not in environment


def test_the_command_prints_what_the_environment_set_as_text_and_as_json():
    environment = {"TDCOPIER_CHECK": "1", "TDCOPIER_STAGING_LIMIT_BYTES": "8388608"}
    found = json.loads(printed_by("--json", **environment))
    assert found["switches"]["check_mode"] is True
    assert found["switches"]["progress"] is True
    assert found["limits"]["staging_limit_bytes"] == 8388608
    lines = printed_by(TDCOPIER_PROGRESS="0", **environment).splitlines()
    assert "  check mode                    on" in lines
    assert "  progress                      off" in lines
    assert "  staging limit      8 MiB (8,388,608 bytes)" in lines
    assert "  TDCOPIER_CHECK                1" in lines


@pytest.mark.sim
def test_without_any_device_it_says_what_is_missing():
    found = json.loads(printed_by("--json", CUDA_VISIBLE_DEVICES=""))
    assert found["devices"] == []
    assert found["missing_devices"]["sim"] == "not enabled (tdcopier.sim.enable)"
    assert found["missing_devices"]["cuda"]


def test_text_and_json_hold_the_same_answers(capsys):
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == tdcopier.info().keys()
    assert main([]) == 0
    text = capsys.readouterr().out
    for device in tdcopier.info()["devices"]:
        assert f"\n{device['device']}\n" in text


def test_empty_sections_say_so():
    found = {**tdcopier.info(), "environment": {}, "versions": {"torchrl": None}}
    text = as_text(found)
    assert text.startswith("versions\n  torchrl  not installed\n")
    assert text.endswith("environment\n  none")


def test_sizes_have_units_of_1024():
    text = as_text({"limits": {"a_bytes": 5, "bb_bytes": 1536, "inline_bytes": 150 << 30}})
    assert text.splitlines()[1:] == [
        "  a       5 bytes",
        "  bb      1.5 KiB (1,536 bytes)",
        "  inline  150 GiB (161,061,273,600 bytes)",
    ]


def test_importing_tdcopier_imports_neither_of_the_commands_nor_tensordict():
    run_python("""
        import sys, tdcopier
        assert not sys.modules.keys() & {"tensordict", "tdcopier._commands"}
        tdcopier.info()
        assert not sys.modules.keys() & {"tensordict", "tdcopier._commands.info"}
    """)


def test_it_works_where_tensordict_cannot_be_imported():
    run_python("""
        import sys
        sys.modules["tensordict"] = None
        import tdcopier
        assert tdcopier.info()["switches"]["tensordict_backend_installed"] is False
    """)
