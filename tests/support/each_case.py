"""Runs many small cases in one test: most of them cost less than a test itself.

All cases run. A failure names every case that fails, with its error, and the first is its cause. A
case that is skipped leaves the others as they are.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest


def check_each(cases: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Runs the checks of all cases, by name. Skips the test if every case is skipped."""
    __tracebackhide__ = True
    count, failed, skipped = 0, [], []
    first: BaseException | None = None
    for name, check in cases:
        count += 1
        try:
            with _named(name):
                check()
        except pytest.skip.Exception as why:
            skipped.append(f"{name}: {why}")
        except (Exception, pytest.fail.Exception) as error:
            told = textwrap.indent(f"{type(error).__name__}: {error}", "    ")
            failed.append(f"{name}:\n{told}")
            first = first or error
    assert count, "there are no cases"
    if failed:
        told = "\n".join(failed)
        raise AssertionError(f"{len(failed)} of {count} cases fail\n{told}") from first
    if skipped and len(skipped) == count:
        pytest.skip("; ".join(skipped))


def together(
    names: str | Sequence[str], cases: Iterable[Any], ids: Iterable[str] = (), *, by: str = ""
) -> Any:
    """Has one test run all cases, which are given as to `pytest.mark.parametrize`.

    With the name of an argument, there is one test for each of its values. The test's fixtures are
    made once, so this is for tests that need no new ones in each case. The cases' filters of
    warnings hold in the whole test.
    """
    arguments = [names] if isinstance(names, str) else [*names]
    rows = [*_rows(arguments, cases, [*ids])]

    def decorate(test: Callable[..., Any]) -> Any:
        wanted = inspect.signature(test).parameters

        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            __tracebackhide__ = True
            given = {name: value for name, value in fixtures.items() if name in wanted}
            check_each(
                (name, functools.partial(test, **{**given, **_only(values, wanted)}))
                for name, values, _ in rows
                if not by or values[by] == fixtures[by]
            )

        kept = [name for name in wanted if name not in arguments] + ([by] if by else [])
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in kept]
        all_cases.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        marked: Any = all_cases
        for mark in {repr(mark): mark for _, _, marks in rows for mark in marks}.values():
            assert mark.name == "filterwarnings", f"a case cannot have the mark {mark.name}"
            marked = getattr(pytest.mark, mark.name)(*mark.args)(marked)
        if by:
            marked = pytest.mark.parametrize(by, [*{values[by]: None for _, values, _ in rows}])(
                marked
            )
        return marked

    return decorate


def _only(values: dict[str, Any], wanted: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in wanted}


def _rows(
    arguments: list[str], cases: Iterable[Any], ids: list[str]
) -> Iterator[tuple[str, dict[str, Any], list[Any]]]:
    """Yields name, values by argument, and marks of each case."""
    for number, case in enumerate(cases):
        is_param = hasattr(case, "marks") and hasattr(case, "values")
        values = case.values if is_param else case if len(arguments) > 1 else (case,)
        name = ids[number] if ids else case.id if is_param else None
        if name is None:
            name = "-".join(getattr(value, "__name__", str(value)) for value in values)
        marks = [getattr(mark, "mark", mark) for mark in case.marks] if is_param else []
        yield name, dict(zip(arguments, values, strict=True)), marks


@contextmanager
def _named(case: str) -> Iterator[None]:
    """Names the thread for the stacks that are printed if the case takes too long."""
    thread = threading.current_thread()
    before = thread.name
    thread.name = f"{before}, in the case {case}"
    try:
        yield
    finally:
        thread.name = before
