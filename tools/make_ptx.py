"""Compiles the kernels in csrc/kernels to the PTX that the engine passes to CUDA's driver.

``python tools/make_ptx.py`` writes a header for each, for example move_segments_ptx.h for
move_segments.cu; ``--check`` only compares them.
It needs no GPU and no toolkit, only NVRTC in one exact version, since each version writes other
PTX: ``pip install nvidia-cuda-nvrtc-cu12==12.1.105``. Its PTX version, 8.1, is the oldest that
allows 32 KiB of kernel parameters, so every driver that supports these (530 and later) accepts it.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from importlib import metadata
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1] / "csrc/kernels"
NAMES = ("move_segments", "move_rows")
PACKAGE, VERSION = "nvidia-cuda-nvrtc-cu12", "12.1.105"
OPTIONS = ["--gpu-architecture=compute_70", "--std=c++17"]

PREAMBLE = """// Written by tools/make_ptx.py from {name}.cu: not to be edited.
#pragma once

namespace tdcopier {{

inline constexpr char k{constant}Ptx[] = R"ptx("""
END = """)ptx";

}  // namespace tdcopier
"""


class WrongCompiler(RuntimeError):
    """NVRTC is missing, or its version is not the one that the header is made with."""


def header_of(name: str) -> Path:
    return KERNELS / f"{name}_ptx.h"


def compiled(name: str) -> str:
    """Returns the text of a kernel's header for its present source.

    Raises:
        WrongCompiler: NVRTC is missing or has another version.
        RuntimeError: The source does not compile; the message has the compiler's log.

    """
    nvrtc = _load()
    program = ctypes.c_void_p()
    source = (KERNELS / f"{name}.cu").read_bytes()
    _check(nvrtc, nvrtc.nvrtcCreateProgram, ctypes.byref(program), source, b"", 0, None, None)
    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    if nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options) != 0:
        raise RuntimeError(_text(nvrtc, program, "ProgramLog"))
    # Drop constants of NVRTC's own headers, which nothing uses.
    lines = _text(nvrtc, program, "PTX").strip().splitlines()
    kept = [line for line in lines if not (line.startswith(".global") and "nv6target" in line)]
    constant = name.title().replace("_", "")
    return "\n".join([PREAMBLE.format(name=name, constant=constant) + kept[0], *kept[1:], END])


def _load() -> ctypes.CDLL:
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise WrongCompiler(f"there is no {PACKAGE}: pip install {PACKAGE}=={VERSION}") from None
    if package.version != VERSION:
        raise WrongCompiler(f"{PACKAGE} is {package.version}, and {VERSION} is wanted")
    for file in package.files or []:
        if file.name.startswith("libnvrtc.so"):
            return ctypes.CDLL(str(file.locate()))
    raise WrongCompiler(f"{PACKAGE} has no libnvrtc.so")


def _check(nvrtc: ctypes.CDLL, call: ctypes._CFuncPtr, *arguments: object) -> None:
    result = call(*arguments)
    if result != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(nvrtc.nvrtcGetErrorString(result).decode())


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size"), program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}"), program, text)
    return text.value.decode()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args(arguments)
    try:
        headers = {header_of(name): compiled(name) for name in NAMES}
    except WrongCompiler as error:
        print(error, file=sys.stderr)
        return 2
    if not options.check:
        for file, header in headers.items():
            file.write_text(header)
        return 0
    stale = [file.name for file, header in headers.items() if file.read_text() != header]
    if stale:
        print(f"{', '.join(stale)}: not what the source compiles to: run {sys.argv[0]}.")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
