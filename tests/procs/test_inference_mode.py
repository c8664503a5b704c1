"""Calls inside `torch.inference_mode` leave normal tensors: training goes on with the numbers of one device. A step there is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.ranks import Ranks
from tests.refusals import raises

pytestmark = cpu_only("compares with one device")
VOCABULARY, WIDTH, MICROBATCHES = 9, 4, 4
TOLERANCE = 1e-9


class Late(nn.Module):
    """Returns a buffer that the first forward makes."""

    factor: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", None)

    def forward(self) -> Tensor:
        if self.factor is None:
            self.factor = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
        return self.factor


class Frozen(nn.Module):
    """Returns a parameter that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((WIDTH,), 0.9), requires_grad=False)

    def forward(self) -> Tensor:
        return self.factor


class Cached(nn.Module):
    """Returns a tensor that the first forward makes."""

    def __init__(self) -> None:
        super().__init__()
        self.factor: Tensor | None = None

    def forward(self) -> Tensor:
        if self.factor is None:
            self.factor = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
        return self.factor


class Block(nn.Module):
    """A linear layer whose output a module that blocks share multiplies."""

    def __init__(self, shared: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return x + (y if self.shared is None else y * self.shared())


class Net(nn.Module):
    """A language model of residual blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        shared = {"frozen": Frozen, "cached": Cached, "late": Late}.get(kind, lambda: None)()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if kind == "tied":
            self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind).double()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.transpose(1, 2), target)


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (8, 3), generator=torch.Generator().manual_seed(1))


def on_one_device(kind: str) -> list[float]:
    """The losses of evaluations and training steps, each evaluation without gradients."""
    model, x, losses = net(kind), tokens(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for length in (3, 2):
        with torch.no_grad():
            losses.append(float(loss_fn(model(x[:, :length]), x[:, :length])))
        loss = loss_fn(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def evaluates_between_steps(group: Any, kind: str, folder: str) -> tuple[list[float], float]:
    """The same losses, each evaluation in inference mode, and the largest difference that the calls between leave in a saved model."""
    model, x, losses = net(kind), tokens(), []
    with torch.inference_mode():
        if kind == "late":
            model(x)
        pipe = zb.Pipeline(zb.split(model, example=x[:2]), "zb-v", MICROBATCHES, loss_fn, group=group)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.1)
    difference = 0.0
    for length, num_microbatches in ((3, 4), (2, 2)):
        with torch.inference_mode():
            part = x[:, :length].clone()
            losses.append(float(pipe.eval_step(part, part, num_microbatches=num_microbatches)[0]))
        losses.append(float(pipe.step(x, x)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            zb.save(folder, pipe, optimizer)
            zb.load(folder, pipe, optimizer)
            with zb.gathered(model):
                saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                model(x)
                model.load_state_dict(saved)
            pipe.clip_grad_norm_(1.0)
        with zb.gathered(model):
            difference = max(difference, *(float((tensor - saved[name]).abs().max()) for name, tensor in model.state_dict().items()))
    assert not any(parameter.is_inference() for parameter in model.parameters())
    pipe.close()
    return losses, difference


@pytest.mark.parametrize("kind", ["plain", "tied", "frozen", "cached", "late"])
def test_training_goes_on_after_calls_in_inference_mode(world: Ranks, tmp_path: Any, kind: str) -> None:
    for losses, difference in world.run(evaluates_between_steps, kind, str(tmp_path / "checkpoint"), ranks=2):
        assert losses == pytest.approx(on_one_device(kind), rel=TOLERANCE)
        assert difference == 0


def takes_inference_tensors(group: Any) -> list[float]:
    """The losses of a batch that was made in inference mode, less those of a normal copy."""
    model, x = net("plain"), tokens()
    with torch.inference_mode():
        made = x.clone()
    with zb.Pipeline(zb.split(model, example=made[:2]), "zb-v", MICROBATCHES, loss_fn, group=group) as pipe:
        results = [(pipe.step(y, y), pipe.step([*y.chunk(4)], [*y.chunk(4)]), pipe.eval_step(y, y)[0]) for y in (x, made)]
        for call in (pipe.step, pipe.profile, pipe.describe):
            with torch.inference_mode(), raises(zb.InputError, "torch.inference_mode"):
                call(x, x)  # type: ignore[operator]
        pipe.step(x, x)
    return [float(ours - theirs) for ours, theirs in zip(*results, strict=True)]


def test_a_step_takes_inference_tensors_and_is_refused_in_inference_mode(world: Ranks) -> None:
    for differences in world.run(takes_inference_tensors, ranks=2):
        assert differences == [0, 0, 0]


def refuses_the_model(group: Any) -> str:
    with torch.inference_mode():
        model = copy.deepcopy(net("plain"))
    with pytest.raises(zb.InputError) as caught:
        zb.split(model, example=tokens())
    return str(caught.value.fields["name"])


def test_a_model_that_was_made_in_inference_mode_is_refused(world: Ranks) -> None:
    assert set(world.run(refuses_the_model, ranks=2)) == {"token.weight"}
