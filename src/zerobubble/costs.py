"""What passes cost in time and memory. Exact integers: nanoseconds and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from zerobubble.arguments import NUMBER, WHOLE, Wanted, as_tuple, each, require, require_ms, takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError, reading, shown, whole
from zerobubble.ir import Placement, Schedule, Step
from zerobubble.kinds import HELD, KINDS, MOVES, Kind, Stuff, Traits, made_where, traits_of
from zerobubble.level import FULL as FULL
from zerobubble.level import NONE as NONE
from zerobubble.level import SELECTIVE as SELECTIVE
from zerobubble.level import Level as Level
from zerobubble.limits import MOST_ROOM as MOST_ROOM
from zerobubble.limits import Limits as Limits
from zerobubble.rules import given_to, message_receiver, recomputed
from zerobubble.units import MOST, MOST_MS, counted, show_bytes, show_ms, show_range
from zerobubble.units import NS_PER_MS as NS_PER_MS

UNIT_BYTES = 1_000_000
"""Bytes that stand for one stage's activation where only ratios matter (`Costs.uniform`)."""
CELL = 14
"""Characters of a printed value, more where the name of its column is longer."""
LARGEST_SHARE = 1_000_000
"""The largest factor on the costs of a microbatch."""
KEPT = "parameters_bytes"
"""The further column of bytes that a stage keeps on its rank throughout: parameters, gradients, optimizer state. No pass uses it."""
FUSED = "fused"
"""The further column with the ns of a BW where it takes less than B and W: what B makes its rank wait for can hide behind W in one pass."""
COLLECTIVE = "collective"
"""The further column of ns from a pass that gives to a collective until the other ranks have gathered it."""
OFFLOADABLE = "offloadable"
"""The further column with the bytes of what F saves that can go to host memory; all can where it is left out."""
_LEVEL_TIME, _LEVEL_BYTES = "recompute ", "held_input "
"""How the further columns of a level of recomputation begin, before its name: see `Costs.levels`."""
KEPT_WORDS = "parameters, gradients and optimizer state"
MOST_BUCKETS = 10_000
"""The most buckets in which a stage's gradients leave: simulating a step takes time and memory for each."""
HEAD_TIMES = Wanted(
    "three numbers, the times in ms of a head or a part of it: forward, gradient for the input, gradient for the weights",
    lambda value: each(NUMBER).accepts(value) and len(value) == 3,
)
TIMES = Wanted("three numbers, the times of F, B and W in ms", lambda value: each(NUMBER).accepts(value) and len(value) == 3)


@dataclass(frozen=True, slots=True, repr=False)
class Costs(Displayed):
    """Per stage: `forward`, `backward` (B) and `weight` (W) times in ns, bytes held from F until B and from B until W.

    `comm[s]` is the time in ns for a message between stages s and s+1, either way; it counts only between different ranks.
    A fused BW takes `fused[s]` if the costs have that further column and it is less, else backward + weight, and nothing that B would leave
    for W stays after it. `hidden[s]` is the time in ns that an overlapped step of F with B or BW, whose first pass is of stage s, saves
    against these one after the other. `reduce[s]` is the time in ns to sum the gradients of stage s over replicas, alongside passes.
    `buckets[s]` is the number of parts in which they leave during the stage's last W's; without buckets they leave after these. Every tuple
    has one entry per stage, `comm` one less; an empty one stands for zeros.

    `placement` says on which ranks the stages were measured. With it the costs are for schedules on that placement only; None, where
    it does not matter or is not known, fits every placement of so many stages. `further` are columns, by name, that kinds of passes
    added to the table ask for, and `parameters_bytes`, where it is known what a stage keeps on its rank throughout, which pages of
    timelines draw below the activations: see `with_columns`.

    `shares` are for microbatches of unequal cost: one positive factor for each, on the times of its passes and the bytes that they hold,
    rounded to ns and bytes. Messages and sums over replicas keep their times. Empty stands for microbatches that are alike.

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
    reduce: tuple[int, ...] = ()
    buckets: tuple[int, ...] = ()
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            object.__setattr__(self, name, as_tuple(f"{name} of the costs", getattr(self, name)))
        if (stages := len(self.forward)) == 0:
            raise InputError("costs need at least one stage")
        for name in _OPTIONAL:
            object.__setattr__(self, name, getattr(self, name) or (0,) * stages)
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
                most = MOST_BUCKETS if name == "buckets" else MOST
                if not 0 <= value <= most:
                    limit = "not be negative" if value < 0 else f"be at most {most:g}"
                    raise InputError(f"{name} of stage {index} must {limit}, got {shown(value)}")
        if self.placement is not None and self.placement.num_stages != stages:
            raise InputError(f"the costs describe {stages} stages, their placement has {self.placement.num_stages}")
        object.__setattr__(self, "shares", as_tuple("shares of the costs", self.shares, "a list or tuple with a factor per microbatch"))
        self._check_shares()

    def _check_shares(self) -> None:
        if not self.shares:
            return
        for microbatch, share in enumerate(self.shares):
            if not NUMBER.accepts(share) or not 0 < share <= LARGEST_SHARE:
                wanted = f"a number above 0, at most {LARGEST_SHARE:,}"
                raise InputError(f"the share of microbatch {microbatch} in the costs must be {wanted}, got {shown(share)}")
        largest = max(map(max, filter(None, self._sized_columns().values())))
        if largest * max(self.shares) > MOST:
            raise InputError(f"a share of {max(self.shares):g} makes a pass cost over {MOST:.0e} ns or bytes: give smaller shares or costs")

    def _refuse_doubles(self) -> None:
        names = [name for name, _ in self.further]
        doubles = [name for place, name in enumerate(names) if name in _COLUMNS or name in names[:place]]
        if doubles:
            raise InputError(f"costs have one column {doubles[0]!r}, which cannot be given again as a further one")

    def _summary(self) -> str:
        times = "F {}, B {}, W {}".format(*(show_range(column, show_ms) for column in (self.forward, self.backward, self.weight)))
        times += f", BW {show_range(self.fused, show_ms)}" if self.fused else ""
        sums = f", sums over replicas {show_range(self.reduce, show_ms)}" if any(self.reduce) else ""
        sums += f", {counted(len(self.shares), 'microbatch')} of shares {show_range(self.shares, '{:g}'.format)}" if self.shares else ""
        return f"of {counted(self.num_stages, 'stage')}: {times}, messages {show_range(self.comm, show_ms)}{sums}"

    def _details(self) -> Iterator[str]:
        columns = {name: column for name, column in self._columns().items() if name not in ("reduce", "buckets") or any(column)}
        widths = [max(CELL, len(name) + 1) for name in columns]
        yield "stage" + "".join(map(str.rjust, columns, widths))
        for stage in range(self.num_stages):
            in_bytes = (*HELD.values(), KEPT, OFFLOADABLE)
            are_bytes = [name in in_bytes or name.startswith(_LEVEL_BYTES) for name in columns]
            shows = [str if name == "buckets" else show_bytes if size else show_ms for name, size in zip(columns, are_bytes, strict=True)]
            cells = [show(column[stage]) if stage < len(column) else "" for show, column in zip(shows, columns.values(), strict=True)]
            yield f"{stage:5}" + "".join(map(str.rjust, cells, widths))

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

    def require_schedule(self, schedule: Schedule) -> None:
        """Raise `InputError` unless these are costs of the stages and of the microbatches of `schedule`."""
        self.require_fit(schedule.placement, f"schedule {schedule.name!r}")
        if self.shares and len(self.shares) != schedule.num_microbatches:
            has = f"schedule {schedule.name!r} has {counted(schedule.num_microbatches, 'microbatch')}"
            raise InputError(f"{has}, the costs have shares of {len(self.shares)}: give one for each")

    def require_alike(self, what: str) -> None:
        """Raise `InputError` for costs with shares, which `what` does not take."""
        if self.shares:
            raise InputError(f"{what} takes microbatches that are alike, and the costs have shares of {len(self.shares)}: leave them out")

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def fused(self) -> tuple[int, ...]:
        """The time in ns of a BW of each stage that has its own; empty where it takes as long as B and W.

        >>> import zerobubble as zb
        >>> zb.Costs.uniform(2, times=(10, 10, 8)).with_columns(fused=(16_000_000, 18_000_000)).time(zb.Kind.BW, 0)
        16000000
        """
        return dict(self.further).get(FUSED, ())

    def time(self, kind: Kind, stage: int, microbatch: int | None = None) -> int:
        """Nanoseconds a pass takes; costs with shares must be asked for a microbatch.

        Raises `InputError` for a kind outside the table of kinds, and where the microbatch is missing.
        """
        traits = traits_of(kind)
        apart = sum([self._sized(name, stage, microbatch) for name in traits.times])
        return min(apart, self._sized(traits.in_one, stage, microbatch)) if self._has(traits.in_one) else apart

    def _sized(self, name: str, stage: int, microbatch: int | None) -> int:
        """What stands in a column, times the share of the microbatch."""
        value = self.column(name)[stage]
        if not self.shares:
            return value
        if microbatch is None:
            raise InputError(f"these costs have shares of {len(self.shares)} microbatches: say which one is meant, or leave the shares out")
        return round(value * self.shares[microbatch])

    def times(self, kind: Kind, stage: int) -> list[int]:
        """What `time` gives for each microbatch of the shares, all at once."""
        traits = traits_of(kind)
        apart = _sums([self._sized_each(name, stage) for name in traits.times], len(self.shares))
        return list(map(min, apart, self._sized_each(traits.in_one, stage))) if self._has(traits.in_one) else apart

    def _sized_each(self, name: str, stage: int) -> list[int]:
        value = self.column(name)[stage]
        return [round(value * share) for share in self.shares]

    def scaled(self, share: float) -> Costs:
        """Costs in which all microbatches are alike, each as one of this share in these costs."""
        return replace(self, shares=()).with_columns(
            **{name: [round(value * share) for value in values] for name, values in self._sized_columns().items()}
        )

    def _sized_columns(self) -> dict[str, tuple[int, ...]]:
        """The columns that the share of a microbatch is a factor on."""
        names, levels = {*self.time_columns, "hidden", *HELD.values(), OFFLOADABLE}, (_LEVEL_TIME, _LEVEL_BYTES)
        return {name: values for name, values in self._columns().items() if name in names or name.startswith(levels)}

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

        Names that not all costs have are further columns, which kinds of passes ask for that were added to the table; an empty one goes.
        """
        given: dict[str, Any] = {name: as_tuple(f"{name} of the costs", values) for name, values in columns.items()}
        further = {name: given.pop(name) for name in columns if name not in _COLUMNS}
        return replace(self, **given, further=tuple(filter(lambda column: column[1], (dict(self.further) | further).items())))

    def with_recompute(self, levels: Level | Sequence[Level]) -> Costs:
        """These costs with what R takes and F then keeps, the columns `recompute` and `held_input`, by the level of each stage or of all.

        Raises `InputError` for levels of another number of stages.

        >>> import zerobubble as zb
        >>> zb.Costs.uniform(2).with_recompute(zb.costs.Level("full", extra=1.0, kept=0.06)).column("held_input")
        (60000, 60000)
        """
        each = (levels,) * self.num_stages if isinstance(levels, Level) else as_tuple("the levels of recomputation", levels)
        if len(each) != self.num_stages:
            raise InputError(f"costs for {self.num_stages} stages need as many levels of recomputation, got {len(each)}")
        for level in each:
            require("each of the levels of recomputation", level, Level)
            level.require_fit(self.num_stages)
        extra = [round(level.extra_in(stage) * time) for stage, (level, time) in enumerate(zip(each, self.forward, strict=True))]
        kept = [round(level.kept_in(stage) * held) for stage, (level, held) in enumerate(zip(each, self.held_after_f, strict=True))]
        return self.with_columns(recompute=extra, held_input=kept)

    def with_level(self, name: str, recompute: Sequence[int], held_input: Sequence[int]) -> Costs:
        """These costs with what level `name` takes and keeps in each stage, in ns and bytes, for plans that choose levels: see `levels`.

        Raises `InputError` for a name that no level can have.
        """
        Level(name, 0.0, 0.0)
        return self.with_columns(**{f"{_LEVEL_TIME}{name}": recompute, f"{_LEVEL_BYTES}{name}": held_input})

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of recomputation that were measured, such as by `Pipeline.profile`, as shares by stage.

        >>> import zerobubble as zb
        >>> zb.Costs.uniform(2).with_level("selective", (250_000, 500_000), (400_000, 600_000)).levels
        (Level(name='selective', extra=(0.25, 0.5), kept=(0.4, 0.6)),)
        """
        further = dict(self.further)
        names = [name.removeprefix(_LEVEL_TIME) for name in further if name.startswith(_LEVEL_TIME)]
        return tuple(self._level(name, further) for name in names if f"{_LEVEL_BYTES}{name}" in further)

    def _level(self, name: str, further: dict[str, tuple[int, ...]]) -> Level:
        columns = (further[f"{_LEVEL_TIME}{name}"], self.forward), (further[f"{_LEVEL_BYTES}{name}"], self.held_after_f)
        extra, kept = (tuple(part / whole if whole else 0.0 for part, whole in zip(*pair, strict=True)) for pair in columns)
        return Level(name, extra, tuple(min(share, 1.0) for share in kept))  # an input that nobody else keeps may be more than is left out

    @takes(times=HEAD_TIMES, held=NUMBER, collective=NUMBER)
    def with_divided_head(self, times: tuple[float, float, float], *, held: float = 0.0, collective: float = 0.0) -> Costs:
        """These costs with those of a head that ranks divide by its vocabulary, without the head in the costs of the last stage.

        `times` are what a rank's part of the head takes for a microbatch, in ms: the forward with the softmax, the gradient for its input,
        the gradient for its weights. S takes the first two together and T the last, SL the first and TX the last two. `held` are the bytes
        that a rank keeps from S to T, or from SL to TX; `collective` is for how long in ms what ranks give is on its way to the others.
        These are the columns `head_forward`, `head_backward`, `head_weight`, `held_head` and `collective`, the same for all stages. Raises
        `InputError` for what is negative or not finite.

        >>> import zerobubble as zb
        >>> zb.Costs.uniform(2).with_divided_head((0.5, 0.25, 0.25), held=1000).column("head_forward")
        (500000, 500000)
        """
        named = {"head_forward": times[0], "head_backward": times[1], "head_weight": times[2], COLLECTIVE: collective}
        for name, value in named.items():
            require_ms(f"{name} of the divided head", value)
        if not 0 <= held <= MOST:
            raise InputError(f"the bytes that a rank keeps of a divided head are 0 to {MOST:.0e}, got {held:g}")
        columns = {name: (round(value * NS_PER_MS),) * self.num_stages for name, value in named.items()}
        return self.with_columns(**columns, held_head=(round(held),) * self.num_stages)

    def completed_for(self, schedule: Schedule) -> Costs:
        """These costs with what passes of `schedule` need besides: for costs made up from the times of F, B and W alone.

        Where forwards are computed again, that is `FULL` for all stages; a divided head is supposed to be as heavy as the first stage.
        """
        costs = self.with_recompute(FULL) if any(map(recomputed, schedule.rows)) else self
        if not schedule.has_divided_head:
            return costs
        ranks, columns = schedule.num_ranks, (self.forward, self.backward, self.weight)
        forward, backward, weight = (column[0] / NS_PER_MS / ranks for column in columns)
        return costs.with_divided_head((forward, backward, weight), held=self.held_after_f[0] / ranks)

    @property
    def time_columns(self) -> tuple[str, ...]:
        """The names of the columns that tell times of passes."""
        asked = {name for traits in KINDS.values() for name in (*traits.times, traits.in_one)}
        return tuple(name for name in self._columns() if name in asked)

    def kept_bytes(self, placement: Placement) -> tuple[int, ...]:
        """What each rank of `placement` keeps throughout, in bytes, each copy of a stage by itself; empty where it is not known."""
        stages = dict(self.further).get(KEPT, ())
        ranks = [0] * placement.num_ranks
        for route in placement.routes:
            for rank, size in zip(route, stages, strict=bool(stages)):
                ranks[rank] += size
        return tuple(ranks) if any(ranks) else ()

    def message_time(self, kind: Kind, stage: int) -> int:
        """Nanoseconds that what a pass sends to another stage, or gives to a collective, is on its way; 0 for a pass that does neither."""
        receiver = message_receiver(kind, stage, self.num_stages)
        if receiver is not None:
            return self.comm[min(stage, receiver)]
        return self.column(COLLECTIVE)[stage] if given_to(kind, stage, self.num_stages) and self._has(COLLECTIVE) else 0

    def _has(self, name: str) -> bool:
        return name in dict(self.further)

    def step_time(self, step: Step) -> int:
        """Nanoseconds a step takes; F overlapped with B or BW never less than the longer of them, other passes as long as one by one.

        Two of microbatches with different shares save what two of the smaller share would.
        """
        apart = [self.time(*op) for op in step]
        if len(step) == 1 or not {stuff for op in step for stuff in traits_of(op.kind).makes} >= MOVES:
            return sum(apart)
        return max(*apart, sum(apart) - min(self._sized("hidden", step[0].stage, op.microbatch) for op in step))

    def held(self, stuff: Stuff, stage: int, microbatch: int | None = None) -> int:
        """Bytes a value occupies on the rank that made it: saved activations and pending weight work; raises as `time` does."""
        return self._sized(HELD[stuff], stage, microbatch) if stuff in HELD else 0

    def memory_change(self, kind: Kind, stage: int, recomputed_by: Kind | None = None, microbatch: int | None = None) -> int:
        """Bytes that a pass of this kind adds to what its rank holds: what it makes without what it uses up; raises as `time` does.

        Where a pass of kind `recomputed_by` computes the forward of its stage and microbatch again, that forward makes less.
        """
        used = sum(self.held(stuff, stage, microbatch) for stuff, hop in traits_of(kind).uses if hop == 0)
        return sum(self.held(stuff, stage, microbatch) for stuff in made_where(kind, recomputed_by)) - used

    def memory_changes(self, kind: Kind, stage: int, recomputed_by: Kind | None = None) -> list[int]:
        """What `memory_change` gives for each microbatch of the shares, all at once."""
        made, used = made_where(kind, recomputed_by), [stuff for stuff, hop in traits_of(kind).uses if hop == 0]
        added, freed = (
            _sums([self._sized_each(HELD[stuff], stage) for stuff in stuffs if stuff in HELD], len(self.shares)) for stuffs in (made, used)
        )
        return [more - less for more, less in zip(added, freed, strict=True)]

    @classmethod
    @takes(num_stages=WHOLE, times=TIMES, comm=NUMBER, stages_per_rank=WHOLE, buckets=WHOLE)
    def uniform(
        cls,
        num_stages: int,
        times: tuple[float, float, float] = (1.0, 1.0, 1.0),
        comm: float = 0.0,
        *,
        stages_per_rank: int = 1,
        held: float = 1.0,
        overlap: float | None = None,
        fused: float | None = None,
        reduce: float = 0.0,
        buckets: int = 0,
    ) -> Costs:
        """Equal stages. `times` are F, B, W in ms of a whole rank and microbatch; a stage takes 1/stages_per_rank of them.

        `overlap` is the time of F and the whole backward overlapped, and `fused` that of a BW, in ms of a whole rank; without them
        overlapping saves nothing, and a BW takes as long as B and W. `reduce`
        is the time to sum the gradients of a whole rank over replicas, in ms, of which a stage takes as large a part; they leave in so many
        `buckets` a stage while its last W's run.
        Memory counts `UNIT_BYTES` per stage after F and `held` times that after B, so peaks come out in stage activations.
        Raises `InputError` for times that are negative or not finite, naming them.
        """
        if stages_per_rank < 1:
            raise InputError(f"stages_per_rank must be at least 1, got {stages_per_rank}")
        together = sum(times) if overlap is None else overlap
        named = {"comm": comm, "held": held, "overlap": together, "fused": fused or 0.0, "reduce": reduce}
        for name, value in {**dict(zip("FBW", times, strict=True)), **named}.items():
            require_ms(f"the cost of {name}", value)
        per_stage = [round(t * NS_PER_MS / stages_per_rank) for t in times]
        forward, backward, weight = ((t,) * num_stages for t in per_stage)
        links = (round(comm * NS_PER_MS),) * (num_stages - 1)
        kept = (UNIT_BYTES,) * num_stages
        hidden = max(0, sum(per_stage) - round(together * NS_PER_MS / stages_per_rank))
        sums = (round(reduce * NS_PER_MS / stages_per_rank),) * num_stages
        pending = (round(held * UNIT_BYTES),) * num_stages
        costs = cls(forward, backward, weight, links, kept, pending, (hidden,) * num_stages, reduce=sums, buckets=(buckets,) * num_stages)
        return costs if fused is None else costs.with_columns(fused=(round(fused * NS_PER_MS / stages_per_rank),) * num_stages)

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
        reduce: Sequence[float] = (),
        fused: Sequence[float] = (),
    ) -> Costs:
        """Costs stage by stage, times in ms, memory in bytes (default: one `UNIT_BYTES` each). One `comm` serves every link.

        Raises `InputError` for a value that is negative or not finite, or a column of another length, naming it.
        """
        stages = len(as_tuple("forward of the costs", forward))
        links = [comm] * (stages - 1) if isinstance(comm, (int, float)) else comm
        columns = {"forward": forward, "backward": backward, "weight": weight, "comm": links, "hidden": hidden, "reduce": reduce}
        columns[FUSED] = fused
        for name, values in columns.items():
            for index, value in enumerate(as_tuple(f"{name} of the costs", values)):
                require_ms(f"{name} of stage {index}", value, "a finite number", -MOST_MS)
        unit = (UNIT_BYTES,) * stages
        f, b, w, c, h, r, in_one = (tuple(round(v * NS_PER_MS) for v in values) for values in columns.values())
        costs = cls(f, b, w, c, _tuple_or(held_after_f, unit), _tuple_or(held_after_b, unit), h, reduce=r)
        return costs.with_columns(fused=in_one) if in_one else costs

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, in ns and bytes; `from_dict` reads it back."""
        columns = {name: list(getattr(self, name)) for name in _COLUMNS if name != "buckets" or any(self.buckets)}
        placement = {} if self.placement is None else {"placement": self.placement.to_dict()}
        further = {"further": {name: list(values) for name, values in self.further}} if self.further else {}
        shares = {"shares": list(self.shares)} if self.shares else {}
        return {"format": f"zerobubble costs {3 if self.shares else 2}", **placement, **columns, **further, **shares}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Costs:
        """Read the JSON form; raises `ParseError` when a part is missing or malformed."""
        with reading("costs", data, newest=3):
            columns = {name: tuple(map(whole, (_OPTIONAL | data)[name])) for name in _COLUMNS}
            further = {str(name): tuple(map(whole, values)) for name, values in data.get("further", {}).items()}
            placement = Placement.from_dict(data["placement"]) if "placement" in data else None
            return cls(**columns, placement=placement, further=tuple(further.items()), shares=tuple(data.get("shares", ())))


_OPTIONAL: dict[str, tuple[int, ...]] = {"hidden": (), "reduce": (), "buckets": ()}
"""The columns that may be left out, with what stands for zeros."""
_COLUMNS = tuple(column.name for column in fields(Costs) if column.name not in ("placement", "further", "shares"))


def _askers(column: str) -> list[Kind]:
    """The kinds whose times or bytes stand in `column`."""
    held = {stuff for stuff, name in HELD.items() if name == column}
    return [kind for kind, traits in KINDS.items() if column in traits.times or held.intersection((*traits.makes, *_used_up(traits)))]


def _used_up(traits: Traits) -> list[Stuff]:
    return [stuff for stuff, hop in traits.uses if hop == 0]


def _tuple_or(values: Sequence[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    return default if values is None else tuple(values)


def _sums(columns: Sequence[list[int]], length: int) -> list[int]:
    """The sums over `columns` of so many numbers, place by place."""
    return [sum(values) for values in zip(*columns, strict=True)] if columns else [0] * length
