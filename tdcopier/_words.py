"""Counts with their nouns, for messages."""

from __future__ import annotations

_PLURALS = {"leaf": "leaves", "leaf or container": "leaves or containers"}


def counted(count: int, noun: str) -> str:
    """Return "1 leaf" or "2 leaves", for example."""
    return f"{count} {noun if count == 1 else _PLURALS.get(noun, f'{noun}s')}"
