"""Makes the text of an error safe to store, send and print.

User code makes this text: `__str__` may raise, return something other than text, or return endless text or characters that no log can show.
Reports hold short texts that UTF-8 can encode. A `__str__` that never returns cannot be helped: the other ranks wait until their timeout
and then name this rank.
"""

from __future__ import annotations

import re

MOST_CHARACTERS = 4000
"""The longest text of an error; a longer one loses its middle."""
MOST_NOTES = 20

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, which cut, color or overwrite a log, and lone surrogates, which UTF-8 cannot encode."""


def text_of(value: object) -> str:
    """Returns `str(value)`, or why it cannot be made, in at most `MOST_CHARACTERS`; unprintable characters become escapes such as \\x00."""
    try:
        text = str.__str__(str(value))
    except Exception as error:  # noqa: BLE001 - it is the user's code
        text = f"(its text cannot be made: {type(error).__name__})"
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], shortened(text))


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Returns `text`, without its middle if it is longer than `most` characters."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    half = most // 2
    return f"{text[:half]} ... {left_out} characters are left out here ... {text[-half:]}"


def describe(error: BaseException) -> str:
    """Returns the type and text of an error, and the notes added to it."""
    text = f"{text_of(type(error).__name__)}: {text_of(error)}".rstrip(": ")
    return shortened("; ".join((text, *map(text_of, _notes(error)))))


def _notes(error: BaseException) -> list[object]:
    """Returns the first notes of `add_note`, unless user code has replaced the list by something else."""
    try:
        notes = getattr(error, "__notes__", [])
    except Exception:  # noqa: BLE001 - it is the user's class
        return []
    return notes[:MOST_NOTES] if isinstance(notes, list) else []
