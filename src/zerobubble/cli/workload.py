"""What the planning verbs are asked: the work of each rank, from options or a file, and the room for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from zerobubble.cli.files import read_costs, read_json, require_size
from zerobubble.cli.options import comm_option, held_option, json_option, microbatches_option, ranks_option, times_option
from zerobubble.costs import Costs
from zerobubble.errors import InputError, ParseError
from zerobubble.ir import Placement
from zerobubble.planning import Objective, Workload
from zerobubble.planning.placements import ANY, FAMILIES, family, placements_to_try

Times = tuple[float, float, float]
Verb = TypeVar("Verb", bound=Callable[..., Any])

_COLUMNS = ("forward", "backward", "weight")

_OPTIONS = (
    ranks_option,
    microbatches_option,
    times_option,
    comm_option,
    held_option,
    click.option("--per-rank", metavar="FILE", help="JSON with the times of each rank in ms, instead of --times."),
    click.option("--placement", default=ANY, metavar="NAME,...", help=f"Where stages may live: {', '.join(FAMILIES)}; {ANY} tries all."),
    click.option("--objective", type=click.Choice([aim.value for aim in Objective]), default="span", help="What to make short."),
    click.option("--budget", type=click.FloatRange(0, 86_400), default=5.0, metavar="SECONDS", help="Time to search; 0: best seed."),
    click.option("--evaluations", type=click.IntRange(0), metavar="N", help="Tries instead of --budget: always the same answer."),
    click.option("--seed", type=click.IntRange(0), default=0, metavar="N", help="Seed of the search."),
    json_option,
)


def planning_options(verb: Verb) -> Verb:
    """The options that every planning verb takes."""
    for option in reversed(_OPTIONS):
        verb = option(verb)
    return verb


def asked_work(
    verb: str, ranks: int | None, microbatches: int | None, times: Times, comm: float, held: float, per_rank: str | None
) -> tuple[Workload, int]:
    """The work of each rank and the number of microbatches; raises `InputError` for what is missing or contradicts the file."""
    work = None if per_rank is None else read_workload(per_rank, comm, held)
    ranks, microbatches = asked_shape(verb, work.num_ranks if ranks is None and work else ranks, microbatches)
    if work is not None and work.num_ranks != ranks:
        raise InputError(f"--ranks {ranks} does not fit {per_rank}, which has times for {work.num_ranks}: leave the option out")
    return work or Workload.uniform(ranks, times, comm, held), microbatches


def asked_shape(verb: str, ranks: int | None, microbatches: int | None) -> tuple[int, int]:
    """The numbers of ranks and microbatches; raises `InputError` for one that is missing, below 1 or too large."""
    missing = [option for option, count in (("--ranks P", ranks), ("--microbatches M", microbatches)) if count is None]
    if ranks is None or microbatches is None:
        raise InputError(f"{verb} needs {' and '.join(missing)}")
    for option, count in (("--ranks", ranks), ("--microbatches", microbatches)):
        if count < 1:
            raise InputError(f"{option} must be at least 1, got {count}")
    require_size("a plan", 3 * ranks * microbatches)
    return ranks, microbatches


def asked_stages(file: str, ranks: int | None, microbatches: int | None, placement: str) -> tuple[Costs, Placement, int]:
    """The costs in `file`, the placement whose stages they describe and the number of microbatches.

    Raises `InputError` for what is missing, and where placement or ranks do not fit the file.
    """
    costs = read_costs(file)
    if placement == ANY and costs.placement is not None:
        shared, microbatches = asked_shape("plan", costs.placement.num_ranks, microbatches)
        return costs, costs.placement, microbatches
    if placement == ANY or "," in placement:
        raise InputError(f"the costs in {file} are those of the stages of one placement: name it, such as --placement {FAMILIES[0]}")
    legs = family(placement, 1).num_stages
    shared, left = divmod(costs.num_stages, legs)
    if left or ranks not in (None, shared):
        puts = f"{placement} puts {legs} on each {'rank' if ranks is None else f'of {ranks} ranks'}"
        raise InputError(f"{file} has costs of {costs.num_stages} stages, but {puts}: give the placement they were measured on")
    shared, microbatches = asked_shape("plan", shared, microbatches)
    (made,) = asked_placements(placement, shared, microbatches).values()
    return costs, made, microbatches


def asked_placements(placement: str, num_ranks: int, microbatches: int) -> dict[str, Placement]:
    """The placements to try by their names; raises `InputError` for an unknown one and for too many passes."""
    named = placements_to_try([name.strip() for name in placement.split(",")], num_ranks)
    most = max(made.num_stages for made in named.values())
    require_size("a plan", 3 * most * microbatches)
    return named


def read_workload(file: str, comm: float, held: float) -> Workload:
    """The work of each rank in `file`: a workload in its JSON form, or times in ms.

    Times are an object of lists `forward`, `backward` and `weight` with an entry per rank, and `comm` and `held` where they differ
    from those given, or a list of [F, B, W] per rank. Raises `InputError` naming the file, and the rank of a time that is wrong.
    """
    return read_json(file, "the times of ranks", lambda data: _workload(data, comm, held))


def _workload(data: Any, comm: float, held: float) -> Workload:
    if isinstance(data, list):
        return _workload(_columns(data), comm, held)
    if not isinstance(data, dict):
        raise ParseError(f"expected an object or a list, got {type(data).__name__}")
    if "format" in data:
        return Workload.from_dict(data)
    unknown = [key for key in data if key not in (*_COLUMNS, "comm", "held")]
    lacking = [key for key in _COLUMNS if not isinstance(data.get(key), list)]
    if unknown or lacking:
        raise ParseError(f"{f'{unknown[0]!r} is unknown' if unknown else f'the list {lacking[0]!r} is missing'}; {_FORM}")
    ranks = max(len(data[key]) for key in _COLUMNS)
    forward, backward, weight = (_whole_column(data[key], ranks) for key in _COLUMNS)
    links = data.get("comm", comm)
    links = links if isinstance(links, list) else [links] * ranks
    return Workload.from_ms(forward, backward, weight, links + [comm] * (len(links) == ranks - 1), data.get("held", held))


_FORM = "give the lists forward, backward and weight in ms, an entry per rank, and comm and held if need be"


def _columns(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """The columns of a list of [F, B, W] per rank."""
    for rank, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(_COLUMNS):
            raise ParseError(f"rank {rank} needs three times in ms, [F, B, W], got {row!r:.60}")
    return {name: [row[k] for row in rows] for k, name in enumerate(_COLUMNS)}


def _whole_column(values: list[Any], ranks: int) -> list[Any]:
    """The column with None for what is missing at its end, which `Workload` refuses by its rank."""
    return values + [None] * (ranks - len(values))
