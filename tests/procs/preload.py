"""Imports for every rank process, done once in the server that forks them.

The first optimizer of a process imports torch._dynamo: on a busy machine, seconds in which others wait for it, beyond a short timeout.
"""

import torch._dynamo
import torch.distributed
import torch.mtia
import torch.xpu

import tests.procs.patience
import zerobubble.runtime.pipeline

__all__ = ["tests", "torch", "zerobubble"]

for device in (torch.cuda, torch.mtia, torch.xpu):
    if not device.is_available():
        # Without the device, torch keeps a stack trace of each `torch.manual_seed`: that takes a hundred times as long as the seed.
        device.manual_seed_all = lambda seed: None
