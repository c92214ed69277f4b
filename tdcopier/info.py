"""`python -m tdcopier.info`: the former name of `python -m tdcopier info`, kept for one release."""

from __future__ import annotations

import sys
from types import ModuleType

from tdcopier._commands.info import as_text, main
from tdcopier._commands.info_facts import Info, info

__all__ = ["as_text", "main"]


class _CallableModule(ModuleType):
    """A module that can be called like the function `info`, whose place it takes when imported."""

    def __call__(self, *, make_contexts: bool = False) -> Info:
        return info(make_contexts=make_contexts)


if __name__ == "__main__":
    sys.exit(main())

sys.modules[__name__].__class__ = _CallableModule
