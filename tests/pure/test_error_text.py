"""An error's text comes from user code; its report is short and printable whatever that code does.

Reporting a failure needs no new thread, no store that answers, and no text that can be made.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.refusals import states
from zerobubble.error_reports.error_file import forget_error_file
from zerobubble.error_reports.text import MOST_CHARACTERS, describe
from zerobubble.error_reports.uncaught import write_report
from zerobubble.runtime.failure.report import describe_error, forget_locals


class RaisesError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NumberError(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


class OddNotesError(Exception):
    @property
    def __notes__(self) -> list[str]:
        raise ValueError("no notes")


class OneNoteError(Exception):
    __notes__ = "a note"  # type: ignore[assignment]


class NoStage:
    def in_flight(self) -> tuple[int, int]:
        raise MemoryError


def noted(*notes: str) -> Exception:
    error = ValueError("boom")
    for note in notes:
        error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (ValueError(), "ValueError"),
        (noted("in a hook", "of rank 3"), "ValueError: boom; in a hook; of rank 3"),
        (RaisesError(), "RaisesError: (its text cannot be made: ValueError)"),
        (NumberError(), "NumberError: (its text cannot be made: TypeError)"),
        (OddNotesError("boom"), "OddNotesError: boom"),
        (OneNoteError("boom"), "OneNoteError: boom"),
        (ValueError("a\0b\ud800c\x1b[31m\r\n\té"), "ValueError: a\\x00b\\ud800c\\x1b[31m\\r\n\té"),
    ],
)
def test_every_error_has_a_text_that_survives_its_way(error: Exception, message: str) -> None:
    assert describe(error) == message
    assert json.loads(json.dumps(message)) == message
    assert message.encode()


@pytest.mark.parametrize("error", [ValueError("begin" + "x" * 10**8 + "end"), noted(*(["begin" + "x" * 10**5 + "end"] * 1000))])
def test_a_long_text_is_shortened_in_its_middle(error: Exception) -> None:
    message = describe(error)
    assert len(message) < MOST_CHARACTERS + 100
    assert "begin" in message[:100]
    assert message.endswith("end")
    states(message, "characters")


@pytest.mark.parametrize("error", [RaisesError(), NumberError(), OddNotesError("boom"), ValueError("a\0\ud800" + "x" * 10**7)])
def test_torchrun_gets_any_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_report(error, "rank 1 failed")
    assert json.loads(path.read_text())["message"]["message"] == "rank 1 failed"
    assert path.stat().st_size < 10**6
    forget_error_file()
    assert not path.exists()


def test_memory_that_ran_out_is_reported_though_nothing_can_be_counted_any_more() -> None:
    found = describe_error(MemoryError("no more"), {0: NoStage()})
    states(found, "MemoryError", "schedule")


def test_the_locals_of_errors_that_cause_each_other_are_forgotten() -> None:
    class Activation:
        pass

    def fail(inner: Exception | None = None) -> Exception:
        held = Activation()
        try:
            raise ValueError(type(held)) from inner
        except ValueError as error:
            return error

    first = fail()
    second = fail(first)
    first.__cause__ = second
    forget_locals(second)
    for error in (first, second):
        assert error.__traceback__ is not None
        assert "held" not in error.__traceback__.tb_frame.f_locals
