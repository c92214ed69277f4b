"""The commands: `python -m tdcopier info` and `python -m tdcopier bench`."""

from __future__ import annotations

import importlib
import sys

import tdcopier

COMMANDS = {
    "info": "print what a bug report needs: versions, devices, limits",
    "bench": "compare tdcopier with the usual ways of copying, on this machine",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command that the first argument names.

    Args:
        arguments: The command, then its own arguments; by default those of the process.

    Returns:
        The exit status: the command's, 0 after `--help` and `--version`, 2 without a command.

    """
    name, *others = arguments if arguments is not None else sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        status: int = importlib.import_module(f"tdcopier._commands.{name}").main(others)
        return status
    if name == "--version":
        print(f"tdcopier {tdcopier.__version__}")
        return 0
    lines = [
        "usage: python -m tdcopier COMMAND [--help]",
        "       python -m tdcopier --version",
        "",
    ]
    lines += [f"  {command:<7}{what}" for command, what in COMMANDS.items()]
    if name in ("-h", "--help"):
        print("\n".join(lines))
        return 0
    print("\n".join([f"unknown command: {name}", *lines]), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
