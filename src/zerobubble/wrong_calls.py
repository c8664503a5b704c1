"""Faults of a call: arguments that are missing, unknown, given twice or too many, as one `InputError` with the names that were meant."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from inspect import Parameter
from typing import Any

from zerobubble.errors import InputError, nearest, shown

Parameters = Mapping[str, Parameter]

SYNONYMS = (
    {"seconds", "budget", "time", "time_limit", "max_seconds"},
    {"memory", "limit", "limits", "max_memory", "memory_limit", "memory_bytes", "mem"},
    {"num_ranks", "ranks", "pp", "pp_size", "world_size", "num_devices"},
    {"num_microbatches", "microbatches", "n_microbatches", "chunks", "micro_batches", "gradient_accumulation_steps"},
    {"stages_per_rank", "chunks_per_rank", "num_model_chunks", "virtual_stages"},
    {"num_stages", "stages", "n_stages"},
    {"build_or_modules", "build", "modules", "module", "model", "stage", "stages"},
    {"loss_fn", "loss", "criterion", "loss_function"},
    {"targets", "target", "labels", "y"},
    {"inputs", "input", "batch", "x"},
    {"placements", "placement"},
    {"recompute", "recomputation", "activation_checkpointing", "checkpointing", "checkpoint"},
    {"transport", "backend"},
    {"group", "process_group"},
    {"mesh", "device_mesh"},
    {"hooks", "callbacks"},
    {"tied", "tied_weights", "tied_parameters", "shared_parameters"},
    {"times", "durations", "work", "workload"},
    {"file", "path", "filename", "folder", "directory"},
    {"max_norm", "clip", "max_grad_norm"},
    {"show", "draw", "plot", "display"},
    {"no_browser", "no_open", "headless"},
)
"""Words for one thing, in the names of zerobubble and those that other libraries and the command line give to it."""


_INSTEAD = {
    ("Pipeline", "stages_per_rank"): "pass make(name, num_ranks, num_microbatches, stages_per_rank={got}) as the schedule",
}
"""Returns the remedy for an unknown argument of a function."""


MOST_SHOWN = 8
"""Parameters of a function that a sentence shows whether or not they are concerned."""


def wrong_call(name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str) -> InputError:
    """Returns the error of a call of `name` with `args` and `kwargs`, which its `signature` does not allow for the `reason`.

    Its fields are `call`, `argument` (the wrong names), `got` (their values), `expected` (the right names) and `remedy`.
    """
    parameters = {name: about for name, about in signature.parameters.items() if name not in ("self", "cls", "_cls")}
    args = args[len(signature.parameters) - len(parameters) :]
    filled = _names(parameters, Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)[: len(args)]
    set_names = [*filled, *(argument for argument in kwargs if argument in parameters)]
    missing = [argument for argument in _required(parameters) if argument not in set_names]
    meant = _meant(kwargs, parameters, filled, missing)
    missing = [argument for argument in missing if argument not in meant.values()]
    twice = {argument: nearest_name(argument, set_names) for argument, right in meant.items() if not right}
    got = list(map(kwargs.get, meant))
    return InputError(
        "{call}: {faults}; {remedy}",
        call=name,
        faults="; ".join(_faults(meant, twice, missing)) or reason,
        argument=", ".join([*meant, *missing]),
        got=got[0] if len(got) == 1 else got or None,
        expected=", ".join([*filter(None, meant.values()), *missing]),
        remedy=_instead(name, meant, kwargs) or f"call it as {_usage(name, parameters, meant | twice)}",
    )


def _faults(meant: Mapping[str, str], twice: Mapping[str, str], missing: Sequence[str]) -> list[str]:
    """Returns a phrase for each unknown argument, with the parameter it was `meant` for or gives `twice`, and one for `missing` ones."""
    hints = {argument: f" ({name!r} is already given)" for argument, name in twice.items() if name}
    hints |= {argument: f" (did you mean {name!r}?)" for argument, name in meant.items() if name}
    faults = [f"unknown argument {argument!r}{hints.get(argument, '')}" for argument in meant]
    return [*faults, f"missing required argument{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}"] if missing else faults


def _instead(name: str, unknown: Iterable[str], kwargs: Mapping[str, Any]) -> str:
    """Returns what to do instead of giving the `unknown` arguments; "" if there is no remedy."""
    near = {argument: nearest_name(argument, [other for call, other in _INSTEAD if call == name]) for argument in unknown}
    return "; ".join(_INSTEAD[name, other].format(got=shown(kwargs[argument])) for argument, other in near.items() if other)


def _meant(kwargs: Iterable[str], parameters: Parameters, filled: Sequence[str], missing: Sequence[str]) -> dict[str, str]:
    """Returns the parameter that each unknown argument among `kwargs` was probably meant for, "" if none is near.

    If the function takes further named arguments, such as options of a schedule, an argument is unknown only if it resembles one of
    `missing`.
    """
    takes_others = bool(_names(parameters, Parameter.VAR_KEYWORD))
    named = _names(parameters, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    free = missing if takes_others else [name for name in named if name not in filled]
    near = {argument: nearest_name(argument, free) for argument in kwargs if argument not in parameters}
    return {argument: name for argument, name in near.items() if name or not takes_others}


def nearest_name(word: str, names: Sequence[str]) -> str:
    """Returns the name that `word` was probably meant for; "" if none is near.

    It is the singular or plural of `word`, a synonym, or a name with a similar spelling.
    """
    forms = {word, f"{word}s", word.removesuffix("s")}
    same = [name for name in names if name in forms] or [name for group in SYNONYMS if word in group for name in names if name in group]
    return same[0] if same else nearest(word, names)


def _names(parameters: Parameters, *kinds: Any) -> list[str]:
    return [name for name, about in parameters.items() if about.kind in kinds]


def _required(parameters: Parameters) -> Iterable[str]:
    optional = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return (name for name, about in parameters.items() if about.default is about.empty and about.kind not in optional)


def _usage(name: str, parameters: Parameters, meant: Mapping[str, str]) -> str:
    """How the function is called, without the types.

    Of many parameters, only those are shown that are required or were meant, unless it is not known what was meant.
    """
    if len(parameters) <= MOST_SHOWN or not all(meant.values()):
        return f"{name}{inspect.Signature([*map(_bare, parameters.values())])}"
    shown = {*_required(parameters), *meant.values()}
    signature = inspect.Signature([_bare(about) for argument, about in parameters.items() if argument in shown])
    return f"{name}{signature}"[:-1] + ", ...)"


def _bare(parameter: Parameter) -> Parameter:
    default = str(parameter.default) if isinstance(parameter.default, str) else parameter.default  # a StrEnum is shown as its text
    return parameter.replace(annotation=Parameter.empty, default=default)
