"""The build backend: scikit-build-core, or a sentence if a build without isolation lacks it."""

import importlib.util

MISSING = [
    package
    for package, module in (("scikit-build-core", "scikit_build_core"), ("pybind11", "pybind11"))
    if importlib.util.find_spec(module) is None
]
if MISSING:
    raise SystemExit(
        f"tdcopier's build needs {' and '.join(MISSING)}: run `pip install .`, which brings them, "
        f"or `pip install {' '.join(MISSING)} cmake ninja` before a build without isolation"
    )

from scikit_build_core.build import *  # noqa: E402, F403 - the hooks of a backend
