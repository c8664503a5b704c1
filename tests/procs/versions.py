"""Marks for tests of what older versions of torch cannot do."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B

from tests.procs.exhaustive import EXHAUSTIVE
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

needs_checkpoints_in_graphs = pytest.mark.skipif(not CAN_SEE_HOOKS, reason="a graph stage takes checkpoints from torch 2.8 on")
needs_fsdp2_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="fully_shard of torch 2.6 calls Stream.record_event, which streams of the CPU lack there",
)
needs_own_reductions = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="the first versions of torch with FSDP2 cannot replace the reduction"
)
needs_torchs_runtime = pytest.mark.skipif(
    VERSION < (2, 13), reason="the schedule runtime of older versions of torch fails or hangs on schedules of its own, too"
)

needs_all_that_ended = pytest.mark.skipif(
    not hasattr(SubprocessContext, "_capture_process_failures"),
    reason="torchrun of torch 2.6 looks only at processes that had ended when it looked, and the culprit may end a moment later",
)
needs_no_dist = pytest.mark.skipif(
    "no_dist" not in signature(checkpoint.save).parameters, reason="torch 2.6 writes no checkpoint without a process group when asked to"
)
needs_scale_grads = pytest.mark.skipif(
    "scale_grads" not in signature(Schedule1F1B).parameters, reason="the schedules of torch 2.6 do not scale gradients"
)
needs_symbolic_lengths = pytest.mark.skipif(
    VERSION < (2, 7), reason="torch 2.6 traces some models for each length that later versions do not"
)
needs_pipes_of_containers = pytest.mark.skipif(VERSION < (2, 7), reason="torch 2.6 cannot cut a Sequential that is the model itself")
needs_steps_under_a_default_device = pytest.mark.skipif(
    VERSION < (2, 7), reason="AdamW of torch 2.6 makes its counters of steps on the default device, without numbers on meta"
)
needs_branches_in_graphs = pytest.mark.skipif(VERSION < (2, 7), reason="in torch 2.6, no mode sees torch.cond without a rule of its own")

takes_an_hour = pytest.mark.skipif(not EXHAUSTIVE, reason="traces and compiles for many minutes: set ZEROBUBBLE_EXHAUSTIVE=1 to run it")
"""For tests that would take longer than all others together."""
