"""A recipe: how to build one schedule, which shapes it supports, and the description in its docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product, takewhile
from types import UnionType
from typing import Any, Union, get_args, get_origin

from zerobubble.arguments import COUNT, takes, wrong
from zerobubble.display import Displayed
from zerobubble.errors import InputError, near
from zerobubble.ir import Schedule
from zerobubble.kinds import ValueKind, kinds_using
from zerobubble.units import counted

MOST_RANKS = 32
"""Largest number of ranks tried in the search for a schedule's smallest shape."""

Needs = Callable[[int, int, int], str]


OF_SHAPE = takes(ranks=COUNT, microbatches=COUNT, stages_per_rank=COUNT)
"""Decorates the function of a schedule. `make` checks also what only this schedule needs."""

OF_SLICES = takes(ranks=COUNT, microbatches=COUNT, stages_per_rank=COUNT, slices=COUNT)
"""Decorates the function of a schedule whose microbatches may be cut into slices of their sequence."""


def no_needs(ranks: int, microbatches: int, stages_per_rank: int) -> str:
    """Return "": the schedule supports every shape of `ranks`, `microbatches` and `stages_per_rank`."""
    return ""


@takes()
@dataclass(frozen=True, repr=False)
class Recipe(Displayed):
    """How to build one schedule.

    Attributes:
        name: The name by which `zb.make` and the command line know it.
        build: `build(ranks, microbatches, stages_per_rank, **options)` returns the schedule.
        stages_per_rank: The default number of stages per rank.
        any_stages: Whether other numbers of stages per rank work, too.
        needs: `needs(ranks, microbatches, stages_per_rank)` returns why a shape is not supported, as the end of a sentence ("needs an even
            number of ranks, got 3"), or "" if it is.

    Raises `InputError` for a `build` that cannot be called with these three arguments.
    """

    name: str
    build: Callable[..., Schedule]
    stages_per_rank: int = 1
    any_stages: bool = False
    needs: Needs = no_needs

    def __post_init__(self) -> None:
        try:
            inspect.signature(self.build).bind(1, 1, 1)
        except (TypeError, ValueError) as error:
            needed = "needs a function of (ranks, microbatches, stages_per_rank)"
            raise InputError("schedule {name!r} {needed}: {reason}", name=self.name, needed=needed, reason=str(error)) from error

    def _summary(self) -> str:
        return f"{self.name}: {counted(self.stages_per_rank, 'stage')} per rank{' or another number' if self.any_stages else ''}"

    def _details(self) -> Iterator[str]:
        yield from filter(None, (self.summary, self.rule, *self.formulas, self.good_for, self.source))

    def refusal(self, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> str:
        """Return why the schedule does not support these numbers of `ranks`, `microbatches` and `stages_per_rank`; "" if it does.

        The reason is a sentence. By default, ranks have the stages of the recipe.
        """
        stages = self.stages_per_rank if stages_per_rank is None else stages_per_rank
        for what, count in (("rank", ranks), ("microbatch", microbatches), ("stage per rank", stages)):
            if count < 1:
                return f"{self.name} needs at least 1 {what}, got {count}"
        if stages != self.stages_per_rank and not self.any_stages:
            needed = counted(self.stages_per_rank, "stage")
            return f"{self.name} needs exactly {needed} per rank, got {stages}"
        lack = self.needs(ranks, microbatches, stages)
        return f"{self.name} {lack}" if lack else ""

    def allows(self, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> bool:
        """Whether the schedule supports these numbers of `ranks`, `microbatches` and `stages_per_rank`, as in `refusal`."""
        return not self.refusal(ranks, microbatches, stages_per_rank)

    def near_shape(self, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> tuple[int, int, int] | None:
        """Return numbers near `ranks`, `microbatches` and `stages_per_rank` that the schedule supports; None if it finds none."""
        stages = stages_per_rank or self.stages_per_rank
        per_rank = [stages, stages + 1] if self.any_stages else [self.stages_per_rank]
        for count, v in product((ranks, ranks + 1), per_rank):
            for number in sorted({microbatches, microbatches + 1, -(-microbatches // count) * count, 2 * count}):
                if self.allows(count, number, v):
                    return count, number, v
        return None

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options of the schedule with their defaults: the parameters of `build` after the first three."""
        parameters = list(inspect.signature(self.build).parameters.values())[3:]
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {parameter.name: parameter.default for parameter in parameters if parameter.kind in named}

    def check_options(self, options: dict[str, Any], recipes: Iterable[Recipe] = ()) -> None:
        """Raise `InputError` if `options`, values by name, has an unknown name or a value of the wrong type.

        The error names the `recipes` that have the unknown option.
        """
        for option, value in options.items():
            if option not in self.options:
                valid = f"{near(option, self.options)}its options are {', '.join(self.options)}" if self.options else "it takes no options"
                having = ", ".join(recipe.name for recipe in recipes if option in recipe.options)
                valid += f"; schedules with this option: {having}" if having else ""
                raise InputError("{name} has no option {option!r}: {known}", name=self.name, option=option, known=valid, having=having)
            hint = self._hint(option)
            if not _fits(value, hint):
                raise wrong(f"the option {option} of {self.name}", value, _in_words(hint))

    def _hint(self, option: str) -> Any:
        try:
            annotation = inspect.signature(self.build, eval_str=True).parameters[option].annotation
        except NameError:  # the type is only imported under TYPE_CHECKING
            return object
        return object if annotation is inspect.Parameter.empty else annotation

    @property
    def summary(self) -> str:
        """Benefit and cost of the schedule: the first line of the docstring."""
        return _one_line(self._paragraphs[0]) if self._paragraphs else ""

    @property
    def rule(self) -> str:
        """A description of the order on each rank: the text between the first line and the bullets."""
        return " ".join(_one_line(text) for text in takewhile(lambda text: not text.startswith("- "), self._paragraphs[1:]))

    @property
    def formulas(self) -> tuple[str, ...]:
        """Bubble and peak memory, each with the conditions under which it holds: the bullets of the docstring."""
        bullets = (re.split(r"^- ", text, flags=re.MULTILINE)[1:] for text in self._paragraphs if text.startswith("- "))
        return tuple(_one_line(bullet) for group in bullets for bullet in group)

    @property
    def condition(self) -> str:
        """A description of the supported shapes: the first line of the docstring of `needs`; "" if every shape is supported."""
        return "" if self.needs is no_needs else inspect.cleandoc(self.needs.__doc__ or "").partition("\n")[0]

    @property
    def good_for(self) -> str:
        """When to choose the schedule."""
        return self._after("Good for:")

    @property
    def source(self) -> str:
        """The publication that the schedule comes from."""
        return self._after("Source:")

    def _after(self, label: str) -> str:
        rest = (text.removeprefix(label) for text in self._paragraphs if text.startswith(label))
        return _one_line(next(rest, ""))

    @cached_property
    def _paragraphs(self) -> list[str]:
        return [text for text in inspect.cleandoc(self.build.__doc__ or "").split("\n\n") if text]

    @cached_property
    def sample(self) -> Schedule:
        """The schedule at its smallest shape, with at least two ranks if possible; raises `InputError` if no small shape works."""
        for ranks in (2, 3, 4, 1, *range(5, MOST_RANKS + 1)):
            for microbatches in range(ranks, 4 * ranks + 1):
                if self.allows(ranks, microbatches):
                    return self.build(ranks, microbatches, self.stages_per_rank)
        raise InputError(
            "{name} supports no shape of up to {limit} ranks and 4 times as many microbatches", name=self.name, limit=MOST_RANKS
        )

    @property
    def splits(self) -> bool:
        """Whether backward is split into B and W."""
        return any(op.kind in kinds_using(ValueKind.WEIGHT_WORK) for _, _, op in self.sample.ops())

    @property
    def trains(self) -> bool:
        """Whether the schedule has backward passes; one for inference has none."""
        return not self.sample.is_forward_only

    @property
    def torch_csv(self) -> bool:
        """Whether PyTorch's schedule CSV, which allows one copy of each stage, can express the schedule."""
        return len(self.sample.placement.routes) == 1


def _one_line(text: str) -> str:
    return " ".join(text.split())


_TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def _in_words(hint: Any) -> str:
    """Describe values of the type `hint`, such as `a whole number or null`."""
    parts = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    return " or ".join(_TYPES.get(part, getattr(part, "__name__", str(part))) for part in parts)


def _fits(value: Any, hint: Any) -> bool:
    """Whether `value` is of the type `hint`; an int is accepted for a float."""
    try:
        return isinstance(value, hint) or (isinstance(value, int) and isinstance(float(value), hint))
    except TypeError:  # isinstance does not support hints such as tuple[int, ...]
        return True
