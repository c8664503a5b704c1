"""The exceptions of the package, and the one form of their messages.

Each is a `ZeroBubbleError`:

    ZeroBubbleError
    ├── InputError          a value from the user cannot be used; the message says which and the remedy
    │   ├── ParseError            a text, JSON or CSV form is malformed; the message names the line
    │   └── MissingPackageError   a package is not installed; the message has the command that installs it
    ├── ScheduleError       a schedule breaks the rules; carries every `Fault`
    ├── ProgramError        a lowered program breaks the rules; carries every `Fault`
    └── PipelineError       a running pipeline stopped; the same message on every rank

The attributes of an error have the values that its message states.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from string import Formatter
from typing import Any

from zerobubble.listing import listing

__all__ = [
    "Fault",
    "InputError",
    "LossWarning",
    "MissingPackageError",
    "ParseError",
    "PipelineError",
    "ProgramError",
    "ScheduleError",
    "ZeroBubbleError",
]

__dir__ = listing(__all__)


MOST_WHOLE = 2**63 - 1
"""The largest whole number in a file."""
_LONGEST_WORD, _LONGEST_MESSAGE = 600, 8000
_ALIKE = 0.85


class _Sentences(Formatter):
    def convert_field(self, value: Any, conversion: Any) -> Any:
        return shown(value) if conversion == "v" else super().convert_field(value, conversion)


_SENTENCES = _Sentences()


class ZeroBubbleError(Exception):
    """Root of every exception this package raises on purpose.

    Programs and tests read `fields`; the wording may change.

    Attributes:
        fields: The values that the message states, by name: `argument`, `got`, `expected` and `remedy` of a wrong argument, and `rank`,
            `stage`, `file`, `line` and others where they apply. Empty if the message states no values. Anything other than a number, text
            or a tuple of these is stored as a description, so that an error keeps no object alive.

    If there are fields, `message` is a template of them, in which `{got!v}` stands for `shown(got)`. A `remedy` follows the sentence after
    a colon, unless the template places it or it is empty.

    >>> error = ZeroBubbleError("{argument} must be {expected}, got {got!v}", argument="width", expected="a number", got="2", remedy="")
    >>> str(error), error.fields["got"]
    ("width must be a number, got '2'", '2')
    """

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        self.fields = {name: _plain(value) for name, value in fields.items()}
        super().__init__(_sentence(message, fields) if fields else message)


class InputError(ZeroBubbleError, ValueError):
    """A value given by the user cannot be used. The message names the value and the remedy; nothing was changed.

    Long quotes in the message are shortened, such as a megabyte from a broken file.

    Attributes:
        fields: The values that the message states, by name, such as `argument`, `got`, `expected` and `remedy`.

    >>> import zerobubble as zb
    >>> try:
    ...     zb.make("zb-h1", "4", 8)
    ... except zb.InputError as error:
    ...     print(error.fields["argument"], error.fields["remedy"], sep=": ")
    num_ranks: write 4 without quotes
    """

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.args = (_shortened(str(self)),)


def raise_faults(faults: Iterable[object]) -> None:
    """Raise `InputError` with all `faults`, if there are any that are not empty."""
    if text := "; ".join(filter(None, map(str, faults))):
        raise InputError("{faults}", faults=text)


def raise_all(faults: Iterable[InputError | None]) -> None:
    """Raise the only one of `faults` that is not None; several as one `InputError` with all sentences."""
    present = [fault for fault in faults if fault is not None]
    if len(present) == 1:
        raise present[0]
    raise_faults(present)


class LossWarning(UserWarning):
    """The loss of a pipeline's step is not the loss of the whole batch, because `loss_fn` is not a mean over samples.

    The step trains as one device that accumulates gradients over the microbatches. If that is meant:

        warnings.simplefilter("ignore", zb.errors.LossWarning)
    """


class ParseError(InputError):
    """A text, JSON or CSV form cannot be read."""


class MissingPackageError(InputError, ImportError):
    """A package that this part of zerobubble needs is not installed. The remedy is the command that installs it. An `ImportError`, too."""


@contextmanager
def reading(noun: str, data: Any, remedy: str = "") -> Iterator[None]:
    """Read the JSON form of a `noun`: whatever malformed `data` raises inside comes out as a `ParseError` that says what is wrong.

    The `remedy` is for a missing key.
    """
    if not isinstance(data, dict):
        raise ParseError("{noun} in JSON form must be an object, got {got}", noun=with_article(noun), got=type(data).__name__)
    if data.get("format", form := f"zerobubble {noun} 1") != form:
        raise ParseError("expected the format {expected!r}, got {got!r}", expected=form, got=data["format"])
    try:
        yield
    except KeyError as error:
        sentence = "{noun} in JSON form must have the key {reason}"
        raise ParseError(sentence, noun=with_article(noun), reason=str(error), remedy=remedy) from error
    except (TypeError, ValueError) as error:
        raise ParseError("not {noun} in JSON form: {reason}", noun=with_article(noun), reason=str(error)) from error


def whole(number: Any) -> int:
    """`number` if it is an integer of 64 bits; raises `ParseError` for anything else, fractions and booleans included."""
    if not isinstance(number, int) or isinstance(number, bool):
        raise ParseError("{number!r} is not a whole number", number=number)
    if not -MOST_WHOLE <= number <= MOST_WHOLE:
        raise ParseError("{number!r:.40}... is not a whole number of 64 bits", number=number)
    return number


def line(text: Any) -> str:
    """`text` if it is one line of printable text; raises `ParseError` for anything else, such as the codes that steer a terminal."""
    if not isinstance(text, str) or not text.isprintable():
        raise ParseError("{text!r} is not one line of printable text", text=text)
    return text


def parsed_json(text: str) -> Any:
    """The value of JSON `text`, which may begin with a byte order mark.

    Raises `ParseError` naming the line for what is no JSON, and for what readers of JSON disagree on: an object with the same key twice,
    and numbers with thousands of digits.
    """
    try:
        return json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ParseError(
            "line {line}: not JSON: {fault} at column {column}", line=error.lineno, fault=error.msg, column=error.colno
        ) from None
    except ParseError:
        raise
    except (RecursionError, ValueError) as error:
        raise ParseError("not JSON that can be read: {reason}", reason=str(error)) from None


def json_or_text(text: str) -> Any:
    """The value of `text` if it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ParseError("the key {key!r} stands twice in one object", key=next(key for key in keys if keys.count(key) > 1))
    return values


def _shortened(message: str) -> str:
    """`message` with words of more than `_LONGEST_WORD` characters cut, and its middle left out where it is still too long."""
    message = re.sub(rf"(\S{{{_LONGEST_WORD // 2}}})\S{{{_LONGEST_WORD},}}", r"\1...", message)
    half = _LONGEST_MESSAGE // 2
    return message if len(message) <= _LONGEST_MESSAGE else f"{message[:half]} ... {message[-half:]}"


def shown(value: Any) -> str:
    """`value` as a message names it: as it is written where that is short, else by its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (str, int, float, tuple, list)):
        try:
            text = repr(value)
        except (RecursionError, ValueError):  # thousands of digits, or of lists in each other
            return with_article(type(value).__name__)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """The name of a class, or another noun, with "a" or "an" before it if it is no plural.

    >>> with_article("Op"), with_article("Plan"), with_article("Costs")
    ('an Op', 'a Plan', 'Costs')
    """
    if noun.endswith("s"):
        return noun
    return f"an {noun}" if noun[0] in "AEIOUaeiou" else f"a {noun}"


def _sentence(template: str, fields: dict[str, Any]) -> str:
    """Fills in a template with its fields. If the template has no place for the remedy, it is appended."""
    sentence = _SENTENCES.vformat(template, (), fields)
    return f"{sentence}: {fields['remedy']}" if fields.get("remedy") and "{remedy" not in template else sentence


def _plain(value: Any) -> Any:
    """Returns `value` if it is a number, text, or a tuple or list of these; otherwise its description for messages."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value)) if len(value) <= 1000 else shown(value)
    return shown(value)


def nearest(word: str, vocabulary: Iterable[str]) -> str:
    """The word of `vocabulary` that resembles `word` most, else the only word that starts with it; "" if there is neither."""
    words = list(vocabulary)
    longer = [other for other in words if word and other.startswith(word)]
    return next(iter(get_close_matches(word, words, n=1, cutoff=0.75)), longer[0] if len(longer) == 1 else "")


def near(word: str, vocabulary: Iterable[str], *, same_numbers: bool = False) -> str:
    """`did you mean 'zb-v'? `, with the words of `vocabulary` about as near to `word`; "" if none is near.

    A word that is spelled almost alike is named alone. With `same_numbers`, words with other numbers than `word` are left out, such as
    models of another size.

    >>> near("zb-x", ["gpipe", "zb-h1", "zb-h2", "zb-v"])
    "did you mean 'zb-h1', 'zb-h2' or 'zb-v'? "
    """
    words = [other for other in vocabulary if not same_numbers or _numbers(other) == _numbers(word)]
    best = nearest(word, words)
    alike = [other for other in words if word and other.startswith(word)][:4]
    alike = alike or (get_close_matches(word, words, n=4, cutoff=0.66) if best else [])
    if SequenceMatcher(None, best, word).ratio() > _ALIKE:
        alike = [best]
    *others, last = [repr(other) for other in words if other in alike] or [""]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}? " if alike else ""


def _numbers(word: str) -> list[str]:
    return re.findall(r"\d+", word)


@dataclass(frozen=True, slots=True)
class Fault:
    """One reason why a schedule or program cannot run.

    Attributes:
        code: A short name of the rule, the same in all versions.
        message: A sentence that says what is wrong.
        rank: The rank of the pass; None if the fault concerns several.
        position: The index of the pass in the row of its rank, from 0; None if the pass is missing.
        op: The pass or action in its text form, such as "2BW5"; None if the fault concerns no single one.
    """

    code: str
    message: str
    rank: int | None = None
    position: int | None = None
    op: str | None = None

    def __str__(self) -> str:
        return self.message


class _FaultsError(ZeroBubbleError):
    noun = "value"

    def __init__(self, faults: Sequence[Fault], name: str = "") -> None:
        self.faults = tuple(faults)
        self.name = name
        title = f"{self.noun} {name!r}" if name else f"this {self.noun}"
        shown = "".join(f"\n  - {fault.message}" for fault in self.faults[:20])
        more = f"\n  ... and {len(self.faults) - 20} more" if len(self.faults) > 20 else ""
        count = "1 fault" if len(self.faults) == 1 else f"{len(self.faults)} faults"
        super().__init__(f"{title} cannot run: {count}, root causes first{shown}{more}")


class ScheduleError(_FaultsError):
    """A schedule is not legal.

    Attributes:
        faults: Every reason, as a `Fault`, root causes first.
        name: The name of the schedule; empty if it has none.
        noun: "schedule".

    >>> import zerobubble as zb
    >>> schedule = zb.make("1f1b", 2, 2)
    >>> try:
    ...     zb.simulate(zb.Schedule("cut", schedule.placement, 2, [schedule.rows[0], ()]), zb.Costs.uniform(2))
    ... except zb.ScheduleError as error:
    ...     print(len(error.faults), error.faults[0].code)
    2 missing
    """

    noun = "schedule"


class ProgramError(_FaultsError):
    """A program is not legal.

    Attributes:
        faults: Every reason, as a `Fault`, root causes first.
        name: The name of the program; empty if it has none.
        noun: "program".
    """

    noun = "program"


class PipelineError(ZeroBubbleError):
    """A pipeline stopped. Every surviving rank raises one, naming the rank, the pass and the cause where they are known.

    Attributes:
        rank: The number of the rank that failed; None if it is not known.
        op: The pass or call that failed, in its text form, such as "0F3"; None if it is not known.
        is_of_other_rank: Whether this rank stopped only because `rank` failed.
        fields: `rank` and `op` by name.
    """

    def __init__(self, message: str, *, rank: int | None = None, op: str | None = None, is_of_other_rank: bool = False) -> None:
        super().__init__(message)
        self.fields = {"rank": rank, "op": op}
        self.rank = rank
        self.op = op
        self.is_of_other_rank = is_of_other_rank
