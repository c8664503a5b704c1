"""What other tools read: pictures and files made from schedules and timelines. One format per module."""

from zerobubble.export.document import load_document
from zerobubble.export.html import report_html
from zerobubble.export.json_form import dumps, loads
from zerobubble.export.megatron import balanced_layers, from_megatron_layout, to_megatron_layout
from zerobubble.export.perfetto import perfetto_json
from zerobubble.export.report import MemoryRow, Report, ThroughputRow
from zerobubble.export.schedule_file import load_schedule
from zerobubble.export.svg import timeline_svg
from zerobubble.export.torch_comms import to_torch_comms_csv
from zerobubble.export.torch_csv import from_torch_csv, to_torch_csv

__all__ = [
    "MemoryRow",
    "Report",
    "ThroughputRow",
    "balanced_layers",
    "dumps",
    "from_megatron_layout",
    "from_torch_csv",
    "load_document",
    "load_schedule",
    "loads",
    "perfetto_json",
    "report_html",
    "timeline_svg",
    "to_megatron_layout",
    "to_torch_comms_csv",
    "to_torch_csv",
]
