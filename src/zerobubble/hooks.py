"""Hooks into the training steps of a `Pipeline`: the protocol for your own hooks, and the built-in ones. Needs torch."""

from __future__ import annotations

from zerobubble.listing import listing
from zerobubble.replanning.auto import Auto
from zerobubble.run_folder import StepReport
from zerobubble.runtime.hooks.bubble_work import Bubble, BubbleWork
from zerobubble.runtime.hooks.post_validation import PostValidation
from zerobubble.runtime.hooks.telemetry import Telemetry, log_steps, write_scalars
from zerobubble.runtime.step.hook import AttachedPipeline, StepHook, TrainingStep
from zerobubble.runtime.step.planner import Switch

__all__ = [
    "AttachedPipeline",
    "Auto",
    "Bubble",
    "BubbleWork",
    "PostValidation",
    "StepHook",
    "StepReport",
    "Switch",
    "Telemetry",
    "TrainingStep",
    "log_steps",
    "write_scalars",
]

__dir__ = listing(__all__)
