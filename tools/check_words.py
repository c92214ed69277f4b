"""Checks the wording of comments, docstrings and Markdown against the rules in CONTRIBUTING.md.

    python tools/check_words.py [--counts] [FILE ...]

Without files, checks every file that git knows. Prints ``file:line: rule: text`` for each violation
and exits with 1 if there is one. ``--counts`` prints the number per 1000 words instead.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

RULES = {
    "nobody, somebody, whoever (name the thread, the caller or the user)": (
        r"\b(?:whoever|whomever|nobody|somebody)\b"
    ),
    "he, his, him (of a thread: it)": r"\b(?:he|him|his)\b",
    "lie (bytes are stored, tensors are allocated)": r"\b(?:lies?|lay)\b",
    "behind (in time: after)": r"\bbehind\b",
    "to be had (available)": r"\bto be had\b",
    "so many, so much, manieth (give the number)": (
        r"\bso many\b|\bso much\b(?! (?:as|that|less))|\bmanieth\b"
    ),
    "what there is, that is there (name it)": r"\bwhat there is\b|\bthat (?:is|are) there\b",
    "a sentence that opens with What (name the subject)": (
        r"(?:^|(?<=[.:!] ))What (?!is |are |does |do |did |if |happens|it |to |you |a |the |each )"
    ),
}
_RULES = {rule: re.compile(pattern, re.IGNORECASE) for rule, pattern in RULES.items()}
_OPENS = "a sentence that opens with What (name the subject)"
_RULES[_OPENS] = re.compile(RULES[_OPENS])
SUFFIXES = (".py", ".pyi", ".md", ".h", ".cpp", ".cu")

Line = tuple[int, str]


def lines_of_python(text: str) -> Iterator[Line]:
    """Yields comments and docstrings, line by line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            yield from _without_code(node.value.value, node.lineno)


def lines_of_cpp(text: str) -> Iterator[Line]:
    """Yields comments, line by line."""
    for number, line in enumerate(text.splitlines(), 1):
        found = re.search(r"(?:^|[\s;{}(,])//+ ?(.*)$", line)
        if found:
            yield number, found.group(1)


def _without_code(text: str, first: int = 1) -> Iterator[Line]:
    fenced = False
    for number, line in enumerate(text.splitlines(), first):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, re.sub(r"`[^`]*`", "`", line).strip()


def lines_of(path: Path) -> Iterator[Line]:
    """Yields the lines of prose in a file, with their numbers."""
    text = path.read_text()
    if path.suffix == ".md":
        return _without_code(text)
    return lines_of_python(text) if path.suffix in (".py", ".pyi") else lines_of_cpp(text)


def main() -> int:
    """Checks the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", action="store_true", help="print figures per 1000 words")
    parser.add_argument("files", nargs="*", type=Path)
    arguments = parser.parse_args()
    files = arguments.files or [
        Path(name)
        for name in subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        if Path(name).exists()
        and name.endswith(SUFFIXES)
        and Path(name) != Path("tools/check_words.py")
    ]
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    words: collections.Counter[str] = collections.Counter()
    for path in files:
        area = path.parts[0] + path.suffix if len(path.parts) > 1 else path.name
        for number, line in lines_of(path):
            words[area] += len(line.split())
            for rule, pattern in _RULES.items():
                for _ in pattern.finditer(line):
                    found[area, rule] += 1
                    if not arguments.counts:
                        print(f"{path}:{number}: {rule}: {line.strip()}")
    if arguments.counts:
        for area in sorted(words):
            print(f"{area} ({words[area]} words)")
            for rule in RULES:
                if found[area, rule]:
                    share = 1000 * found[area, rule] / words[area]
                    print(f"  {share:6.2f}  {found[area, rule]:4}  {rule}")
    return 1 if found and not arguments.counts else 0


if __name__ == "__main__":
    sys.exit(main())
