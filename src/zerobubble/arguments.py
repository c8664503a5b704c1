"""Arguments of public functions: a wrong one is an `InputError` that names it, what came and the remedy.

A function says what it takes in one line above it, `@takes(schedule=Schedule, num_ranks=WHOLE)`; a value checks its parts with `require`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from math import inf
from os import PathLike
from sys import float_info
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from zerobubble.errors import InputError, raise_all, raise_faults, shown, with_article
from zerobubble.units import BYTE_UNITS, MOST, MOST_MS, as_bytes, read_bytes
from zerobubble.wrong_calls import wrong_call

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=Callable[..., Any])


Remedy = Callable[[Any], str]
"""Returns what to write instead of a wrong value; empty if that goes without saying."""


class Wanted(NamedTuple):
    """The requirement of an argument: a description, a test, and the remedy for a value that fails the test."""

    words: str
    accepts: Callable[[Any], bool]
    remedy: Remedy = lambda value: ""


def instance(*classes: type) -> Wanted:
    """A value of one of these classes."""
    names = [cls.__name__ for cls in classes]
    return Wanted(" or ".join(map(with_article, names)), lambda value: isinstance(value, classes), lambda value: _remedy_of(names, value))


def optional(wanted: Wanted | type) -> Wanted:
    """None, or a value as `wanted`."""
    words, accepts, remedy = _as_wanted(wanted)
    return Wanted(f"{words}, or None", lambda value: value is None or accepts(value), remedy)


def either(*options: Wanted | type) -> Wanted:
    """The requirement to be one of `options`."""
    requirements = [_as_wanted(option) for option in options]
    return Wanted(
        " or ".join(option.words for option in requirements),
        lambda value: any(option.accepts(value) for option in requirements),
        lambda value: _first(option.remedy(value) for option in requirements),
    )


def each(wanted: Wanted | type) -> Wanted:
    """A list or tuple whose items are all as `wanted`."""
    words, accepts, remedy = _as_wanted(wanted)
    return Wanted(
        f"a list or tuple of {words.removeprefix('a ')}",
        lambda value: _is_row(value) and all(map(accepts, value)),
        lambda value: _first(remedy(part) for part in value if not accepts(part)) if _is_row(value) else remedy(value),
    )


def number(words: str, accepts: Callable[[Any], bool]) -> Wanted:
    """A number that `accepts` returns True for."""
    return Wanted(words, accepts, lambda value: _as_number(value, accepts))


def function(*parameters: str, that: str = "", makes: str = "") -> Wanted:
    """A callable that takes these positional arguments, and does what `that` says. If it `makes` a value, a class is one, too."""
    words = f"a function ({', '.join(parameters)}){f' that {that}' if that else ''}{f' -> {makes}' if makes else ''}"

    def accepts(value: Any) -> bool:
        return callable(value) and (bool(makes) or not isinstance(value, type)) and _takes(value, len(parameters))

    def remedy(value: Any) -> str:
        if not callable(value):
            return ""
        if isinstance(value, type) and not makes:
            return f"give an instance, {value.__name__}()"
        return f"this one takes ({', '.join(inspect.signature(value).parameters)})"

    return Wanted(words, accepts, remedy)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether `function` can be called with `count` arguments, as far as is known."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether `value` is a number. No integer is one that is too large for a float."""
    return isinstance(value, float) or (_is_whole(value) and abs(value) <= float_info.max)


def _as_number(value: Any, accepts: Callable[[Any], bool]) -> str:
    """The remedy for a float or text that stands for a number that a function `accepts`."""
    if isinstance(value, float):
        return f"write {int(value)}" if value.is_integer() and accepts(int(value)) else ""
    if not isinstance(value, str):
        return _as_list(value)
    if value.strip().lstrip("-").isdecimal():
        return f"write {value.strip()} without quotes" if accepts(int(value)) else ""
    size = read_bytes(value)
    return f"write {size}" if size and accepts(size) else ""


def _as_list(value: Any) -> str:
    return "value.tolist() gives plain numbers" if hasattr(value, "tolist") else ""


READABLE = Wanted("a path or an open file", lambda value: isinstance(value, str | PathLike) or hasattr(value, "read"))
WRITABLE = Wanted("a path or an open file", lambda value: isinstance(value, str | PathLike) or hasattr(value, "write"))
WHOLE = number("a whole number", _is_whole)
COUNT = number("a whole number above 0", lambda value: _is_whole(value) and value > 0)
SIZE = number(f"a whole number from 1 to {MOST:,}", lambda value: _is_whole(value) and 0 < value <= MOST)
NUMBERED = number("a whole number from 0 on", lambda value: _is_whole(value) and value >= 0)
NUMBER = number("a number", _is_number)
BYTES = number(
    f"a positive number of bytes, or an amount in {BYTE_UNITS}, such as '40GB'",
    lambda value: (_is_whole(value) or isinstance(value, str)) and as_bytes(value) > 0,
)
"""An amount of memory. `units.as_bytes` returns its bytes."""


def takes(**wanted: Wanted | type) -> Callable[[C], C]:
    """Checks each call of the function or class below it before it runs, and the named arguments that it is given.

    The call then raises `InputError` for an argument of another type or out of its range, and for those that are missing, unknown, given
    twice or too many. Of a class, calls that make instances are checked.
    """

    def decorate(called: C) -> C:
        if isinstance(called, type):
            name = "__new__" if "__new__" in vars(called) else "__init__"
            setattr(called, name, _checked(getattr(called, name), wanted))
            return called
        return cast(C, _checked(called, wanted))

    return decorate


def _checked(function: Callable[P, R], wanted: dict[str, Wanted | type]) -> Callable[P, R]:
    name, signature = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__"), inspect.signature(function)

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if wanted:
            values = bound(name, signature, args, kwargs)
            raise_all(_fault(argument, values[argument], want, name) for argument, want in wanted.items() if argument in values)
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except TypeError:
            bound(name, signature, args, kwargs)
            raise  # from inside the function

    return checked


def bound(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name; raises `InputError` with all its faults if the function cannot be called so."""
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise wrong_call(name, signature, args, kwargs, str(error)) from None


def require(what: str, value: Any, wanted: Wanted | type) -> None:
    """Raise `InputError` unless `value`, named `what` in the message, is as `wanted`."""
    raise_all([_fault(what, value, wanted, "")])


def require_amount(what: str, value: Any, most: int = MOST) -> None:
    """Raise `InputError` unless `value` is a whole number up to `most`, by default of ns or bytes that a pass can take or hold."""
    raise_all([amount_fault(what, value, most)])


def require_ms(what: str, value: Any, words: str = "a finite number >= 0", least: int = 0) -> None:
    """Raise `InputError`, saying that `what` must be `words`, unless `value` is a time in ms that a pass can take, at least `least`."""
    _require_within(what, value, Wanted(words, _is_number), least, MOST_MS)


def require_bytes(what: str, value: Any) -> None:
    """Raise `InputError` unless `value`, named `what` in the message, is a finite number of bytes that a pass can hold, whole or not."""
    _require_within(what, value, Wanted("a finite number >= 0", _is_number), 0, MOST)


def _require_within(what: str, value: Any, number: Wanted, least: int, most: int) -> None:
    raise_all([_fault_within(what, value, number, least, most)])


def amount_fault(what: str, value: Any, most: int = MOST, remedy: str = "") -> InputError | None:
    """Returns the error of `require_amount`, with a `remedy` for other than whole numbers; None for an amount that it accepts."""
    return _fault_within(
        what,
        value,
        Wanted("a whole number >= 0" + " of ns or bytes" * (most == MOST), _is_whole, lambda value: "" if _is_whole(value) else remedy),
        0,
        most,
    )


def _fault_within(what: str, value: Any, number: Wanted, least: int, most: int) -> InputError | None:
    if number.accepts(value) and least <= value <= most:
        return None
    is_merely_too_large = _is_number(value) and most < value < inf
    return wrong(what, value, f"at most {most:,}" if is_merely_too_large else number.words, number.remedy(value))


def require_positive(what: str, amounts: Mapping[str, Any], *, or_zero: bool = False) -> None:
    """Raise `InputError` for all `amounts` of `what` that are not finite numbers above 0, or 0 itself with `or_zero`."""
    words = f"a finite number {'at least' if or_zero else 'above'} 0"
    wrong = [name for name, value in amounts.items() if not _is_number(value) or not 0 <= value < inf or not (value or or_zero)]
    raise_faults(f"{name} of {what} must be {words}, got {shown(amounts[name])}" for name in wrong)


def faults_among(values: Mapping[str, Any], wanted: Mapping[str, Wanted | type]) -> list[str]:
    """Returns a sentence for each of `values` that is not as `wanted` by its name."""
    return [str(fault) for name, want in wanted.items() if (fault := _fault(name, values[name], want, "")) is not None]


def _fault(argument: str, value: Any, wanted: Wanted | type, call: str) -> InputError | None:
    words, accepts, remedy = _as_wanted(wanted)
    return None if accepts(value) else wrong(argument, value, words, remedy(value), call)


def wrong(argument: str, value: Any, expected: str, remedy: str = "", call: str = "") -> InputError:
    """The error of an `argument` that was given `value` where `expected` is wanted, of the function `call` if it is not the value's own.

    Its fields are `argument`, `got`, `expected`, `remedy` and `call`.
    """
    sentence = f"{'{call}: ' if call else ''}{{argument}} must be {{expected}}, got {{got!v}}"
    return InputError(sentence, argument=argument, got=value, expected=expected, remedy=remedy, call=call)


def as_tuple(what: str, values: Any, words: str = "a list or tuple", remedy: Remedy = _as_list) -> tuple[Any, ...]:
    """`values` as a tuple if they are a list, tuple or range; raises `InputError` for anything else, saying that `what` must be `words`."""
    if type(values) is tuple:
        return values
    require(what, values, Wanted(words, _is_row, remedy))
    return tuple(values)


def _as_wanted(wanted: Wanted | type) -> Wanted:
    return wanted if isinstance(wanted, Wanted) else instance(wanted)


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _first(remedies: Iterable[str]) -> str:
    return next(filter(None, remedies), "")


def _remedy_of(wanted: Sequence[str], value: Any) -> str:
    """The remedy for a value of the wrong class; `wanted` are the expected classes."""
    came = type(value).__name__
    return _first(_REMEDIES.get((name, came), "") for name in wanted).format(value=value)


_REMEDIES = {
    ("Schedule", "str"): "make({value!r}, num_ranks, num_microbatches) gives a published one",
    ("Schedule", "Plan"): "give its .schedule",
    ("Schedule", "Program"): "program.to_schedule() gives its order",
    ("Schedule", "Recipe"): "make(recipe.name, num_ranks, num_microbatches) gives its schedule",
    ("Schedule", "Costs"): "give the schedule first, then the costs",
    ("Module", "Pipeline"): "give the model that zb.split has cut",
    ("Plan", "str"): "give the plan first, then the file",
    ("Plan", "Schedule"): "plan(...) gives one; a schedule alone is written by io.dumps",
    ("Program", "Schedule"): "lower(schedule) gives its program",
    ("Timeline", "Schedule"): "simulate(schedule, costs) gives its timeline",
    ("Workload", "tuple"): "Workload.uniform(num_ranks, times=(F, B, W)) has times in ms for equal ranks",
    ("Workload", "list"): "Workload.uniform(num_ranks, times=(F, B, W)) has times in ms for equal ranks",
    ("Workload", "Costs"): "Workload.uniform or Workload.from_ms say what whole ranks do",
    ("Costs", "Workload"): "workload.costs(placement) gives the costs of the stages there",
    ("Costs", "tuple"): "Costs.uniform(num_stages, times=(F, B, W)) has times in ms for equal stages",
    ("Costs", "list"): "Costs.uniform(num_stages, times=(F, B, W)) has times in ms for equal stages",
    ("Costs", "dict"): "Costs.from_dict reads the JSON form",
    ("Limits", "int"): "Limits(({value},) * num_ranks) gives each rank {value} bytes",
    ("Limits", "float"): "Limits((int({value:g}),) * num_ranks) gives each rank {value:g} bytes",
    ("Limits", "str"): "Limits(('40GB',) * num_ranks) gives 40 GB to each rank",
    ("Limits", "tuple"): "Limits({value}) has the bytes of each rank",
    ("Limits", "list"): "Limits({value}) has the bytes of each rank",
    ("Placement", "str"): "write Placement.linear(num_ranks), Placement.vee(num_ranks) or another of its methods",
    ("Placement", "int"): "Placement.linear({value}) puts one stage on each of {value} ranks",
    ("Block", "str"): "blocks.known_block({value!r}, num_ranks) gives a published one",
    ("Timeline", "list"): "give each timeline as an argument of its own, or put * before the list",
    ("Timeline", "tuple"): "give each timeline as an argument of its own, or put * before the list",
    ("Op", "str"): "Op.parse({value!r}) reads a pass",
    ("Problem", "Workload"): "plan(workload, num_microbatches) plans it on any placement",
    ("Layer", "tuple"): "write Layer(forward, backward, weight, held_after_f, held_after_b), in ns and bytes",
}
"""Remedies for a value of one class where another is expected. Classes are given by name, because those of higher layers cannot be imported
here."""
