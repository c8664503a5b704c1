"""Global settings and random generators of the user's process: calls give the same numbers under the former, and leave the latter alone.

The settings are the default dtype and device, the grad and inference modes, autocast, deterministic algorithms, and errors of NumPy and of
warnings. The generators are torch's, Python's and NumPy's.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE, cpu_only
from tests.procs.ranks import Ranks
from tests.procs.versions import needs_steps_under_a_default_device
from zerobubble.runtime.device import interface

M, WIDTH = 4, 6
Setting = Callable[[], AbstractContextManager[Any]]


class Net(nn.Module):
    """Four blocks with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(stage_of() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def stage_of(*_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64, device=DEVICE), nn.Dropout(0.1), nn.Tanh())


def numbers(seed: int) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(2 * M, WIDTH, generator=generator, dtype=torch.float64, device="cpu").to(DEVICE)


def states() -> dict[str, Any]:
    device = interface(DEVICE)
    kind, words, *rest = np.random.get_state()
    return {
        "torch": torch.default_generator.get_state().tolist(),
        "device": device.random_state().tolist() if device.has_generator else None,
        "python": random.getstate(),
        "numpy": (kind, words.tolist(), *rest),
    }


class Calls:
    """Makes calls under a setting, and notes those that move a generator."""

    def __init__(self, setting: Setting = nullcontext) -> None:
        self.moved: list[tuple[str, str]] = []
        self.names: list[str] = []
        self._setting = setting

    def __call__(self, call: Callable[..., Any], *args: Any, trains: bool = False, **kwargs: Any) -> Any:
        name, before = getattr(call, "__name__", str(call)), states()
        with nullcontext() if trains else self._setting():
            result = call(*args, **kwargs)
        self.names.append(name)
        self.moved += [(name, what) for what, state in states().items() if state != before[what]]
        return result


def used(group: Any, calls: Calls, folder: str, way: str) -> list[float]:
    """What a run that makes most public calls reports: losses, norms, and first weights."""
    x, y, found = numbers(0), numbers(1), []
    torch.manual_seed(3)
    stages: Any = stage_of
    if way == "split":
        stages = calls(zb.split, Net(), example=x[:2])
    pipe = calls(zb.Pipeline, stages, "zb-h1", M, nn.functional.mse_loss, group=group, hooks=[zb.hooks.Telemetry(lambda _: None, 1e9)])
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=512.0)
    for _ in range(2):
        found.append(calls(pipe.step, x, y, scaler=scaler, trains=True))
        calls(pipe.unscale_, scaler, optimizer)
        found.append(calls(pipe.clip_grad_norm_, 0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found.append(calls(pipe.eval_step, x, y)[0])
    found.append(calls(lambda: pipe.eval_step(x * 2, y * 2))[0])
    calls(pipe.timeline)
    costs = calls(pipe.profile, x, y, steps=1, trains=True)
    calls(pipe.describe, x, y, trains=True)
    if way == "split":
        calls(pipe.profile_layers, x, y, steps=1, trains=True)
    calls(pipe.memory_forecast, costs)
    calls(pipe.load_step_state, calls(pipe.step_state))
    calls(zb.save, folder, pipe, optimizer)
    calls(zb.load, folder, pipe, optimizer)
    found.append(calls(pipe.step, x, y, trains=True))
    optimizer.step()
    validated = calls(zb.PostValidation, optimizer, pipe, max_norm=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        found.append(calls(pipe.step, x, y, trains=True))
        calls(validated.step)
    calls(pipe.close)
    return [float(value) for value in (*found, *(p.detach().flatten()[0] for p in pipe.parameters()))]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def strict() -> Iterator[None]:
    with warnings.catch_warnings(), np.errstate(all="raise"), torch.autograd.set_multithreading_enabled(False):
        warnings.simplefilter("error")
        yield


WHOLE: dict[str, Setting] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "strict": strict,
}
"""Settings of a whole run. A tensor that is made without its device is one without numbers."""
OUTSIDE_OF_STEPS: dict[str, Setting] = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
"""Settings in which steps cannot train, or compute other numbers."""
MARKS = {"meta": needs_steps_under_a_default_device}


def under(group: Any, folder: str, setting: str, way: str) -> tuple[list[float], list[float]]:
    """What a run reports by default, and under a setting."""
    plain = used(group, Calls(), folder, way)
    with WHOLE.get(setting, nullcontext)():
        return plain, used(group, Calls(OUTSIDE_OF_STEPS.get(setting, nullcontext)), folder, way)


@pytest.mark.sweep
@pytest.mark.parametrize("way", ["build", "split"])
@pytest.mark.parametrize("setting", [pytest.param(name, marks=MARKS.get(name, ())) for name in (*WHOLE, *OUTSIDE_OF_STEPS)])
@cpu_only("the setting is that of the CPU")
def test_settings_of_the_user_change_no_number(world: Ranks, tmp_path: Path, setting: str, way: str) -> None:
    for plain, other in world.run(under, str(tmp_path / "run"), setting, way, ranks=2):
        assert other == pytest.approx(plain, rel=0 if setting == "strict" else 1e-12)


def moved_by(group: Any, folder: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The names of calls, and those that move a generator."""
    calls = Calls()
    for way in ("build", "split"):
        used(group, calls, f"{folder}/{way}", way)
    torch.manual_seed(group.rank())
    modules = [stage_of()]
    with calls(zb.Pipeline, modules, zb.Auto(), M, nn.functional.mse_loss, group=group) as pipe:
        for step in range(3):
            calls(pipe.step, numbers(step), numbers(step), trains=True)
    plan = calls(zb.plan, zb.Costs.uniform(2), M, placements=zb.Placement.linear(2), seconds=0.1)
    calls(zb.simulate, plan.schedule, zb.Costs.uniform(2))
    calls(zb.make, "zb-h1", 2, M)
    return calls.names, calls.moved


def test_no_call_moves_a_generator_of_the_user(world: Ranks, tmp_path: Path) -> None:
    for names, moved in world.run(moved_by, str(tmp_path), ranks=2):
        assert {"Pipeline", "split", "step", "eval_step", "profile", "describe", "save", "load", "plan"} <= set(names)
        assert moved == []


def test_pipelines_made_after_other_draws_have_other_seeds(world: Ranks) -> None:
    for same, other in world.run(seeds, ranks=2):
        assert same[0] == same[1]
        assert other != same[0]


def seeds(group: Any) -> tuple[list[int], int]:
    """The seeds of pipelines made after the same number of draws, and of another after one more."""
    found = []
    for num_draws in (1, 1, 2):
        torch.manual_seed(3)
        torch.rand(num_draws)
        with zb.Pipeline(stage_of, "1f1b", M, nn.functional.mse_loss, group=group) as pipe:
            found.append(pipe.step_state()["draws_seed"])
    return found[:2], found[2]


def anomalies(group: Any) -> list[str]:
    """The errors that anomaly mode reports while a pipeline is made and steps."""
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        with zb.Pipeline(zb.split(Net(), example=numbers(0)[:2]), "zb-h1", M, nn.functional.mse_loss, group=group) as pipe:
            pipe.step(numbers(0), numbers(1))
        assert torch.is_anomaly_enabled()
    return [str(warning.message) for warning in caught if "Error detected" in str(warning.message)]


def test_anomaly_mode_reports_no_error_of_probing_passes(world: Ranks) -> None:
    assert world.run(anomalies, ranks=2) == [[], []]
