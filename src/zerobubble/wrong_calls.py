"""Faults of a call: arguments that are missing, unknown, given twice or too many, as one `InputError` with the names that were meant."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zerobubble.errors import InputError, nearest, shown

Parameters = Mapping[str, inspect.Parameter]

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
    parameters = {each.name: each for each in signature.parameters.values() if each.name not in ("self", "cls", "_cls")}
    args = args[len(signature.parameters) - len(parameters) :]
    filled = [*_positional(parameters)][: len(args)]
    missing = [each for each in _required(parameters) if each not in filled and each not in kwargs]
    unknown = [each for each in kwargs if each not in parameters]
    meant = _meant(unknown, parameters, filled, missing)
    missing = [each for each in missing if each not in meant.values()]
    given = [*filled, *(each for each in kwargs if each in parameters)]
    twice = {each: known for each in meant if not meant[each] and (known := nearest_name(each, given))}
    hints = {each: f" (did you mean {known!r}?)" for each, known in meant.items() if known}
    hints |= {each: f" ({known!r} is already given)" for each, known in twice.items()}
    faults = [f"unknown argument {each!r}{hints.get(each, '')}" for each in meant]
    if missing:
        faults.append(f"missing required argument{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}")
    got = [kwargs[each] for each in meant]
    return InputError(
        "{call}: {faults}; {remedy}",
        call=name,
        faults="; ".join(faults) or reason,
        argument=", ".join([*meant, *missing]),
        got=got[0] if len(got) == 1 else got or None,
        expected=", ".join([*filter(None, meant.values()), *missing]),
        remedy=_instead(name, meant, kwargs) or f"call it as {_usage(name, parameters, meant | twice)}",
    )


def _instead(name: str, unknown: Iterable[str], kwargs: Mapping[str, Any]) -> str:
    """Returns what to do instead of giving the `unknown` arguments; "" if that is not known."""
    found = {each: nearest_name(each, [argument for call, argument in _INSTEAD if call == name]) for each in unknown}
    return "; ".join(_INSTEAD[name, known].format(got=shown(kwargs[each])) for each, known in found.items() if known)


def _meant(unknown: Sequence[str], parameters: Parameters, filled: Sequence[str], missing: Sequence[str]) -> dict[str, str]:
    """Returns the parameter that each `unknown` argument was probably meant for, "" if none is near.

    If the function takes further named arguments, such as options of a schedule, only one that is meant for a `missing` one is unknown.
    """
    takes_others = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    free = missing if takes_others else [each for each, about in parameters.items() if each not in filled and _has_name(about)]
    found = {each: nearest_name(each, free) for each in unknown}
    return {given: known for given, known in found.items() if known or not takes_others}


def nearest_name(word: str, known: Sequence[str]) -> str:
    """Returns the known name that `word` was probably meant for; "" if none is near.

    It is its singular or plural, a synonym, or a name with a similar spelling.
    """
    forms = {word, f"{word}s", word.removesuffix("s")}
    same = [each for each in known if each in forms] or [each for group in SYNONYMS if word in group for each in known if each in group]
    return same[0] if same else nearest(word, known)


def _positional(parameters: Parameters) -> Iterable[str]:
    return (name for name, each in parameters.items() if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD))


def _required(parameters: Parameters) -> Iterable[str]:
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return (name for name, each in parameters.items() if each.default is each.empty and each.kind not in optional)


def _has_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _usage(name: str, parameters: Parameters, meant: Mapping[str, str]) -> str:
    """How the function is called, without the types.

    Of many parameters, only those are shown that are required or were meant, unless it is not known what was meant.
    """
    if len(parameters) <= MOST_SHOWN or not all(meant.values()):
        return f"{name}{inspect.Signature([_bare(each) for each in parameters.values()])}"
    shown = {*_required(parameters), *meant.values()}
    signature = inspect.Signature([_bare(each) for known, each in parameters.items() if known in shown])
    return f"{name}{signature}"[:-1] + ", ...)"


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    default = str(parameter.default) if isinstance(parameter.default, str) else parameter.default  # a StrEnum is shown as its text
    return parameter.replace(annotation=inspect.Parameter.empty, default=default)
