"""`DividedHead`: the head of a language model and its loss, with the vocabulary divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from zerobubble.arguments import NUMBER, takes, wrong
from zerobubble.errors import InputError
from zerobubble.ir import Schedule
from zerobubble.runtime.split.layers.eligibility import is_scripted
from zerobubble.runtime.stage.head_part import BuildRows, HeadName, HeadPart
from zerobubble.runtime.stage.shards import shards_of
from zerobubble.runtime.values.gradients import Gradients


@takes()
class DividedHead:
    """The `loss_fn` of a pipeline with the head divided by vocabulary over the ranks: cross entropy of `output @ weight.T + bias`.

    Use it with a schedule that has passes of a divided head, such as those of `zb.schedules.with_vocabulary`. The last stage then ends
    before the head: it returns a tensor (..., width), and the targets are row indices, (...). The loss of a microbatch is the mean over its
    tokens except those whose target is `ignore_index`, as in `torch.nn.functional.cross_entropy`. If the vocabulary does not divide evenly,
    some parts have one more row. Called with an output and targets, it computes the same loss on one device.

    Arguments:
        head: the whole head, of which each rank copies its rows, or a function `(first_row, end_row) -> nn.Linear` that makes only
            these rows, with `end_row - first_row` outputs.
        vocabulary: total number of rows, if `head` is a function.
        ignore_index: target of tokens that do not contribute to the loss.
        label_smoothing: weight of the uniform distribution in each target, from 0 to 1, as in `torch.nn.functional.cross_entropy`.
        name: name of the head in the whole model, such as "lm_head". Checkpoints store it whole, as `lm_head.weight`.

    Raises `InputError` for a head that is neither or does more than `nn.Linear`, for a missing vocabulary or one given with a whole head,
    and for smoothing outside of that range.
    """

    def __init__(
        self,
        head: nn.Linear | BuildRows,
        vocabulary: int | None = None,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        name: str = "head",
    ) -> None:
        is_whole = isinstance(head, nn.Module)
        if (is_whole and type(head) is not nn.Linear) or not callable(head):
            raise wrong("head", head, "an nn.Linear, or a function (first_row, end_row) -> nn.Linear")
        if isinstance(head, nn.Linear):
            _refuse_more_than_linear(head, "the head")
        if is_whole == (vocabulary is not None) or (vocabulary is not None and (type(vocabulary) is not int or vocabulary < 1)):
            raise wrong("vocabulary", vocabulary, "the total number of rows if head is a function, else left out")
        if type(ignore_index) is not int:
            raise wrong("ignore_index", ignore_index, "a whole number")
        if not NUMBER.accepts(label_smoothing) or not 0 <= label_smoothing <= 1:
            raise wrong("label_smoothing", label_smoothing, "a number from 0 to 1")
        if type(name) is not str or not name.strip("."):
            raise wrong("name", name, "the name of the head in the whole model, such as 'lm_head'")
        self._head = head
        self.name = name
        self.vocabulary: int = head.out_features if isinstance(head, nn.Linear) else vocabulary  # type: ignore[assignment]
        self.ignore_index = ignore_index
        self.label_smoothing = float(label_smoothing)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the mean loss of a microbatch on one device."""
        whole = self._head if isinstance(self._head, nn.Linear) else self._rows(0, self.vocabulary)
        logits, smoothing = whole(output).flatten(0, -2), self.label_smoothing
        return functional.cross_entropy(logits, target.flatten(), ignore_index=self.ignore_index, label_smoothing=smoothing)

    def __str__(self) -> str:
        return f"{self.vocabulary} rows, ignore_index {self.ignore_index}, label_smoothing {self.label_smoothing:g}, {self.name}"

    def parts(self, stages: tuple[int, ...], modules: Mapping[int, nn.Module], gradients: Gradients) -> dict[int, HeadPart]:
        """Returns the head parts of those `stages` that this rank has, registered as parameters of their `modules`.

        `gradients` says where their gradients are summed (`.grad` or `.main_grad`).
        Raises `InputError` for fewer rows than parts, and for unsuitable rows.
        """
        if self.vocabulary < len(stages):
            message = "the head has {vocabulary} rows, fewer than the {num_stages} parts into which the schedule divides it"
            raise InputError(message, vocabulary=self.vocabulary, num_stages=len(stages))
        if isinstance(self._head, nn.Linear):
            self._refuse_tied(self._head, modules)
        mine = {stage: modules[stage] for stage in stages if stage in modules}
        scripted = [stage for stage, module in mine.items() if is_scripted(module)]
        if scripted:
            message = "stage {scripted} is TorchScript, which cannot get more parameters, and has a part of a divided head"
            raise InputError(message, scripted=scripted[0], remedy="wrap the scripted module in an nn.Sequential, or do not script it")
        sharded = [stage for stage, module in mine.items() if shards_of(module, stage) is not None]
        if sharded:
            message = "stage {sharded} is sharded by FSDP2 and has a part of a divided head"
            raise InputError(message, sharded=sharded[0], remedy="leave out one of the two")
        starts = [-(-number * self.vocabulary // len(stages)) for number in range(len(stages) + 1)]
        token_weights = 1 - self.label_smoothing, self.label_smoothing / self.vocabulary
        whole, parts = HeadName(self.name, self.vocabulary), {}
        for stage, (first, end) in zip(stages, pairwise(starts), strict=True):
            if stage in mine:
                parts[stage] = HeadPart(mine[stage], self._rows, first, end, whole, gradients, *token_weights)
        return parts

    def _rows(self, first: int, end: int) -> nn.Linear:
        if isinstance(self._head, nn.Linear):
            return _copy_of(self._head, first, end)
        rows = self._head(first, end)
        if not isinstance(rows, nn.Linear) or len(rows.weight) != end - first:
            got = f"a weight of {tuple(rows.weight.shape)}" if isinstance(rows, nn.Linear) else type(rows).__name__
            message = "head({first}, {end}) must return an nn.Linear with {expected} outputs, got {got}"
            raise InputError(message, first=first, end=end, expected=end - first, got=got)
        _refuse_more_than_linear(rows, f"head({first}, {end})")
        return rows

    def _refuse_tied(self, head: nn.Linear, modules: Mapping[int, nn.Module]) -> None:
        for stage, module in modules.items():
            for name, parameter in module.named_parameters():
                if parameter is head.weight or parameter is head.bias:
                    raise InputError(
                        "the head's {parameter} is {name!r} of stage {stage}, too: a divided head is not tied to a stage; {remedy}",
                        parameter="weight" if parameter is head.weight else "bias",
                        name=name,
                        stage=stage,
                        remedy="give it a weight of its own, or keep it whole in the last stage, with tied=...",
                    )


def _refuse_more_than_linear(rows: nn.Linear, what: str) -> None:
    """Raises if `rows` do more than `nn.Linear`: parts use only the weight and the bias, and would ignore the rest."""
    hooks = (rows._forward_hooks, rows._forward_pre_hooks, rows._backward_hooks, rows._backward_pre_hooks)
    others = [name for name, _ in rows.named_parameters() if name not in ("weight", "bias")]
    faults = {
        "has hooks": any(hooks),
        f"is a {type(rows).__name__} with a forward of its own": type(rows).forward is not nn.Linear.forward or "forward" in vars(rows),
        f"has parameters other than weight and bias, {', '.join(others)}": bool(others),
    }
    if reasons := " and ".join(fault for fault, holds in faults.items() if holds):
        message = "{what} {found}, and a divided head uses only its weight and bias"
        raise InputError(message, what=what, found=reasons, remedy="give a plain nn.Linear, or keep the head whole in the last stage")


def _copy_of(head: nn.Linear, first: int, end: int) -> nn.Linear:
    rows = nn.Linear(head.in_features, end - first, bias=head.bias is not None, device="meta")
    with torch.no_grad():
        rows.weight = nn.Parameter(head.weight[first:end].detach().clone(), head.weight.requires_grad)
        if head.bias is not None:
            rows.bias = nn.Parameter(head.bias[first:end].detach().clone(), head.bias.requires_grad)
    return rows


def head_parts_of(loss_fn: object, schedule: Schedule, modules: Mapping[int, nn.Module], gradients: Gradients) -> dict[int, HeadPart]:
    """Returns the parts of the head that this rank computes in `schedule`, none if the head is not divided.

    Raises `InputError` if only one of schedule and `loss_fn` divides it.
    """
    if isinstance(loss_fn, DividedHead):
        if not schedule.has_divided_head:
            raise InputError(
                "loss_fn is a DividedHead, but schedule {schedule!r} has no passes of a divided head",
                schedule=schedule.name,
                remedy="give zb.schedules.with_vocabulary(schedule), or keep the head in the last stage and give a loss function",
            )
        return loss_fn.parts(schedule.head_parts, modules, gradients)
    if schedule.has_divided_head:
        raise InputError(
            "schedule {schedule!r} has passes of a divided head",
            schedule=schedule.name,
            remedy="give loss_fn=zb.nn.DividedHead(...) and a last stage that ends before the head, or a schedule without these passes",
        )
    return {}
