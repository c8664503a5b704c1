"""Checkpoints hold any state of an optimizer exactly, or the model alone, or nothing: no optimizer is left out or mistaken in silence."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.models import loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_checkpoint import MICROBATCHES, Tied, cut, train
from tests.procs.test_one_device_checkpoint import train_alone
from tests.refusals import raises
from zerobubble.errors import InputError
from zerobubble.runtime.checkpoint.nested import decoded, encoded, tensors_in


class Preconditioned(torch.optim.Optimizer):
    """Keeps preconditioners in lists as SOAP does, and in nested dicts as distributed Shampoo does."""

    def __init__(self, parameters: Any, lr: float = 0.02, sizes: Any = (1, (2, 3))) -> None:
        super().__init__(parameters, {"lr": lr, "sizes": sizes, "dtype": torch.float64})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: Tensor, lr: float) -> None:
        grad, state = parameter.grad, self.state[parameter]
        assert grad is not None
        if not state:
            state["step"] = 0
            state["GG"] = [torch.zeros(size, size, dtype=grad.dtype) if size < 12 else [] for size in grad.shape]
            state["blocks"] = {"a.b": ({0: torch.zeros_like(grad)}, None), 7: (torch.zeros(()), torch.zeros(0, 2))}
            state["words"] = ["ijk,kl", ("x", 1.5, True)]
        state["step"] += 1
        for dim, moment in enumerate(state["GG"]):
            if isinstance(moment, Tensor):
                rows = grad.movedim(dim, 0).flatten(1) if grad.dim() > 1 else grad[:, None]
                moment.add_(rows @ rows.T)
                scale = 1 + moment.diagonal().sqrt()
                grad = (grad.movedim(dim, 0) / scale.view(-1, *[1] * (grad.dim() - 1))).movedim(0, dim)
        average = state["blocks"]["a.b"][0][0]
        average.mul_(0.9).add_(grad)
        state["blocks"][7][0].add_(average.norm().float())
        parameter.sub_(lr * average / (1 + 0.01 * state["blocks"][7][0].double() + 0.1 / state["step"]))


def is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    return all(map(is_same, one, other)) and len(one) == len(other) if isinstance(one, (list, tuple)) else bool(one == other)


def alone(seed: int, make: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = Tied().double()
    return model, make(model.parameters())


def test_a_nested_form_is_decoded_to_the_same_value() -> None:
    value = {
        "GG": [torch.ones(2), [], None, (1, (2.5, "x"))],
        "GG/0": torch.zeros(1),
        "tensor": {"tensor": "GG", 3: {(1, 2): torch.ones(3)}, "3": torch.ones(4)},
        "#1": {True: torch.float16},
    }
    tensors = dict(tensors_in(value))
    assert len(tensors) == 4
    assert is_same(decoded(encoded(value), tensors), value)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=3)


def test_an_optimizer_with_nested_states_is_restored_exactly_on_one_device(tmp_path: Path) -> None:
    model, optimizer = alone(0, Preconditioned)
    train_alone(model, optimizer, range(3))
    for state in optimizer.state.values():
        state["low"] = {"precision": [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int8)]}
    zb.save(tmp_path / "last", model, optimizer)
    again, loaded = alone(1, lambda parameters: Preconditioned(parameters, 0.5, ()))
    zb.load(tmp_path / "last", again, loaded)
    assert all(map(is_same, optimizer.state.values(), loaded.state.values()))
    assert [(group["sizes"], group["lr"], group["dtype"]) for group in loaded.param_groups] == [((1, (2, 3)), 0.02, torch.float64)]
    assert train_alone(again, loaded, range(3, 6)) == train_alone(model, optimizer, range(3, 6))


def test_lbfgs_is_restored_exactly_on_one_device(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(5, 1).double() for _ in range(2)]
    x, y = torch.rand(20, 5).double(), torch.rand(20, 1).double()
    optimizers = [lbfgs(model.parameters()) for model in models]

    def closure(model: nn.Module) -> Tensor:
        model.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizers[0].step(lambda: closure(models[0]))
    zb.save(tmp_path / "last", models[0], optimizers[0])
    zb.load(tmp_path / "last", models[1], optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.step(lambda model=model: closure(model))
    assert torch.equal(models[0].weight, models[1].weight)


def preconditioned(group: Any, path: str, schedule: str, seed: int) -> list[float]:
    """The losses of three steps after saving; with another seed, after loading."""
    with zb.Pipeline(cut(seed=seed), schedule, MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = Preconditioned(pipe.parameters())
        if seed:
            zb.load(path, pipe, optimizer)
        else:
            train(pipe, optimizer, range(3))
            zb.save(path, pipe, optimizer, wait=False).wait()
        return train(pipe, optimizer, range(3, 6))


def test_nested_states_go_on_in_another_cut_and_on_one_device(world: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "last")
    before = world.run(preconditioned, path, "zb-v", 0, ranks=2)[0]
    assert world.run(preconditioned, path, "1f1b", 1, ranks=2)[0] == pytest.approx(before, rel=1e-9)
    model, optimizer = alone(1, Preconditioned)
    zb.load(path, model, optimizer)
    assert train_alone(model, optimizer, range(3, 6)) == pytest.approx(before, rel=1e-9)


class Opaque:
    """A state that no checkpoint holds."""


def refused_and_model_only(group: Any, path: str) -> tuple[list[dict[str, Any]], list[float], bool]:
    """What each wrong call states, then the losses of two steps that go on from the weights alone, and whether steps were counted anew."""
    stated: list[dict[str, Any]] = []
    with zb.Pipeline(cut(), "1f1b", MICROBATCHES, loss_fn, group=group) as pipe:
        optimizer = Preconditioned(pipe.parameters())
        other = torch.optim.AdamW(nn.Linear(3, 3).double().parameters())
        train(pipe, optimizer, range(2))
        for call in (
            pipe.state_dict,
            lambda: pipe.load_state_dict({}),
            lambda: zb.save(path, pipe),
            lambda: zb.save(path, pipe, other),
            lambda: zb.save(path, pipe, optimizer, model_only=True),
            lambda: zb.save(path, pipe, [optimizer, trained_elsewhere()]),
        ):
            with pytest.raises(zb.InputError) as caught:
                call()
            stated.append({"sentence": str(caught.value)})
        state = next(iter(optimizer.state.values()), {})
        state["object"] = [Opaque()]
        with pytest.raises(zb.InputError) as caught:
            zb.save(path, pipe, optimizer)
        stated.append({"sentence": str(caught.value)})
        assert not Path(path).exists()
        zb.save(path, pipe, extra={"seen": 2}, model_only=True)
        with pytest.raises(zb.InputError):
            zb.load(path, pipe, optimizer)
        state.pop("object")
        zb.save(f"{path} with optimizer", pipe, optimizer)
    losses = []
    for name in (path, f"{path} with optimizer"):
        with zb.Pipeline(cut(seed=1), "zb-v", MICROBATCHES, loss_fn, group=group) as pipe:
            zb.load(name, pipe, model_only=True)
            losses += train(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1), range(2))
            is_new = pipe.step_state()["num_steps"] == 2
    return stated, losses, is_new


def trained_elsewhere() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.step()
    return optimizer


def test_no_checkpoint_leaves_out_an_optimizer_or_takes_another_in_silence(world: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "last"
    of_ranks = world.run(refused_and_model_only, str(path), ranks=2)
    sentences = [stated["sentence"] for stated in of_ranks[0][0]]
    assert sentences == [stated["sentence"] for stated in of_ranks[1][0]]
    for sentence, names in zip(
        sentences,
        ("zb.save", "zb.load", "Preconditioned model_only=True", "AdamW", "optimizer", "SGD", "object Opaque model_only=True"),
        strict=True,
    ):
        assert all(name in sentence for name in names.split())
    assert all(of_rank[1:] == of_ranks[0][1:] for of_rank in of_ranks)
    _, losses, is_new = of_ranks[0]
    assert is_new
    assert losses[:2] == losses[2:]
    model = Tied().double()
    for name in (path, tmp_path / "last with optimizer"):
        assert zb.load(name, model, model_only=True) == ({"seen": 2} if name == path else {})
        assert train_alone(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2)) == pytest.approx(losses[:2], rel=1e-9)


def test_an_optimizer_of_another_model_is_refused_on_one_device(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(other.parameters())
    with raises(zb.InputError, "AdamW", 2):
        zb.save(tmp_path / "last", model, optimizer)
    zb.save(tmp_path / "last", model, torch.optim.AdamW(model.parameters()))
    with raises(zb.InputError, "AdamW", 2):
        zb.load(tmp_path / "last", model, optimizer)
    with raises(zb.InputError, argument="optimizer and scaler"):
        zb.load(tmp_path / "last", model, optimizer, scaler=torch.amp.GradScaler("cpu"), model_only=True)


def test_a_placeholder_in_an_optimizer_is_not_trained_and_not_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.requires_grad_(False)
    zb.save(tmp_path / "last", model, torch.optim.AdamW([nn.Parameter(torch.zeros(1))]))


@pytest.mark.long
def test_the_first_use_of_a_name_moves_no_generator_of_the_program() -> None:
    """A library that zerobubble imports may draw from Python's generator when it is imported."""
    program = "import random, numpy, torch, zerobubble as zb\n" + "\n".join(
        (
            "def now(): return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()",
            "before = now()",
            "for name in zb.__dir__(): getattr(zb, name)",
            "from zerobubble.runtime.measure.profile import progress_reporter",
            "with progress_reporter(None, 0): pass",
            "assert now() == before",
        )
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def recut(group: Any, path: str, saves: bool) -> tuple[list[float], str]:
    """Differences of losses from one device over two pipelines, with the model cut elsewhere; or the error.

    One optimizer trains both, or each has its own, with the states `saves` and loads.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    single, x = copy.deepcopy(model), torch.rand(4, 4, dtype=torch.float64)
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, single))
    found = []
    for cut_at in ("2", "1"):
        pipe = zb.Pipeline(zb.split(model, example=x, cuts=[cut_at]), "1f1b", 2, nn.functional.mse_loss, group=group)
        ours = torch.optim.Adam(pipe.parameters(), lr=0.01) if saves else ours
        if saves and cut_at == "1":
            zb.load(path, pipe, ours)
        for _ in range(2):
            loss = nn.functional.mse_loss(single(x), x)
            loss.backward()
            found.append(float(abs(pipe.step(x, x) - loss.detach())))
            theirs.step(), theirs.zero_grad()
            try:
                ours.step()
            except InputError as error:
                return found, str(error)
            ours.zero_grad()
            if cut_at == "1" and not saves and pipe.rank == 0:
                return found, ""
        if saves and cut_at == "2":
            zb.save(path, pipe, ours)
        with zb.gathered(model):
            pipe.close()
    return found, ""


def test_an_optimizer_of_another_cut_is_refused_or_takes_its_states_along(world: Ranks, tmp_path: Path) -> None:
    (_, first), (_, second) = world.run(recut, str(tmp_path / "never"), False, ranks=2)
    assert (first, "zb.load" in second) == ("", True)
    for found, error in world.run(recut, str(tmp_path / "saved"), True, ranks=2):
        assert (error, len(found)) == ("", 4)
        assert max(found) < 1e-12
