"""Costs of a model on GPUs that nobody has measured, as the page's fields describe it."""

from __future__ import annotations

from zerobubble.cost_model import Estimate, transformer
from zerobubble.cost_model.gpus import gpu_named
from zerobubble.cost_model.models import model_named
from zerobubble.cost_model.setting import SettingError
from zerobubble.explorer.question import FieldError, Question, errors_at, read_layers
from zerobubble.ir import Schedule
from zerobubble.units import show_bytes, show_percent

FIELDS = {"pp": "ranks", "v": "stages"}
"""The page's fields for arguments that have another name."""
GPU_MEMORY = "memory of a GPU"


def estimate_of(question: Question, schedule: Schedule) -> Estimate:
    """The estimated costs of the question's model for the stages of the schedule; raises `FieldError` naming the field that is wrong."""
    with errors_at("model"):
        model = model_named(question.model)  # a request must not name a file of the server
    with errors_at("gpu"):
        gpu = gpu_named(question.gpu)  # nor here
    per_rank, rest = divmod(schedule.num_stages, schedule.num_ranks)
    if rest:
        message = f"{schedule.num_stages} stages are not equally many on each of {schedule.num_ranks} ranks"
        raise FieldError("model", message, "choose no model, and give times or costs")
    shape = {name: getattr(question, name) for name in ("tp", "cp", "ep", "dp", "microbatch", "recompute", "precision", "gradients")}
    shape |= {name: bool(getattr(question, name)) for name in ("sequence_parallel", "overlap_tp")}
    try:
        return transformer(model, gpu=gpu, pp=schedule.num_ranks, v=per_rank, **shape, layers=read_layers(question.layers))
    except SettingError as error:
        field, sentence = error.faults[0][0], str(error)
        named = sentence.rpartition(": ")[2] if ": take " in sentence else ""
        raise FieldError(FIELDS.get(field, field), sentence, named) from error


def estimate_python(question: Question, schedule: Schedule) -> str:
    """The expression in Python that estimates the same costs."""
    arguments = {"gpu": question.gpu, "pp": schedule.num_ranks, "v": schedule.num_stages // schedule.num_ranks}
    usual = {"tp": 1, "cp": 1, "ep": 1, "dp": 1, "microbatch": 1, "recompute": "none", "precision": "bf16", "gradients": "fp32"}
    arguments |= {name: getattr(question, name) for name, value in usual.items() if getattr(question, name) != value}
    arguments |= {} if question.sequence_parallel else {"sequence_parallel": False}
    arguments |= {"overlap_tp": True} if question.overlap_tp else {}
    layers = read_layers(question.layers)
    arguments |= {} if layers is None else {"layers": layers}
    texts = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"zb.cost_model.transformer({question.model!r}, {texts}).costs"


def estimate_figures(estimate: Estimate, schedule: Schedule) -> list[tuple[str, str, str]]:
    """Label, value and a line of detail of the estimated training step and of the memory of its fullest GPU."""
    step, gpu = estimate.step(schedule), estimate.setting.gpu
    fullest = max(range(len(step.rank_bytes)), key=step.rank_bytes.__getitem__)
    held, activations = step.rank_bytes[fullest], step.rank_activations[fullest]
    speed = f"{step.tokens_per_second:,.0f} tokens/s on {step.gpus:,} GPUs, {show_percent(step.utilization)} of their peak FLOP/s"
    shares = f"activations take {show_bytes(activations)}, all else {show_bytes(held - activations)}"
    parts = f"of {show_bytes(gpu.memory_bytes)}; on rank {fullest} {shares}"
    return [("estimated step", f"{step.seconds:.4g} s", speed), (GPU_MEMORY, show_bytes(held), parts)]
