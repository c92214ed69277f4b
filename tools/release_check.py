"""Checks that a release is complete, and prints the commands that publish it, or its notes.

python tools/release_check.py           # what is missing, or the two commands
python tools/release_check.py --notes   # the section of CHANGELOG.md for this version
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"


def version() -> str:
    """Returns the version, which tdcopier/__init__.py states."""
    stated = re.search(r'^__version__ = "(.*)"$', read("tdcopier/__init__.py"), re.MULTILINE)
    if stated is None:
        raise SystemExit("tdcopier/__init__.py states no version")
    return stated[1]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def notes(changelog: str, of_version: str) -> str:
    """Returns the section of a version, without its heading; empty if there is none."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, text = section.partition("\n")
        if heading.split()[:1] == [of_version]:
            return text.strip()
    return ""


def dead_links(page: Path) -> list[str]:
    """Returns the relative links of a Markdown page that lead nowhere."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    return [
        target
        for target in targets
        if not re.match(r"[a-z]+:", target) and not (page.parent / target).exists()
    ]


def pairs_without_modules(wheels: Sequence[Path]) -> list[str]:
    """Returns the supported pairs of Python and torch for which no wheel has modules."""
    found: dict[str, str] = {}
    for wheel in wheels:
        if zipfile.is_zipfile(wheel):
            python = re.search(r"-cp3(\d+)-", wheel.name)
            found[f"3.{python[1]}" if python else ""] = "\n".join(zipfile.ZipFile(wheel).namelist())
    wanted = re.findall(r"Python (3\.\d+), torch (\d+\.\d+)", read("docs/design/wheels.json"))
    return [
        f"Python {python}, torch {torch}"
        for python, torch in wanted
        if f"/for_torch_{torch}/_C." not in found.get(python, "")
    ]


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", "-C", str(ROOT), *arguments], text=True).strip()


def missing() -> list[str]:
    """Returns what keeps this commit from being a release, in sentences."""
    stated = version()
    found = []
    if git("status", "--porcelain"):
        found.append("The tree is not clean.")
    is_tagged = bool(git("tag", "--list", f"v{stated}"))
    if is_tagged and f"v{stated}" not in git("tag", "--points-at", "HEAD").split():
        found.append(f"The tag v{stated} is at another commit.")
    if not notes(read("CHANGELOG.md"), stated):
        found.append(f"CHANGELOG.md has no section for {stated}.")
    if f"\nversion: {stated}\n" not in read("CITATION.cff"):
        found.append(f"CITATION.cff does not name version {stated}.")
    if "\npip install tdcopier\n" not in read("README.md"):
        found.append("README.md does not begin with `pip install tdcopier`, and for which torch.")
    for page in [*ROOT.glob("*.md"), *ROOT.glob("csrc/*.md")]:  # Sphinx checks those of docs
        found += [f"{page.name} links to {each}, which is not there." for each in dead_links(page)]
    wheels = list(DIST.glob(f"tdcopier-{stated}-*.whl"))
    sources = list(DIST.glob(f"tdcopier-{stated}.tar.gz"))
    if pairs := pairs_without_modules(wheels):
        found.append(f"dist lacks modules of {stated} for {', '.join(pairs)}: `make wheels`.")
    found += [
        f"{wheel.name} is not for all of Linux: `make wheels` names the oldest C library."
        for wheel in wheels
        if "manylinux" not in wheel.name
    ]
    if not sources:
        found.append(f"dist has no sdist of {stated}: `python -m build --sdist -o dist`.")
    if wheels or sources:
        check = [sys.executable, "-m", "twine", "check", "--strict", *wheels, *sources]
        checked = subprocess.run(check, capture_output=True, text=True, check=False)
        if checked.returncode:
            found.append(f"twine refuses the metadata: {checked.stdout}{checked.stderr}")
    return found


def published_by(stated: str) -> str:
    """Returns what a person runs to publish this commit."""
    return f"""tdcopier {stated} is complete. These publish it:

git tag --annotate v{stated} --message "tdcopier {stated}" && git push origin v{stated}
python -m twine upload dist/tdcopier-{stated}-*.whl dist/tdcopier-{stated}.tar.gz"""


def main() -> None:
    """Prints the notes, or what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notes", action="store_true", help="print the section of CHANGELOG.md")
    if parser.parse_args().notes:
        print(notes(read("CHANGELOG.md"), version()))
        return
    if found := missing():
        print("\n".join(found))
        sys.exit(1)
    print(published_by(version()))


if __name__ == "__main__":
    main()
