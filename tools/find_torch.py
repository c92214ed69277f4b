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


def _sees_the_system(environment: Path) -> bool:
    """Returns whether the packages of the system and the user count in this environment."""
    settings = environment / "pyvenv.cfg"
    if not settings.exists():
        return True
    lines = settings.read_text().lower().replace(" ", "").splitlines()
    return "include-system-site-packages=true" in lines


def torch_folder() -> Path | None:
    """Returns the folder of the first torch on the path or among the installed packages."""
    active = os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX") or sys.prefix
    bases = {"base": active, "platbase": active}
    of_active = sysconfig.get_path("platlib", "posix_prefix", bases)
    places = [*sys.path, sysconfig.get_path("platlib"), of_active]
    if _sees_the_system(Path(active)):
        places += [*site.getsitepackages([sys.base_prefix]), site.getusersitepackages()]
    for place in places:
        found = PathFinder.find_spec("torch", [place])
        if found is not None and found.origin is not None:
            return Path(found.origin).parent
    return None


if __name__ == "__main__":
    print(torch_folder() or "")
