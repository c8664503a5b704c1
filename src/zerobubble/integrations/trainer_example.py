"""Makes the example by which `zb.split` cuts a trainer's model, from the trainer's data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zerobubble.integrations.trainer_loss import TrainerLoss
from zerobubble.models.observation.example import own_example
from zerobubble.runtime.values.random_state import states_restored

SAMPLES = 2


def example_of(trainer: Any, computed: TrainerLoss) -> Any:
    """Returns the arguments with which `compute_loss` calls the model for the first samples of the data.

    Returns None for a model of Transformers that has an example with as many dimensions, such as no choices between texts, and for a
    trainer without data that can be read twice.
    """
    dataset = trainer.eval_dataset if trainer.train_dataset is None else trainer.train_dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    with states_restored(None, trainer.args.device):
        collate = trainer._get_collator_with_removed_columns(trainer.data_collator)
        inputs = trainer._prepare_inputs(collate([dataset[index % len(dataset)] for index in range(SAMPLES)]))
        return None if _is_like(own_example(trainer.model), inputs, trainer.model) else computed.arguments_of(inputs)


def _is_like(example: Any, inputs: Any, model: nn.Module) -> bool:
    """Returns whether the main input of a model of Transformers has as many dimensions in an example of its own as in `inputs`."""
    main = getattr(model, "main_input_name", "input_ids")
    if example is None or main not in example:
        return False
    given = inputs.get(main) if isinstance(inputs, Mapping) else None
    return not isinstance(given, Tensor) or given.dim() == example[main].dim()
