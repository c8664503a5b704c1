"""The axes that a plan is asked for, read from the arguments of `zb.plan`, and their choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerobubble.arguments import as_tuple
from zerobubble.bounds.overlap import fusing_saves
from zerobubble.costs import Costs, Level
from zerobubble.errors import InputError
from zerobubble.offload import HostLink
from zerobubble.partition.speeds import EACH_LINK, EACH_RANK
from zerobubble.planning.axes.axis import ChoicesOfAxis
from zerobubble.planning.axes.fused import FusedChoices
from zerobubble.planning.axes.head import HeadChoices, HeadParts
from zerobubble.planning.axes.host import HostChoices
from zerobubble.planning.axes.recompute import RecomputeChoices
from zerobubble.planning.axes.sharded import ShardedChoices
from zerobubble.planning.axes.shares import SharesChoices
from zerobubble.planning.axes.slices import SlicesAsked, SlicesChoices
from zerobubble.planning.problem.axes import refuse_pairs
from zerobubble.planning.problem.from_work import Memory
from zerobubble.planning.problem.head import Head, has_parts
from zerobubble.planning.problem.problem import Objective, Problem, Work, is_forward_only
from zerobubble.planning.problem.recomputation import levels_for
from zerobubble.planning.problem.sharded import Sharded
from zerobubble.planning.problem.workload import Workload


@dataclass(frozen=True)
class AskedAxes:
    """The arguments for axes, as given, with the recompute levels `offered`; absent ones are empty or None."""

    shares: tuple[float, ...]
    sharded: Sharded | None
    offered: tuple[Level, ...]
    head: Head | None
    host: HostLink | None
    speeds: tuple[float, ...]
    links: tuple[float, ...]
    baseline: str | None
    slices: SlicesAsked

    @classmethod
    def read(
        cls,
        work: Work,
        shares: Sequence[float],
        sharded: Sharded | None,
        recompute: str,
        levels: Sequence[Level] | None,
        head: Head | None,
        host: HostLink | None,
        speeds: Sequence[float],
        links: Sequence[float],
        baseline: str | None,
        slices: SlicesAsked,
    ) -> AskedAxes:
        """Reads the arguments; shares and measured levels may be in the costs. Raises `InputError` for those that cannot be used."""
        measured = work.levels if isinstance(work, Costs) and recompute != "none" else ()
        offered = levels_for(recompute, measured or None if levels is None else levels)
        in_costs = work.shares if isinstance(work, Costs) else ()
        of_ranks, of_links = as_tuple("plan: speeds", speeds, EACH_RANK), as_tuple("plan: links", links, EACH_LINK)
        return cls(tuple(shares) or in_costs, sharded, tuple(offered), head, host, of_ranks, of_links, baseline, slices)

    def has_head(self, work: Work) -> bool:
        """Whether a head is planned, given or in the costs."""
        return self.head is not None or (isinstance(work, Costs) and has_parts(work))

    def refuse(self, work: Work, memory: Memory | None, aim: Objective) -> None:
        """Raises `InputError` for pairs of axes that cannot be planned together, and for axes that lack what they need."""
        names = self._names(work, aim)
        refuse_pairs(names)
        if self.host is not None and memory is None:
            raise InputError("host needs a memory, which decides what goes to the host", remedy="give memory")
        wrong = [names[axis] for axis in ("baseline", "sharded", "recompute", "host") if axis in names]
        if wrong and is_forward_only(work) and "head" not in names:
            raise InputError("work without backward passes is planned without {wrong}", wrong=", ".join(wrong), remedy="leave that out")

    def _names(self, work: Work, aim: Objective) -> dict[str, str]:
        """How messages name each axis that was asked for."""
        of_layers = not isinstance(work, (Workload, Costs))
        has_fused = any(layer.fused for layer in work) if not isinstance(work, (Workload, Costs)) else bool(work.fused)
        given = {
            name: name
            for name in ("speeds", "links", "baseline", "sharded", "shares", "head", "host")
            if getattr(self, name) not in (None, ())
        }
        given |= {"slices": "slices"} if self.slices.counts or (isinstance(work, Costs) and work.slices) else {}
        given |= {"layers": "a cut of layers"} if of_layers else {}
        given |= {"recompute": "recompute"} if self.offered else {}
        given |= {"head": "the head in the costs"} if self.head is None and self.has_head(work) else {}
        given |= {"fused": "fused"} if has_fused else {}
        return given | ({"period": "objective='period'"} if aim is Objective.PERIOD else {})

    def choices(self, problems: Mapping[str, Problem], head_parts: HeadParts | None) -> list[ChoicesOfAxis]:
        """The choices of all axes asked for, the outermost first."""
        some = next(iter(problems.values()))
        axes: list[ChoicesOfAxis] = [SlicesChoices(self.slices)] if self.slices.counts else []
        if self.sharded is not None:
            axes.append(ShardedChoices(self.sharded))
        if self.host is not None:
            axes.append(HostChoices(self.host))
        if head_parts is not None:
            axes.append(HeadChoices(head_parts))
        if (self.offered or some.costs.shares) and any(fusing_saves(problem.costs) for problem in problems.values()):
            axes.append(FusedChoices())
        if some.costs.shares:
            axes.append(SharesChoices(self.offered))
        if self.offered:
            axes.append(RecomputeChoices(self.offered))
        return axes
