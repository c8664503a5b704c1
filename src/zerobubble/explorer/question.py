"""Reads the requests of the page: a schedule by name or in a file, its shape, times and memory.

Every value is bounded, and a refusal names its field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, TypeVar, cast

from zerobubble.errors import InputError, json_or_text
from zerobubble.units import MOST_MS, read_time

MOST_PASSES = 200_000
"""Maximum passes of a schedule on the page: a larger picture takes too long."""
MOST_TEXT = 2_000_000
"""The most characters of a file."""
MOST_SECONDS = 600.0
"""The longest budget of a search."""


class FieldError(InputError):
    """A value of the page cannot be used. `field` is its field; empty if it is in none.

    The `remedy` follows the message; by default, it is the field's remedy in `REMEDIES`. `faults` are all wrong fields, this one first,
    with their sentences and remedies.
    """

    def __init__(self, field: str, message: str, remedy: str = "", others: Sequence[FieldError] = ()) -> None:
        remedy = remedy or REMEDIES[field]
        sentence = message if remedy in message else f"{message}: {remedy}"
        super().__init__(sentence)
        self.field = field
        self.fields["remedy"] = remedy
        self.faults: list[tuple[str, str, str]] = [(field, sentence, remedy), *(fault for other in others for fault in other.faults)]


REMEDIES = {
    "": "reload the page, which may be of another version than its server",
    "schedule": "choose one of the list",
    "versus": "compare with another schedule, or with nothing",
    "ranks": "give a whole number, such as 4",
    "microbatches": "give a whole number, such as 8",
    "stages": "give a whole number, such as 2, or leave it empty",
    "options": "give NAME=VALUE, such as group=4, or leave it empty",
    "slow_link": "leave both fields of the slow link empty, or give both",
    "memory": "give microbatches of a rank, such as 2.5, or leave it empty for no limit",
    "held": "give a share of what F saves, such as 0.5",
    "model": "choose a model of the list, or none, and give times",
    "gpu": "choose a GPU of the list",
    "recompute": "choose another way of the list",
    "precision": "choose another precision of the list",
    "gradients": "choose another precision of the list",
    "layers": "give the layers of each stage, such as 10, 10, 12, or leave it empty",
    "file": "open what zerobubble make or plan writes with -o, or PyTorch's CSV",
    "costs": "open the JSON of Pipeline.profile, from zb.io.save_document, or a plan",
    "run": "open the JSON of Pipeline.timeline, from zb.io.save_document",
    "block": "choose a block of the list",
    "text": "reset it to a published block, and change its numbers",
    "seconds": "give the seconds of the search, such as 5",
    "objective": "choose the period or the makespan",
    "limits": "give a number of microbatches for each limit",
    **dict.fromkeys(("tp", "cp", "ep", "dp", "microbatch"), "give a whole number, such as 1"),
    **dict.fromkeys(("sequence_parallel", "overlap_tp", "reorder_steady"), "check the box or do not"),
    **dict.fromkeys(("forward", "backward", "weight", "comm", "slow_comm"), "give ms, such as 10, or a time with its unit, such as 250us"),
    **dict.fromkeys(("file_name", "search_placement", "search_seconds", "search_limits", "evaluations"), "open the plan again"),
}
"""What helps at a field whose value cannot be used, unless the error has a better remedy."""


def faults_to_list(errors: Sequence[FieldError]) -> list[dict[str, str]]:
    """Return the wrong fields with their sentences, as the page reads them."""
    return [
        {"field": field, "error": " ".join(text.split()), "remedy": " ".join(remedy.split())}
        for error in errors
        for field, text, remedy in error.faults
    ]


@contextmanager
def errors_at(field: str) -> Iterator[None]:
    """Turn an `InputError` raised inside into one that the page shows at `field`."""
    try:
        yield
    except FieldError:
        raise
    except InputError as error:
        raise FieldError(field, str(error), str(error.fields.get("remedy", ""))) from error


@dataclass(frozen=True)
class Question:
    """A schedule and its times, in ms for a whole rank and microbatch; memory is in microbatches of a rank's stages.

    `file` is the text of a schedule, a plan or PyTorch's CSV; it replaces `schedule` and the shape. `costs` is the text of a costs file,
    which replaces the times. `slow_link` is the rank before a link whose messages take `slow_comm`. `model` is a model of `zb.cost_model`,
    whose estimated costs replace the times; it runs on GPUs as `gpu` and the fields below it say, where 1 is yes and 0 is no.

    If a search of the page found the plan in `file`, `search_placement` is the placement of the plan. If that is the best of all
    placements, `search_seconds` is the budget of the search, and for a front, `search_limits` has its first and last memory limit and
    their distance, such as `1:8:1`. `versus` is a schedule to draw below on the same axis, for the same shape and times. `run` is the text
    of a measured timeline of this schedule, which is also drawn there.
    """

    schedule: str = "zb-v"
    versus: str = ""
    ranks: int = 4
    microbatches: int = 8
    stages: int | None = None
    options: str = ""
    forward: float = 10.0
    backward: float = 10.0
    weight: float = 8.0
    comm: float = 0.5
    held: float = 1.0
    slow_link: int | None = None
    slow_comm: float | None = None
    memory: float | None = None
    model: str = ""
    gpu: str = "H100"
    tp: int = 8
    cp: int = 1
    ep: int = 1
    dp: int = 1
    microbatch: int = 1
    recompute: str = "none"
    sequence_parallel: int = 1
    overlap_tp: int = 0
    precision: str = "bf16"
    gradients: str = "fp32"
    layers: str = ""
    costs: str = ""
    file: str = ""
    file_name: str = ""
    search_placement: str = ""
    search_seconds: float | None = None
    search_limits: str = ""
    run: str = ""

    @property
    def times(self) -> tuple[float, float, float]:
        """F, B and W in ms."""
        return self.forward, self.backward, self.weight


RANGES: dict[str, tuple[float, float]] = {
    "ranks": (1, 256),
    "microbatches": (1, 4096),
    "stages": (1, 32),
    "forward": (0, MOST_MS),
    "backward": (0, MOST_MS),
    "weight": (0, MOST_MS),
    "comm": (0, MOST_MS),
    "held": (0, 1),
    "slow_link": (0, 255),
    "slow_comm": (0, MOST_MS),
    "memory": (0, 1_000_000),
    "tp": (1, 1024),
    "cp": (1, 1024),
    "ep": (1, 1024),
    "dp": (1, 65_536),
    "microbatch": (1, 1024),
    "sequence_parallel": (0, 1),
    "overlap_tp": (0, 1),
    "search_seconds": (0, MOST_SECONDS),
}
"""The least and the most of each number."""
TIMES = ("forward", "backward", "weight", "comm", "slow_comm")
"""The times, which may have a unit."""
ABOVE_LEAST = ("memory",)
"""Numbers that must exceed the minimum of their range."""
BY_COMMAND = "use the command line, such as zerobubble show"
"""The remedy for a schedule that is too large for the page."""
FOR_MORE = {
    "ranks": f"{BY_COMMAND} zb-h1 --ranks 512 --microbatches 1024",
    "microbatches": f"{BY_COMMAND} zb-h1 --ranks 8 --microbatches 8192",
}
"""The remedy for a number above its range."""

Fields = TypeVar("Fields")


def read_question(data: Any) -> Question:
    """The question in the JSON that the page sends. Raises `FieldError` naming the field of a value that cannot be used."""
    return read_fields(Question, RANGES, data)


def read_fields(asked: type[Fields], ranges: Mapping[str, tuple[float, float]], data: Any) -> Fields:
    """Reads the dataclass `asked` from the JSON that the page sends. Values may be texts; missing values have their defaults.

    The fields are texts and numbers; `ranges` has the minimum and maximum of each number. Raises `FieldError` with every field whose value
    cannot be used.
    """
    types = {field.name: str(field.type) for field in fields(cast(Any, asked))}
    if not isinstance(data, Mapping):
        raise FieldError("", f"a question is an object with the page's fields, got {type(data).__name__}")
    if unknown := [name for name in data if name not in types]:
        raise FieldError("", f"there is no field {unknown[0]!r:.60}: the fields are {', '.join(types)}")
    values, wrong = {}, []
    for name, value in data.items():
        try:
            values[name] = _read(name, value, types[name], ranges)
        except FieldError as error:
            wrong.append(error)
    if wrong:
        raise FieldError(wrong[0].field, *wrong[0].faults[0][1:], wrong[1:])
    return asked(**values)


def _read(name: str, value: Any, type_: str, ranges: Mapping[str, tuple[float, float]]) -> Any:
    if type_ == "str":
        return _text(name, value)
    if value in ("", None) and "None" in type_:
        return None
    if value == "":
        raise FieldError(name, "this field is empty")
    number = _number(name, value, *ranges[name], whole=type_.startswith("int"))
    require_range(name, value, number, *ranges[name], above_least=name in ABOVE_LEAST)
    return number


def require_range(name: str, value: Any, number: float, least: float, most: float, *, above_least: bool = False) -> None:
    """Raise `FieldError` unless `number`, read from `value`, is from `least` to `most`; with `above_least`, it must exceed `least`."""
    if (least < number if above_least else least <= number) and number <= most:
        return
    range_ = f"above {least:,.12g} and at most {most:,.12g}" if above_least else _range(least, most)
    raise FieldError(name, f"{value!s:.40} is not {range_}", FOR_MORE.get(name, "") if number > most else "")


def _range(least: float, most: float) -> str:
    return f"in {least:,.12g} to {most:,.12g}"


def _number(name: str, value: Any, least: float, most: float, *, whole: bool) -> float:
    """The value of a number field, which is an int if it is `whole`; times may be texts with a unit."""
    try:
        if isinstance(value, bool):
            raise ValueError
        if whole and not isinstance(value, float):
            return int(value)
        time = read_time(value, "ms") if name in TIMES and isinstance(value, str) else None
        number = float(value) if time is None else time
    except (TypeError, ValueError, OverflowError):
        what = f"whole number {_range(least, most)}" if whole else "number"
        raise FieldError(name, f"{value!r:.40} is not a {what}") from None
    if whole and number != int(number if isfinite(number) else 0):
        raise FieldError(name, f"{value!r:.40} is not a whole number {_range(least, most)}")
    return int(number) if whole else number


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(name, f"a text is needed, got {type(value).__name__}")
    if len(value) > MOST_TEXT:
        raise FieldError(name, f"the file has {len(value):,} characters; the page takes at most {MOST_TEXT:,}", BY_COMMAND)
    return value


def read_layers(text: str) -> list[float] | None:
    """The layers of each stage from `10, 10.5, 11.5`, whole ones as whole numbers; None for an empty text."""
    words = text.replace(",", " ").split()
    try:
        return [int(word) if word.isdecimal() else float(word) for word in words] or None
    except ValueError:
        raise FieldError("layers", f"{text!r:.60} are not numbers of layers") from None


def read_options(text: str) -> dict[str, Any]:
    """The schedule's own options from `group=4, other=x`; a value that is not JSON is a text."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if wrong := [word for word in words if "=" not in word[1:]]:
        raise FieldError("options", f"{wrong[0]!r:.60} is not NAME=VALUE")
    return {name.strip(): json_or_text(value.strip()) for name, _, value in (word.partition("=") for word in words)}
