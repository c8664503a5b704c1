"""Files in and out: plans, schedules and costs to keep, the formats of PyTorch and Megatron, and pictures for people."""

from __future__ import annotations

from zerobubble.export import (
    MemoryRow,
    Report,
    ThroughputRow,
    balanced_layers,
    dumps,
    from_megatron_layout,
    from_torch_csv,
    load_document,
    load_schedule,
    loads,
    perfetto_json,
    report_html,
    timeline_svg,
    to_megatron_layout,
    to_torch_comms_csv,
    to_torch_csv,
)
from zerobubble.planning.plan_file import load_plan, save_plan

__all__ = [
    "MemoryRow",
    "Report",
    "ThroughputRow",
    "balanced_layers",
    "dumps",
    "from_megatron_layout",
    "from_torch_csv",
    "load_document",
    "load_plan",
    "load_schedule",
    "loads",
    "perfetto_json",
    "report_html",
    "save_plan",
    "timeline_svg",
    "to_megatron_layout",
    "to_torch_comms_csv",
    "to_torch_csv",
]
