"""Bounds the differences between the clocks of ranks: a message cannot be used before it is made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeVar

from zerobubble.display import Displayed
from zerobubble.errors import InputError
from zerobubble.units import show_ms

K = TypeVar("K")

TOLERANCE = 20_000
"""ns by which times of one machine may contradict each other, since times of a GPU are converted to the host's clock."""

Links = Mapping[tuple[int, int], int]
"""By sender and receiver, the least time in ns from the end of a pass that makes a message to its use, each by its own rank's clock."""


@dataclass(frozen=True, slots=True, repr=False)
class ClockShift(Displayed):
    """The ns added to the times of `rank`, so that they are by the clock of rank 0: `shift`, from `least` to `most`.

    These bounds follow from the messages of the run; None for no bound.
    """

    rank: int
    shift: int
    least: int | None
    most: int | None

    def _summary(self) -> str:
        shown = [show_ms(bound) if bound is not None else "unknown" for bound in (self.least, self.most)]
        return f"of rank {self.rank}: {show_ms(self.shift)} added, between {shown[0]} and {shown[1]} by the messages"


def shifts(links: Links, hosts: Sequence[str]) -> tuple[ClockShift, ...]:
    """Returns the shift of each rank's clock, such that no message is used before it was made.

    Consistent clocks are not shifted. Otherwise, ranks of one host share a clock if `hosts` names them all and the messages allow it.
    Clocks are shifted as little as possible. If the least shifts exceed what the messages leave open, they are set to the middle of it,
    as if messages took equal time either way. Raises `InputError` if no shift helps: the traces are not of one run.
    """
    ranks = range(len(hosts))
    alone = [str(rank) for rank in ranks]
    loose = {link: least + TOLERANCE for link, least in links.items()}
    if all(least >= 0 for least in loose.values()):
        chosen = [0] * len(hosts)
    else:
        owners = hosts if all(hosts) and _least_shifts(_joined(loose, hosts), sorted({*hosts})) else alone
        chosen = [round(shift) for shift in _chosen(loose, owners)]
    below, above = _bounds(loose, ranks)
    return tuple(
        ClockShift(rank, chosen[rank], *(None if abs(bound) == inf else round(bound) for bound in (below[rank], above[rank])))
        for rank in ranks
    )


def _chosen(links: Links, owners: Sequence[str]) -> list[float]:
    """The shift of each rank's clock, where ranks of one owner share theirs."""
    names = sorted({*owners})
    joined = _joined(links, owners)
    needed = _least_shifts(joined, names)
    if needed is None:
        wrong = min(links, key=lambda link: links[link])
        raise InputError(
            "rank {later_rank} uses a message {early} before rank {earlier_rank} made it, and no shift of the clocks helps",
            later_rank=wrong[1],
            early=show_ms(-links[wrong]),
            earlier_rank=wrong[0],
            remedy="give the traces of one run, of the same steps",
        )
    numbers = {name: number for number, name in enumerate(names)}
    below, above = _bounds({(numbers[a], numbers[b]): least for (a, b), least in joined.items()}, range(len(names)), numbers[owners[0]])
    shifts = [needed[name] - needed[owners[0]] for name in names]
    widths = [above[number] - below[number] for number in range(len(names))]
    if max(map(abs, shifts)) > max(widths):
        shifts = [(above[number] + below[number]) / 2 for number in range(len(names))]
    return [shifts[numbers[owner]] for owner in owners]


def _joined(links: Links, owners: Sequence[str]) -> dict[tuple[str, str], int]:
    """The links between owners of clocks. If times of one clock contradict each other, its owner has a link to itself."""
    joined: dict[tuple[str, str], int] = {}
    for (sender, receiver), least in links.items():
        pair = owners[sender], owners[receiver]
        joined[pair] = min(least, joined.get(pair, least))
    return joined


def _least_shifts(links: Mapping[tuple[str, str], int], names: Sequence[str]) -> dict[str, float] | None:
    """The least shifts down that the links need; None if no shifts fulfill them."""
    return _relaxed(links, dict.fromkeys(names, 0.0))


def _bounds(links: Links, ranks: Iterable[int], origin: int = 0) -> tuple[dict[int, float], dict[int, float]]:
    """Per rank, the least and the largest shift against the clock of `origin` that the links allow."""
    start = {rank: 0.0 if rank == origin else inf for rank in ranks}
    most = _relaxed(links, dict(start)) or start
    least = _relaxed({(b, a): time for (a, b), time in links.items()}, dict(start)) or start
    return {rank: -time for rank, time in least.items()}, most


def _relaxed(links: Mapping[tuple[K, K], int], shift: dict[K, float]) -> dict[K, float] | None:
    """`shift` lowered until `shift[sender] <= shift[receiver] + time` holds for every link, by Bellman and Ford.

    None if links contradict each other, so that this would never end.
    """
    for _ in range(len(shift) + 1):
        is_done = True
        for (sender, receiver), time in links.items():
            if shift[receiver] + time < shift[sender]:
                shift[sender], is_done = shift[receiver] + time, False
        if is_done:
            return shift
    return None
