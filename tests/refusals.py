"""Checks of errors by what they state: their fields, and the values and names in the sentence. The wording may change.

with raises(InputError, argument="width", got=639):
    block_svg(block, width=639)
states(report, "rank 2", "1F3")
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from zerobubble.errors import shown

Stated = tuple[str | float, ...]
"""Values and names that a sentence has to state."""

PROSE = re.compile(r"(?<![\w.'-])[A-Za-z][a-z]+,? [a-z]{2,}(?![\w.(=-])")
"""Two words in a row: wording, not a value."""


@contextmanager
def raises(kind: type[BaseException], *values: str | float, foreign: str = "", **fields: Any) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Expects an error of `kind` that states the `values` and has the `fields`, and yields what pytest.raises yields.

    `foreign` is text of another library, of the system or of the test that the error quotes.
    """
    with pytest.raises(kind) as caught:
        yield caught
    states(caught.value, *values, foreign=foreign, **fields)
    del caught  # its traceback has this frame: a cycle would keep the tensors of the test alive


def states(error: BaseException | str, *values: str | float, foreign: str = "", **fields: Any) -> None:
    """Fails unless each of `values` occurs in the sentence as a whole word, and each of `fields` has its value.

    A field is looked up in the sentence if the error has no fields of its own.
    """
    assert values or fields or foreign, "an error is checked by what it states"
    prose = [value for value in values if PROSE.search(str(value))]
    assert not prose, f"tests do not compare wording: {prose}"
    sentence, own = str(error), getattr(error, "fields", {})
    own = {name: value for name, value in own.items() if value is not None}
    missing = [value for value in values if not _occurs(value, sentence)]
    missing += [f"{name}={value!r}" for name, value in fields.items() if not _has(name, value, own, sentence)]
    missing += [foreign] * (foreign not in sentence)
    assert not missing, f"not stated: {missing}\nin: {sentence}\nwith the fields {own}"


def _has(name: str, value: Any, own: dict[str, Any], sentence: str) -> bool:
    return own[name] in (value, shown(value)) if name in own else _occurs(value, sentence)


def _occurs(value: Any, sentence: str) -> bool:
    """Whether `value` is in the sentence, and not as a part of a longer word or number. A number has any of its usual forms."""
    forms = {str(value)}
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15:
        forms |= {repr(float(value)), f"{value:g}", f"{value:,}"}
    return any(re.search(_as_word(form), sentence) for form in forms)


def _as_word(text: str) -> str:
    before = r"(?<![\w-])(?<!\d[.,])" if re.match(r"[\w-]", text) else ""
    after = r"(?![\w-]|[.,]\d)" if re.search(r"[\w-]$", text) else ""
    return before + re.escape(text) + after
