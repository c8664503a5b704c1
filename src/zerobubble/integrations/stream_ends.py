"""Finds how many samples of the last batch count if the dataset of an evaluation has no length.

Accelerate knows it where one process loads the batches for all. The ranks of a pipeline load the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import find_batch_size
from torch.utils.data import IterableDataset
from transformers.trainer_utils import has_length

from zerobubble.errors import InputError


class Counted(IterableDataset[Any]):
    """A `dataset` that counts its samples while they are read."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        for self.count, sample in enumerate(self.dataset, 1):  # noqa: B020 - the count so far
            yield sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


def count_samples(loader: Any) -> None:
    """Lets the loader of one of several replicas count the samples of all of them, if their dataset has no length.

    Raises `InputError` if other processes would count them.
    """
    shard = loader.dataset
    if not isinstance(shard, IterableDatasetShard) or isinstance(shard.dataset, Counted) or has_length(shard.dataset):
        return
    if loader.num_workers:
        raise InputError(
            "{argument}={got}: replicas fill the last batch with samples of the first, and do not know which count twice if others "
            "processes load a dataset without length",
            argument="dataloader_num_workers",
            got=loader.num_workers,
            remedy="set it to 0, or evaluate a dataset with a length",
        )
    shard.dataset = Counted(shard.dataset)


def note_remainder(accelerator: Any, inputs: Any) -> None:
    """Notes how many samples of the last batch, which has these `inputs` in this replica, count if the dataset has no length."""
    state = accelerator.gradient_state
    if not state.end_of_dataloader or state.remainder >= 0:
        return
    loader = state.active_dataloader
    shard = loader.dataset
    if isinstance(shard, IterableDatasetShard):
        loader.remainder = (shard.dataset.count - 1) % (shard.batch_size * shard.num_processes) + 1
    else:
        loader.remainder = find_batch_size(inputs)
