"""For authors of modules: skips over stages, auxiliary losses on any stage, experts spread over ranks, layers with a custom W.

Needs torch.
"""

from __future__ import annotations

from zerobubble.runtime.split.layers.custom_layers import deferral
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.stage.check_split import check_split
from zerobubble.runtime.stage.divided_head import DividedHead
from zerobubble.runtime.values.added_losses import add_loss, collecting_losses
from zerobubble.runtime.values.experts import mark_experts
from zerobubble.runtime.values.skips import pop, stash

__all__ = ["DividedHead", "SplitReport", "add_loss", "check_split", "collecting_losses", "deferral", "mark_experts", "pop", "stash"]
