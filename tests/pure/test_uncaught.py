"""An exception that nothing catches ends on the screen with the rank, the fault and the user's line; torchrun prints the same last."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import zerobubble as zb
from tests.pure.test_user_code import in_package
from zerobubble.error_reports import error_file, uncaught

Show = Callable[[Callable[[], object]], tuple[str, str, int]]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Show:
    """Shows what a call raises as Python would; returns the screen, and the report and time of rank 1's error file."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(uncaught, "_previous", [])
    monkeypatch.setattr(error_file.time, "time", lambda: 100.0)
    uncaught.show_uncaught()
    uncaught.show_uncaught()

    def shown(call: Callable[[], object]) -> tuple[str, str, int]:
        error_file.forget_error_file()
        try:
            call()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        details = json.loads(path.read_text())["message"]["extraInfo"] if path.exists() else {"py_callstack": "", "timestamp": 0}
        return capsys.readouterr().err, details["py_callstack"], int(details["timestamp"])

    return shown


def files(text: str) -> set[str]:
    return set(re.findall(r'File "(.*?)"', text))


def wrong_call() -> None:
    zb.make("zb-h9", 4, 8)


def test_an_error_of_zerobubble_shows_the_users_frames_only(show: Show) -> None:
    screen, report, seconds = show(wrong_call)
    assert files(screen) == files(report) == {__file__}
    last = report.splitlines()[-1]
    assert last.startswith("rank 1: InputError: ")
    assert "'zb-h9'" in last
    assert re.search(rf"\({re.escape(__file__)}:\d+\)$", last)
    assert "'zb-h9'" in screen.splitlines()[-1]
    assert seconds == 99


def test_all_frames_are_shown_when_asked_for(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROBUBBLE_TRACEBACK", "full")
    screen, report, _ = show(wrong_call)
    assert len(files(screen)) > 1
    assert files(screen) == files(report)
    screen, _, _ = show(stopped)
    assert len(files(screen)) > 0


def stopped() -> None:
    raise zb.PipelineError("rank 0 failed at 'run 0F0': ValueError: boom", rank=0, is_of_other_rank=True)


def test_a_rank_that_another_one_stops_says_so_in_one_line(show: Show) -> None:
    """torchrun names the other one, which dates its report earlier."""
    screen, report, seconds = show(stopped)
    (line,) = screen.splitlines()
    assert line == report
    assert line.startswith(f"rank 0 failed at 'run 0F0': ValueError: boom (rank 1 stopped at {__file__}:")
    assert seconds == 110


def failed() -> None:
    try:
        in_package()["between"](users_stage)
    except ValueError as error:
        raise zb.PipelineError("rank 1 failed at 'run 1F0': ValueError: boom", rank=1) from error


def users_stage() -> None:
    raise ValueError("boom")


def test_the_users_error_in_a_pass_keeps_its_traceback(show: Show) -> None:
    screen, report, _ = show(failed)
    for text in (screen, report):
        assert 'raise ValueError("boom")' in text
    last = report.splitlines()[-1]
    assert last.startswith("rank 1 failed at 'run 1F0': ValueError: boom (")


def users_error() -> None:
    in_package()["between"](lambda: {}["missing"])


def test_an_error_of_others_keeps_all_frames(show: Show) -> None:
    screen, report, _ = show(users_error)
    assert files(screen) == files(report) == {__file__, zb.__file__}
    assert report.splitlines()[-1].startswith("rank 1: KeyError: 'missing' (")


def refused_while_handling() -> None:
    try:
        users_stage()
    except ValueError:
        zb.make("zb-h9", 4, 8)


def test_the_users_error_before_that_of_zerobubble_is_shown(show: Show) -> None:
    screen, _, _ = show(refused_while_handling)
    assert 'raise ValueError("boom")' in screen


def test_a_cause_inside_the_package_is_left_out(show: Show) -> None:
    screen, _, _ = show(lambda: zb.Schedule.from_text("x"))
    assert screen.count("Traceback") == 1


def test_an_interrupt_writes_nothing(show: Show) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    assert show(interrupt)[1:] == ("", 0)


@pytest.mark.parametrize("status", [0, 3, "bad data"])
def test_an_exit_is_written_unless_its_status_is_0(show: Show, status: object) -> None:
    def leave() -> None:
        try:
            sys.exit(status)  # type: ignore[arg-type]
        except SystemExit as error:
            uncaught.report_exit(error)

    _, report, seconds = show(leave)
    assert (f"rank 1: SystemExit: {status} ({__file__}:" in report, seconds) == ((True, 99) if status else (False, 0))


def test_a_rank_that_is_gone_gets_its_report_from_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Complete at once, dated like a cause, and without a file besides; what the rank itself has written stays."""
    monkeypatch.setattr(error_file.time, "time", lambda: 100.0)
    path = tmp_path / "error.json"
    for message in ("rank 1 is gone", "rank 1 is gone, says rank 3"):
        error_file.write_error_file_of_other(str(path), message)
        details = {"py_callstack": "rank 1 is gone", "timestamp": "99"}
        assert json.loads(path.read_text()) == {"message": {"message": "rank 1 is gone", "extraInfo": details}}
    error_file.write_error_file_of_other("", "rank 1 is gone")
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_of_another_process_is_replaced_by_an_error_of_zerobubble_alone(show: Show, tmp_path: Path) -> None:
    other = {"message": {"message": "", "extraInfo": {"py_callstack": "of a child", "timestamp": "7"}}}
    (tmp_path / "error.json").write_text(json.dumps(other))
    assert show(users_error)[1:] == ("of a child", 7)
    assert "zb-h9" in show(wrong_call)[1]
