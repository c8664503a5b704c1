"""Summarization with Seq2SeqTrainer: BART, padded labels, generation in the evaluation, predictions of a test set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

from tests.integrations.scripts.corpus import sentences, tokenizer, write_results


def main(folder: Path, pipelined: bool) -> None:
    """Train to write the first words of a text, evaluate with greedy search, and predict."""
    set_seed(13)
    tokens = tokenizer()
    config = BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=32,
        dropout=0.0,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=tokens.eos_token_id,
        eos_token_id=tokens.eos_token_id,
        decoder_start_token_id=tokens.eos_token_id,
        forced_eos_token_id=tokens.eos_token_id,
    )
    model = BartForConditionalGeneration(config).double()
    texts = sentences(80, 3)
    data = [{**tokens(text), "labels": tokens(" ".join(text.split()[: 2 + index % 3]))["input_ids"]} for index, text in enumerate(texts)]

    def compute_metrics(predictions: Any) -> dict[str, float]:
        guesses, labels = predictions
        guesses = np.where(guesses != -100, guesses, tokens.pad_token_id)
        return {"generated length": float(np.mean([np.count_nonzero(row != tokens.pad_token_id) for row in guesses])), "rows": len(labels)}

    arguments = Seq2SeqTrainingArguments(
        str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        max_steps=8,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        optim="sgd",
        learning_rate=0.2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        predict_with_generate=True,
        generation_max_length=8,
        generation_num_beams=1,
    )
    base: type[Seq2SeqTrainer] = Seq2SeqTrainer
    options: dict[str, Any] = {}
    if pipelined:
        from zerobubble.integrations.transformers import PipelineMixin

        base = type("PipelineSeq2SeqTrainer", (PipelineMixin, Seq2SeqTrainer), {})
        options = {"schedule": "1f1b", "num_microbatches": 4}
    trainer = base(
        model=model,
        args=arguments,
        train_dataset=data[:60],
        eval_dataset=data[60:],
        processing_class=tokens,
        data_collator=DataCollatorForSeq2Seq(tokens, model=model),
        compute_metrics=compute_metrics,
        **options,
    )
    trainer.train()
    predicted = trainer.predict(data[60:], max_length=8, num_beams=1)
    names = ("loss", "grad_norm", "eval_loss", "eval_generated length", "eval_rows")
    figures = {
        "log": [[row[name] for name in names if name in row] for row in trainer.state.log_history],
        "predictions": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
    }
    trainer.save_model(str(folder / "final"))
    if trainer.is_world_process_zero():
        write_results(folder, figures, BartForConditionalGeneration.from_pretrained(folder / "final", dtype=torch.float64).state_dict())
    if pipelined:
        trainer.close()
