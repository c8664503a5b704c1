"""User code in a call stack: tracebacks of errors begin with it, and warnings point to it."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import zerobubble
from zerobubble.error_reports.user_code import begin_at_user_code, keep_only_user_code, user_place, warn_user

IN_PACKAGE = """
def error_of(call):
    try:
        between(call)
    except Exception as error:
        return error


def between(call):
    call()


def warn(warn_user):
    warn_user("slow")
"""


def in_package() -> dict[str, Callable[..., Any]]:
    """Functions whose frames are those of the package."""
    functions: dict[str, Callable[..., Any]] = {}
    exec(compile(IN_PACKAGE, zerobubble.__file__, "exec"), functions)
    return functions


def boom() -> None:
    in_package()["between"](raise_it)


def raise_it() -> None:
    raise ValueError


def test_a_traceback_begins_at_the_users_code() -> None:
    error = in_package()["error_of"](boom)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["error_of", "between", "boom", "between", "raise_it"]
    begin_at_user_code(error)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["boom", "between", "raise_it"]
    assert user_place(error) == f"{__file__}:{raise_it.__code__.co_firstlineno + 1}"


def test_a_traceback_without_the_users_code_stays_whole() -> None:
    error = in_package()["error_of"](None)
    begin_at_user_code(error)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["error_of", "between"]


def test_a_cause_is_only_what_the_user_wrote() -> None:
    error, without = in_package()["error_of"](boom), in_package()["error_of"](None)
    error.__context__ = without
    keep_only_user_code(without)
    assert without.__traceback__ is None
    keep_only_user_code(error)
    assert error.__context__ is None
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["boom", "between", "raise_it"]


class KeepsItsTracebackError(Exception):
    def with_traceback(self, _: object) -> Any:
        raise AssertionError


def raise_odd_error() -> None:
    raise KeepsItsTracebackError


def test_a_class_of_the_user_cannot_prevent_it() -> None:
    error = in_package()["error_of"](raise_odd_error)
    begin_at_user_code(error)
    assert [frame.name for frame in traceback.extract_tb(error.__traceback__)] == ["raise_odd_error"]


def test_a_warning_points_to_the_users_code() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        in_package()["warn"](warn_user)
    (found,) = caught
    line = test_a_warning_points_to_the_users_code.__code__.co_firstlineno + 3
    assert (found.filename, found.lineno, found.category, str(found.message)) == (__file__, line, UserWarning, "slow")
