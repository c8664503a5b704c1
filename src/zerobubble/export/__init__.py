"""Export of schedules and timelines to pictures and to the file formats of other tools. One format per module."""

from zerobubble.export.document import dumps, load_costs, load_document, load_plan, load_schedule, loads, save_document, save_plan
from zerobubble.export.megatron import balanced_layers, from_megatron_layout, to_megatron_layout
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.svg import timeline_svg
from zerobubble.export.torch_comms import to_torch_comms_csv
from zerobubble.export.torch_csv import from_torch_csv, to_torch_csv
from zerobubble.export.torchtitan import torchtitan_settings

__all__ = [
    "balanced_layers",
    "dumps",
    "from_megatron_layout",
    "from_torch_csv",
    "load_costs",
    "load_document",
    "load_plan",
    "load_schedule",
    "loads",
    "perfetto_json",
    "save_document",
    "save_plan",
    "timeline_svg",
    "to_megatron_layout",
    "to_torch_comms_csv",
    "to_torch_csv",
    "torchtitan_settings",
]
