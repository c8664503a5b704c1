"""The text of an error, which is made by the user's code: it may raise, be no text, have no end of characters or ones that no log can hold.

A report is stored, sent and printed, so its texts are short and of characters that UTF-8 can write. A `__str__` that never returns cannot
be helped: the others then wait for this rank until their timeout, and name it.
"""

from __future__ import annotations

import re

MOST_CHARACTERS = 4000
"""The longest text of an error; of a longer one the middle is left out."""
MOST_NOTES = 20

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, which cut, colour or overwrite a log, and halves of characters, which UTF-8 cannot write."""


def text_of(value: object) -> str:
    """`str(value)` if it can be made, of at most `MOST_CHARACTERS`, with unprintable characters as escapes such as \\x00."""
    try:
        text = str.__str__(str(value))
    except Exception as error:  # noqa: BLE001 - it is the user's code
        text = f"(its text cannot be made: {type(error).__name__})"
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], shortened(text))


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text` without its middle where it is longer than `most` characters."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    half = most // 2
    return f"{text[:half]} ... {left_out} characters are left out here ... {text[-half:]}"


def describe(error: BaseException) -> str:
    """The type and text of an error, with the notes added to it."""
    told = f"{text_of(type(error).__name__)}: {text_of(error)}".rstrip(": ")
    return shortened("; ".join((told, *map(text_of, _notes(error)))))


def _notes(error: BaseException) -> list[object]:
    """The first of what `add_note` has left, if it still is what that leaves."""
    try:
        notes = getattr(error, "__notes__", [])
    except Exception:  # noqa: BLE001 - it is the user's class
        return []
    return notes[:MOST_NOTES] if isinstance(notes, list) else []
