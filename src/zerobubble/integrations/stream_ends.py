"""Finds how many samples of the last batch of an evaluation count: replicas fill it with samples of the first.

Accelerate knows it for datasets with a length, and where one process loads the batches for all. The ranks of a pipeline load the same.
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


def note_remainder(accelerator: Any, inputs: Any, num_replicas: int) -> None:
    """Notes how many samples of the last batch, which has these `inputs` in this replica, count if Accelerate does not know it."""
    state = accelerator.gradient_state
    if not state.end_of_dataloader:
        return
    loader, total = state.active_dataloader, num_replicas * find_batch_size(inputs)
    count = num_read(loader)
    if count is not None and not loader.dataset.drop_last:
        loader.remainder = (count - 1) % total + 1
    elif state.remainder < 0:
        loader.remainder = total


def num_read(loader: Any) -> int | None:
    """Returns the number of samples that replicas have read of a dataset in order; None for other datasets, or without replicas."""
    shard = loader.dataset
    if not isinstance(shard, IterableDatasetShard):
        return None
    return len(shard.dataset) if has_length(shard.dataset) else shard.dataset.count


def nums_counted(accelerator: Any, samples: int, num_replicas: int) -> list[int]:
    """Returns, for each replica, how many of the first `samples` of its batch count. The others fill the last batch."""
    state = accelerator.gradient_state
    fills = num_replicas > 1 and state.end_of_dataloader and state.remainder > 0
    total = state.remainder if fills else num_replicas * samples
    return [min(max(total - replica * samples, 0), samples) for replica in range(num_replicas)]
