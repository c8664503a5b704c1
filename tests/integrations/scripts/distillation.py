"""Distillation with Trainer: a teacher outside of the trained model, a loss of soft and hard labels that ignores `num_items_in_batch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from tests.integrations.scripts.corpus import write_results


class Distilling:
    """Adds the divergence from the teacher to the student's own loss, with a temperature."""

    def __init__(self, *args: Any, teacher: nn.Module, temperature: float, alpha: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.eval()
        self.temperature, self.alpha = temperature, alpha

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        student = model(**inputs)
        with torch.no_grad():
            teacher = self.teacher(**inputs)
        soft = functional.kl_div(
            functional.log_softmax(student.logits / self.temperature, dim=-1),
            functional.softmax(teacher.logits / self.temperature, dim=-1),
            reduction="batchmean",
        )
        loss = self.alpha * student.loss + (1 - self.alpha) * self.temperature**2 * soft
        return (loss, student) if return_outputs else loss


def language_model(layers: int, seed: int) -> Any:
    set_seed(seed)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, num_hidden_layers=layers)).double()


def main(folder: Path, pipelined: bool) -> None:
    """Train a student of four layers with a teacher of two, evaluate it, and write it."""
    teacher, student = language_model(2, 1), language_model(4, 2)
    rows = torch.randint(0, 64, (80, 12), generator=torch.Generator().manual_seed(4))
    data = [{"input_ids": row, "labels": row.clone()} for row in rows]
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=8,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        optim="sgd",
        learning_rate=0.05,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
    )
    base: type[Trainer] = Trainer
    options: dict[str, Any] = {}
    if pipelined:
        from zerobubble.integrations.transformers import PipelineTrainer

        base = PipelineTrainer
        options = {"schedule": "zb-h1", "num_microbatches": 4}
    trainer = type("DistillationTrainer", (Distilling, base), {})(
        model=student,
        args=arguments,
        train_dataset=data[:64],
        eval_dataset=data[64:],
        teacher=teacher,
        temperature=2.0,
        alpha=0.3,
        **options,
    )
    trainer.train()
    figures = {"log": [[row[name] for name in ("loss", "grad_norm", "eval_loss") if name in row] for row in trainer.state.log_history]}
    trainer.save_model(str(folder / "final"))
    if trainer.is_world_process_zero():
        write_results(folder, figures, AutoModelForCausalLM.from_pretrained(folder / "final", dtype=torch.float64).state_dict())
    if pipelined:
        trainer.close()
