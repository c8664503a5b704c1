"""Device meshes, shared by the jobs of a rank.

Every mesh has process groups, and a thread of gloo wakes 100 times a second for each group. With a new mesh for each job, a rank would have
a hundred groups in the end, and their threads would take as much time as the tests. Groups cannot be destroyed after a job: torch caches
what it finds out for a DTensor, with the names of the groups of its mesh, and uses it for equal meshes.
"""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh


def init_device_mesh(kind: str, sizes: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh that torch's function of this name made for the first such call."""
    return _made(dist.group.WORLD, kind, tuple(sizes), mesh_dim_names)


@cache
def _made(world: dist.ProcessGroup | None, kind: str, sizes: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    return device_mesh.init_device_mesh(kind, sizes, mesh_dim_names=names)
