"""Frameworks leave the address of their store, ranks and process groups in the process of a test: the next test must not find them."""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # read at import, here and in the ranks

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Takes back what a test leaves in the environment, and destroys its process group."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
