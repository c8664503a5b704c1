"""What the arguments of a pipeline need of the device of its stages.

Each rank finds its faults before the ranks compare their arguments, so that all ranks raise them, and none waits for one that cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from zerobubble.errors import InputError
from zerobubble.runtime.device import Feature, has_nccl, holds_values, interface, is_host
from zerobubble.runtime.options import PipelineOptions, uses_offloads
from zerobubble.runtime.transport.choice import AUTO, NCCL, STAGED, fastest_for


def refuse_unusable(options: PipelineOptions, device: torch.device) -> None:
    """Raises `InputError` with everything that these options need and a rank with stages on `device` lacks."""
    if not holds_values(device):
        raise InputError("stages are on {device}, whose tensors hold no values", device=str(device), remedy="create them on another device")
    faults = [*_faults_of_rehearsals(options, device), *_faults_of_features(options, device)]
    if not is_host(device) and options.transport == NCCL and not has_nccl():
        faults.append(f"transport 'nccl' needs NCCL, which torch {torch.__version__} is built without: leave it out, or pass 'staged'")
    if faults:
        raise InputError("{faults}", faults="; ".join(faults), device=str(device))


def _faults_of_rehearsals(options: PipelineOptions, device: torch.device) -> Iterator[str]:
    for argument in ("pace", "link"):
        if getattr(options, argument) is not None and not is_host(device):
            yield f"{argument} is for rehearsals on CPUs, but stages are on {device}: leave it out, or move them"


def _faults_of_features(options: PipelineOptions, device: torch.device) -> Iterator[str]:
    for user, remedy, features in _needs(options, device):
        lacking = interface(device).lacking(features)
        if lacking:
            yield f"{user} needs {' and '.join(lacking)}, which {device} lacks in torch {torch.__version__}: {remedy}"


def _needs(options: PipelineOptions, device: torch.device) -> Iterator[tuple[str, str, tuple[Feature, ...]]]:
    """Yields what needs some features of the device, the remedy without them, and the features."""
    if not is_host(device):
        yield "a pipeline", "put the stages on another device", (Feature.STREAMS, Feature.TIMES)
        if options.transport == STAGED or (options.transport == AUTO and fastest_for(device) == STAGED):
            yield "transport 'staged'", "put the stages on another device, or pass a transport of your own", (Feature.PINNED,)
        if uses_offloads(options):
            yield "offload", "leave it out", (Feature.PINNED,)
    if options.cuda_graphs:
        yield "cuda_graphs", "leave it out", (Feature.GRAPHS,)
