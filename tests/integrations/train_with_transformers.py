"""Trains small Llamas with Trainer, or in a pipeline of all ranks with `PipelineTrainer`, and writes their logs and weights to a folder.

`python train_with_transformers.py FOLDER` is the reference. Under torchrun, all ranks form one pipeline, or with `--replicas 2` two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import zerobubble as zb

STEPS, SAMPLES, BATCH = 30, 100, 8
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}


def summed_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of the user: the labels are not shifted."""
    return functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).mean())}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({"dtype": torch.float32, "optim": "sgd"}, {}),
    "plain": ({}, {"compute_metrics": accuracy}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}),
    "own loss": ({}, {"compute_loss_func": summed_loss}),
    "adapters": ({"lora": True}, {}),
    "bf16": ({"dtype": torch.float32, "optim": "sgd", "bf16": True}, {}),
    "saved": ({"save_strategy": "steps", "save_steps": 10, "load_best_model_at_end": True}, {}),
    "own optimizer": ({"save_strategy": "steps", "save_steps": 10, "own_optimizer": True}, {}),
}
"""By name: settings of the model and of TrainingArguments, and arguments of Trainer."""


def sample(index: int) -> dict[str, torch.Tensor]:
    """A sequence; the labels of a prompt of another length do not count."""
    ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
    labels = ids.clone()
    labels[: index % 9] = -100
    return {"input_ids": ids, "labels": labels}


def trainer_of(folder: Path, settings: dict[str, Any], arguments: dict[str, Any], replicas: int) -> Trainer:
    """Trainer, or `PipelineTrainer` under torchrun."""
    settings = dict(settings)
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=settings.pop("tie_word_embeddings", False))
    model = LlamaForCausalLM(config).to(settings.pop("dtype", torch.float64))
    own_optimizer = settings.pop("own_optimizer", False)
    if settings.pop("lora", False):
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"]))
    training = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=STEPS,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        per_device_train_batch_size=BATCH // replicas,
        per_device_eval_batch_size=BATCH // replicas,
        **{"save_strategy": "no", **settings},
    )
    data = [sample(index) for index in range(SAMPLES)]
    given: dict[str, Any] = {"model": model, "args": training, "train_dataset": data[:80], "eval_dataset": data[80:], **arguments}
    if own_optimizer:  # in another order than the model
        given["optimizers"] = torch.optim.AdamW(reversed(list(model.parameters())), lr=3e-3), None
    if "WORLD_SIZE" not in os.environ:
        return Trainer(**given)
    from zerobubble.integrations.transformers import PipelineTrainer

    ranks = int(os.environ["WORLD_SIZE"])
    mesh = {"mesh": init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=("dp", "pp"))} if replicas > 1 else {}
    return PipelineTrainer(**given, schedule="zb-v", num_microbatches=4, pipeline_options=mesh)


class Killer(TrainerCallback):
    """Kills this process in the fifth step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


class WeightsInUse(TrainerCallback):
    """Uses the weights of the model in the middle of training, and at its end on the first rank alone. `refused` are uses that raised."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused: list[str] = []
        self.tokens: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != 12:
            return
        for name, use in {"generate": lambda: model.generate(sample(0)["input_ids"][None]), "state": model.state_dict}.items():
            try:
                use()
            except zb.InputError:
                self.refused.append(name)
        with zb.gathered(model, rank=0) if "WORLD_SIZE" in os.environ else nullcontext():
            if state.is_world_process_zero:
                torch.save(model.state_dict(), self.folder / "step12.pt")

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            torch.save(model.state_dict(), self.folder / "end.pt")
            self.tokens = model.eval().generate(input_ids=sample(0)["input_ids"][None], max_new_tokens=8, do_sample=False)[0].tolist()


def main() -> None:
    """Train each case and write its log and weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--kill", type=int, help="the rank that kills itself in step 5")
    parser.add_argument("--resume", help="a checkpoint from which the cases go on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.cases:
        folder = options.folder / name
        trainer = trainer_of(folder, *CASES[name], options.replicas)
        if options.kill == int(os.environ.get("RANK", -1)):
            trainer.add_callback(Killer())
        uses = WeightsInUse(folder)
        trainer.add_callback(uses)
        trainer.train(resume_from_checkpoint=options.resume)
        trainer.save_model(str(folder / "final"))
        if trainer.is_world_process_zero():
            rows = [{key: value for key, value in row.items() if isinstance(value, float)} for row in trainer.state.log_history]
            found = {"rows": rows, "best": trainer.state.best_global_step, "refused": uses.refused, "tokens": uses.tokens}
            (folder / "log.json").write_text(json.dumps(found))
            trainer.model.save_pretrained(folder / "by the model")
        if hasattr(trainer, "close"):
            trainer.close()
        if trainer.is_world_process_zero():
            model = trainer.model.merge_and_unload() if hasattr(trainer.model, "merge_and_unload") else trainer.model
            torch.save(model.state_dict(), folder / "after.pt")


if __name__ == "__main__":
    main()
