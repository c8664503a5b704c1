"""The ranks of a cluster that train one model: which of them form a pipeline, and which are given other data.

A mesh of torch has a dimension for each way to divide the work. Here a rank's place in it is read once, by the names that torchtitan gives
to dimensions, and everything else counts ranks as in `Layout`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerobubble.errors import InputError
from zerobubble.runtime.transport.rank_process import RankProcess

PIPELINE = "pp"
EXPERTS = "ep"
DATA = frozenset({"dp", "dp_replicate", "dp_shard", "cp", EXPERTS})
"""Dimensions along which ranks are given other data. Parameters are the same along them, but for those that ranks divide among them."""
MODEL = frozenset({"tp"})
"""Dimensions along which ranks are given the same data and hold parts of one stage."""
LOCKSTEP = frozenset({"tp", EXPERTS, "cp", "dp_shard"})
"""Dimensions along which the modules of a stage talk to each other in every pass: their ranks must run the same passes in one order."""


class Layout(NamedTuple):
    """The `ranks` of torch.distributed that train one model, and this rank's place among them.

    All else counts them by their place among them. `pipelines` are all pipelines, each with the ranks of its stages; `pipeline` is this
    rank's. `along` has, for each set of other dimensions of the mesh, the ranks that differ from this one in their place along these alone,
    itself included. `data` are the dimensions along which ranks are given other data, `lockstep` those along which they must run the same
    passes in the same order. `name` tells process groups and meshes apart.
    `processes` are those of the `ranks`, if they are known from an earlier pipeline.
    """

    name: str
    ranks: tuple[int, ...]
    pipelines: tuple[tuple[int, ...], ...]
    pipeline: tuple[int, ...]
    along: Mapping[frozenset[str], tuple[int, ...]]
    data: frozenset[str] = frozenset()
    lockstep: frozenset[str] = frozenset()
    processes: tuple[RankProcess, ...] = ()

    def dimensions_of(self, ranks: Collection[int]) -> frozenset[str]:
        """The dimensions along which these ranks of torch.distributed lie, of which this one is one; none where no other is in the mesh.

        Raises `InputError` for ranks of the mesh that are not all of those along some of its dimensions.
        """
        wanted = set(ranks)
        if len(wanted.intersection(self.ranks)) == 1:
            return frozenset()
        found = [names for names, places in self.along.items() if {self.ranks[place] for place in places} == wanted]
        if not found:
            known = ", ".join(map(repr, sorted(frozenset().union(*self.along)))) if self.along else "none"
            raise InputError(
                f"a parameter is divided over ranks {', '.join(map(str, sorted(wanted)))}, which lie along no dimensions of the Pipeline's "
                f"mesh beside 'pp' (it has {known}): divide it over a part of that mesh, such as mesh['ep']"
            )
        return max(found, key=lambda names: len(names))


def one_pipeline(name: str, ranks: Sequence[int], processes: Iterable[RankProcess] = ()) -> Layout:
    """A single pipeline of these ranks, whose `processes` may be known."""
    everybody = tuple(range(len(ranks)))
    return Layout(name, tuple(ranks), (everybody,), everybody, {}, processes=tuple(processes))


def layout_of_group(group: dist.ProcessGroup | None) -> Layout:
    """A single pipeline of the ranks of a process group."""
    world = group or dist.group.WORLD
    assert world is not None
    return one_pipeline(world.group_name, dist.get_process_group_ranks(world))


def layout_of_mesh(mesh: DeviceMesh) -> Layout:
    """The pipelines along the dimension "pp" of `mesh`; raises `InputError` for a mesh without one, and for dimensions of unknown names."""
    names = mesh.mesh_dim_names
    fault = _fault(names)
    if fault:
        raise InputError(fault)
    assert names is not None
    rank = dist.get_rank()
    ranks = sorted(mesh.mesh.flatten().tolist())
    if rank not in ranks:
        raise InputError(f"Pipeline: rank {rank} is not in `mesh`: make a Pipeline on the ranks of the mesh alone")
    numbers = mesh.mesh.clone().apply_(ranks.index)
    rows = numbers.movedim(names.index(PIPELINE), -1).reshape(-1, mesh.size(names.index(PIPELINE)))
    pipelines = tuple(tuple(row) for row in rows.tolist())
    here = ranks.index(rank)
    at = (numbers == here).nonzero()[0].tolist()
    others = [name for name in names if name != PIPELINE]
    along = {}
    for chosen in (frozenset(some) for count in range(1, len(others) + 1) for some in combinations(others, count)):
        same = numbers[tuple(slice(None) if name in chosen else place for name, place in zip(names, at, strict=True))]
        along[chosen] = tuple(same.flatten().tolist())
    pipeline = next(row for row in pipelines if here in row)
    lockstep = frozenset(name for name in others if name in LOCKSTEP and mesh.size(names.index(name)) > 1)
    return Layout("mesh-" + "-".join(names), tuple(ranks), pipelines, pipeline, along, DATA.intersection(others), lockstep)


def _fault(names: tuple[str, ...] | None) -> str:
    """What is wrong with the names of a mesh's dimensions, empty where nothing is."""
    remedy = 'such as init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "pp"))'
    if names is None:
        return f"mesh has no names of its dimensions: give them, {remedy}"
    if PIPELINE not in names:
        return f"mesh has no dimension {PIPELINE!r} along which stages lie, it has {', '.join(names)}: name one so, {remedy}"
    unknown = [name for name in names if name not in {PIPELINE, *DATA, *MODEL}]
    if unknown:
        known = ", ".join(map(repr, (PIPELINE, *sorted(DATA), *sorted(MODEL))))
        return f"mesh has dimensions {', '.join(map(repr, unknown))}, and a Pipeline knows {known}: flatten or rename the others"
    return ""
