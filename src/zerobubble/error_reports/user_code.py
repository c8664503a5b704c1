"""Finds the user's code among the frames of a call: for the place and the traceback of an error, and for warnings."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path
from types import FrameType

from zerobubble.error_reports.text import text_of

_PATHS = (str(Path(__file__).parents[1]), *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))
_LIBRARIES = (*(f"{path}{os.sep}" for path in _PATHS), "<")
"""Locations of code that is not the user's: this package, Python, and installed packages. Frozen modules have names such as <frozen os>."""


def is_users(frame: FrameType) -> bool:
    """Returns whether `frame` runs the user's code."""
    return not frame.f_code.co_filename.startswith(_LIBRARIES)


def with_place(text: str, error: BaseException) -> str:
    """Returns `text`, which describes `error`, followed by the line of the user's code that raised it, if there is one."""
    place = user_place(error)
    return f"{text} ({place})" if place else text


def user_place(error: BaseException) -> str:
    """Returns `file:line` of the innermost frame of the user's code in the traceback of `error`; empty if it has none."""
    frames = traceback.walk_tb(error.__traceback__)
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in frames if is_users(frame)]
    return text_of(places[-1]) if places else ""


def begin_at_user_code(error: BaseException) -> None:
    """Drops the frames before the first one of the user's code from the traceback of `error`; keeps all if it has none."""
    first = error.__traceback__
    while first is not None and not is_users(first.tb_frame):
        first = first.tb_next
    if first is not None:
        BaseException.with_traceback(error, first)  # a class of the user's may replace the method


def keep_only_user_code(error: BaseException) -> None:
    """Drops the context of `error`, and its traceback before the first frame of the user's code, or all of it without such a frame."""
    error.__context__ = None
    begin_at_user_code(error)
    if not user_place(error):
        error.__traceback__ = None


def calling_place() -> str:
    """Returns `file:line` of the user's code that the current call comes from; of the outermost line if there is none."""
    frame = _calling_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _calling_frame() -> FrameType:
    frame = sys._getframe(1)
    while not is_users(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line of the user's code that the current call comes from; at the outermost line if there is none."""
    frame = _calling_frame()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"), registry)
