"""Pages that open offline and answer why: timelines to zoom into, point at and play. Python packs the data, `web/` draws it."""

from zerobubble.view.columns import Viewed
from zerobubble.view.comparison import comparison_html
from zerobubble.view.report import MemoryRow, Report, ThroughputRow
from zerobubble.view.report_page import report_html

__all__ = ["MemoryRow", "Report", "ThroughputRow", "Viewed", "comparison_html", "report_html"]
