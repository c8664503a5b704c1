"""Trains on data of one's own with Trainer, or in a pipeline of all ranks, and writes logs, weights and errors to a folder.

`python train_with_own_data.py FOLDER` is the reference; under torchrun, all ranks form one pipeline, or with `--replicas 2` two.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Trainer,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)
from transformers.utils import ModelOutput

STEPS, BATCH = 4, 8
BERT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MASK = 63
LOCAL = {"average_tokens_across_devices": False}
"""Trainer would multiply losses that are means by the number of processes."""
WORKERS = {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"}


def masked_model() -> nn.Module:
    return BertForMaskedLM(BertConfig(**BERT)).double()


def choosing_model() -> nn.Module:
    return BertForMultipleChoice(BertConfig(**BERT)).double()


def classifier() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**BERT, num_labels=3)).double()


def tagging_model() -> nn.Module:
    return BertForTokenClassification(BertConfig(**BERT, num_labels=5)).double()


def tags_model() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**BERT, num_labels=5, problem_type="multi_label_classification")).double()


def segmenting_model() -> nn.Module:
    """A model that ignores pixels of class 255. Statistics of a batch would be those of a microbatch."""
    sizes = {"depths": [1] * 4, "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1] * 4, "decoder_hidden_size": 8, "num_labels": 3}
    dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob", "drop_path_rate"), 0.0)
    model = SegformerForSemanticSegmentation(SegformerConfig(**sizes, **dropout)).double()
    model.decode_head.batch_norm = nn.Identity()
    return model


def hearing_model() -> nn.Module:
    names = (
        "attention_dropout",
        "hidden_dropout",
        "feat_proj_dropout",
        "final_dropout",
        "activation_dropout",
        "layerdrop",
        "mask_time_prob",
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 12}
    convolutions = {"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "feat_extract_norm": "layer"}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    dropout = dict.fromkeys((*names, "layerdrop", "mask_time_prob"), 0.0)
    return Wav2Vec2ForCTC(Wav2Vec2Config(**sizes, **convolutions, **positions, **dropout, ctc_zero_infinity=True)).double()


class Intents(BertPreTrainedModel):
    """A model with a class for each text and for each token, and trained weights of both losses."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.intent, self.slot = nn.Linear(16, 3), nn.Linear(16, 4)
        self.scales = nn.Parameter(torch.tensor([0.5, -0.5]))
        self.post_init()

    def forward(self, input_ids: Any = None, intents: Any = None, slots: Any = None) -> ModelOutput:
        hidden = self.bert(input_ids).last_hidden_state
        of_text, of_tokens = self.intent(hidden[:, 0]), self.slot(hidden)
        if intents is None:
            return ModelOutput(intents=of_text, slots=of_tokens)
        losses = functional.cross_entropy(of_text, intents), functional.cross_entropy(of_tokens.flatten(0, 1), slots.flatten())
        loss = sum((-scale).exp() * loss + scale for loss, scale in zip(losses, self.scales.unbind(), strict=True))
        return ModelOutput(loss=loss, intents=of_text, slots=of_tokens)


class Detecting(nn.Module):
    """A model of one's own that takes a dict of boxes for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = BertModel(BertConfig(**BERT)).double(), nn.Linear(16, 4).double()

    def forward(self, input_ids: Any, labels: Any = None) -> dict[str, Any]:
        found = self.head(self.encoder(input_ids).last_hidden_state[:, 0])
        losses = [(row - of_one["boxes"]).abs().mean() for row, of_one in zip(found, labels or (), strict=True)]
        return {"loss": torch.stack(losses).mean(), "boxes": found} if losses else {"boxes": found}


def detecting_model() -> nn.Module:
    return Detecting()


def intending_model() -> nn.Module:
    return Intents(BertConfig(**BERT)).double()


def tokens(index: int) -> dict[str, Any]:
    ids = torch.randint(1, 60, (12,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": ids, "labels": ids.clone()}


def of_class(index: int) -> dict[str, Any]:
    return {"input_ids": tokens(index)["input_ids"], "labels": index * 7 % 3}


def with_intent(index: int) -> dict[str, Any]:
    ids = tokens(index)["input_ids"]
    return {"input_ids": ids, "intents": index * 7 % 3, "slots": ids % 4}


def choices(index: int) -> dict[str, Any]:
    """A question with four texts as answers."""
    return {"input_ids": torch.stack([tokens(4 * index + choice)["input_ids"] for choice in range(4)]), "labels": index % 4}


def tagged(index: int) -> dict[str, Any]:
    """Tokens with tags, of which a number that differs between samples is -1."""
    labels = torch.arange(12) * (index + 1) % 5
    labels[: index * 5 % 9] = -1
    return {"input_ids": tokens(index)["input_ids"], "labels": labels}


def with_tags(index: int) -> dict[str, Any]:
    return {"input_ids": tokens(index)["input_ids"], "labels": torch.tensor([float(index >> bit & 1) for bit in range(5)])}


def pixels(index: int) -> dict[str, Any]:
    """An image of which a part, which differs between samples, has no class."""
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(3, (32, 32), generator=generator)
    labels[: index * 5 % 27] = 255
    return {"pixel_values": torch.randn(3, 32, 32, generator=generator, dtype=torch.float64), "labels": labels}


def sound(index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index)
    labels = torch.randint(1, 12, (6,), generator=generator)
    labels[2 + index % 4 :] = -100
    return {"input_values": torch.randn(160, generator=generator, dtype=torch.float64), "labels": labels}


def ignoring_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def shared_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


def of_length(index: int) -> dict[str, Any]:
    """Tokens and their number, which differs between samples."""
    ids = tokens(index)["input_ids"][: 4 + index * 5 % 8]
    return {"input_ids": ids, "labels": ids.clone()}


def boxes(index: int) -> dict[str, Any]:
    """Tokens with as many boxes as a batch has samples."""
    count = BATCH
    return {"input_ids": tokens(index)["input_ids"], "labels": {"boxes": torch.ones(count, 4), "class_labels": torch.zeros(count)}}


def of_lists(samples: list[Any]) -> dict[str, Any]:
    """A batch with labels as object detection has them."""
    return {"input_ids": torch.stack([sample["input_ids"] for sample in samples]), "labels": [sample["labels"] for sample in samples]}


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    length = max(len(sample["input_ids"]) for sample in samples)

    def rows(name: str, value: int) -> torch.Tensor:
        return torch.stack([functional.pad(sample[name], (0, length - len(sample[name])), value=value) for sample in samples])

    ids = rows("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": rows("labels", -100)}


class OwnDraws(Dataset[Any]):
    """Masks tokens by numbers of generators of its own, and counts its reads. Its class counts, too."""

    reads_of_all = 0

    def __init__(self) -> None:
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_numpy = np.random.default_rng(2)
        self.state: dict[str, Any] = {"reads": 0, "scale": np.zeros(3), "last": torch.zeros(2)}

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, Any]:
        OwnDraws.reads_of_all += 1
        self.state["reads"] += 1
        self.state["scale"] += 1
        self.state["last"].add_(1)
        sample = tokens(index)
        shift = self.state["reads"] + OwnDraws.reads_of_all + int(self.state["scale"][0]) + int(self.state["last"][0])
        sample["input_ids"][int(self.of_numpy.integers(12))] = MASK
        sample["input_ids"][torch.randint(12, (), generator=self.of_torch)] = shift % 60
        return sample


class GlobalDraws(Dataset[Any]):
    """Masks tokens by numbers of the default generators, which a worker process seeds."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = tokens(index)
        for place in (random.randrange(12), np.random.randint(12), int(torch.randint(12, ()))):
            sample["input_ids"][place] = MASK
        return sample


class OfEachRank(Dataset[Any]):
    """Draws from a generator that each rank seeds by its number, from a sample on."""

    def __init__(self, first: int = 0) -> None:
        self.reads, self.first = 0, first
        self.generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        sample = tokens(index)
        if self.reads > self.first:
            sample["input_ids"][torch.randint(12, (), generator=self.generator)] = MASK
        return sample


class Stream(Dataset[Any]):
    """Reads the next sample of a stream, whatever the index is."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return next(self.samples)


class Sequence(IterableDataset[Any]):
    """Samples that are read in order only."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


class SizedSequence(Sequence):
    """Samples that are read in order only, of a known number."""

    def __len__(self) -> int:
        return len(self.samples)


class Mixup:
    """A collator with a state of its own: it mixes labels by a number drawn from Python's `Random`."""

    def __init__(self) -> None:
        self.generator = random.Random(3)
        self.calls = 0

    def __call__(self, samples: list[Any]) -> dict[str, Any]:
        self.calls += 1
        batch = default_collate(samples)
        batch["input_ids"][:, self.generator.randrange(12)] = self.calls
        return batch


def drawing_collator() -> Any:
    """A closure with generators and a counter."""
    of_torch, of_numpy, calls = torch.Generator().manual_seed(1), np.random.RandomState(2), 0

    def collate(samples: list[Any]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        batch = default_collate(samples)
        mask = torch.rand(batch["input_ids"].shape, generator=of_torch) < 0.3
        batch["input_ids"] = torch.where(mask, calls, batch["input_ids"])
        batch["input_ids"][:, of_numpy.randint(12)] = MASK
        return batch

    return collate


def generated() -> Any:
    yield from map(tokens, itertools.count())


def of(sample: Any) -> Any:
    """Returns a function that makes 80 of these samples."""
    return lambda: [sample(index) for index in range(80)]


SEARCHED: dict[str, dict[str, Any]] = {
    "a search": {"num_evaluated": 13, "settings": LOCAL | {"dataloader_drop_last": True}, "rates": [1e-2, 1e-9, 5e-2], "most": 4.17},
}
"""Searches for a learning rate, of which a trial ends early because its loss is above the most."""
CASES: dict[str, dict[str, Any]] = {
    "closure": {"collator": drawing_collator},
    "callable object": {"collator": Mixup},
    "own generators": {"data": OwnDraws},
    "subset": {"data": lambda: Subset(OwnDraws(), range(80))},
    "workers": {"data": GlobalDraws, "settings": WORKERS},
    "workers, accumulated": {
        "data": GlobalDraws,
        "settings": WORKERS | {"gradient_accumulation_steps": 2, "dataloader_persistent_workers": True},
    },
    "batch_rebalance": {"data": of(of_length), "collator": lambda: padded, "settings": {"train_sampling_strategy": "batch_rebalance"}},
    "group_by_length": {"data": of(of_length), "collator": lambda: padded, "settings": {"train_sampling_strategy": "group_by_length"}},
    "sequential": {"settings": {"train_sampling_strategy": "sequential", "max_steps": -1, "num_train_epochs": 1}},
    "data_seed": {"settings": {"data_seed": 7, "max_steps": 12}},
    "unseedable": {"settings": {"accelerator_config": {"use_seedable_sampler": False}}},
    "full_determinism": {"settings": {"full_determinism": True, "accelerator_config": {"even_batches": False}}},
    "tokens": {
        "data": of(of_length),
        "collator": lambda: padded,
        "evaluated": of_length,
        "num_evaluated": 14,
        "settings": {"include_num_input_tokens_seen": "non_padding", "torch_empty_cache_steps": 2},
        "arguments": {"compute_loss_func": shared_loss},
    },
    "no training": {
        "trains": False,
        "evaluated": of_length,
        "num_evaluated": 11,
        "collator": lambda: padded,
        "arguments": {"compute_loss_func": shared_loss},
    },
    "no training, means": {
        "trains": False,
        "model": tagging_model,
        "data": of(tagged),
        "evaluated": tagged,
        "num_evaluated": 13,
        "arguments": {"compute_loss_func": ignoring_loss},
    },
    "no training, one microbatch": {
        "trains": False,
        "evaluated": of_length,
        "num_evaluated": 14,
        "collator": lambda: padded,
        "arguments": {"compute_loss_func": shared_loss},
        "microbatches": 1,
    },
    "no training, a sequence": {"trains": False, "evaluation": SizedSequence, "num_evaluated": 13},
    "classes": {"model": classifier, "data": of(of_class), "evaluated": of_class, "num_evaluated": 14, "settings": LOCAL},
    "dropped batches": {"num_evaluated": 13, "settings": LOCAL | {"dataloader_drop_last": True}},
    "segmentation": {"model": segmenting_model, "data": of(pixels), "evaluated": pixels},
    "labels of -1": {"model": tagging_model, "data": of(tagged), "evaluated": tagged, "arguments": {"compute_loss_func": ignoring_loss}},
    "several tags": {"model": tags_model, "data": of(with_tags), "evaluated": with_tags},
    "speech": {"model": hearing_model, "data": of(sound), "evaluated": sound},
    "labels of other names": {
        "model": intending_model,
        "data": of(with_intent),
        "evaluated": with_intent,
        "settings": {"label_names": ["intents", "slots"]},
    },
    "given example": {
        "data": lambda: Stream(generated()),
        "options": {"example": {"input_ids": torch.ones(2, 12, dtype=torch.long)}},
    },
}
"""What trains as on one device."""
DIFFERENT: dict[str, dict[str, Any]] = {
    "ranks": {"data": OfEachRank},
    "ranks, later": {"data": lambda: OfEachRank(20)},
}
"""What is refused on all ranks, since each reads batches of its own."""
REFUSED: dict[str, dict[str, Any]] = {
    "generator": {"data": lambda: Stream(generated())},
    "choices in order": {"model": choosing_model, "data": lambda: Sequence(of(choices)()), "evaluated": choices},
    "labels of other names, in order": {
        "model": intending_model,
        "data": lambda: Sequence(of(with_intent)()),
        "evaluated": with_intent,
        "settings": {"label_names": ["intents", "slots"]},
    },
    "detection": {"model": detecting_model, "data": of(boxes), "collator": lambda: of_lists, "evaluated": boxes},
    "cycle": {"data": lambda: Stream(itertools.cycle([tokens(index) for index in range(80)]))},
}
"""What is refused on all ranks."""


def trainer_of(folder: Path, case: dict[str, Any], replicas: int) -> Trainer:
    """Trainer, or `PipelineTrainer` under torchrun."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-2,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=BATCH // replicas,
        per_device_eval_batch_size=BATCH // replicas,
        **{"max_steps": STEPS, **case.get("settings", {})},
    )
    data = case.get("data", of(tokens))()
    evaluated = [case.get("evaluated", tokens)(index) for index in range(64, 64 + case.get("num_evaluated", 12))]
    model = case.get("model", masked_model)
    given: dict[str, Any] = {"model_init": model} if "rates" in case else {"model": model()}
    given |= {"args": arguments, "train_dataset": data}
    given |= case.get("arguments", {}) | {"eval_dataset": case.get("evaluation", list)(evaluated)}
    given |= {"data_collator": case.get("collator", lambda: default_collate)()}
    if "WORLD_SIZE" not in os.environ:
        return Trainer(**given)
    from zerobubble.integrations.transformers import PipelineTrainer

    ranks = int(os.environ["WORLD_SIZE"])
    options = dict(case.get("options", {}))
    if replicas > 1:
        options["mesh"] = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("dp", "pp"))
    return PipelineTrainer(**given, schedule="zb-h1", num_microbatches=case.get("microbatches", 3), pipeline_options=options)


def search(trainer: Trainer, rates: list[float], most: float) -> dict[str, Any]:
    """Returns the losses of all evaluations of all trials, and the best trial."""
    losses: list[float] = []

    def objective(metrics: dict[str, float]) -> float:
        losses.append(metrics["eval_loss"])
        return losses[-1]

    best = trainer.hyperparameter_search(
        lambda trial: {"learning_rate": trial.suggest_categorical("learning_rate", rates)},
        objective,
        n_trials=len(rates),
        direction="minimize",
        backend="optuna",
        sampler=optuna.samplers.GridSampler({"learning_rate": rates}, seed=0),
        pruner=optuna.pruners.ThresholdPruner(upper=most),
    )
    return {"losses": losses, "best": best and best.hyperparameters}


def play(trainer: Trainer, *, trains: bool) -> dict[str, Any]:
    """Returns the logs and the predictions, or the error."""
    emptied: list[int] = []
    transformers.trainer.clear_device_cache = lambda: emptied.append(trainer.state.global_step)
    try:
        _ = trainer.train() if trains else trainer.evaluate()
        predicted = trainer.predict(trainer.eval_dataset)
    except Exception as error:
        fields = getattr(error, "fields", {})
        return {"error": type(error).__name__, "fields": {name: str(value) for name, value in fields.items()}, "text": str(error)}
    rows = [{key: value for key, value in row.items() if isinstance(value, (int, float))} for row in trainer.state.log_history]
    shapes = [list(values.shape) for values in pytree.tree_leaves((predicted.predictions, predicted.label_ids)) if values is not None]
    return {"rows": rows, "metrics": predicted.metrics, "shapes": shapes, "counts": [trainer.state.num_input_tokens_seen, emptied]}


def main() -> None:
    """Trains each case and writes what it gave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # which could not have workers
    rank = int(os.environ.get("RANK", 0))
    for name in options.cases:
        OwnDraws.reads_of_all = 0
        case = (CASES | SEARCHED | DIFFERENT | REFUSED)[name]
        trainer = trainer_of(options.folder / name, case, options.replicas)
        result = search(trainer, case["rates"], case["most"]) if "rates" in case else play(trainer, trains=case.get("trains", True))
        weights = {} if "error" in result or "rates" in case else trainer.model.state_dict()
        if hasattr(trainer, "close"):
            trainer.close()
        (options.folder / f"{name}.{rank}.json").write_text(json.dumps(result))
        if rank == 0:
            torch.save(weights, options.folder / f"{name}.pt")


if __name__ == "__main__":
    main()
