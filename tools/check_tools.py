"""Lists the tools that the build needs and this machine lacks, and the command to install them."""

import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path


def missing_debian_packages() -> list[str]:
    """Returns the Debian packages that provide the missing tools."""
    missing = [
        package for tool, package in (("g++", "g++"), ("git", "git")) if not shutil.which(tool)
    ]
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        missing.append("python3-venv")
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("python3-dev")
    return missing


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - the one place that must say so
        found = ".".join(map(str, sys.version_info[:3]))
        print(f"tdcopier needs Python 3.10 or newer; {sys.executable} is {found}.", file=sys.stderr)
        return 1
    missing = missing_debian_packages()
    if missing:
        print(f"Missing: {', '.join(missing)}. Install with:", file=sys.stderr)
        print(f"  sudo apt-get install {' '.join(missing)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
