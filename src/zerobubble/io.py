"""Reading and writing files: plans, schedules, costs, the formats of PyTorch and Megatron, reports and pictures."""

from __future__ import annotations

import os
from typing import Any

from zerobubble.arguments import WHOLE, instance, require, takes
from zerobubble.errors import InputError
from zerobubble.export import (
    balanced_layers,
    dumps,
    from_megatron_layout,
    from_torch_csv,
    load_costs,
    load_document,
    load_plan,
    load_schedule,
    loads,
    perfetto_json,
    save_document,
    save_plan,
    timeline_svg,
    to_megatron_layout,
    to_torch_comms_csv,
    to_torch_csv,
    torchtitan_settings,
)
from zerobubble.installing import install
from zerobubble.listing import listing
from zerobubble.traces import ClockShift, TracedRun, read_trace
from zerobubble.view import MemoryRow, Report, ThroughputRow, report_html

__all__ = [
    "ClockShift",
    "MemoryRow",
    "Report",
    "ThroughputRow",
    "TracedRun",
    "balanced_layers",
    "dumps",
    "export_weights",
    "from_megatron_layout",
    "from_torch_csv",
    "load_costs",
    "load_document",
    "load_plan",
    "load_schedule",
    "loads",
    "name_passes",
    "perfetto_json",
    "read_trace",
    "report_html",
    "save_document",
    "save_plan",
    "timeline_svg",
    "to_megatron_layout",
    "to_torch_comms_csv",
    "to_torch_csv",
    "torchtitan_settings",
]

__dir__ = listing(__all__)


@takes()
def export_weights(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    config: Any,
    *,
    adapter: Any = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the weights of a `checkpoint` made by `zb.save` into a `folder` for `from_pretrained` of Transformers.

        zb.io.export_weights("checkpoint", "exported", "llama/config.json")

    `config` is the model's configuration: an object of Transformers, a file such as config.json, or a folder with a config.json. The
    weights keep their dtypes, and tied ones are written once. A file has up to `shard_bytes`, 5 GB by default; several files get an index.
    With an `adapter`, the configuration of peft with which the model was trained (a `LoraConfig`, or a folder that holds its
    adapter_config.json), only the adapter is written, for `PeftModel.from_pretrained`.

    Run it in one process, without a process group, with enough memory for all weights. Raises `InputError` if the checkpoint belongs to
    another model or the names of its stages do not form one model.
    """
    require("checkpoint", checkpoint, instance(str, os.PathLike))
    require("folder", folder, instance(str, os.PathLike))
    require("shard_bytes", shard_bytes, WHOLE)
    try:
        from zerobubble.models.pretrained import write_pretrained

        write_pretrained(checkpoint, folder, config, shard_bytes, adapter)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors", "transformers", "peft"):
            raise
        raise InputError("export_weights needs {name}", name=error.name, remedy=f"pip install {error.name}") from error


@takes()
def name_passes(stage: Any) -> None:
    """Make profiler traces name every pass of `stage`, a `PipelineStage` of torch.distributed.pipelining, as `read_trace` requires.

        for stage in stages:
            zb.io.name_passes(stage)

    Call it once before training, for schedules of PyTorch that do not name their passes, such as Schedule1F1B. It only adds profiler
    ranges; the computation of the stage does not change. Raises `InputError` for anything but a stage.
    """
    try:
        from zerobubble.traces.naming import name_stage
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError("name_passes needs torch", remedy=install("torch")) from error
    name_stage(stage)
