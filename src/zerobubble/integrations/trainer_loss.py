"""The losses of a trainer's batches: loss and gradients are those of one call of `compute_loss` for the whole batch.

`compute_loss` runs for each microbatch: on every rank up to the call of the model, to capture the arguments of the call, and once more on
the rank of the last stage (see `loss_calls`). What it divides by is found out from a few samples of a batch (see `loss_probe`), before the
first step, before steps 2, 4, 8 and so on, and before a step in which the rules that have applied so far differ, with a larger or smaller
label than before, or with another mode of the trainer. So a step costs no further call. After a step whose loss is the first that is not
finite, it is found out again: terms over a batch, such as a standard deviation, have no number for a single sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerobubble.errors import InputError
from zerobubble.integrations.batches import cut, num_samples, samples_of
from zerobubble.integrations.loss_calls import ATTRIBUTE, LOGGED, Called, LossCalls, Microbatches, number_in
from zerobubble.integrations.loss_probe import LOSS, Probe, Prober
from zerobubble.integrations.loss_rules import (
    IGNORED,
    OFTEN_IGNORED,
    SUM,
    Rule,
    are_near,
    differ,
    extremes,
    rules_of,
    shares_differ,
    shares_of,
    telling_samples,
)
from zerobubble.integrations.over_replicas import reduce_over_replicas
from zerobubble.integrations.stream_ends import nums_counted
from zerobubble.runtime.frameworks import RandomStates, drawn_seed, join_outputs

COUNTED = ("current_flos", "current_gradient_accumulation_steps", "is_in_train")
"""Attributes in which Trainer counts."""


@dataclass
class Batch(Microbatches):
    """A batch in microbatches.

    Attributes:
        sizes: The numbers of samples of the microbatches.
        factor: The factor of the loss of the batch.
        states_before: The random states before all captures.
        states_after: The random states after all captures.
        rules: How each number of the batch follows from the numbers of microbatches.
        share_of_replica: The factor of the loss of this replica in that of all replicas.
        shares: The factor of the loss of each microbatch in the loss of the batch.
        called: By microbatch, what `compute_loss` gave, on the rank that computes the losses. Losses have no gradients.
    """

    sizes: list[int] = field(default_factory=list)
    factor: float = 1.0
    states_before: RandomStates | None = None
    states_after: RandomStates | None = None
    rules: dict[str, Rule] = field(default_factory=dict)
    share_of_replica: float = 1.0
    shares: list[float] = field(default_factory=list)
    called: dict[int, Called] = field(default_factory=dict)

    def joined_outputs(self) -> Any:
        """Returns the outputs that `compute_loss` returned for the microbatches, joined."""
        return join_outputs([self.called[index].outputs for index in range(len(self.parts))], self.sizes, takes_first=True)


class TrainerLoss:
    """The losses of a trainer's batches.

    Args:
        trainer: The trainer, a `PipelineMixin`.
        weight: What the user gave as `loss_weight`.
        dims: The batch dimensions of arguments that have another one than the first.
        covered: The attributes that `compute_loss` changes and the trainer's class merges itself.
    """

    def __init__(self, trainer: Any, weight: Any, dims: Mapping[str, int | None], covered: tuple[str, ...]) -> None:
        self._trainer = trainer
        self._weighted = None if weight is None else Rule("a mean with the weights of loss_weight", weight)
        self._dims = dims
        self._mean_over_samples = Rule("a mean over samples", lambda batch: num_samples(batch, dims))
        self._calls = LossCalls(trainer, covered)
        self._prober = Prober(trainer, self._calls, dims)
        self._rules: dict[tuple[bool, tuple[str, ...]], dict[str, list[Rule]]] = {}
        self._num_steps = {True: 0, False: 0}
        self._extremes: dict[tuple[bool, str], tuple[int, int]] = {}
        self._modes: dict[bool, dict[str, Any]] = {}
        self._draws = {True: False, False: False}
        self._is_finite = True
        self._batch: Batch | Probe | None = None

    # A batch

    def num_microbatches(self, inputs: Any) -> int:
        """Returns the number of microbatches of a batch: fewer than usual for a batch with fewer samples."""
        return min(num_samples(inputs, self._dims), self._trainer._num_microbatches)

    def begin(
        self, inputs: Any, items: Any, factor: float, count: int, *, trains: bool, returns_outputs: bool = False, counted: Any = None
    ) -> Batch:
        """Returns `count` microbatches of a batch with the arguments of the model for each, after finding out the rules if that is due.

        The microbatches have the `counted` samples of the batch, by default all. The rules are found out from all.
        """
        parts, sizes = cut(inputs if counted is None else counted, count, self._dims)
        batch = Batch(parts, trains, items, returns_outputs, sizes=sizes, factor=factor)
        key = trains, tuple(name for name, value in inputs.items() if value is not None)
        self._num_steps[trains] += 1
        rules = self._rules.get(key, {})
        self._calls.filled = self._filled(inputs)
        is_new = self._has_new_labels(inputs, trains=trains) | self._has_new_modes(trains=trains) | bool(self._calls.filled)
        if self._is_due(rules, batch, is_new=is_new):
            rules = self._rules[key] = self._found_out(inputs, batch, rules)
        batch.rules = {name: left[0] for name, left in rules.items()}
        batch.shares = batch.rules[LOSS].shares(batch.parts)
        if (replicas := self._trainer._num_replicas) > 1:
            batch.share_of_replica = self._share_of_replica(batch, rules[LOSS])
            batch.factor *= replicas * batch.share_of_replica  # gradients are averaged over replicas
        self._capture(batch)
        self._batch = batch
        return batch

    def _has_new_labels(self, inputs: Any, *, trains: bool) -> bool:
        """Returns whether a batch has a larger or smaller label than all batches before."""
        before = dict(self._extremes)
        for name, (low, high) in extremes(inputs, self._trainer.label_names or ()).items():
            lowest, highest = before.get((trains, name), (low, high))
            self._extremes[trains, name] = min(low, lowest), max(high, highest)
        return before != self._extremes

    def _has_new_modes(self, *, trains: bool) -> bool:
        """Returns whether a public attribute of the trainer that chooses among forms of a loss, a flag, a whole number or a string, is
        another one than before. `compute_loss` may count others itself."""
        counted = {name.removeprefix(ATTRIBUTE) for rules in self._rules.values() for name in rules} | {*COUNTED}
        before = self._modes.get(trains)
        modes = {name: value for name, value in vars(self._trainer).items() if type(value) in (bool, int, str) and not name.startswith("_")}
        self._modes[trains] = modes
        return before is not None and any(before.get(name) != value for name, value in modes.items() if name not in counted)

    def _is_due(self, rules: dict[str, list[Rule]], batch: Batch, *, is_new: bool) -> bool:
        """Returns whether the rules must be found out before this batch, the same on all ranks."""
        step = self._num_steps[batch.trains]
        due = not rules or is_new or step & (step - 1) == 0 or any(differ(left, batch.parts) for left in rules.values())
        return self._in_any_replica(due)

    def _filled(self, inputs: Any) -> list[int]:
        """Returns, for each replica, how many samples of a batch that others fill count; nothing if all count."""
        samples, replicas = num_samples(inputs, self._dims), self._trainer._num_replicas
        counts = nums_counted(self._trainer.accelerator, samples, replicas)
        return counts if counts[-1] < samples else []

    def _in_any_replica(self, flag: bool) -> bool:
        """Returns whether a flag, which all ranks of a replica share, is set in any replica."""
        if self._trainer._num_replicas == 1:
            return flag
        flags = torch.tensor(int(flag), device=self._trainer.args.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._trainer._same_stages)
        return bool(flags)

    def arguments_of(self, inputs: Any) -> dict[str, Any]:
        """Returns the arguments with which `compute_loss` calls the model for a batch, before there is a pipeline."""
        batch = Batch([inputs], True, None)
        self._calls.capture(batch, 0, keeps=False, compares=True)
        return batch.arguments[0]

    def weight(self, index: Tensor) -> float:
        """Returns the weight of a microbatch in the pipeline's mean loss. The weights of a batch sum up to 1."""
        batch = self._batch
        assert batch is not None
        return 1 / len(batch.parts) if isinstance(batch, Probe) or batch.rules[LOSS].divisor is None else batch.shares[int(index)]

    def loss(self, output: Any, index: Tensor) -> Tensor:
        """Returns the loss of a microbatch for the pipeline's mean: that of `compute_loss`, times the number of microbatches if it sums."""
        batch = self._batch
        assert batch is not None
        if isinstance(batch, Probe):
            return self._prober.answer(batch, output, int(index))
        called = self._calls.call(batch, int(index), output)
        batch.called[int(index)] = called._replace(loss=called.loss.detach())
        factor = batch.factor * (len(batch.shares) if batch.rules[LOSS].divisor is None else 1)
        return called.loss if factor == 1 else called.loss * factor

    def finish(self, batch: Batch) -> None:
        """Ends a batch on every rank: random states, numbers among the trainer's attributes, and logs are alike on all of them."""
        self._batch = None
        if batch.states_after is not None:
            batch.states_after.set()
        if len(batch.rules) > 1:
            attributes, logs = self._trainer._from_last_stage(self._merged(batch) if batch.called else None)
            vars(self._trainer).update(attributes)
            for row in logs:
                self._trainer.log(row)

    def check(self, batch: Batch, inputs: Any, loss: Tensor) -> None:
        """Finds out the rules of a batch again, before the optimizer steps, if its loss is the first that is not finite."""
        was_finite, self._is_finite = self._is_finite, not self._in_any_replica(not loss.isfinite())
        if was_finite and not self._is_finite and len(batch.parts) > 1:
            self._found_out(inputs, batch, {name: [rule] for name, rule in batch.rules.items()})

    def drop(self, batch: Batch) -> None:
        """Ends a batch as if it had not begun: random states are those before it, and it logs nothing."""
        self._batch = None
        if batch.states_before is not None:
            batch.states_before.set()

    def own_loss(self, batch: Batch) -> Tensor:
        """Returns the loss of this replica's batch, on the rank that computes the losses."""
        return torch.stack([batch.called[index].loss * share for index, share in enumerate(batch.shares) if share]).sum()

    def loss_of_replicas(self, batch: Batch, loss: Tensor) -> Tensor:
        """Returns the loss of one call of `compute_loss` for the batches of all replicas, given that of this one. All ranks call it."""
        if self._trainer._num_replicas == 1:
            return loss
        own = loss * batch.share_of_replica if batch.share_of_replica else torch.zeros_like(loss)
        loss_of_all: Tensor = reduce_over_replicas(self._trainer._same_stages, own)
        return loss_of_all

    @contextmanager
    def _raised_in_all_replicas(self) -> Iterator[None]:
        """A context after which all ranks raise the `InputError` of the first replica that has raised one, instead of waiting for it."""
        trainer, error = self._trainer, None
        try:
            yield
        except InputError as own:
            error = own
        if trainer._num_replicas > 1:
            errors: list[InputError | None] = [None] * trainer._num_replicas
            dist.all_gather_object(errors, error, group=trainer._same_stages)
            error = next(filter(None, errors), None)
        if error is not None:
            raise error

    def _share_of_replica(self, batch: Batch, rules: Sequence[Rule]) -> float:
        """Returns the factor of the loss of this replica in that of all replicas. Raises `InputError` if the rules give several factors."""
        trainer = self._trainer
        if all(rule.divisor is None for rule in rules):
            return 1.0 if trainer._is_counted else 0.0
        own = [sum(map(rule.divisor, batch.parts)) if rule.divisor and trainer._is_counted else 0.0 for rule in rules]
        counts = trainer._gather_among_replicas(torch.tensor([own], dtype=torch.float64, device=trainer.args.device)).T.tolist()
        shares = [shares_of(of_rule if rule.divisor else [None] * len(of_rule)) for rule, of_rule in zip(rules, counts, strict=True)]
        if shares_differ(shares):
            raise InputError(
                "the loss of {count} replicas is {rules}, and their samples leave open which",
                count=trainer._num_replicas,
                rules=" or ".join(rule.name for rule in rules),
                remedy="give loss_weight, which returns what the mean of a microbatch divides by",
            )
        return shares[0][trainer._replica]

    def _merged(self, batch: Batch) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Returns the new values of attributes, and the logs, of the whole batch."""
        numbers = [batch.called[index].numbers for index in range(len(batch.parts))]
        merged = {}
        for name, rule in batch.rules.items():
            shares = rule.shares(batch.parts)
            merged[name] = sum(share * of_one.get(name, 0.0) for share, of_one in zip(shares, numbers, strict=True) if share)
        attributes = {}
        for name in (name for name in merged if name.startswith(ATTRIBUTE) and any(name in of_one for of_one in numbers)):
            is_whole = all(isinstance(of_one.get(name, 0), int) for of_one in numbers)
            attribute = name.removeprefix(ATTRIBUTE)
            attributes[attribute] = number_in(self._trainer, attribute) + (round(merged[name]) if is_whole else merged[name])
        rows = [
            {key: merged.get(f"{LOGGED}{place} {key}", value) for key, value in row.items()}
            for place, row in enumerate(batch.called[0].rows)
        ]
        return attributes, rows

    def _capture(self, batch: Batch) -> None:
        """Captures the arguments of the model for each microbatch, with the random states of each if random numbers are drawn."""
        device = self._trainer.args.device
        batch.states_before = before = RandomStates.now(device)
        draws = self._draws[batch.trains]
        self._capture_all(batch, keeps=draws)
        after = RandomStates.now(device)
        if not after.is_same_as(before) and not draws:
            self._draws[batch.trains] = draws = True
            before.set()
            self._capture_all(batch, keeps=True)
        if draws:
            batch.seed = int(drawn_seed())
        batch.states_after = RandomStates.now(device) if draws else after

    def _capture_all(self, batch: Batch, *, keeps: bool) -> None:
        batch.arguments, batch.is_compared = [], keeps
        for index in range(len(batch.parts)):
            self._calls.capture(batch, index, keeps=keeps)

    # The rules

    def _found_out(self, inputs: Any, batch: Batch, before: dict[str, list[Rule]]) -> dict[str, list[Rule]]:
        """Returns, by name of a number, the rules that may apply to the samples of a batch, of which those of the loss are alike for it.

        Raises `InputError` on every rank if there are no such rules.
        """
        of_model = getattr(getattr(self._trainer.model, "config", None), "semantic_loss_ignore_index", IGNORED)
        ignored = tuple(dict.fromkeys((of_model, *OFTEN_IGNORED)))
        shifts = self._trainer._loss_shifts_labels
        candidates = rules_of(inputs, lambda batch: num_samples(batch, self._dims), shifts=shifts, ignored=ignored)
        candidates += [self._weighted] if self._weighted else []
        is_whole = self._trainer._num_microbatches == 1
        with self._raised_in_all_replicas():
            probe = self._probed(inputs, self._rows(inputs, candidates), batch.items, trains=batch.trains)
            names = dict.fromkeys(name for comparison in probe.comparisons for numbers in comparison.numbers for name in numbers)
            if is_whole:
                rules = {name: [self._rule_of_whole_batch(probe)] for name in names}
            else:
                rules = {name: self._fitting(candidates, name, probe, before.get(name, candidates)) for name in names}
        if is_whole:
            return self._agreed(rules)
        for seed in range(self._prober.num_tries):
            if not self._in_any_replica(differ(rules[LOSS], batch.parts)):
                break
            self._play(probe, seed)
            rules[LOSS] = self._left(rules[LOSS], LOSS, probe) or rules[LOSS]
        rules = self._agreed(rules)
        if self._in_any_replica(differ(rules[LOSS], batch.parts)):
            raise InputError(
                "the loss of {name} is {rules}, and its samples leave open which",
                name=self._calls.name,
                rules=" or ".join(rule.name for rule in rules[LOSS]),
                remedy="give loss_weight, which returns what the mean of a microbatch divides by",
            )
        return rules

    def _rule_of_whole_batch(self, probe: Probe) -> Rule:
        """Returns how the loss of all replicas follows from theirs, which are not cut: as a sum if each is a share of all items."""
        first, *rest = [comparison.numbers[0][LOSS] for comparison in probe.comparisons]
        tolerance = probe.comparisons[0].tolerance
        is_share = all(are_near(2 * loss, first, tolerance, [first]) for loss in rest)
        if not is_share and not are_near(rest[0], first, tolerance, [first]):
            raise InputError(
                "the loss of {name} is {got} for {count} items and {expected} for twice as many, so that of replicas does not follow",
                name=self._calls.name,
                got=first,
                expected=rest[0],
                count=int(probe.items),
                remedy="divide all terms by num_items_in_batch, or none",
            )
        return SUM if rest and is_share else self._mean_over_samples

    def _agreed(self, rules: dict[str, list[Rule]]) -> dict[str, list[Rule]]:
        """Returns the rules that numbers may follow in all replicas."""
        if self._trainer._num_replicas == 1:
            return rules
        everywhere: list[Any] = [None] * self._trainer._num_replicas
        names = {name: [rule.name for rule in left] for name, left in rules.items()}
        dist.all_gather_object(everywhere, names, group=self._trainer._same_stages)
        agreed = {
            name: [rule for rule in left if all(rule.name in of_one.get(name, [rule.name]) for of_one in everywhere)]
            for name, left in rules.items()
        }
        if wrong := [name for name, left in agreed.items() if not left]:
            found = " or ".join(of_one[wrong[0]][0] for of_one in everywhere)
            raise InputError("{name} is {got} in different replicas", name=wrong[0], got=found, remedy="give all samples one rule")
        return agreed

    def _rows(self, inputs: Any, candidates: list[Rule]) -> list[int]:
        """Returns the samples of a batch that distinguish the most rules."""
        samples = [samples_of(inputs, [row], self._dims) for row in range(num_samples(inputs, self._dims))]
        return telling_samples(samples, candidates, extremes(inputs, self._trainer.label_names or ()))

    def _probed(self, inputs: Any, rows: list[int], items: Any, *, trains: bool) -> Probe:
        """Returns a probe of these samples, the same on every rank, or raises `InputError` for what of `compute_loss` cannot run."""
        probe = self._prober.prepared(inputs, rows, items, trains=trains)
        self._play(probe)
        if probe.faults:
            raise InputError("{faults}", faults=probe.faults[0])
        self._draws[trains] |= probe.draws
        return probe

    def _play(self, probe: Probe, seed: int | None = None) -> None:
        self._batch = probe
        self._prober.play(probe, seed)
        self._batch = None

    def _left(self, rules: list[Rule], name: str, probe: Probe) -> list[Rule]:
        """Returns the rules that a number follows in all comparisons of a probe."""
        return [rule for rule in rules if all(one.fits(rule, name, probe.samples_of(one)) for one in probe.comparisons)]

    def _fitting(self, candidates: list[Rule], name: str, probe: Probe, before: list[Rule]) -> list[Rule]:
        """Returns the rules that a number follows in all comparisons, of those that it has followed so far."""
        is_weighted = self._weighted is not None and name == LOSS
        allowed = [self._weighted] if self._weighted is not None and is_weighted else candidates
        allowed = [rule for rule in allowed if any(rule.name == other.name for other in before)]
        left = self._left(allowed, name, probe)
        if left or (is_weighted and self._draws[probe.trains]):
            return left or allowed
        raise self._refused(name, allowed, probe)

    def _refused(self, name: str, allowed: list[Rule], probe: Probe) -> InputError:
        """Returns the error for a number, with the comparison that most rules break."""
        draws, is_weighted = self._draws[probe.trains], self._weighted in allowed[:1]
        broken = [sum(not one.fits(rule, name, probe.samples_of(one)) for rule in allowed) for one in probe.comparisons]
        alone, together = probe.comparisons[broken.index(max(broken))].of(name)
        if name != LOSS:
            reason = ""
            remedy = "log it in a callback" if name.startswith(LOGGED) else "count it in a callback"
        elif is_weighted:
            reason, remedy = ": not a mean with the weights of loss_weight", "let it return what the loss divides by"
        else:
            reason = ", and random numbers that it draws for each sample hide the rule" if draws else ""
            weighted = (
                "if it is a mean, give loss_weight, which returns what the mean of a microbatch divides by, such as lambda inputs: "
                'class_weights[inputs["labels"]].sum(); '
            )
            remedy = (
                ("draw them in the data collator; " if draws else "")
                + (weighted if min(alone) <= together <= max(alone) else "no weights of samples make it a mean; ")
                + "a loss that compares samples, or adds means over different things, needs num_microbatches=1"
            )
        return InputError(
            "{name} in {cls}.compute_loss is neither a sum nor a mean over samples, labels or tokens: {got} for {count} samples alone, "
            "{expected} for all of them{reason}",
            name=name,
            cls=type(self._trainer).__name__,
            got=", ".join(f"{number:.6g}" for number in alone),
            count=len(alone),
            expected=f"{together:.6g}",
            reason=reason,
            remedy=remedy,
        )
