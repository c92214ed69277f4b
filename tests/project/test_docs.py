"""The pages on supported batches, tests and wheels agree with what they tell of."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from catalogue import CONTAINERS, DIRECTIONS, KINDS, NOT_THERE, Kind
from defects import DEFECTS
from each_case import together
from tensordict_kinds import TD_KINDS, TdKind

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "reference" / "what_may_be_in_a_batch.md"
EVERY_KIND = DOCS / "reference" / "tensordict_kinds.md"
TESTS = DOCS / "design" / "how_promises_are_tested.md"
BETWEEN_NAMES = "; "  # in a cell that lists several
AFTER_SUBJECT = ": "  # "numpy: 0-dim; read-only" is two names that begin with "numpy"

PLAIN = {"packed", "alone", "opaque", "none"}
ON_HOST = " (from the host only)"


def names_of(text: str) -> list[str]:
    """Returns the names that a cell lists, as `bare` does."""
    found, subject = [], ""
    for part in text.split(BETWEEN_NAMES):
        *new, name = part.split(AFTER_SUBJECT)
        subject = new[0] if new else subject
        found.append(bare(f"{subject} {'' if subject and name == 'plain' else name}"))
    return found


def bare(name: str) -> str:
    """Returns a name without commas, which a subject and its rest have or lack."""
    return name.replace(",", "").strip()


def cell(kind: Kind, direction: str) -> str | None:
    """Returns the page's text for a kind of leaf in one direction; None: it is not there."""
    outcome = kind.outcome(direction)
    if outcome == NOT_THERE:
        return None
    if kind.fails is not None:
        return f"`{kind.fails.__name__}` from `get()`"
    return outcome if isinstance(outcome, str) else f"`{outcome.__name__}`"


def as_one(cells: dict[str, str | None]) -> str:
    """Returns the page's text for all directions."""
    said = {direction: text for direction, text in cells.items() if text is not None}
    if len(set(said.values())) == 1:
        text = said["H2D"]
    else:
        text = "; ".join(f"{direction}: {words}" for direction, words in said.items())
    return text if len(said) == len(DIRECTIONS) else text + ON_HOST


def tables(page: Path = PAGE) -> list[list[list[str]]]:
    """Returns all tables of a page: rows of cells, the heading first, without the line below it."""
    found: list[list[list[str]]] = []
    inside = False
    for line in page.read_text("utf-8").splitlines():
        if line.startswith("|"):
            if not inside:
                found.append([])
            cells = [text.strip() for text in line.strip("|").split("|")]
            if not all(re.fullmatch("-+", text) for text in cells):
                found[-1].append(cells)
        inside = line.startswith("|")
    return found


def test_the_page_has_its_tables():
    assert [table[0] for table in tables()] == [
        ["treatment", "meaning"],
        ["leaf", "treatment"],
        ["container", "kept besides its class and its children"],
        ["cause", "error"],
    ]


def test_the_table_of_leaves_is_the_catalogue():
    on_page = [(name, words) for names, words in tables()[1][1:] for name in names_of(names)]
    in_catalogue = {
        bare(name): as_one({direction: cell(kind, direction) for direction in DIRECTIONS})
        for name, kind in KINDS.items()
    }
    assert_agree(on_page, {name: text.removesuffix(ON_HOST) for name, text in in_catalogue.items()})


def test_the_table_of_containers_agrees_with_the_catalogue():
    on_page = [(name, keeps) for names, keeps in tables()[2][1:] for name in names_of(names)]
    in_catalogue = {bare(name): container.keeps for name, container in CONTAINERS.items()}
    assert as_text(on_page) == as_text([(name, in_catalogue[name]) for name, _ in on_page])


def outcome(kind: TdKind) -> str:
    """Returns the text of the page on TensorDicts for one kind."""
    said: dict[str, str | None] = {}
    for direction in DIRECTIONS:
        if (counts := kind.counts(direction)) is not None:
            words = [word for word, count in zip(counts._fields, counts, strict=True) if count]
            said[direction] = ", ".join(words) or "none"
    return as_one(said)


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Formats a table so that a difference shows the rows to add and to remove."""
    return "\n".join(" | ".join(row) for row in rows)


def assert_agree(on_page: Sequence[tuple[str, str]], in_catalogue: dict[str, str]) -> None:
    """A page has to name what is not packed, and may name examples of the rest."""
    others = [(name, in_catalogue.get(name, "not there")) for name, _ in on_page]
    named = {name for name, _ in on_page}
    others += [row for row in in_catalogue.items() if row[0] not in named and not is_plain(row[1])]
    assert as_text(sorted(on_page)) == as_text(sorted(others))


def is_plain(treatment: str) -> bool:
    """Returns whether a page need not name what is treated so."""
    return set(treatment.removesuffix(ON_HOST).split(", ")) <= PLAIN


def test_the_table_of_tensordicts_is_the_catalogue():
    rows = tables(EVERY_KIND)[0][1:]
    on_page = [(name, words) for names, words in rows for name in names_of(names)]
    assert_agree(on_page, {bare(name): outcome(kind) for name, kind in TD_KINDS.items()})


@together("name", [*KINDS, *CONTAINERS, *TD_KINDS])
def test_names_can_stand_in_a_table(name):
    assert "|" not in name
    assert BETWEEN_NAMES not in name
    assert AFTER_SUBJECT not in name
    assert name == name.strip()


def test_the_page_on_tests_names_broken_engines_that_exist():
    table = tables(TESTS)[-1]
    known = [(defect.promise, name.replace("_", " ")) for name, defect in DEFECTS.items()]
    for promise, name, _ in table[1:]:
        assert (promise, name) in known


def test_the_readme_names_the_pairs_whose_wheels_were_tested():
    pairs = {
        tuple(re.findall(r"\d+\.\d+", pair)[:2])
        for pair in json.loads((DOCS / "design/wheels.json").read_text())
    }

    def span(versions):
        ordered = sorted(versions, key=lambda version: [*map(int, version.split("."))])
        return f"{ordered[0]} to {ordered[-1]}", ordered[-1]

    pythons, _ = span({python for python, _ in pairs})
    torches, newest = span({torch for _, torch in pairs})
    oldest = pythons.split()[0]
    _, last = span({torch for python, torch in pairs if python == oldest})
    assert last != newest, "then the README need not tell that Python apart"
    told = f"Python {pythons} and torch {torches} (Python {oldest}: up to {last})"
    assert told in (DOCS.parent / "README.md").read_text()
