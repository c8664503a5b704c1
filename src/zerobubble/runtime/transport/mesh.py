"""Reads from a `DeviceMesh` which ranks form a pipeline and which get different data.

A mesh has a dimension for each kind of parallelism. This module reads a rank's place in it once, by torchtitan's names of dimensions.
Everything else counts ranks as `Layout` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerobubble.errors import InputError
from zerobubble.runtime.transport.rank_process import RankProcess

PIPELINE = "pp"
EXPERTS = "ep"
DATA = frozenset({"dp", "dp_replicate", "dp_shard", "cp", EXPERTS})
"""Dimensions along which ranks get different data. Parameters are equal along them, except those that are sharded."""
MODEL = frozenset({"tp"})
"""Dimensions along which ranks get the same data and hold parts of one stage."""
LOCKSTEP = frozenset({"tp", EXPERTS, "cp", "dp_shard"})
"""Dimensions along which the modules of a stage communicate in every pass. Their ranks must run the same passes in the same order, or their
collectives would mismatch."""


class Layout(NamedTuple):
    """The ranks that train one model, and this rank's place among them.

    Attributes:
        name: Distinguishes process groups and meshes.
        ranks: The ranks of torch.distributed, lost ones included. All other attributes, and errors, count ranks by their index in it.
        pipelines: All pipelines, each with the ranks of its stages.
        pipeline: The pipeline of this rank.
        along: For each set of other dimensions, the ranks that differ from this one only along these, itself included.
        data: The dimensions with more than one rank along which ranks get different data.
        lockstep: The dimensions with more than one rank along which ranks must run the same passes in the same order.
        processes: The processes of `members`, if they are known from an earlier pipeline.
    """

    name: str
    ranks: tuple[int, ...]
    pipelines: tuple[tuple[int, ...], ...]
    pipeline: tuple[int, ...]
    along: Mapping[frozenset[str], tuple[int, ...]]
    data: frozenset[str] = frozenset()
    lockstep: frozenset[str] = frozenset()
    processes: tuple[RankProcess, ...] = ()

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that train: all but the lost ranks."""
        return tuple(sorted(rank for pipeline in self.pipelines for rank in pipeline))

    @property
    def survivors(self) -> tuple[int, ...]:
        """The ranks that train, if any is lost; otherwise empty."""
        return self.members if len(self.members) < len(self.ranks) else ()

    def without(self, lost: Collection[int], processes: Sequence[RankProcess]) -> Layout:
        """Returns one pipeline of all ranks but the `lost` ones, with the `processes` of `members` if they are known.

        The ranks keep their numbers.
        """
        left = tuple(rank for rank in self.members if rank not in lost)
        process_of = dict(zip(self.members, processes, strict=True)) if processes else {}
        name = "-".join(["survivors", self.name, *map(str, sorted(lost))])
        return Layout(name, self.ranks, (left,), left, {}, processes=tuple(process_of[rank] for rank in left if process_of))

    def dimensions_of(self, ranks: Collection[int]) -> frozenset[str]:
        """Returns the dimensions along which these ranks of torch.distributed lie, this rank included; none if no other is in the mesh.

        Raises `InputError` if they are not all ranks along some dimensions of the mesh.
        """
        wanted = set(ranks)
        if len(wanted.intersection(self.ranks)) == 1:
            return frozenset()
        fitting = [names for names, places in self.along.items() if {self.ranks[place] for place in places} == wanted]
        if not fitting:
            dimensions = ", ".join(map(repr, sorted(frozenset().union(*self.along)))) if self.along else "none"
            raise InputError(
                (
                    "a parameter is divided over ranks {wanted}, which lie along no dimensions of the Pipeline's mesh other "
                    "than 'pp' (it has {known})"
                ),
                wanted=", ".join(map(str, sorted(wanted))),
                known=dimensions,
                remedy="divide it over a part of that mesh, such as mesh['ep']",
            )
        return max(fitting, key=lambda names: len(names))


def one_pipeline(name: str, ranks: Sequence[int]) -> Layout:
    """Returns a single pipeline of these ranks."""
    everybody = tuple(range(len(ranks)))
    return Layout(name, tuple(ranks), (everybody,), everybody, {})


def layout_of_group(group: dist.ProcessGroup | None) -> Layout:
    """Returns a single pipeline of the ranks of a process group."""
    world = group or dist.group.WORLD
    assert world is not None
    return one_pipeline(world.group_name, dist.get_process_group_ranks(world))


def layout_of_mesh(mesh: DeviceMesh) -> Layout:
    """Returns the pipelines along the dimension "pp" of `mesh`. Raises `InputError` without one, and for dimensions of unknown names."""
    names = mesh.mesh_dim_names
    fault = _fault(names)
    if fault:
        raise InputError(fault)
    assert names is not None
    rank = dist.get_rank()
    ranks = sorted(mesh.mesh.flatten().tolist())
    if rank not in ranks:
        raise InputError("Pipeline: rank {rank} is not in `mesh`", rank=rank, remedy="make a Pipeline on the ranks of the mesh alone")
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
    shared = frozenset(name for name in others if mesh.size(names.index(name)) > 1)
    return Layout("mesh-" + "-".join(names), tuple(ranks), pipelines, pipeline, along, DATA & shared, LOCKSTEP & shared)


def _fault(names: tuple[str, ...] | None) -> str:
    """Returns the fault in the names of a mesh's dimensions, empty without a fault."""
    remedy = 'such as init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "pp"))'
    if names is None:
        return f"mesh has no names of its dimensions: pass them, {remedy}"
    if PIPELINE not in names:
        return f"mesh has no dimension {PIPELINE!r} for the stages, it has {', '.join(names)}: name one so, {remedy}"
    unknown = [name for name in names if name not in {PIPELINE, *DATA, *MODEL}]
    if unknown:
        allowed = ", ".join(map(repr, (PIPELINE, *sorted(DATA), *sorted(MODEL))))
        return f"mesh has unknown dimensions {', '.join(map(repr, unknown))}, a Pipeline knows {allowed}: flatten or rename the others"
    return ""
