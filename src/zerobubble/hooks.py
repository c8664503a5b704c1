"""What plugs into the steps of a `Pipeline`: the optimizer without a barrier, and reports of each step. It needs torch."""

from __future__ import annotations

from zerobubble.runtime.hooks.post_validation import PostValidation
from zerobubble.runtime.hooks.telemetry import StepReport, log_steps, write_scalars

__all__ = ["PostValidation", "StepReport", "log_steps", "write_scalars"]
