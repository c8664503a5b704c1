"""The optimizer's step without a barrier leaves what the synchronous loop leaves, to the bit, whatever steps are clipped or left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import batch, loss_fn
from tests.procs.ranks import Ranks

LIMIT = 3.0
"""About the middle of the norms that come up."""


class Spoiled(nn.Module):
    """Passes its input on; a gradient that comes back through it is multiplied by `factor` of the step."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(x, self)  # type: ignore[no-any-return]


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, owner: Spoiled) -> Tensor:
        ctx.owner = owner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.owner.factor, None


class Normed(nn.Module):
    """BatchNorm over the width of a sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return y


def build(stage: int, num_stages: int, width: int = 6) -> nn.Module:
    """A stage with dropout and BatchNorm: its forwards use the random state and change buffers."""
    torch.manual_seed(100 + stage)
    parts: list[nn.Module] = [nn.Embedding(11, width)] if stage == 0 else []
    parts += [nn.Linear(width, width), Normed(width), nn.Tanh(), nn.Dropout(0.2), Spoiled()]
    if stage == num_stages - 1:
        parts.append(nn.Linear(width, 11))
    return nn.Sequential(*parts).double()


MAKERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
}


def spoil(pipe: zb.Pipeline, step: int, steps: int) -> None:
    """Some steps have gradients that are large, infinite or not a number, from one stage on; the first and the last among them."""
    kinds = {0: 50.0, 3: float("inf"), 5: float("nan"), 6: 1e4, 7: 1e4, steps - 1: 30.0}
    factor = kinds.get(step if step in (0, steps - 1) else step % 11, 1.0)
    if factor == 1.0 and step % 4:
        factor = 0.02
    culprit = step % pipe.schedule.num_stages
    for stage, module in pipe.modules.items():
        for part in module.modules():
            if isinstance(part, Spoiled):
                part.factor = factor if stage == culprit else 1.0


def state_of(pipe: zb.Pipeline, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters, buffers and the optimizer's state."""
    tensors = [t.detach().clone() for module in pipe.modules.values() for t in (*module.parameters(), *module.buffers())]
    for entry in optimizer.state.values():
        tensors += [torch.as_tensor(value).clone() for value in entry.values() if value is not None]
    return tensors


class Run:
    """What a rank has after training: the losses, the norms in units of the limit, its state, and how often it started a step over."""

    def __init__(self, losses: list[float], norms: list[float], state: list[Tensor], again: int) -> None:
        self.losses, self.norms, self.state, self.again = losses, norms, state, again


def train(group: Any, schedule: zb.Schedule, kind: str, steps: int, way: str | None, accumulate: int = 1) -> Run:
    """Train with clipping: synchronously without a `way` to undo."""
    count = schedule.num_microbatches
    torch.manual_seed(7 + group.rank())
    losses, norms = [], []
    with zb.Pipeline(build, schedule, count, loss_fn, group=group) as pipe:
        inner = MAKERS[kind](pipe.parameters())
        optimizer = zb.PostValidation(inner, pipe, LIMIT, undo=way) if way else None  # type: ignore[arg-type]
        calls = CountCalls(pipe)
        rate = torch.optim.lr_scheduler.StepLR(inner, 3, 0.95)
        for step in range(steps):
            for part in range(accumulate):
                spoil(pipe, step, steps)
                losses.append(pipe.step(*batch(count, seed=step * accumulate + part)).item())
            if optimizer is None:
                total = pipe.clip_grad_norm_(LIMIT)
                if total.isfinite():
                    inner.step()
                norms.append(total.item() / LIMIT)
                inner.zero_grad()
            else:
                optimizer.step()
                optimizer.zero_grad()
            rate.step()
        if optimizer is not None:
            optimizer.settle()
        return Run(losses, norms, state_of(pipe, inner), calls.forwards - steps * accumulate * calls.expected)


class CountCalls:
    """Counts the forwards of this rank's modules."""

    def __init__(self, pipe: zb.Pipeline) -> None:
        self.forwards = 0
        rows = pipe.schedule.rows
        self.expected = sum(op.kind is zb.Kind.F for op in rows[pipe.rank])
        for module in pipe.modules.values():
            module.register_forward_pre_hook(lambda *_: self.count())

    def count(self) -> None:
        self.forwards += 1


def train_both(group: Any, schedule: zb.Schedule, kind: str, steps: int, way: str, accumulate: int = 1) -> tuple[Run, Run]:
    return train(group, schedule, kind, steps, None, accumulate), train(group, schedule, kind, steps, way, accumulate)


def check_equal(pairs: list[tuple[Run, Run]]) -> None:
    for expected, found in pairs:
        assert found.losses == expected.losses
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found.state, expected.state, strict=True))
        assert expected.again == 0
    norms = pairs[0][0].norms
    clipped = [1 < norm < float("inf") for norm in norms]
    assert 0 < sum(clipped) < len(norms), norms
    assert clipped[0], norms
    assert clipped[-1], norms
    assert pairs[-1][1].again == 0, "the last rank knows before it starts"


FAMILIES = [
    ("gpipe", "adamw"),
    ("1f1b", "momentum"),
    ("interleaved-1f1b", "adam"),
    ("breadth-first", "sgd"),
    ("zb-h1", "adamw"),
    ("zb-h2", "adamw"),
    ("zb-v", "adamw"),
    ("v-half", "adagrad"),
    ("v-min", "nesterov"),
    ("hanayo", "adam"),
    ("chimera", "adamw"),
    ("dualpipe", "momentum"),
    ("dualpipe-v", "adamw"),
]


@pytest.mark.parametrize(("name", "kind"), FAMILIES)
def test_steps_equal_the_synchronous_loop_to_the_bit(world: Ranks, name: str, kind: str) -> None:
    pairs = world.run(train_both, zb.make(name, 4, 8), kind, 14, "copy", ranks=4)
    check_equal(pairs)
    assert pairs[0][1].again > 0, "the first rank ran forwards in vain"
