"""`init_distributed`: connects the ranks of a program that torchrun starts, each with its device."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from zerobubble.arguments import Wanted, optional, takes
from zerobubble.error_reports.uncaught import show_uncaught
from zerobubble.error_reports.user_code import warn_user
from zerobubble.errors import InputError
from zerobubble.runtime.device import accelerator, accelerators, backend_of, has_driver, is_numbered, make_current, shortage
from zerobubble.units import counted, listed

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The environment variables that torchrun sets for each process, besides the address of the first."""


def _is_kind(device: Any) -> bool:
    try:
        return isinstance(device, (str, torch.device)) and torch.device(device).index is None
    except RuntimeError:
        return False


def _kind_of(device: Any) -> str:
    """Returns the remedy for a `device` that is no kind of device."""
    return f"write {str(device).partition(':')[0]!r}, and each rank takes number LOCAL_RANK" if ":" in str(device) else ""


@takes(device=optional(Wanted("a kind of device such as 'cuda' or 'cpu'", _is_kind, _kind_of)))
def init_distributed(device: str | torch.device | None = None) -> torch.device:
    """Connects the ranks that torchrun has started, and returns the device of this rank.

        device = zb.init_distributed()  # cuda:0 on the first rank of a machine, cuda:1 on the second; without GPUs, cpu

    On GPUs, makes number `LOCAL_RANK` current. Calls `torch.distributed.init_process_group`: NCCL for tensors on GPUs, gloo for tensors on
    the CPU. The first rank of each machine prints its device, and warns if the machine has a GPU that the ranks do not use.

    Args:
        device: The kind of device, such as "cuda" or "cpu". By default the accelerator of torch, such as "cuda", if each rank of this
            machine can have one; otherwise "cpu". A further call for the same device, such as a notebook cell run again, only returns it.

    Raises `InputError` in a process that no launcher has started, if this machine has fewer devices of that kind than ranks, and if the
    ranks are already connected by other backends.
    """
    show_uncaught()
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        script = sys.argv[0] if sys.argv[0].endswith(".py") else "train.py"
        raise InputError(
            "init_distributed connects the ranks that torchrun starts, but {missing} of this process are not set",
            missing=listed(missing),
            remedy=f"run it with `torchrun --nproc-per-node 2 {Path(script).name}`, on GPUs with one process for each",
        )
    local_rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    fault = shortage(num_ranks)
    chosen = _chosen(device, fault)
    if is_numbered(chosen):
        chosen = make_current(chosen.type, local_rank)
    backend = f"cpu:gloo,{chosen.type}:{backend_of(chosen)}" if is_numbered(chosen) else "gloo"
    if dist.is_initialized():
        _refuse_other_backends(chosen, str(BackendConfig(dist.Backend(backend))))
        return chosen
    dist.init_process_group(backend)
    if local_rank == 0:
        place = accelerators()[0]["name"] if is_numbered(chosen) else "the CPU"
        why = f": {fault}" if device is None and fault else ""
        report = warn_user if why and has_driver() else partial(print, file=sys.stderr)
        report(f"zerobubble: {counted(num_ranks, 'rank')} on {place}{why}")
    return chosen


def _refuse_other_backends(device: torch.device, expected: str) -> None:
    """Raises `InputError` if the ranks are connected by other backends than `expected`, those for this `device`."""
    got = dist.get_backend_config()
    if got != expected:
        raise InputError(
            "init_distributed connects ranks on {device} by {expected}, but they are already connected by {got}",
            device=device.type,
            expected=expected,
            got=got,
            remedy="call torch.distributed.destroy_process_group() on every rank before, or leave this call out",
        )


def _chosen(device: str | torch.device | None, fault: str) -> torch.device:
    """Returns the `device` given, or the accelerator unless a `fault` keeps ranks from it. Raises `InputError` for one they lack."""
    usable = accelerator()
    if device is None:
        return torch.device("cpu") if fault or usable is None else usable
    chosen = torch.device(device)
    if is_numbered(chosen) and usable is not None and chosen.type != usable.type:
        fault = f"torch {torch.__version__} is built for {usable.type}: write {usable.type!r}"
    if fault and is_numbered(chosen):
        raise InputError("ranks cannot train on {device}: {fault}", argument="device", device=chosen.type, fault=fault)
    return chosen
