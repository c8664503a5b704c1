"""What every rank process needs, imported once by the server that they are forked from.

The first optimizer of a process imports torch._dynamo: on a busy machine, seconds in which others wait for it, beyond a short timeout.
"""

import torch._dynamo
import torch.distributed

import tests.procs.patience
import zerobubble.runtime.pipeline

__all__ = ["tests", "torch", "zerobubble"]
