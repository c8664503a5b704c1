"""Interactive pages that open offline: timelines to zoom, inspect and play. Python packs the data, and `web/` draws it."""

from zerobubble.view.columns import Viewed
from zerobubble.view.page import comparison_html
from zerobubble.view.report import MemoryRow, Report, ThroughputRow
from zerobubble.view.report_page import report_html

__all__ = ["MemoryRow", "Report", "ThroughputRow", "Viewed", "comparison_html", "report_html"]
