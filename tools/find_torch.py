"""Prints the folder of the installed torch, or nothing. Does not import it.

An isolated build does not see the installed packages, but with pip their folder is that of this
Python, and `python -m build` names the environment that is active.
"""

import os
import site
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path


def torch_folder() -> Path | None:
    """Returns the folder of the first torch on the path or among the installed packages."""
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or sys.prefix
    bases = {"base": active, "platbase": active}
    of_active = sysconfig.get_path("platlib", "posix_prefix", bases)
    for place in [
        *sys.path,
        sysconfig.get_path("platlib"),
        of_active,
        site.getusersitepackages(),
    ]:
        found = PathFinder.find_spec("torch", [place])
        if found is not None and found.origin is not None:
            return Path(found.origin).parent
    return None


if __name__ == "__main__":
    print(torch_folder() or "")
