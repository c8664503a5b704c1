"""Recompute levels in the runtime: which submodules R recomputes, by name of the level and by stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from zerobubble.arguments import Wanted
from zerobubble.costs import FULL, NONE
from zerobubble.errors import InputError
from zerobubble.runtime.split.weight_flops import is_wrapped
from zerobubble.units import first_of

Chosen: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
"""Selects submodules to recompute: patterns of their names, their classes, or a function of name and module."""
GivenLevels: TypeAlias = Mapping[str, Chosen | Mapping[int, Chosen]]
"""The parts that each level recomputes, for all stages or by stage. A stage that is left out is recomputed completely."""

_MAX_LISTED = 6
"""Maximum number of module names in the report of a stage."""
_MEANS = {FULL.name: "the whole stage", NONE.name: "nothing"}


def _is_chosen(chosen: Any) -> bool:
    if isinstance(chosen, (str, type)):
        return isinstance(chosen, str) or issubclass(chosen, nn.Module)
    if isinstance(chosen, Sequence):
        return bool(chosen) and all(isinstance(choice, (str, type)) and _is_chosen(choice) for choice in chosen)
    return callable(chosen) and not isinstance(chosen, nn.Module)


def _are_levels(levels: Any) -> bool:
    return isinstance(levels, Mapping) and all(isinstance(name, str) and _is_level(what) for name, what in levels.items())


def _is_level(what: Any) -> bool:
    if isinstance(what, Mapping):
        return all(isinstance(stage, int) and _is_chosen(chosen) for stage, chosen in what.items())
    return _is_chosen(what)


LEVELS = Wanted(
    'what R recomputes by the name of the level, such as {"selective": ["*.attn"]}: patterns of names of modules, their classes or a '
    "function (name, module) -> bool, for all stages or in a dict by stage",
    _are_levels,
)


class RecomputedParts(NamedTuple):
    """The parts of a stage that R recomputes at `level`: calls of `parts`, submodules by name, or the whole stage if None."""

    level: str
    parts: dict[str, nn.Module] | None

    @property
    def recomputes(self) -> bool:
        """Whether R has anything to compute."""
        return self.parts is None or bool(self.parts)

    def __str__(self) -> str:
        if self.parts is None:
            return f"level {self.level!r}: R recomputes the whole stage"
        names = [path or "the whole module" for path in self.parts]
        return f"level {self.level!r}: R recomputes {first_of(names, _MAX_LISTED) or 'nothing, as no module is chosen here'}"


class RecomputeLevels:
    """The user's `levels`, by name. `of_stage` has the level of each stage in a schedule.

    If `of_stage` is None, every stage has the user's only level, or `full` without a level. A profile measures the levels `measured`, none
    without levels. Raises `InputError` for reserved names.
    """

    def __init__(self, levels: GivenLevels | None, of_stage: Sequence[str] | None = None) -> None:
        self.given: GivenLevels = levels or {}
        self.measured: tuple[str, ...] = () if levels is None else (*levels, FULL.name)
        self.of_stage = of_stage
        for name in (FULL.name, NONE.name):
            if name in self.given:
                raise InputError("the level {name!r} is reserved for {means}", name=name, means=_MEANS[name], remedy="choose another name")

    def name_of(self, stage: int) -> str:
        """Returns the level of a stage that a schedule recomputes.

        Raises `InputError` if several are given and the schedule does not select one.
        """
        if self.of_stage is None:
            if len(self.given) > 1:
                raise InputError(
                    (
                        "the schedule has R passes without levels, and several levels are given: {given}. Give recompute a "
                        "single level, or use a plan, which has the level of each stage"
                    ),
                    given=", ".join(self.given),
                )
            return next(iter(self.given), FULL.name)
        return self.of_stage[stage]

    def refuse_unknown(self, stages: Sequence[int], num_stages: int) -> None:
        """Raises `InputError` if the level of one of these `stages` is unknown, and for levels of stages that do not exist."""
        by_stage = [(name, stage) for name, what in self.given.items() if isinstance(what, Mapping) for stage in what]
        for name, stage in by_stage:
            if not 0 <= stage < num_stages:
                message = "recompute has level {name!r} for stage {stage}, but the schedule has stages 0 to {last_stage}"
                raise InputError(message, name=name, stage=stage, last_stage=num_stages - 1)
        unknown = [(stage, name) for stage in stages if (name := self.name_of(stage)) not in {*self.given, FULL.name}]
        if unknown:
            listed = ", ".join(f"{stage} ({name})" for stage, name in unknown)
            example = ", ".join(f"{name!r}: ['*.attn']" for name in dict.fromkeys(name for _, name in unknown))
            raise InputError(
                (
                    "this plan recomputes stages at levels that the pipeline does not know: {listed}. Define which modules "
                    "they recompute, as in Pipeline(recompute={{{example}}}), or plan with the level that needs no "
                    "definition, levels=[zb.costs.FULL], on the command line --levels full:1:0.06"
                ),
                listed=listed,
                example=example,
            )

    def parts_of(self, name: str, stage: int, module: nn.Module) -> RecomputedParts:
        """Returns what level `name` recomputes of a stage: the outermost of the submodules that it selects.

        Raises `InputError` for one inside a compiled module, where single calls are not visible, and for a PyTorch module that works in
        place.
        """
        what = self._given_for(name, stage)
        if what is None:
            return RecomputedParts(name, None)
        parts: dict[str, nn.Module] = {}
        for path, part in module.named_modules():
            if _is_among(what, path, part) and not any(_is_within(path, outer) for outer in parts):
                parts[path] = part
        for path in parts:
            _refuse_compiled(path, module, stage)
        for path, part in parts.items():
            _refuse_in_place(path, part, stage)
        return RecomputedParts(name, parts)

    def _given_for(self, name: str, stage: int) -> Chosen | None:
        """Returns the selection of level `name` for a stage, None for the whole stage."""
        if name == FULL.name:
            return None
        what = self.given[name]
        return what.get(stage) if isinstance(what, Mapping) else what

    def as_one(self, stages: Sequence[int]) -> GivenLevels:
        """Returns a single level that recomputes in each of `stages` what these levels do."""
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
        return any(_is_among(choice, path, part) for choice in what)
    return bool(what(path, part))


def _is_within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _refuse_compiled(path: str, module: nn.Module, stage: int) -> None:
    """Raises `InputError` if compiled code calls a submodule, because that call is not visible."""
    names = path.split(".") if path else []
    for length in range(len(names) + 1):
        outer = ".".join(names[:length])
        part = module.get_submodule(outer)
        if (length < len(names) and is_wrapped(part)) or part._compiled_call_impl is not None:
            raise InputError(
                "{path!r} of stage {stage} cannot be recomputed separately, because {compiled!r} is compiled as a unit",
                path=path,
                stage=stage,
                compiled=outer or "the stage",
                remedy=(
                    f"compile {path!r} alone, as torch.compile(module), and choose the compiled module, or choose modules "
                    "that are not compiled"
                ),
            )


def _refuse_in_place(path: str, part: nn.Module, stage: int) -> None:
    """Raises `InputError` for a PyTorch module that overwrites its input, or a sequence that begins with one."""
    first = part
    while type(first) is nn.Sequential and len(first):
        first = first[0]
    works_in_place = type(first).__module__.startswith("torch.nn.modules.") and getattr(first, "inplace", False)
    if works_in_place and getattr(first, "p", None) != 0:  # Dropout with p = 0 writes nothing
        begins = "is" if first is part else "begins with"
        message = "{path!r} of stage {stage} {begins} {first}, which changes its input, so that it cannot be recomputed separately"
        raise InputError(
            message, path=path, stage=stage, begins=begins, first=first, remedy="set inplace=False, or choose the module around it"
        )


def _words(what: Any) -> str:
    """Describes what a level recomputes, identically on all ranks."""
    if isinstance(what, Mapping):
        return "; ".join(f"stage {stage}: {_words(chosen)}" for stage, chosen in sorted(what.items()))
    if isinstance(what, str):
        return what
    if isinstance(what, type):
        return what.__name__
    return ", ".join(map(_words, what)) if isinstance(what, Sequence) else "a function"


def refuse_empty_levels(levels: RecomputeLevels, gathered: Sequence[tuple[Sequence[str], Sequence[str]]]) -> None:
    """Raises `InputError` if a level chooses no module on any rank, from each rank's levels that choose, and names of its modules."""
    empty = [name for name in levels.given if not any(name in choosing for choosing, _ in gathered)]
    if empty:
        names = list(dict.fromkeys(name for _, names in gathered for name in names))
        hint = f"Modules in stages are called {', '.join(names)}: give patterns such as '*.{names[0]}'" if names else "They have none"
        message = "recompute={{{empty!r}: ...}} chooses no module of any stage; the levels are {levels}. {known}"
        raise InputError(message, empty=empty[0], levels=levels, known=hint)
