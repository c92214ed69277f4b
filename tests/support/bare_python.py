"""A Python with this one's packages that does not find tdcopier in the source tree."""

from __future__ import annotations

import os
import sys
import sysconfig
import venv
from pathlib import Path


def bare_python(folder: Path) -> str:
    """Makes one in a folder, and returns its path. It finds tdcopier through PYTHONPATH.

    An editable installation would come before anything on the path.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "packages.pth").write_text("\n".join(filter(os.path.isdir, sys.path)) + "\n")
    return str(folder / "bin" / "python")
