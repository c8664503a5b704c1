"""Levels of recomputation in the runtime: of which submodules R makes the calls again, by the name of the level and by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from zerobubble.arguments import Wanted
from zerobubble.costs import FULL, NONE
from zerobubble.errors import InputError
from zerobubble.runtime.split.weight_flops import is_wrapped

Chosen: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
"""Which submodules are computed again: patterns of their names, their classes, or a function of name and module."""
GivenLevels: TypeAlias = Mapping[str, Chosen | Mapping[int, Chosen]]
"""What each level computes again, the same in all stages or by stage; a stage that is left out is computed again whole."""

_MOST_TOLD = 6
"""Names of modules that a report tells of a stage."""
_MEANS = {FULL.name: "the whole stage", NONE.name: "nothing"}


def _is_chosen(given: Any) -> bool:
    if isinstance(given, (str, type)):
        return isinstance(given, str) or issubclass(given, nn.Module)
    if isinstance(given, Sequence):
        return bool(given) and all(isinstance(one, (str, type)) and _is_chosen(one) for one in given)
    return callable(given) and not isinstance(given, nn.Module)


def _are_levels(given: Any) -> bool:
    return isinstance(given, Mapping) and all(isinstance(name, str) and _is_level(what) for name, what in given.items())


def _is_level(what: Any) -> bool:
    if isinstance(what, Mapping):
        return all(isinstance(stage, int) and _is_chosen(of) for stage, of in what.items())
    return _is_chosen(what)


LEVELS = Wanted(
    'what R computes again by the name of the level, such as {"selective": ["*.attn"]}: patterns of names of modules, their classes or a '
    "function (name, module) -> bool, for all stages or in a dict by stage",
    _are_levels,
)


class ComputedAgain(NamedTuple):
    """What R computes again of a stage, by its `level`: the calls of these `parts`, submodules by name, or all where that is None."""

    level: str
    parts: dict[str, nn.Module] | None

    @property
    def chooses(self) -> bool:
        """Whether there is anything that R computes."""
        return self.parts is None or bool(self.parts)

    def __str__(self) -> str:
        if self.parts is None:
            return f"level {self.level!r}: R computes all of it again"
        names = [path or "the whole module" for path in self.parts]
        more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
        return f"level {self.level!r}: R computes again {', '.join(names[:_MOST_TOLD]) or 'nothing, as no module is chosen here'}{more}"


class RecomputeLevels:
    """The levels that users `given`, by name, and `of_stage` those that the stages of a schedule have; without it they have the only one.

    `measured` are those that a profile measures, none where none are given. Raises `InputError` for names that mean something else.
    """

    def __init__(self, given: GivenLevels | None, of_stage: Sequence[str] | None = None) -> None:
        self.given: GivenLevels = given or {}
        self.measured: tuple[str, ...] = () if given is None else (*given, FULL.name)
        self.of_stage = of_stage
        for name in (FULL.name, NONE.name):
            if name in self.given:
                raise InputError(f"the level {name!r} is always known, and is {_MEANS[name]}: give yours another name")

    def name_of(self, stage: int) -> str:
        """The level of a stage whose forwards a schedule computes again.

        Raises `InputError` where several are given and nobody says which, and for one that is not given.
        """
        if self.of_stage is None:
            if len(self.given) > 1:
                raise InputError(
                    f"the schedule has R passes and tells no levels, and several are given: {', '.join(self.given)}. "
                    "Give recompute the one that they have, or a plan, which tells the level of each stage"
                )
            return next(iter(self.given), FULL.name)
        return self.of_stage[stage]

    def refuse_unknown(self, stages: Sequence[int], num_stages: int) -> None:
        """Raise `InputError` where it is not known what is computed again of one of these `stages`, and for stages that there are not."""
        told = [(name, stage) for name, what in self.given.items() if isinstance(what, Mapping) for stage in what]
        for name, stage in told:
            if not 0 <= stage < num_stages:
                raise InputError(f"recompute tells of level {name!r} in stage {stage}, but the schedule has stages 0 to {num_stages - 1}")
        unknown = [(stage, name) for stage in stages if (name := self.name_of(stage)) not in {*self.given, FULL.name}]
        if unknown:
            listed = ", ".join(f"{stage} ({name})" for stage, name in unknown)
            example = ", ".join(f"{name!r}: ['*.attn']" for name in dict.fromkeys(name for _, name in unknown))
            raise InputError(
                f"this plan computes stages again at levels that the pipeline does not know: {listed}. Tell which modules "
                f"they compute again, as in Pipeline(recompute={{{example}}}), or plan with the one level that needs no telling, "
                "levels=[zb.costs.FULL], on the command line --levels full:1:0.06"
            )

    def of(self, name: str, stage: int, module: nn.Module) -> ComputedAgain:
        """What level `name` computes again of a stage: of the submodules that it chooses the outermost.

        Raises `InputError` for one within a module that is compiled, in which calls cannot be told apart, and for one of PyTorch's that
        works in place.
        """
        what = self._given_for(name, stage)
        if what is None:
            return ComputedAgain(name, None)
        found: dict[str, nn.Module] = {}
        for path, part in module.named_modules():
            if _is_among(what, path, part) and not any(_is_within(path, outer) for outer in found):
                found[path] = part
        for path in found:
            _refuse_compiled(path, module, stage)
        for path, part in found.items():
            _refuse_in_place(path, part, stage)
        return ComputedAgain(name, found)

    def _given_for(self, name: str, stage: int) -> Chosen | None:
        """What level `name` was given for a stage, None where that is all of it."""
        if name == FULL.name:
            return None
        what = self.given[name]
        return what.get(stage) if isinstance(what, Mapping) else what

    def as_one(self, stages: Sequence[int]) -> GivenLevels:
        """The level that all `stages` have whose R's are to compute again what they do by these, whatever the names."""
        by_stage = {stage: self._given_for(self.name_of(stage), stage) for stage in stages}
        return {"as before": {stage: what for stage, what in by_stage.items() if what is not None}}

    def __str__(self) -> str:
        return ", ".join(f"{name} ({_words(what)})" for name, what in self.given.items()) or "the whole stage"


def _is_among(what: Chosen, path: str, part: nn.Module) -> bool:
    if isinstance(what, str):
        return fnmatchcase(path, what) or fnmatchcase(f".{path}", what)
    if isinstance(what, type):
        return isinstance(part, what)
    if isinstance(what, Sequence):
        return any(_is_among(one, path, part) for one in what)
    return bool(what(path, part))


def _is_within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _refuse_compiled(path: str, module: nn.Module, stage: int) -> None:
    """Raise `InputError` where compiled code makes the call of a submodule, which then cannot be told from what is around it."""
    names = path.split(".") if path else []
    for length in range(len(names) + 1):
        outer = ".".join(names[:length])
        part = module.get_submodule(outer)
        if (length < len(names) and is_wrapped(part)) or part._compiled_call_impl is not None:
            raise InputError(
                f"{path!r} of stage {stage} cannot be computed again by itself, as {outer or 'the stage'!r} is compiled as one: compile it "
                "with torch.compile(module) and choose that, or choose modules that are not compiled"
            )


def _refuse_in_place(path: str, part: nn.Module, stage: int) -> None:
    """Raise `InputError` for a module of PyTorch's that writes its output over its input, or a sequence that begins with one."""
    first = part
    while type(first) is nn.Sequential and len(first):
        first = first[0]
    works_in_place = type(first).__module__.startswith("torch.nn.modules.") and getattr(first, "inplace", False)
    if works_in_place and getattr(first, "p", None) != 0:  # a Dropout of nothing writes nothing
        begins = "is" if first is part else "begins with"
        raise InputError(
            f"{path!r} of stage {stage} {begins} {first}, which changes its input, so that it cannot be computed again by itself: give "
            "inplace=False, or choose the module around it"
        )


def _words(what: Any) -> str:
    """What a level computes again, in words that are the same on all ranks."""
    if isinstance(what, Mapping):
        return "; ".join(f"stage {stage}: {_words(of)}" for stage, of in sorted(what.items()))
    if isinstance(what, str):
        return what
    if isinstance(what, type):
        return what.__name__
    return ", ".join(map(_words, what)) if isinstance(what, Sequence) else "a function"
