"""For the authors of modules: skips over stages, losses that any stage adds, custom layers whose weight gradients wait for W.

It needs torch.
"""

from __future__ import annotations

from zerobubble.runtime.split.custom_layers import deferral
from zerobubble.runtime.split.report import SplitReport
from zerobubble.runtime.stage.check_split import check_split
from zerobubble.runtime.values.added_losses import add_loss, collecting_losses
from zerobubble.runtime.values.skips import pop, stash

__all__ = ["SplitReport", "add_loss", "check_split", "collecting_losses", "deferral", "pop", "stash"]
