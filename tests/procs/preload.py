"""What every rank process needs, imported once by the server that they are forked from."""

import torch.distributed

import zerobubble.runtime.pipeline

__all__ = ["torch", "zerobubble"]
