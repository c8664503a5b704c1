"""For the authors of modules: tensors that skip over stages, and custom layers whose weight gradients wait for W. It needs torch."""

from __future__ import annotations

from zerobubble.runtime.split.custom_layers import deferral
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.stage.check_split import check_split
from zerobubble.runtime.values.skips import pop, stash

__all__ = ["SplitReport", "check_split", "deferral", "pop", "stash"]
