"""Trains a small GPT of Megatron-Core on two CPU ranks with Megatron's own schedules and with ours, and writes losses and gradients.

`train_with_megatron.py FOLDER PORT CASE ...` forks two ranks, so that Megatron is imported once. It allocates with `device="cuda"`, and
`on_cpu` gives it the CPU instead.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about packages for GPUs that are missing
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

from zerobubble.integrations.megatron import Player

MICROBATCHES, SEQUENCE, BATCH, VOCABULARY, STEPS = 6, 8, 2, 32, 3
CASES: dict[str, tuple[str | None, int]] = {
    "1f1b": (None, 1),
    "zb-h1": ("zb-h1", 1),
    "interleaved": (None, 2),
    "interleaved-zb": ("interleaved-zb", 2),
    "ours": ("interleaved-1f1b", 2),
}
"""The schedule of each case, None for Megatron's own, and its chunks per rank."""


class OnCPU(TorchFunctionMode):
    """Allocates on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def on_cpu() -> None:
    """Lets Megatron-Core run on this CPU."""
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    random.CudaRNGStatesTracker.fork = contextlib.contextmanager(lambda self, name=None: (yield))


def model_of(config: Any, chunk: int | None) -> Any:
    """The GPT of this rank, or one of its chunks, in Megatron's wrapper for replicas."""
    torch.manual_seed(10 * parallel_state.get_pipeline_model_parallel_rank() + (chunk or 0))
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
    }
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE, **ends, vp_stage=chunk)
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), gpt)


def forward_step(batches: Any, model: Any) -> Any:
    """The user's forward step: the output of a microbatch, and its loss function."""
    ids = next(batches)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
    output = model(ids, torch.arange(SEQUENCE)[None].expand(BATCH, SEQUENCE), mask, labels=ids)
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().item()})


def describe_next(pipe: Any, found: dict[str, Any]) -> None:
    """Notes the share of weight gradients that W computes, when the next step begins."""
    step = pipe.step

    def described(inputs: Any, targets: Any, *, kwargs: Any, num_microbatches: int) -> None:
        found["shares"] = [report.share for report in pipe.describe(inputs, targets, kwargs=kwargs)]
        step(inputs, targets, kwargs=kwargs, num_microbatches=num_microbatches)

    pipe.step = described


def train(case: str) -> dict[str, Any]:
    """The losses of all steps and of an evaluation, the gradients of the first step and the final weights."""
    schedule, chunks = CASES[case]
    parallel_state.initialize_model_parallel(1, 2, chunks if chunks > 1 else None)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_dtype=torch.float32,
        batch_p2p_comm=False,  # else gloo confuses the messages of two ranks that are each both the next and the previous one
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = [model_of(config, chunk if chunks > 1 else None) for chunk in range(chunks)]
    run = schedules.get_forward_backward_func() if schedule is None else Player(schedule)
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    found: dict[str, Any] = {"losses": [], "gradients": {}}
    for step in range(STEPS + 1):
        ids = torch.randint(0, VOCABULARY, (MICROBATCHES, BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step % STEPS))
        for chunk in model:
            chunk.zero_grad_buffer()
        losses = run(
            forward_step_func=forward_step,
            data_iterator=[iter(ids) for _ in model],
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=step == STEPS,
        )
        found["losses"] += [loss["loss"] for loss in losses]
        if step == 0 and isinstance(run, Player):
            describe_next(run.pipeline, found)
        if step < STEPS:
            if step == 0:
                found["gradients"] = [parameter.main_grad.flatten().tolist() for parameter in parameters]
            with torch.no_grad():
                for parameter in parameters:
                    parameter -= 0.5 * parameter.main_grad
    found["weights"] = [parameter.flatten().tolist() for parameter in parameters]
    if schedule is not None:
        run.close()
    parallel_state.destroy_model_parallel()
    return found


def train_all(rank: int, folder: str, port: str, cases: list[str]) -> None:
    """Trains each case on a rank."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    with OnCPU():
        for case in cases:
            Path(folder, f"{case}-{rank}.json").write_text(json.dumps(train(case)))
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    on_cpu()
    folder, port, *cases = sys.argv[1:]
    start_processes(train_all, (folder, port, cases), nprocs=2, start_method="fork")
