"""Why a training step had nothing to train: the loss of no microbatch required a gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_CUTS = ".detach(), torch.no_grad, an integer result such as that of argmax"


def why_nothing_trains(told: Sequence[Mapping[int, tuple[bool, bool]]], output_goes_back: bool) -> str:
    """The reason, and the remedy, by the `GradientFlow` of each rank's stages and whether any output of the model required a gradient."""
    flows: dict[int, tuple[bool, bool]] = {}
    for theirs in told:
        for stage, (trains, goes_back) in theirs.items():
            before = flows.get(stage, (False, False))
            flows[stage] = before[0] or trains, before[1] or goes_back
    return f"the loss does not require a gradient, so this step trained nothing: {_reason(flows, output_goes_back)}"


def _reason(flows: Mapping[int, tuple[bool, bool]], output_goes_back: bool) -> str:
    if output_goes_back:
        return f"loss_fn cuts it off from the output of the model, which requires one ({_CUTS}, .item()); return the loss itself"
    if not any(trains for trains, _ in flows.values()):
        return "no parameter of any stage requires one; unfreeze parameters, or call eval_step"
    in_order = sorted(flows.items())
    are_reached = [False, *(goes_back for _, (_, goes_back) in in_order)]
    cut = max(stage for (stage, (trains, _)), is_reached in zip(in_order, are_reached, strict=False) if trains or is_reached)
    whose = "parameters" if flows[cut][0] else "inputs"
    return f"the output of stage {cut} does not require one although its {whose} do ({_CUTS}); return the output itself"
