"""What passes cost in time and memory, and how much memory there is. Exact integers: nanoseconds and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from zerobubble.arguments import NUMBER, WHOLE, Wanted, as_tuple, each, require, require_ms, shown, takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError, reading, whole
from zerobubble.ir import Placement, Step
from zerobubble.kinds import HELD, KINDS, Kind, Stuff, traits_of
from zerobubble.rules import message_receiver
from zerobubble.units import MOST, MOST_MS, counted, show_bytes, show_ms, show_range
from zerobubble.units import NS_PER_MS as NS_PER_MS

UNIT_BYTES = 1_000_000
"""Bytes that stand for one stage's activation where only ratios matter (`Costs.uniform`)."""
CELL = 14
"""Characters of a printed value."""
TIMES = Wanted("three numbers, the times of F, B and W in ms", lambda value: each(NUMBER).accepts(value) and len(value) == 3)


@dataclass(frozen=True, slots=True, repr=False)
class Costs(Displayed):
    """Per stage: `forward`, `backward` (B) and `weight` (W) times in ns, bytes held from F until B and from B until W.

    `comm[s]` is the time in ns for a message between stages s and s+1, either way; it counts only between different ranks.
    A fused BW takes backward + weight. `hidden[s]` is the time in ns that an overlapped step saves against its two passes one after
    the other, where s is the stage of its first pass; empty stands for nothing. Every tuple has one entry per stage, `comm` one less.

    `placement` says on which ranks the stages were measured. With it the costs are for schedules on that placement only; None, where
    it does not matter or is not known, fits every placement of so many stages. `further` are columns, by name, that kinds of passes
    added to the table ask for: see `with_columns`.

    >>> import zerobubble as zb
    >>> zb.Costs.uniform(4, times=(10, 10, 8), comm=0.5)
    <Costs of 4 stages: F 10 ms, B 10 ms, W 8 ms, messages 0.5 ms>
    >>> zb.Costs.from_ms([10, 12], [10, 12], [8, 9], comm=0.5, held_after_f=[4_000_000, 5_000_000])
    <Costs of 2 stages: F 10 ms to 12 ms, B 10 ms to 12 ms, W 8 ms to 9 ms, messages 0.5 ms>
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weight: tuple[int, ...]
    comm: tuple[int, ...]
    held_after_f: tuple[int, ...]
    held_after_b: tuple[int, ...]
    hidden: tuple[int, ...] = ()
    placement: Placement | None = None
    further: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            object.__setattr__(self, name, as_tuple(f"{name} of the costs", getattr(self, name)))
        stages = len(self.forward)
        if stages == 0:
            raise InputError("costs need at least one stage")
        object.__setattr__(self, "hidden", self.hidden or (0,) * stages)
        self._refuse_doubles()
        for name, values in self._columns().items():
            wanted = stages - 1 if name == "comm" else stages
            if len(values) != wanted:
                raise InputError(f"costs for {stages} stages need {wanted} values of {name}, got {len(values)}")
            for index, value in enumerate(values):
                if not WHOLE.accepts(value):
                    raise InputError(
                        f"{name} of stage {index} must be a whole number of ns or bytes, got {shown(value)}: see Costs.from_ms"
                    )
                if not 0 <= value <= MOST:
                    limit = "not be negative" if value < 0 else f"be at most {MOST:.0e}"
                    raise InputError(f"{name} of stage {index} must {limit}, got {shown(value)}")
        if self.placement is not None and self.placement.num_stages != stages:
            raise InputError(f"the costs describe {stages} stages, their placement has {self.placement.num_stages}")

    def _refuse_doubles(self) -> None:
        names = [name for name, _ in self.further]
        doubles = [name for place, name in enumerate(names) if name in _COLUMNS or name in names[:place]]
        if doubles:
            raise InputError(f"costs have one column {doubles[0]!r}, which cannot be given again as a further one")

    def _summary(self) -> str:
        times = "F {}, B {}, W {}".format(*(show_range(column, show_ms) for column in (self.forward, self.backward, self.weight)))
        return f"of {counted(self.num_stages, 'stage')}: {times}, messages {show_range(self.comm, show_ms)}"

    def _details(self) -> Iterator[str]:
        columns = self._columns()
        yield "stage" + "".join(name.rjust(CELL) for name in columns)
        for stage in range(self.num_stages):
            shows = [show_bytes if name in HELD.values() else show_ms for name in columns]
            cells = [show(column[stage]) if stage < len(column) else "" for show, column in zip(shows, columns.values(), strict=True)]
            yield f"{stage:5}" + "".join(cell.rjust(CELL) for cell in cells)

    def _columns(self) -> dict[str, tuple[int, ...]]:
        return {name: getattr(self, name) for name in _COLUMNS} | dict(self.further)

    def require_fit(self, placement: Placement, what: str) -> None:
        """Raise `InputError` unless these are costs of the stages of `placement`, which belongs to `what`.

        Stages must be as many and, where it is known, on the same ranks, since a message between two stages of a rank was measured as
        free. Of several routes the first one counts: copies of a stage are alike.
        """
        if placement.num_stages != self.num_stages:
            raise InputError(f"{what} has {placement.num_stages} stages, the costs describe {self.num_stages}")
        measured = placement if self.placement is None else self.placement
        for stage, (rank, other) in enumerate(zip(placement.routes[0], measured.routes[0], strict=True)):
            if rank != other:
                where = f"the costs were measured with it on rank {other} (placement {measured.name} over {measured.num_ranks} ranks)"
                raise InputError(f"{what} has stage {stage} on rank {rank}, {where}: stay on that placement, or measure on this one")

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    def time(self, kind: Kind, stage: int) -> int:
        """Nanoseconds a pass takes; raises `InputError` for a kind outside the table of kinds."""
        return sum([self.column(name)[stage] for name in traits_of(kind).times])

    def column(self, name: str) -> tuple[int, ...]:
        """The column `name`, one that every costs have or a further one; raises `InputError` where there is none."""
        if name in _COLUMNS:
            values: tuple[int, ...] = getattr(self, name)
            return values
        for known, further in self.further:
            if known == name:
                return further
        raise InputError(f"these costs lack the column {name!r}, which {' and '.join(_askers(name))} needs: see Costs.with_columns")

    def with_columns(self, **columns: Sequence[int]) -> Costs:
        """These costs with other columns, ns or bytes, one value per stage.

        Names that not all costs have are further columns, which kinds of passes ask for that were added to the table.
        """
        given: dict[str, Any] = {name: tuple(values) for name, values in columns.items()}
        further = {name: given.pop(name) for name in columns if name not in _COLUMNS}
        return replace(self, **given, further=tuple((dict(self.further) | further).items()))

    @property
    def time_columns(self) -> tuple[str, ...]:
        """The names of the columns that tell times of passes."""
        asked = {name for traits in KINDS.values() for name in traits.times}
        return tuple(name for name in self._columns() if name in asked)

    def message_time(self, kind: Kind, stage: int) -> int:
        """Nanoseconds that what a pass sends to another stage is on its way; 0 for a pass that sends nothing."""
        receiver = message_receiver(kind, stage, self.num_stages)
        return 0 if receiver is None else self.comm[min(stage, receiver)]

    def step_time(self, step: Step) -> int:
        """Nanoseconds a step takes; two overlapped passes never less than the longer of them."""
        if len(step) == 1:
            return self.time(step[0].kind, step[0].stage)
        apart = [self.time(op.kind, op.stage) for op in step]
        return max(*apart, sum(apart) - self.hidden[step[0].stage])

    def held(self, stuff: Stuff, stage: int) -> int:
        """Bytes a value occupies on the rank that made it: saved activations and pending weight work."""
        return self.column(HELD[stuff])[stage] if stuff in HELD else 0

    def memory_change(self, kind: Kind, stage: int) -> int:
        """Bytes that a pass of this kind adds to what its rank holds: what it makes without what it uses up."""
        used = sum(self.held(stuff, stage) for stuff, hop in traits_of(kind).uses if hop == 0)
        return sum(self.held(stuff, stage) for stuff in traits_of(kind).makes) - used

    @classmethod
    @takes(num_stages=WHOLE, times=TIMES, comm=NUMBER, stages_per_rank=WHOLE)
    def uniform(
        cls,
        num_stages: int,
        times: tuple[float, float, float] = (1.0, 1.0, 1.0),
        comm: float = 0.0,
        *,
        stages_per_rank: int = 1,
        held: float = 1.0,
        overlap: float | None = None,
    ) -> Costs:
        """Equal stages. `times` are F, B, W in ms of a whole rank and microbatch; a stage takes 1/stages_per_rank of them.

        `overlap` is the time of F and the whole backward overlapped, in ms of a whole rank; without it overlapping saves nothing.
        Memory counts `UNIT_BYTES` per stage after F and `held` times that after B, so peaks come out in stage activations.
        Raises `InputError` for times that are negative or not finite, naming them.
        """
        if stages_per_rank < 1:
            raise InputError(f"stages_per_rank must be at least 1, got {stages_per_rank}")
        together = sum(times) if overlap is None else overlap
        for name, value in zip(("F", "B", "W", "comm", "held", "overlap"), (*times, comm, held, together), strict=True):
            require_ms(f"the cost of {name}", value)
        per_stage = [round(t * NS_PER_MS / stages_per_rank) for t in times]
        forward, backward, weight = ((t,) * num_stages for t in per_stage)
        links = (round(comm * NS_PER_MS),) * (num_stages - 1)
        kept = (UNIT_BYTES,) * num_stages
        hidden = max(0, sum(per_stage) - round(together * NS_PER_MS / stages_per_rank))
        return cls(forward, backward, weight, links, kept, (round(held * UNIT_BYTES),) * num_stages, (hidden,) * num_stages)

    @classmethod
    def unit(cls, num_stages: int) -> Costs:
        """Equal stages where every time is 1 ms and what is held `UNIT_BYTES`, further columns that added kinds ask for included."""
        costs = cls.uniform(num_stages)
        further = {name: (NS_PER_MS,) * num_stages for traits in KINDS.values() for name in traits.times if name not in _COLUMNS}
        further |= {name: (UNIT_BYTES,) * num_stages for name in HELD.values() if name not in _COLUMNS}
        return costs.with_columns(**further)

    @classmethod
    def from_ms(
        cls,
        forward: Sequence[float],
        backward: Sequence[float],
        weight: Sequence[float],
        comm: float | Sequence[float] = 0.0,
        held_after_f: Sequence[int] | None = None,
        held_after_b: Sequence[int] | None = None,
        hidden: Sequence[float] = (),
    ) -> Costs:
        """Costs stage by stage, times in ms, memory in bytes (default: one `UNIT_BYTES` each). One `comm` serves every link.

        Raises `InputError` for a value that is negative or not finite, or a column of another length, naming it.
        """
        stages = len(as_tuple("forward of the costs", forward))
        links = [comm] * (stages - 1) if isinstance(comm, (int, float)) else comm
        columns = {"forward": forward, "backward": backward, "weight": weight, "comm": links, "hidden": hidden}
        for name, values in columns.items():
            for index, value in enumerate(as_tuple(f"{name} of the costs", values)):
                require_ms(f"{name} of stage {index}", value, "a finite number", -MOST_MS)
        unit = (UNIT_BYTES,) * stages
        f, b, w, c, h = (tuple(round(v * NS_PER_MS) for v in values) for values in columns.values())
        return cls(f, b, w, c, _tuple_or(held_after_f, unit), _tuple_or(held_after_b, unit), h)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, in ns and bytes; `from_dict` reads it back."""
        columns = {name: list(getattr(self, name)) for name in _COLUMNS}
        placement = {} if self.placement is None else {"placement": self.placement.to_dict()}
        further = {"further": {name: list(values) for name, values in self.further}} if self.further else {}
        return {"format": "zerobubble costs 2", **placement, **columns, **further}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Costs:
        """Read the JSON form; raises `ParseError` when a part is missing or malformed."""
        with reading("costs", data, newest=2):
            columns = {name: tuple(map(whole, ({"hidden": ()} | data)[name])) for name in _COLUMNS}
            further = {str(name): tuple(map(whole, values)) for name, values in data.get("further", {}).items()}
            placement = Placement.from_dict(data["placement"]) if "placement" in data else None
            return cls(**columns, placement=placement, further=tuple(further.items()))


_COLUMNS = tuple(column.name for column in fields(Costs) if column.name not in ("placement", "further"))


def _askers(column: str) -> list[Kind]:
    """The kinds whose times or bytes stand in `column`."""
    held = {stuff for stuff, name in HELD.items() if name == column}
    return [kind for kind, traits in KINDS.items() if column in traits.times or held.intersection(traits.makes)]


def _tuple_or(values: Sequence[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    return default if values is None else tuple(values)


@dataclass(frozen=True, slots=True, repr=False)
class Limits(Displayed):
    """Bytes of activation memory each rank may hold.

    >>> import zerobubble as zb
    >>> zb.Limits((40 * 10**9,) * 8)
    <Limits of 8 ranks: 40 GB>
    """

    memory: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", as_tuple("memory of Limits", self.memory, "a list or tuple with the bytes of each rank"))
        for rank, value in enumerate(self.memory):
            require(f"the memory limit of rank {rank}, in bytes,", value, WHOLE)
            if value <= 0:
                raise InputError(f"the memory limit of rank {rank} must be positive, got {value}")

    def _summary(self) -> str:
        return f"of {counted(len(self.memory), 'rank')}: {show_range(self.memory, show_bytes)}"
