"""Checks that a release is complete, and prints the commands that publish it, or its notes.

python tools/release_check.py               # what is missing, or the two commands
python tools/release_check.py --tag v0.1.0  # also whether the tag is that of the version
python tools/release_check.py --notes       # the section of CHANGELOG.md for this version
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import build_wheels

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PAIRS = "docs/design/wheels.json"


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


def date_in(text: str, before: str) -> str:
    """Returns the date that follows these words in a line of its own, or "no date"."""
    found = re.search(rf"^{re.escape(before)}(\d{{4}}-\d\d-\d\d)$", text, re.MULTILINE)
    return found[1] if found else "no date"


def minor_of(pair: str) -> tuple[str, str]:
    """Returns the minor versions of Python and torch of "Python 3.12, torch 2.13.0"."""
    found = re.fullmatch(r"Python (3\.\d+), torch (\d+\.\d+)\.\d+", pair)
    if found is None:
        raise SystemExit(f"{PAIRS}: {pair!r} is no pair of Python and torch")
    return found[1], found[2]


def wheel_name(of_version: str, python: str) -> str:
    tag = f"cp{python.replace('.', '')}"
    return f"tdcopier-{of_version}-{tag}-{tag}-{build_wheels.PLATFORM}.whl"


def files_of(of_version: str, pairs: Sequence[str]) -> list[str]:
    """Returns the names of the files of a release: a wheel for each Python, and the sdist."""
    pythons = dict.fromkeys(minor_of(pair)[0] for pair in pairs)
    return [*(wheel_name(of_version, each) for each in pythons), f"tdcopier-{of_version}.tar.gz"]


def pairs_without_modules(of_version: str, pairs: Sequence[str]) -> list[str]:
    """Returns the pairs for which no wheel in dist has modules."""
    found = []
    for pair in pairs:
        python, torch = minor_of(pair)
        wheel = DIST / wheel_name(of_version, python)
        names = zipfile.ZipFile(wheel).namelist() if zipfile.is_zipfile(wheel) else []
        if not any(name.startswith(f"tdcopier/for_torch_{torch}/_C.") for name in names):
            found.append(pair)
    return found


def failures(pairs: dict[str, dict[str, Any]]) -> list[str]:
    """Returns for each pair that was not seen to work what did not, as `make test-wheels` wrote."""
    found = []
    for pair, seen in pairs.items():
        failed = [name for name in ("import", "demo") if seen.get(name) is not True]
        if not re.match(r"[1-9]\d* passed(, \d+ skipped)? in ", str(seen.get("tests"))):
            failed.append("tests")
        if failed:
            found.append(f"{pair} ({', '.join(failed)})")
    return found


def git(*arguments: str) -> str:
    return subprocess.check_output(["git", "-C", str(ROOT), *arguments], text=True).strip()


def committed_files() -> dict[str, str]:
    """Returns the files of HEAD, each with git's hash of its bytes."""
    lines = git("ls-tree", "-r", "HEAD").splitlines()
    return {path: about.split()[2] for about, path in (line.split("\t") for line in lines)}


def hash_of(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def wheel_is_of(committed: dict[str, str], commit_time_s: int, wheel: Path) -> bool:
    """Returns whether a wheel has the commit's package, and was built with the commit's time."""
    with zipfile.ZipFile(wheel) as archive:
        members = archive.infolist()
        package = {
            member.filename: hash_of(archive.read(member))
            for member in members
            if member.filename.startswith("tdcopier/")
            and not member.filename.endswith((".so", "/"))
        }
    year, month, day, hour, minute, second, *_ = time.gmtime(commit_time_s)
    when = (year, month, day, hour, minute, second // 2 * 2)  # all that an archive can say
    wanted = {path: each for path, each in committed.items() if path.startswith("tdcopier/")}
    return package == wanted and all(member.date_time == when for member in members)


def sdist_is_of(committed: dict[str, str], excluded: Sequence[str], sdist: Path) -> bool:
    """Returns whether an sdist has the commit's files, except those that it leaves out."""
    top = sdist.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(sdist) as archive:
        found = {
            member.name.removeprefix(top): hash_of(archive.extractfile(member).read())
            for member in archive
            if member.isfile()
        }
    found.pop("PKG-INFO", None)
    wanted = {
        path: each for path, each in committed.items() if not path.startswith(tuple(excluded))
    }
    return found == wanted


def files_of_others(files: Sequence[Path]) -> list[Path]:
    """Returns the files that are not of this commit, or are no archives."""
    committed = committed_files()
    commit_time_s = int(git("log", "-1", "--format=%ct"))
    stated = re.search(r"^sdist\.exclude = (\[.*\])$", read("pyproject.toml"), re.MULTILINE)
    excluded = json.loads(stated[1]) if stated else []

    def is_of_commit(file: Path) -> bool:
        if file.suffix == ".whl":
            return zipfile.is_zipfile(file) and wheel_is_of(committed, commit_time_s, file)
        return tarfile.is_tarfile(file) and sdist_is_of(committed, excluded, file)

    return [file for file in files if not is_of_commit(file)]


def wrong_in_dist(of_version: str, pairs: Sequence[str]) -> list[str]:
    """Returns what is wrong with the files in dist, in sentences."""
    names = files_of(of_version, pairs)
    found = []
    if lacking := pairs_without_modules(of_version, pairs):
        found.append(f"dist lacks modules of {of_version} for {'; '.join(lacking)}: `make wheels`.")
    for file in sorted(DIST.glob("*")):
        if file.name not in names:
            wheels = wheel_name(of_version, "3.x")
            found.append(f"{file.name} is not of this release: remove it. Wheels are {wheels}.")
    files = [DIST / name for name in names if (DIST / name).exists()]
    if DIST / names[-1] not in files:
        found.append(f"dist has no sdist of {of_version}: `python -m build --sdist -o dist`.")
    for file in files_of_others(files):
        make = "make wheels" if file.suffix == ".whl" else "python -m build --sdist -o dist"
        found.append(f"{file.name} is not of this commit: `{make}`.")
    if files:
        check = [sys.executable, "-m", "twine", "check", "--strict", *files]
        checked = subprocess.run(check, capture_output=True, text=True, check=False)
        if checked.returncode:
            found.append(f"twine refuses the metadata: {checked.stdout}{checked.stderr}")
    return found


def missing(tag: str | None = None) -> list[str]:
    """Returns what keeps this commit from being a release, in sentences."""
    stated = version()
    found = []
    if tag not in (None, f"v{stated}"):
        found.append(f"The tag is {tag}, but tdcopier/__init__.py states {stated}.")
    if git("status", "--porcelain"):
        found.append("The tree is not clean.")
    is_tagged = bool(git("tag", "--list", f"v{stated}"))
    if is_tagged and f"v{stated}" not in git("tag", "--points-at", "HEAD").split():
        found.append(f"The tag v{stated} is at another commit.")
    if not notes(read("CHANGELOG.md"), stated):
        found.append(f"CHANGELOG.md has no section for {stated}.")
    if f"\nversion: {stated}\n" not in read("CITATION.cff"):
        found.append(f"CITATION.cff does not name version {stated}.")
    dated = date_in(read("CHANGELOG.md"), f"## {stated} - ")
    cited = date_in(read("CITATION.cff"), "date-released: ")
    if not dated == cited != "no date":
        found.append(f"CHANGELOG.md has {dated} for {stated}, and CITATION.cff {cited}.")
    if "\npip install tdcopier\n" not in read("README.md"):
        found.append("README.md does not begin with `pip install tdcopier`, and for which torch.")
    for page in [*ROOT.glob("*.md"), *ROOT.glob("csrc/*.md")]:  # Sphinx checks those of docs
        found += [f"{page.name} links to {each}, which is not there." for each in dead_links(page)]
    pairs = json.loads(read(PAIRS))
    found += [f"{each} was not seen to work: `make test-wheels`." for each in failures(pairs)]
    return found + wrong_in_dist(stated, list(pairs))


def published_by(stated: str) -> str:
    """Returns what a person runs to publish this commit."""
    return f"""tdcopier {stated} is complete. These publish it:

git tag --annotate v{stated} --message "tdcopier {stated}" && git push origin v{stated}
python -m twine upload dist/tdcopier-{stated}-*.whl dist/tdcopier-{stated}.tar.gz"""


def main() -> None:
    """Prints the notes, or what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notes", action="store_true", help="print the section of CHANGELOG.md")
    parser.add_argument("--tag", help="which has to be that of the version")
    arguments = parser.parse_args()
    if arguments.notes:
        print(notes(read("CHANGELOG.md"), version()))
        return
    if found := missing(arguments.tag):
        print("\n".join(found))
        sys.exit(1)
    print(published_by(version()))


if __name__ == "__main__":
    main()
