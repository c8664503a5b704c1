"""Times and memory of passes, as integers: nanoseconds and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from zerobubble.arguments import (
    COUNT,
    NUMBER,
    WHOLE,
    Wanted,
    amount_fault,
    as_tuple,
    each,
    number,
    optional,
    require,
    require_ms,
    takes,
    wrong,
)
from zerobubble.display import Displayed
from zerobubble.errors import InputError, raise_all, reading, whole
from zerobubble.ir import Placement, Schedule, Step
from zerobubble.kinds import HELD, KINDS, SENT_BETWEEN_STAGES, Kind, ValueKind, makes_if_recomputed, traits_of
from zerobubble.level import FULL as FULL
from zerobubble.level import NONE as NONE
from zerobubble.level import SELECTIVE as SELECTIVE
from zerobubble.level import Level as Level
from zerobubble.limits import MAX_LIMIT as MAX_LIMIT
from zerobubble.limits import Limits as Limits
from zerobubble.rules import given_to, message_receiver, recomputed
from zerobubble.slicing import MOST_SLICES, SliceShares, slices_from, slices_of
from zerobubble.units import MOST, MOST_MS, counted, show_bytes, show_ms, show_range
from zerobubble.units import NS_PER_MS as NS_PER_MS

UNIT_BYTES = 1_000_000
"""Bytes of one stage's activation where only ratios matter (`Costs.uniform`)."""
CELL = 14
"""Width of a printed column, unless its name is longer."""
LARGEST_SHARE = 1_000_000
"""The largest factor on the costs of a microbatch."""
KEPT = "parameters_bytes"
"""Further column: bytes that a stage keeps on its rank throughout, as parameters, gradients and optimizer state. No pass uses it."""
FUSED = "fused"
"""Further column: ns of a BW, if it takes less than B and W. In one pass, communication in B can overlap with computation in W."""
COLLECTIVE = "collective"
"""Further column: ns from the end of a pass that gives to a collective until the other ranks have gathered it."""
OFFLOADABLE = "offloadable"
"""Further column: how many of the bytes that F saves can be offloaded to host memory; all if the column is missing."""
_LEVEL_TIME, _LEVEL_BYTES = "recompute ", "held_input "
"""Prefixes of the further columns of a level of recomputation, followed by its name; see `Costs.levels`."""
KEPT_WORDS = "parameters, gradients and optimizer state"
MOST_BUCKETS = 10_000
"""The largest number of gradient buckets of a stage. Each takes time and memory in a simulation."""
STAGES = number("a whole number from 1 to 1,000,000", lambda value: WHOLE.accepts(value) and 0 < value <= 1_000_000)
HEAD_TIMES = Wanted(
    "three numbers, the times in ms of a head or a part of it: forward, gradient for the input, gradient for the weights",
    lambda value: each(NUMBER).accepts(value) and len(value) == 3,
)
TIMES = Wanted("three numbers, the times of F, B and W in ms", lambda value: each(NUMBER).accepts(value) and len(value) == 3)


_COLUMN_BY_NAME = Wanted(
    "a pair of a column's name and its values, one per stage",
    lambda value: each(object).accepts(value) and len(value) == 2 and isinstance(value[0], str) and each(object).accepts(value[1]),
)
_SLICE = Wanted(
    "a SliceShares of four shares from 0 to 1",
    lambda value: isinstance(value, SliceShares) and all(NUMBER.accepts(share) and 0 <= share <= 1 for share in value),
)


@takes(placement=optional(Placement), further=each(_COLUMN_BY_NAME), slices=each(_SLICE))
@dataclass(frozen=True, slots=True, repr=False)
class Costs(Displayed):
    """Costs per stage: times of passes and messages in ns, and the bytes held from F until B and from B until W.

    Every tuple of times or bytes has one entry per stage, `comm` one less. An empty optional tuple stands for zeros. A BW takes the time of
    the further column `fused` if there is one and it is less, else backward + weight, and holds nothing afterwards.

    Attributes:
        forward: Times of F in ns.
        backward: Times of B in ns.
        weight: Times of W in ns.
        comm: Times of a message between stages s and s+1 in either direction, in ns; they count only between different ranks.
        held_after_f: Bytes held for one microbatch from the end of F until the end of B or BW.
        held_after_b: Bytes held for one microbatch from the end of B until the end of W.
        hidden: Times in ns that an overlapped step of F with B or BW saves over running both in turn, by the stage of its first pass.
        placement: The placement on which the stages were measured. The costs then apply to schedules on it only; None applies to every
            placement of as many stages.
        further: Other columns by name: columns of added kinds of passes, and `parameters_bytes`, the bytes that a stage always keeps,
            which pages of timelines draw below the activations. See `with_columns`.
        reduce: Times in ns to sum the gradients of a stage over replicas, in parallel with passes.
        buckets: Numbers of buckets in which gradients leave during the final W passes of a stage; with 0 they leave after these.
        shares: A positive factor for each microbatch on the times and bytes of its passes, rounded to ns and bytes; empty for equal
            microbatches. Messages and sums over replicas keep their times.
        slices: The slices of a sequence into which each microbatch is cut: see `sliced`. All columns are then costs of the whole
            microbatch, and each slice has a share of them. A further column `held_keys` has the bytes of the keys and values of a
            microbatch: each slice keeps its share from its F until the backward of the first slice. Without `slices`, a schedule over
            slices counts each slice as a microbatch of these costs.

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
    slices: tuple[SliceShares, ...] = ()

    def __post_init__(self) -> None:
        for name in _COLUMNS:
            object.__setattr__(self, name, as_tuple(f"{name} of the costs", getattr(self, name)))
        if (stages := len(self.forward)) == 0:
            raise InputError("costs need at least one stage")
        for name in _OPTIONAL:
            object.__setattr__(self, name, getattr(self, name) or (0,) * stages)
        self._refuse_doubles()
        raise_all(fault for name, values in self._columns().items() for fault in _faults_of_column(name, values, stages))
        if self.placement is not None:
            self.require_fit(self.placement, "the placement of the costs")
        object.__setattr__(self, "shares", as_tuple("shares of the costs", self.shares, "a list or tuple with a factor per microbatch"))
        self._check_shares()

    def _check_shares(self) -> None:
        if not self.shares:
            return
        raise_all(
            wrong(f"the share of microbatch {microbatch} in the costs", share, f"a number above 0, at most {LARGEST_SHARE:,}")
            for microbatch, share in enumerate(self.shares)
            if not NUMBER.accepts(share) or not 0 < share <= LARGEST_SHARE
        )
        largest = max(map(max, filter(None, self._sized_columns().values())))
        if largest * max(self.shares) > MOST:
            message = "a share of {share:g} makes a pass cost over {limit:.0e} ns or bytes"
            raise InputError(message, share=max(self.shares), limit=MOST, remedy="give smaller shares or costs")

    def _refuse_doubles(self) -> None:
        names = [name for name, _ in self.further]
        doubles = [name for place, name in enumerate(names) if name in _COLUMNS or name in names[:place]]
        if doubles:
            raise InputError("costs have one column {column!r}, which cannot be given twice", column=doubles[0])

    def _summary(self) -> str:
        times = "F {}, B {}, W {}".format(*(show_range(column, show_ms) for column in (self.forward, self.backward, self.weight)))
        times += f", BW {show_range(self.fused, show_ms)}" if self.fused else ""
        sums = f", sums over replicas {show_range(self.reduce, show_ms)}" if any(self.reduce) else ""
        sums += f", {counted(len(self.shares), 'microbatch')} of shares {show_range(self.shares, '{:g}'.format)}" if self.shares else ""
        sums += f", in {len(self.slices)} slices" if self.slices else ""
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
        """Raise `InputError` unless these costs describe the stages of `placement`, which belongs to `what`.

        The number of stages must match and, if known, their ranks, since messages within a rank were measured as free. Of several routes
        the first one is compared, as copies of a stage are equal.
        """
        if placement.num_stages != self.num_stages:
            message = "{what} has {got} stages, but the costs describe {expected}: use costs of {got} stages, or a schedule with {expected}"
            raise InputError(message, what=what, got=placement.num_stages, expected=self.num_stages)
        measured = placement if self.placement is None else self.placement
        for stage, (rank, other) in enumerate(zip(placement.routes[0], measured.routes[0], strict=True)):
            if rank != other:
                where = f"the costs were measured with it on rank {other} (placement {measured.name} over {measured.num_ranks} ranks)"
                message = "{what} has stage {stage} on rank {rank}, {where}"
                raise InputError(message, what=what, stage=stage, rank=rank, where=where, remedy="stay there, or measure on this placement")

    def require_schedule(self, schedule: Schedule) -> None:
        """Raise `InputError` unless these costs match the stages and microbatches of `schedule`."""
        self.require_fit(schedule.placement, f"schedule {schedule.name!r}")
        if self.slices and len(self.slices) != schedule.slices:
            message = "schedule {schedule!r} has {expected} slices of each microbatch, the costs have {got}"
            raise InputError(message, schedule=schedule.name, expected=schedule.slices, got=len(self.slices), remedy="see Costs.sliced")
        if self.shares and len(self.shares) != schedule.num_microbatches // (len(self.slices) or 1):
            count = counted(schedule.num_microbatches, "microbatch")
            message = "schedule {schedule!r} has {count}, but the costs have shares of {got}"
            raise InputError(message, schedule=schedule.name, count=count, got=len(self.shares), remedy="give one for each")

    def require_alike(self, what: str) -> None:
        """Raise `InputError` for costs with shares or slices, which `what` does not support."""
        self.require_whole(what)
        self.require_equal(what)

    def require_equal(self, what: str) -> None:
        """Raise `InputError` for costs with shares, which `what` does not support."""
        if self.shares:
            raise InputError("{what} needs equal microbatches, not {got} shares", what=what, got=len(self.shares), remedy="leave them out")

    def require_whole(self, what: str) -> None:
        """Raise `InputError` for costs with slices, which `what` does not support."""
        if self.slices:
            raise InputError("{what} needs whole microbatches, not {got} slices", what=what, got=len(self.slices), remedy="leave them out")

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.forward)

    @property
    def fused(self) -> tuple[int, ...]:
        """The time of BW per stage, in ns; empty if it is the sum of B and W.

        >>> import zerobubble as zb
        >>> zb.Costs.uniform(2, times=(10, 10, 8)).with_columns(fused=(16_000_000, 18_000_000)).time(zb.Kind.BW, 0)
        16000000
        """
        return dict(self.further).get(FUSED, ())

    @property
    def are_alike(self) -> bool:
        """Whether all microbatches cost the same, and are not cut into slices."""
        return not (self.shares or self.slices)

    @property
    def num_different(self) -> int:
        """How many consecutive microbatch numbers may have different costs; those after them repeat."""
        return (len(self.shares) or 1) * (len(self.slices) or 1)

    def sliced(self, slices: int | Sequence[float], *, attention: tuple[float, float] = (0.0, 0.0)) -> Costs:
        """Return these costs of whole microbatches for schedules over slices of a sequence.

        Arguments:
            slices: how many slices of equal length, or their lengths as shares of the tokens, which sum to 1.
            attention: the shares of F and of B that attention between tokens takes. It grows with the square of the length, so later slices
                take longer; `zerobubble.slicing.equal_lengths` gives slices that take equally long.

        >>> import zerobubble as zb
        >>> costs = zb.Costs.uniform(2, times=(10, 10, 8)).sliced(4, attention=(0.2, 0.3))
        >>> [costs.time(zb.Kind.F, 0, number) for number in range(4)]
        [2125000, 2375000, 2625000, 2875000]
        """
        if WHOLE.accepts(slices):
            require(
                "slices", slices, number(f"a whole number from 1 to {MOST_SLICES:,}, or lengths", lambda value: 0 < value <= MOST_SLICES)
            )
        lengths = (1 / slices,) * slices if isinstance(slices, int) else slices
        return replace(self, slices=slices_of(lengths, *attention))

    @property
    def mean_slice(self) -> Costs:
        """These costs for a slice of mean size, without `slices`; the costs themselves if there are none."""
        return self._of_slice(lambda shares: sum(shares) / len(shares))

    @property
    def least_slice(self) -> Costs:
        """As `mean_slice`, with the least of all slices in each column."""
        return self._of_slice(min)

    def _of_slice(self, share: Callable[[list[float]], float]) -> Costs:
        """Return costs of whole microbatches as short as a slice: in each column, one `share` for all slices."""
        if not self.slices:
            return self
        whole, numbers = replace(self, shares=()), range(len(self.slices))

        def sized(name: str, values: Sequence[int]) -> list[int]:
            return [round(value * share([whole._share(name, at, number) for number in numbers])) for at, value in enumerate(values)]

        columns = {name: sized(name, values) for name, values in {"comm": self.comm, **self._sized_columns()}.items()}
        return replace(self, slices=()).with_columns(**columns)

    def time(self, kind: Kind, stage: int, microbatch: int | None = None) -> int:
        """Return the time in ns of the pass of `kind` in `stage` for `microbatch`, which only costs with shares or slices need.

        Raises `InputError` for a kind outside the table of kinds, and for a missing microbatch.
        """
        traits = traits_of(kind)
        apart = sum([self._sized(name, stage, microbatch) for name in traits.times])
        return min(apart, self._sized(traits.fused_time, stage, microbatch)) if self._has(traits.fused_time) else apart

    def _sized(self, name: str, stage: int, microbatch: int | None) -> int:
        """Return a value of a column times the shares of the microbatch and slice."""
        value = self.column(name)[stage]
        if self.are_alike:
            return value
        if microbatch is None:
            raise InputError("the costs have shares of {got} microbatches", got=self.num_different, remedy="pass the microbatch")
        return round(value * self._share(name, stage, microbatch))

    def _share(self, name: str, stage: int, microbatch: int) -> float:
        """Return the share of a microbatch number in the column `name`. A fused BW has the share of B and W together."""
        whole, number = divmod(microbatch, len(self.slices) or 1)
        share = self.shares[whole] if self.shares else 1.0
        if not self.slices:
            return share
        piece, (b, w) = self.slices[number], (self.backward[stage], self.weight[stage])
        return share * ((piece.backward * b + piece.weight * w) / (b + w) if name == FUSED and b + w else piece.share(name))

    def times(self, kind: Kind, stage: int) -> list[int]:
        """Return `time` of `kind` in `stage` for the first `num_different` microbatch numbers."""
        traits = traits_of(kind)
        apart = _sums([self._sized_each(name, stage) for name in traits.times], self.num_different)
        return list(map(min, apart, self._sized_each(traits.fused_time, stage))) if self._has(traits.fused_time) else apart

    def _sized_each(self, name: str, stage: int) -> list[int]:
        value = self.column(name)[stage]
        return [round(value * self._share(name, stage, number)) for number in range(self.num_different)]

    def scaled(self, share: float) -> Costs:
        """Return costs in which every microbatch costs `share` times as much as one of share 1 in these costs."""
        sized = {name: [round(value * share) for value in values] for name, values in self._sized_columns().items()}
        return replace(self, shares=()).with_columns(**sized)

    def _sized_columns(self) -> dict[str, tuple[int, ...]]:
        """Return the columns to which the share of a microbatch applies."""
        names, levels = {*self.time_columns, "hidden", *HELD.values(), OFFLOADABLE}, (_LEVEL_TIME, _LEVEL_BYTES)
        return {name: values for name, values in self._columns().items() if name in names or name.startswith(levels)}

    def column(self, name: str) -> tuple[int, ...]:
        """Return the column `name`, standard or further; raises `InputError` if there is none."""
        if name in _COLUMNS:
            values: tuple[int, ...] = getattr(self, name)
            return values
        for further_name, further in self.further:
            if further_name == name:
                return further
        raise InputError("{users} needs the column {name!r}", users=" and ".join(_askers(name)), name=name, remedy="see Costs.with_columns")

    def with_columns(self, **columns: Sequence[int]) -> Costs:
        """Return these costs with some columns replaced or added, in ns or bytes, one value per stage.

        Names outside the standard columns are further columns, which added kinds of passes may need. An empty column is removed.
        """
        standard: dict[str, Any] = {name: as_tuple(f"{name} of the costs", values) for name, values in columns.items()}
        further = {name: standard.pop(name) for name in columns if name not in _COLUMNS}
        return replace(self, **standard, further=tuple(filter(lambda column: column[1], (dict(self.further) | further).items())))

    def with_recompute(self, levels: Level | Sequence[Level]) -> Costs:
        """Return these costs with the columns `recompute` and `held_input`, by `levels`: one for all stages, or one for each.

        R takes no time in stages without B and W, which no gradient reaches. Raises `InputError` for levels of another number of stages.

        >>> import zerobubble as zb
        >>> zb.Costs.uniform(2).with_recompute(zb.costs.Level("full", extra=1.0, kept=0.06)).column("held_input")
        (60000, 60000)
        """
        by_stage = (levels,) * self.num_stages if isinstance(levels, Level) else as_tuple("the levels of recomputation", levels)
        if len(by_stage) != self.num_stages:
            raise InputError("costs for {stages} stages need as many levels, got {got}", stages=self.num_stages, got=len(by_stage))
        for level in by_stage:
            require("each of the levels of recomputation", level, Level)
            level.require_fit(self.num_stages)
        repeated = [time if any(back) else 0 for time, *back in zip(self.forward, self.backward, self.weight, strict=True)]
        extra = [round(level.extra_in(stage) * time) for stage, (level, time) in enumerate(zip(by_stage, repeated, strict=True))]
        kept = [round(level.kept_in(stage) * held) for stage, (level, held) in enumerate(zip(by_stage, self.held_after_f, strict=True))]
        return self.with_columns(recompute=extra, held_input=kept)

    def with_level(self, name: str, recompute: Sequence[int], held_input: Sequence[int]) -> Costs:
        """Return these costs with level `name` of recomputation, for plans that choose levels; see `levels`.

        Args:
            name: The name of the level, such as "selective".
            recompute: The time that its R takes in each stage, in ns.
            held_input: The bytes that each stage keeps from F to R.

        Raises `InputError` for a name that is not one line of printable text.
        """
        Level(name, 0.0, 0.0)
        return self.with_columns(**{f"{_LEVEL_TIME}{name}": recompute, f"{_LEVEL_BYTES}{name}": held_input})

    @property
    def levels(self) -> tuple[Level, ...]:
        """The measured levels of recomputation, for example from `Pipeline.profile`, as shares by stage.

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
        return Level(name, extra, tuple(min(share, 1.0) for share in kept))  # the kept input may be larger than what is not saved

    @takes(times=HEAD_TIMES, held=NUMBER, collective=NUMBER)
    def with_divided_head(self, times: tuple[float, float, float], *, held: float = 0.0, collective: float = 0.0) -> Costs:
        """Return these costs with the columns of a divided head; the costs of the last stage must exclude the head.

        `times` are the times of a rank's part of the head for a microbatch, in ms: the forward with the softmax, the gradient for its input
        and the gradient for its weights. S takes the first two and T the last; SL takes the first and TX the last two. `held` are the bytes
        that a rank keeps from S to T, or from SL to TX. `collective` is the latency of the collectives, in ms. These become the columns
        `head_forward`, `head_backward`, `head_weight`, `held_head` and `collective`, equal for all stages. Raises `InputError` for negative
        and infinite values.

        >>> import zerobubble as zb
        >>> zb.Costs.uniform(2).with_divided_head((0.5, 0.25, 0.25), held=1000).column("head_forward")
        (500000, 500000)
        """
        named = {"head_forward": times[0], "head_backward": times[1], "head_weight": times[2], COLLECTIVE: collective}
        for name, value in named.items():
            require_ms(f"{name} of the divided head", value)
        if not 0 <= held <= MOST:
            raise wrong("held of the divided head", held, f"0 to {MOST:.0e} bytes")
        columns = {name: (round(value * NS_PER_MS),) * self.num_stages for name, value in named.items()}
        return self.with_columns(**columns, held_head=(round(held),) * self.num_stages)

    def completed_for(self, schedule: Schedule) -> Costs:
        """Return these costs with default columns for other passes of `schedule`, for costs that have times of F, B and W only.

        Recomputed forwards have the level `FULL`. A divided head is assumed to cost as much as the first stage.
        """
        costs = self.with_recompute(FULL) if any(map(recomputed, schedule.rows)) else self
        if not schedule.has_divided_head:
            return costs
        forward, backward, weight = (column[0] / NS_PER_MS / schedule.num_ranks for column in (self.forward, self.backward, self.weight))
        return costs.with_divided_head((forward, backward, weight), held=self.held_after_f[0] / schedule.num_ranks)

    @property
    def time_columns(self) -> tuple[str, ...]:
        """The names of the columns with times of passes."""
        asked = {name for traits in KINDS.values() for name in (*traits.times, traits.fused_time)}
        return tuple(name for name in self._columns() if name in asked)

    def kept_bytes(self, placement: Placement) -> tuple[int, ...]:
        """Return the bytes that each rank of `placement` always keeps, counting every copy of a stage; empty if unknown."""
        stages = dict(self.further).get(KEPT, ())
        ranks = placement.rank_sums(stages) if stages else ()
        return tuple(ranks) if any(ranks) else ()

    def message_time(self, kind: Kind, stage: int, microbatch: int = 0) -> int:
        """Return the time in ns of the message that a pass of `kind` in `stage` sends, or of the collective that uses its result.

        It is 0 if there is neither. With slices, `microbatch` is the number of the slice, whose message takes a share of the microbatch's
        time.
        """
        receiver = message_receiver(kind, stage, self.num_stages)
        if receiver is not None:
            time = self.comm[min(stage, receiver)]
            return round(time * self.slices[microbatch % len(self.slices)].tokens) if self.slices else time
        return self.column(COLLECTIVE)[stage] if given_to(kind, stage, self.num_stages) and self._has(COLLECTIVE) else 0

    def _has(self, name: str) -> bool:
        return name in dict(self.further)

    def step_time(self, step: Step) -> int:
        """Return the time of the passes of `step` in ns.

        F overlapped with B or BW saves `hidden`, down to the longer of both; other pairs save nothing.
        For microbatches with different shares, the saving is for the smaller share.
        """
        apart = [self.time(*op) for op in step]
        if len(step) == 1 or not {value_kind for op in step for value_kind in traits_of(op.kind).makes} >= SENT_BETWEEN_STAGES:
            return sum(apart)
        return max(*apart, sum(apart) - min(self._sized("hidden", step[0].stage, op.microbatch) for op in step))

    def held(self, value_kind: ValueKind, stage: int, microbatch: int | None = None) -> int:
        """Return the bytes of the value of `value_kind` that `stage` makes for `microbatch`, while it stays on the rank.

        They are 0 for values that do not stay there. Raises as `time` does.
        """
        return self._sized(HELD[value_kind], stage, microbatch) if value_kind in HELD else 0

    def memory_change(self, kind: Kind, stage: int, recomputed_by: Kind | None = None, microbatch: int | None = None) -> int:
        """Return the bytes that the pass of `kind` in `stage` for `microbatch` adds to its rank: values made minus values consumed.

        Raises as `time` does.
        If a pass of kind `recomputed_by` recomputes a forward, that forward makes only its input.
        """
        used = sum(self.held(value_kind, stage, microbatch) for value_kind, hop in traits_of(kind).uses if hop == 0)
        return sum(self.held(value_kind, stage, microbatch) for value_kind in makes_if_recomputed(kind, recomputed_by)) - used

    def memory_changes(self, kind: Kind, stage: int, recomputed_by: Kind | None = None) -> list[int]:
        """Return `memory_change` of `kind`, `stage` and `recomputed_by` for the first `num_different` numbers, with the keys of slices."""
        makes, used = makes_if_recomputed(kind, recomputed_by), [value_kind for value_kind, hop in traits_of(kind).uses if hop == 0]
        added, freed = (
            _sums([self._sized_each(HELD[value_kind], stage) for value_kind in value_kinds if value_kind in HELD], self.num_different)
            for value_kinds in (makes, used)
        )
        kept = self._key_changes(kind, stage)
        return [more - less + keys for more, less, keys in zip(added, freed, kept, strict=True)]

    def _key_changes(self, kind: Kind, stage: int) -> list[int]:
        """Return the bytes of keys and values that passes add, or free for the whole microbatch behind the backward of its first slice."""
        carried = {value_kind for value_kind, _ in traits_of(kind).carries}
        if not (carried and self.slices and self._has(HELD[ValueKind.KEYS])):
            return [0] * self.num_different
        keys, count = self._sized_each(HELD[ValueKind.KEYS], stage), len(self.slices)
        if ValueKind.KEYS in carried:
            return keys
        return [0 if number % count else -sum(keys[number : number + count]) for number in range(self.num_different)]

    @classmethod
    @takes(num_stages=STAGES, times=TIMES, comm=NUMBER, stages_per_rank=COUNT, buckets=WHOLE)
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
        """Return costs of `num_stages` equal stages, with times in ms.

        Args:
            num_stages: The number of stages, a multiple of `stages_per_rank`.
            times: The times of F, B and W of a whole rank and microbatch.
            comm: The time of each message.
            stages_per_rank: The number of stages that share the times of a rank evenly.
            held: The bytes held from B to W, relative to those from F to B. The latter are `UNIT_BYTES` per stage, so peaks are in units of
                stage activations.
            overlap: The time of F overlapped with the whole backward, of a whole rank; by default, overlapping saves nothing.
            fused: The time of BW of a whole rank; by default, that of B and W.
            reduce: The time to sum the gradients of a whole rank over replicas.
            buckets: The number of buckets per stage in which they leave during its final W passes; with 0 they leave after these.

        Raises `InputError` for negative and infinite values, naming them.
        """
        if num_stages % stages_per_rank:
            raise wrong("num_stages", num_stages, f"a multiple of {stages_per_rank}, the stages_per_rank")
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
        """Return `num_stages` equal stages, 1 ms for every time and `UNIT_BYTES` for all bytes, including the columns of added kinds."""
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
        """Return costs from columns with one value per stage, times in ms and memory in bytes.

        Args:
            forward, backward, weight: The times of F, B and W.
            comm: The times of messages between each stage and the next, one value fewer than stages, or one value for all.
            held_after_f: The bytes held from F to B; `UNIT_BYTES` by default.
            held_after_b: The bytes held from B to W; `UNIT_BYTES` by default.
            hidden: The time saved by overlapping F with B or BW; none by default.
            reduce: The time to sum the gradients over replicas; 0 by default.
            fused: The time of BW; by default, that of B and W.

        Raises `InputError` for a negative or infinite value or a column of another length.
        """
        stages = len(as_tuple("forward of the costs", forward))
        links = [comm] * (stages - 1) if isinstance(comm, (int, float)) else comm
        columns = {"forward": forward, "backward": backward, "weight": weight, "comm": links, "hidden": hidden, "reduce": reduce}
        columns[FUSED] = fused
        for name, values in columns.items():
            for index, value in enumerate(as_tuple(f"{name} of the costs", values)):
                require_ms(f"{name} of stage {index}", value, "a finite number", -MOST_MS)
        unit = (UNIT_BYTES,) * stages
        f, b, w, c, h, r, bw = (tuple(round(v * NS_PER_MS) for v in values) for values in columns.values())
        costs = cls(f, b, w, c, _tuple_or(held_after_f, unit), _tuple_or(held_after_b, unit), h, reduce=r)
        return costs.with_columns(fused=bw) if bw else costs

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, in ns and bytes; `from_dict` reads it."""
        columns = {name: list(getattr(self, name)) for name in _COLUMNS if name != "buckets" or any(self.buckets)}
        placement = {} if self.placement is None else {"placement": self.placement.to_dict()}
        further = {"further": {name: list(values) for name, values in self.further}} if self.further else {}
        parts = {"shares": list(self.shares), "slices": list(map(list, self.slices))}
        return {"format": "zerobubble costs 1", **placement, **columns, **further, **{name: part for name, part in parts.items() if part}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Costs:
        """Read `data`, as `to_dict` returns it; raises `ParseError` if a part is missing or malformed."""
        with reading("costs", data):
            columns = {name: tuple(map(whole, (_OPTIONAL | data)[name])) for name in _COLUMNS}
            further = {str(name): tuple(map(whole, values)) for name, values in dict(data.get("further", {})).items()}
            placement = Placement.from_dict(data["placement"]) if "placement" in data else None
            shares, slices = tuple(data.get("shares", ())), slices_from(data.get("slices", ()))
            return cls(**columns, placement=placement, further=tuple(further.items()), shares=shares, slices=slices)


_OPTIONAL: dict[str, tuple[int, ...]] = {"hidden": (), "reduce": (), "buckets": ()}
"""The columns that may be left out, with their default, which stands for zeros."""
_COLUMNS = tuple(column.name for column in fields(Costs) if column.name not in ("placement", "further", "shares", "slices"))


def _askers(column: str) -> list[Kind]:
    """Return the kinds whose times or bytes are in `column`."""
    held = {value_kind for value_kind, name in HELD.items() if name == column}
    used = {(value_kind, 0) for value_kind in held}
    return [kind for kind, row in KINDS.items() if column in row.times or held.intersection(row.makes) or used.intersection(row.uses)]


def _faults_of_column(name: str, values: Sequence[int], stages: int) -> Iterator[InputError | None]:
    """Yields the faults of the column `name` of costs of this many stages."""
    expected = stages - 1 if name == "comm" else stages
    if len(values) != expected:
        message = "{name} of costs for {stages} stages needs {expected} values, got {got}"
        yield InputError(message, name=name, stages=stages, expected=expected, got=len(values))
    most = MOST_BUCKETS if name == "buckets" else MOST
    for stage, value in enumerate(values):
        yield amount_fault(f"{name} of stage {stage}", value, most, "see Costs.from_ms")


def _tuple_or(values: Sequence[int] | None, default: tuple[int, ...]) -> tuple[int, ...]:
    return default if values is None else tuple(values)


def _sums(columns: Sequence[list[int]], length: int) -> list[int]:
    """Return the elementwise sum of `columns` of this length."""
    return [sum(values) for values in zip(*columns, strict=True)] if columns else [0] * length
