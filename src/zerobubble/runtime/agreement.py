"""The phase *agree*: what must be equal on all ranks, and how they compare it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from zerobubble.error_reports.text import describe
from zerobubble.errors import raise_faults
from zerobubble.runtime.device import accelerator_fault, hardware_queues, is_host
from zerobubble.runtime.failure.setup_ranks import SetupRanks
from zerobubble.runtime.options import (
    PipelineOptions,
    gathered_bytes_of,
    usable_timeout,
)
from zerobubble.runtime.setup import Setup
from zerobubble.runtime.stage.divided_head import DividedHead
from zerobubble.runtime.stage.levels import refuse_empty_levels
from zerobubble.runtime.stage.uncut_model import RankStages, refuse_uncut_models
from zerobubble.runtime.stage.whole_model import ModelFacts, differences
from zerobubble.runtime.transport.choice import fastest_for
from zerobubble.runtime.transport.mesh import Layout
from zerobubble.runtime.transport.terms import Terms, note, versions, without_note

_KIND_OF_DEVICE = "kind of device"


def terms_of(options: PipelineOptions, setup: Setup | None) -> Terms:
    """Returns what must be equal on all ranks."""
    transport = options.transport
    terms = {
        **versions(),
        "timeout": f"{usable_timeout(options):g} s",
        "pace": _fingerprint(options.pace),
        "overlap function": "one" if options.overlap else "none",
        "type of main_grad": str(options.main_grad),
        "scale": str(options.scale),
        "gathered_bytes": str(gathered_bytes_of(options)),
        "bucket_bytes": str(options.bucket_bytes),
        "survive": str(options.survive),
        "whole steps in CUDA graphs": str(options.captures_steps),
        "order_by": "a function" if callable(options.order_by) else str(options.order_by),
        "transport": transport if isinstance(transport, str) else type(transport).__name__,
    }
    if isinstance(options.loss_fn, DividedHead):
        terms["divided head"] = str(options.loss_fn)
    if setup is not None:
        schedule = setup.schedule
        terms["schedule"] = f"{schedule.name} of {options.num_microbatches} microbatches #{_fingerprint(schedule.to_text())}"
        terms["recompute"] = str(setup.stages.levels)
        if setup.stages.has_tensors:
            terms |= _terms_of_device(setup.stages.device)
        terms["offload"] = _fingerprint(None if setup.offloads is None else tuple(rank.offloads for rank in setup.offloads.ranks))
        terms["link"] = _fingerprint(options.link)
        terms["planning"] = "none" if setup.planner is None else f"auto with {setup.planner.limits_in_words}"
        rewinding = [type(hook).__name__ for hook in options.hooks if getattr(hook, "needs_rollback_point", False)]
        terms["hooks that let steps start over"] = ", ".join(rewinding) or "none"
        if schedule.num_stages - 1 in setup.stages.modules:
            terms["loss_weight"] = "none" if options.loss_weight is None else "a function"
    return terms


def _terms_of_device(device: torch.device) -> Terms:
    """Returns what must be equal on all ranks whose stages have tensors. A rank on the CPU says why it can use no accelerator."""
    if is_host(device):
        return {_KIND_OF_DEVICE: device.type + note(accelerator_fault())}
    return {_KIND_OF_DEVICE: device.type, "fastest transport": fastest_for(device), "number of hardware queues": str(hardware_queues())}


def place_stages_without_tensors(ranks: SetupRanks, setup: Setup, all_terms: Sequence[Terms]) -> None:
    """Makes stages without tensors run on the kind of device of the other stages. Raises the same `InputError` on all ranks."""
    kinds = [without_note(terms[_KIND_OF_DEVICE]) for terms in all_terms if _KIND_OF_DEVICE in terms]
    if not kinds or len(kinds) == len(all_terms):
        return
    fault = ""
    if not setup.stages.has_tensors:
        try:
            setup.stages.go_to(kinds[0])
        except Exception as error:  # noqa: BLE001 - backends of torch raise errors of many types
            fault = f"stages without parameters run on {kinds[0]}, as on other ranks, but this rank cannot use it: {describe(error)}"
    ranks.agree(fault, {})


def compare_models(ranks: SetupRanks, layout: Layout, setup: Setup, uncut_stages: RankStages | None) -> None:
    """Raises the same `InputError` on all ranks, and closes, if ranks of a pipeline have cut different models, or pass one model uncut.

    They first exchange a short hash, and everything else only if hashes differ. `uncut_stages` are this rank's stages that no split made.
    """
    doing, ours = "comparing models", setup.facts
    with ranks.guard.opening(f"while {doing}"):
        gathered = ranks.gather_by_rank((_fingerprint(ours), None if uncut_stages is None else tuple(uncut_stages)), doing)
        if len({theirs for theirs, _ in gathered.values()}) > 1:
            facts = ranks.gather_by_rank(None if ours is None else list(ours), doing)
            facts = {rank: None if theirs is None else ModelFacts(*theirs) for rank, theirs in facts.items()}
            raise_faults(dict.fromkeys(differences({rank: facts[rank] for rank in pipeline}) for pipeline in layout.pipelines))
        uncut = {rank: theirs for rank, (_, theirs) in gathered.items()}
        refuse_uncut_models(layout.pipelines, uncut, warns=ranks.transport.group.is_first)


def compare_levels(ranks: SetupRanks, setup: Setup) -> None:
    """Raises the same `InputError` on all ranks, and closes, if a recomputation level chooses no module on any rank."""
    stages = setup.stages
    if not stages.levels.given:
        return
    doing = "comparing levels of recomputation"
    with ranks.guard.opening(f"while {doing}"):
        refuse_empty_levels(stages.levels, ranks.gather((setup.choosing, stages.names_of_modules()), doing))


def _fingerprint(value: object) -> str:
    """Returns a short hash of `value`."""
    return "none" if value is None else hashlib.sha256(str(value).encode()).hexdigest()[:8]
