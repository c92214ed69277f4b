"""Cases that run together in one test (tests/support/each_case.py)."""

from __future__ import annotations

import pytest
from each_case import check_each


def fails() -> None:
    raise ValueError("odd")


def is_skipped() -> None:
    pytest.skip("no device")


def test_all_cases_run_and_a_failure_names_each_that_fails():
    ran = []
    cases = [("a", fails), ("b", lambda: ran.append("b")), ("c", is_skipped), ("d", fails)]
    with pytest.raises(AssertionError) as caught:
        check_each(cases)
    told = "\n".join(f"{name}:\n    ValueError: odd" for name in "ad")
    assert str(caught.value) == f"2 of 4 cases fail\n{told}"
    assert isinstance(caught.value.__cause__, ValueError)
    assert ran == ["b"]


def test_cases_are_skipped_if_all_are():
    check_each([("a", is_skipped), ("b", lambda: None)])
    with pytest.raises(pytest.skip.Exception, match="a: no device"):
        check_each([("a", is_skipped)])


def test_no_case_at_all_is_an_error():
    with pytest.raises(AssertionError, match="no cases"):
        check_each([])
