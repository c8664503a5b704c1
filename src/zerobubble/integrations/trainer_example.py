"""Makes the example by which `zb.split` cuts a trainer's model, from the trainer's data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from zerobubble.errors import InputError
from zerobubble.integrations.trainer_loss import TrainerLoss
from zerobubble.runtime.frameworks import PythonState, put_back, states_restored

SAMPLES = 2
MOST_ENTRIES = 64
"""The entries of larger containers are samples, and are not copied."""


def example_of(trainer: Any, computed: TrainerLoss) -> Any:
    """Returns the arguments with which `compute_loss` calls the model for the first samples of the data.

    A model of Transformers has an example of its own, but without the labels and further arguments of the data, on which parameters may
    depend. Returns None for a trainer without data that can be read twice. Random generators, counters and other state of the data are what
    they were. Raises `InputError` for data whose state cannot be put back.
    """
    dataset = trainer.eval_dataset if trainer.train_dataset is None else trainer.train_dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    with states_restored(None, trainer.args.device), _unchanged(dataset, trainer.data_collator):
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
        inputs = trainer._prepare_inputs(collate([dataset[index % len(dataset)] for index in range(SAMPLES)]))
        return computed.arguments_of(inputs)


@contextmanager
def _unchanged(*code: Any) -> Iterator[None]:
    """A context after which the Python state of a dataset and a collator is what it was."""
    before = PythonState(*code, most_entries=MOST_ENTRIES).snapshot()
    try:
        yield
    finally:
        faults = put_back(before)
    if faults:
        raise InputError(
            "reading {count} samples, an example by which the model is cut, changes {places} of the data, which cannot be put back",
            count=SAMPLES,
            places=", ".join(dict.fromkeys(str(fault.fields["place"]) for fault in faults)),
            remedy='give pipeline_options={"example": {"input_ids": ...}}, the arguments of the model for two samples',
        )


@contextmanager
def remedies_of_trainer() -> Iterator[None]:
    """A context in which the remedies of errors of `zb.split` name the argument of the trainer instead."""
    try:
        yield
    except InputError as error:
        text, fields = str(error), dict(error.fields)
        if remedy := str(fields.get("remedy", "")):
            text, fields["remedy"] = text.removesuffix(f": {remedy}"), _of_trainer(remedy)
        if (_of_trainer(text), fields.get("remedy", "")) == (text, remedy):
            raise
        raise InputError("{reason}", **fields | {"reason": _of_trainer(text)}) from error


def _of_trainer(text: str) -> str:
    return re.sub(r"zb\.split\(model, (\w+)=(\.\.\.|\[\.\.\.\])\)", r'pipeline_options={"\1": \2}', text)
