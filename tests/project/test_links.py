"""Links and references of the Markdown pages, the tutorials and the API page lead somewhere.

Nothing is fetched: of a link to another site, only the form is checked.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

import pytest
from each_case import together

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
API = DOCS / "reference" / "api.rst"
GENERATED = [DOCS / "_build", DOCS / "tutorials"]
FOLDERS = ["benchmarks", "csrc", "docs", "tests", "tools", "tutorials"]
FOUND = [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in ROOT.glob(f"{name}/**/*.md"))]
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in FOUND
    if not any(path.is_relative_to(folder) for folder in GENERATED)
}
TUTORIALS = {str(path.relative_to(ROOT)): path for path in ROOT.glob("tutorials/*.py")}
WITH_ROLES = {**PAGES, **TUTORIALS, "docs/reference/api.rst": API}

SHOWN_LEVELS = 3  # myst_heading_anchors in conf.py
FENCED = re.compile(r"^( *)```.*\n(?:.*\n)*?\1```$", re.MULTILINE)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(([^()\s]*)\)|\b(?:href|src)=\"([^\"]*)\"")
INCLUDED = re.compile(r"^ *```\{(?:include|literalinclude)\} (\S+)", re.MULTILINE)
ROLE = re.compile(r"(?:\{([a-z:]+)\}|:([a-z:]+):)`([^`]+)`")
OF_PYTHON = {"func", "meth", "class", "exc", "attr", "data", "mod", "obj"}


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "`", FENCED.sub("", text))


def links(text: str) -> list[str]:
    """Returns the targets of links and images."""
    return [found[1] or found[2] or "" for found in LINK.finditer(without_code(text))]


def roles(text: str) -> list[tuple[str, str]]:
    """Returns each role, such as `func`, with what it names."""
    found = []
    for role in ROLE.finditer(text):
        named = re.search(r"<([^<>]+)>$", role[3])
        name = named[1] if named else role[3]
        found.append(((role[1] or role[2]).removeprefix("py:"), name.lstrip("~!")))
    return found


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and myst form them."""
    found: dict[str, int] = {}
    names = set(re.findall(r"^\(([\w-]+)\)=$", page.read_text("utf-8"), re.MULTILINE))
    for marks, heading in re.findall(r"^(#+) (.+)$", FENCED.sub("", page.read_text("utf-8")), re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = found[slug] = found.get(slug, -1) + 1
        if len(marks) <= SHOWN_LEVELS:
            names.add(f"{slug}-{count}" if count else slug)
    return names


def file_of(page: Path, target: str) -> Path:
    """Returns the file that a link or a `doc` role leads to; Sphinx makes pages of tutorials."""
    path = (DOCS / target[1:] if target.startswith("/") else page.parent / target).resolve()
    if path.parent == DOCS / "tutorials":
        return ROOT / "tutorials" / f"{path.name}.py"
    if path.exists() or path.suffix:
        return path
    found = [path.with_suffix(suffix) for suffix in (".md", ".rst")]
    return next((file for file in found if file.exists()), path)


def broken(page: Path, target: str) -> str | None:
    """Says what is wrong with a link."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        is_right = parts.scheme == "https" and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc)
        return None if is_right else f"{target} is not of the form https://host/..."
    file = file_of(page, parts.path) if parts.path else page
    if not file.exists():
        return f"{target} leads to no file"
    if parts.fragment and parts.fragment not in anchors(file):
        return f"{target} leads to no heading"
    return None


def documented() -> dict[str, set[str] | None]:
    """Returns the names on the API page, with their members where it lists them."""
    found: dict[str, set[str] | None] = {}
    entries = re.split(r"^\.\. (?=auto|py:)", API.read_text("utf-8"), flags=re.MULTILINE)[1:]
    for entry in entries:
        name = re.match(r"\S+:: ([\w.]+)", entry)
        assert name is not None, entry
        members = re.search(r"^ +:members: *(.*(?:\n {6,}\S.*)*)$", entry, re.MULTILINE)
        listed = {text.strip() for text in members[1].split(",")} if members else set()
        inside = set(re.findall(r"^ +\.\. py:\w+:: (\w+)", entry, re.MULTILINE))
        place = "tdcopier.torchrl." if entry.startswith("py:") else ""
        found[place + name[1]] = None if listed == {""} else listed | inside
    return found


def is_documented(name: str, known: dict[str, set[str] | None]) -> bool:
    if name in known:
        return True
    holder, _, member = name.rpartition(".")
    members = known.get(holder, set())
    return members is None or member in members


def exists(name: str) -> bool:
    """Returns whether a module has this name in it."""
    module, *rest = name.split(".")
    value: object = importlib.import_module(module)
    for part in rest:
        if isinstance(value, ModuleType) and not hasattr(value, part):
            value = importlib.import_module(f"{value.__name__}.{part}")
        elif part not in getattr(value, "__annotations__", {}):
            value = getattr(value, part, None)
        else:
            return True
    return value is not None


@together("page", sorted(PAGES))
def test_the_links_of_a_page_lead_to_files_and_headings(page):
    text = PAGES[page].read_text("utf-8")
    assert [why for link in links(text) if (why := broken(PAGES[page], link))] == []


@together("page", sorted(PAGES))
def test_the_files_that_a_page_includes_exist(page):
    for name in INCLUDED.findall(PAGES[page].read_text("utf-8")):
        file = (PAGES[page].parent / name).resolve()
        assert file.exists() or file.is_relative_to(DOCS / "_build"), name


@together("page", sorted(WITH_ROLES))
def test_the_references_of_a_page_name_what_the_api_page_has(page):
    known = documented()
    for role, name in roles(WITH_ROLES[page].read_text("utf-8")):
        if role == "doc":
            assert file_of(WITH_ROLES[page], name).exists(), name
            continue
        assert role in OF_PYTHON, role
        if page == "docs/reference/api.rst" and "." not in name:
            name = f"tdcopier.torchrl.{name}"
        if name.startswith("tdcopier"):
            assert is_documented(name, known), f"{name} is not on the API page"
        if not name.startswith("tdcopier.torchrl."):  # which imports torchrl
            assert exists(name), name


def test_every_page_of_the_docs_stands_in_the_table_of_contents():
    index = DOCS / "index.md"
    listed = re.findall(r"^[a-z_]+/[a-z_]+$", index.read_text("utf-8"), re.MULTILINE)
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.glob("*/*.md")}
    pages |= {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.glob("*/*.rst")}
    generated = {"tutorials", "_build"}
    assert {page for page in pages if page.split("/")[0] not in generated} == {
        page for page in listed if page.split("/")[0] not in generated
    }


@pytest.mark.parametrize(
    ("link", "is_right"),
    [
        ("here.md", True),
        ("here.md#a-heading-of-tdcopierpark", True),
        ("#again-1", True),
        ("https://example.org/page", True),
        ("there.md", False),
        ("#a-heading", False),
        ("#in-a-fence", False),
        ("http://example.org", False),
        ("https://", False),
    ],
)
def test_a_broken_link_is_found(link, is_right, tmp_path):
    page = tmp_path / "here.md"
    fence = "```sh\n# in a fence\n```\n"
    page.write_text(f"# A heading of `tdcopier.park`\n\n{fence}\n## Again\n\n## Again\n")
    assert (broken(page, link) is None) == is_right
    assert links(f"See [`this`\nthing]({link}), `[no]({link}x)`.\n{fence}") == [link]


def test_a_reference_to_a_name_that_is_not_there_is_found():
    known = documented()
    assert is_documented("tdcopier.Snapshot.get", known)
    assert not is_documented("tdcopier.Snapshot.got", known)
    assert not is_documented("tdcopier.start_copied", known)
    assert exists("tdcopier.stats.CopyStats.packed_leaves")
    assert not exists("tdcopier.stats.CopyStats.packet_leaves")
    assert roles("{func}`with x: <tdcopier.park>` and :meth:`~tdcopier.Parked.resume`") == [
        ("func", "tdcopier.park"),
        ("meth", "tdcopier.Parked.resume"),
    ]
