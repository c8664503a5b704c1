"""Marks for tests of what older versions of torch cannot do."""

from __future__ import annotations

import pytest
import torch

from zerobubble.runtime.split.eligibility import CAN_SEE_HOOKS

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

needs_checkpoints_in_graphs = pytest.mark.skipif(not CAN_SEE_HOOKS, reason="a graph stage takes checkpoints from torch 2.8 on")
needs_fsdp2_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"),
    reason="fully_shard of torch 2.6 calls Stream.record_event, which streams of the CPU lack there",
)
needs_torchs_runtime = pytest.mark.skipif(
    VERSION < (2, 13), reason="the schedule runtime of older versions of torch fails or hangs on schedules of its own, too"
)
