"""The head of a model as an axis of a plan: its costs as a whole, and those of each rank's part if it is divided."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from zerobubble.arguments import NUMBER, optional, require, require_bytes, require_ms, takes
from zerobubble.costs import COLLECTIVE, HEAD_TIMES, NS_PER_MS, Costs
from zerobubble.display import Displayed
from zerobubble.errors import InputError, reading
from zerobubble.ir import Placement
from zerobubble.schedules.vocabulary import part_of

LEAST_SLOWDOWN = 1
"""A part of a head takes at least its even share."""

HEAD_BYTES = "held_head"
"""The column of costs with the bytes that a part of a divided head keeps."""

COLUMNS = ("head_forward", "head_backward", "head_weight", HEAD_BYTES, COLLECTIVE)
"""The columns of costs for the parts of a divided head: see `Costs.with_divided_head`."""


@takes()
@dataclass(frozen=True, slots=True, repr=False)
class Head(Displayed):
    """A head separate from the stages. Divided by vocabulary, the part of each rank takes an even share of its times, times `slowdown`.

    Attributes:
        times: Times of a microbatch in ms: of the forward with the loss, of the input gradient, and of the weight gradient.
        held: Bytes that the whole head keeps from its forward to its backward; a part keeps an even share.
        collective: Time in ms that the results of a part take to reach the other ranks.
        slowdown: How much longer parts take than even shares of the whole: 1.2 is 20 %.

    Raises `InputError` for
    values that are negative or not finite, and for a slowdown below 1.

    >>> import zerobubble as zb
    >>> head = zb.planning.Head((10, 10, 10), slowdown=1.2)
    >>> head.divided(zb.Costs.uniform(4), num_ranks=4).column("head_forward")
    (3000000, 3000000, 3000000, 3000000)
    """

    times: tuple[float, float, float]
    held: float = 0.0
    collective: float = 0.0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        require("times of a Head", self.times, HEAD_TIMES)
        forward, for_input, for_weights = self.times
        object.__setattr__(self, "times", (forward, for_input, for_weights))
        for name in ("held", "collective", "slowdown"):
            require(f"{name} of a Head", getattr(self, name), NUMBER)
        for name, value in zip(("forward", "gradient for the input", "gradient for the weights"), self.times, strict=True):
            require_ms(f"the time of the head's {name}", value)
        require_bytes("the bytes that the head keeps", self.held)
        require_ms("the time of a collective of the head", self.collective)
        require_ms("the slowdown of a divided head", self.slowdown, "a finite number from 1 on", LEAST_SLOWDOWN)

    def _summary(self) -> str:
        forward, for_input, for_weights = self.times
        return f"of {forward:g} ms, {for_input:g} ms and {for_weights:g} ms, a part {self.slowdown:g} times its share"

    def divided(self, costs: Costs, num_ranks: int) -> Costs:
        """The `costs` of the stages, with an even part of the head on each of `num_ranks` ranks."""
        forward, for_input, for_weights = (self.slowdown * time / num_ranks for time in self.times)
        return costs.with_divided_head((forward, for_input, for_weights), held=self.held / num_ranks, collective=self.collective)

    def whole(self, costs: Costs) -> Costs:
        """The `costs` of the stages, with the whole head in the last one."""
        names = ("forward", "backward", "weight")
        columns = {name: _add_to_last(costs.column(name), round(time * NS_PER_MS)) for name, time in zip(names, self.times, strict=True)}
        if costs.fused:
            columns["fused"] = _add_to_last(costs.fused, sum(round(time * NS_PER_MS) for time in self.times[1:]))
        return costs.with_columns(**columns, held_after_f=_add_to_last(costs.held_after_f, round(self.held)))

    @classmethod
    @takes(costs=Costs, placement=optional(Placement), slowdown=NUMBER)
    def from_parts(cls, costs: Costs, placement: Placement | None = None, slowdown: float = 1.0) -> Head:
        """The head whose parts are in `costs`, such as `Pipeline.profile` measures for a divided head.

        Bytes are the sum of all parts, and times the sum divided by `slowdown`, since a whole head has larger, more efficient products. On
        the placement of the costs, or else on `placement`, each rank has one part, in the columns of its first stage; if neither is known,
        each stage is a rank. Raises `InputError` for costs without the columns of a divided head.

        >>> import zerobubble as zb
        >>> zb.planning.Head.from_parts(zb.Costs.uniform(4).with_divided_head((3, 2, 2), collective=0.1))
        <Head of 12 ms, 8 ms and 8 ms, a part 1 times its share>
        """
        require_ms("the slowdown of a divided head", slowdown, "a finite number from 1 on", LEAST_SLOWDOWN)
        if missing := [name for name in COLUMNS if name not in dict(costs.further)]:
            raise InputError(
                "these costs have no divided head, they lack {missing}",
                missing=" and ".join(missing),
                remedy="measure them by Pipeline.profile with a zb.nn.DividedHead as its loss_fn, or use Costs.with_divided_head",
            )
        where = costs.placement or placement
        parts = range(costs.num_stages) if where is None else parts_on(where)
        forward, backward, weight, held = (sum(costs.column(name)[stage] for stage in parts) for name in COLUMNS[:-1])
        times = (forward / NS_PER_MS / slowdown, backward / NS_PER_MS / slowdown, weight / NS_PER_MS / slowdown)
        return cls(times, float(held), max(costs.column(COLLECTIVE)) / NS_PER_MS, slowdown)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Head:
        """Reads `data`, as `to_dict` returns it; raises `ParseError` if a part is missing or malformed."""
        with reading("head", data):
            forward, for_input, for_weights = data["times"]
            return cls((forward, for_input, for_weights), data["held"], data["collective"], data["slowdown"])


def parts_on(placement: Placement) -> list[int]:
    """For each rank, the stage whose columns have its part of a divided head."""
    return [part_of(placement, rank) for rank in range(placement.num_ranks)]


def has_parts(costs: Costs) -> bool:
    """Whether `costs` have the columns of a divided head."""
    return COLUMNS[0] in dict(costs.further)


def without_parts(costs: Costs) -> Costs:
    """The costs of the stages alone."""
    return replace(costs, further=tuple((name, column) for name, column in costs.further if name not in COLUMNS))


def _add_to_last(column: tuple[int, ...], last: int) -> tuple[int, ...]:
    return (*column[:-1], column[-1] + last)
