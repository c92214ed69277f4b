"""Names on our subclasses of torchrl's classes are on the API page, or private."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

torchrl = pytest.importorskip("tdcopier.torchrl", exc_type=ImportError)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "api.rst"
CLASSES = [name for name in torchrl.__all__ if not hasattr(getattr(torchrl, name), "_fields")]


def listed(name: str) -> set[str]:
    """Returns the attributes and methods of a class on the page, with those of its base there."""
    text = PAGE.read_text("utf-8").partition(f".. py:class:: {name}")[2]
    own = re.split(r"^\S", text.partition("\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    found = set(re.findall(r"\.\. py:(?:attribute|method):: (\w+)", own))
    is_like = re.search(r"otherwise as :class:`(\w+)`", own)
    return found | listed(is_like.group(1)) if is_like else found


@pytest.mark.parametrize("name", CLASSES)
def test_no_public_name_is_missing_on_the_api_page(name):
    cls = getattr(torchrl, name)
    ours = [base for base in cls.__mro__ if base.__module__.startswith("tdcopier.")]
    theirs = {each for base in cls.__mro__ if base not in ours for each in dir(base)}
    found = {each for base in ours for each in vars(base)}
    for base in ours:
        found |= set(
            re.findall(r"^ +self\.(\w+)\b[^=\n]* = ", inspect.getsource(base), re.MULTILINE)
        )
    public = {each for each in found if not each.startswith("_")}
    assert public - theirs <= listed(name)
