"""The sensitivity of a plan as text: what moves it most, what chance does to it, which rank has no memory to spare."""

from __future__ import annotations

from collections.abc import Iterator

from zerobubble.planning.answer import Plan
from zerobubble.planning.noise.sensitivity import Effect, Scope, Sensitivity, Spread, sensitivity
from zerobubble.planning.table import aligned, percent

SHOWN = {Scope.KIND: 4, Scope.RANK: 3, Scope.ALONE: 5}
"""How many effects of each scope are shown: those that move the plan most."""


def what_if(solved: Plan, error: float, *, samples: int = 100, seed: int = 0) -> Sensitivity:
    """What becomes of the plan when measured times are off by `error`; raises `InputError` for a bad error and without a schedule."""
    problem = solved.problem
    return sensitivity(
        solved.schedule,
        problem.costs,
        error,
        objective=problem.objective,
        limits=problem.limits,
        samples=samples,
        seed=seed,
        offloads=solved.offloads,
        host=problem.host,
    )


def what_if_text(found: Sensitivity) -> str:
    """A line for each effect shown, by how much the objective grows and shrinks, then what chance does, then the memory."""
    error = f"{100 * found.error:g} %"
    head = (f"off by {error}", "longer", "shorter")
    rows = [(effect.what, _change(found, effect.slower), _change(found, effect.faster)) for effect in _shown(found)]
    everything = ("everything", _change(found, found.worst), "")
    return "\n".join([*aligned([head, *rows, everything], left=(0,)), "", *_chances(found, error), *_memory(found, error)])


def _shown(found: Sensitivity) -> Iterator[Effect]:
    for scope, most in SHOWN.items():
        alike = [effect for effect in found.effects if effect.scope is scope]
        yield from sorted(alike, key=lambda effect: effect.faster - effect.slower)[:most]


def _change(found: Sensitivity, time: int) -> str:
    share = time / found.time - 1 if found.time else 0.0
    return f"{'+' if share > 0 else ''}{percent(share)}"


def _chances(found: Sensitivity, error: str) -> Iterator[str]:
    yield f"Every measured time wrong by a random share of up to {error}: {_spread(found.profile)}."
    yield f"Every pass varying by itself, with a standard deviation of {error}: {_spread(found.jitter)}."


def _spread(spread: Spread) -> str:
    return f"{percent(spread.mean)} longer on average, {percent(spread.worst)} at worst"


def _memory(found: Sensitivity, error: str) -> Iterator[str]:
    if found.spare is not None and found.ranks_over_limit:
        tightest = min(found.ranks_over_limit, key=found.spare.__getitem__)
        short, left = f"{len(found.ranks_over_limit)} of {len(found.spare)} ranks", percent(found.spare[tightest])
        yield f"Memory: activations {error} larger would not fit on {short}; rank {tightest} has {left} of its memory left."
