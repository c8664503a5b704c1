"""Plays one step of a schedule file in NeMo AutoModel's pipeline, and writes the largest relative error of a gradient to a file.

Under torchrun: `play_in_automodel.py SCHEDULE.csv STAGES MICROBATCHES ERRORS`; each rank writes ERRORS followed by its number.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.pipelining.functional import build_pipeline_schedule
from torch.distributed.pipelining import PipelineStage

from tests.procs.models import batch, build, loss_fn, one_device
from zerobubble.export.torch_csv import from_torch_csv


def main() -> None:
    """Play the step and compare with one device."""
    file, errors = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shape = from_torch_csv(Path(file).read_text())
    own = [stage for _, stage in shape.placement.stages(dist.get_rank())]
    modules = {stage: build(stage, shape.num_stages) for stage in own}
    stages = [PipelineStage(module, stage, shape.num_stages, torch.device("cpu")) for stage, module in modules.items()]
    schedule = build_pipeline_schedule(file, None, 1, shape.num_microbatches, stages, loss_fn, scale_grads=True)
    inputs, targets = batch(shape.num_microbatches)
    last = shape.num_stages - 1
    schedule.step(*([inputs] if 0 in modules else []), target=targets if last in modules else None)
    expected = [build(stage, shape.num_stages) for stage in range(shape.num_stages)]
    one_device(expected, shape.num_microbatches, inputs, targets)
    gradients = [pair for stage in own for pair in zip(modules[stage].parameters(), expected[stage].parameters(), strict=True)]
    error = max(float((mine.grad - theirs.grad).norm() / theirs.grad.norm()) for mine, theirs in gradients)
    Path(f"{errors}{os.environ['RANK']}").write_text(str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
