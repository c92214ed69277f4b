"""Prints the folder of the installed torch, or nothing. Does not import it.

pip hides the installed packages from an isolated build, but not the folder that they are in.
"""

import site
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path


def torch_folder() -> Path | None:
    """Returns the folder of the first torch on the path or among the installed packages."""
    installed = [sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    for place in [*sys.path, *installed, site.getusersitepackages()]:
        found = PathFinder.find_spec("torch", [place])
        if found is not None and found.origin is not None:
            return Path(found.origin).parent
    return None


if __name__ == "__main__":
    print(torch_folder() or "")
