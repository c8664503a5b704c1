"""Torch calls that treat a pipeline rank as a replica are refused; the same calls on other modules are not."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.programs import programs_of, run_forked
from tests.procs.ranks import Ranks
from tests.refusals import raises, states
from zerobubble.runtime.hooks.torch_calls import COMBINING


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two ranks that are all there are: a sampler counts the ranks of the default group."""
    ranks = Ranks(2)
    yield ranks
    ranks.kill()


def clip_by_torch(group: Any) -> tuple[bool, float]:
    """Imported by name, before there was a pipeline; with one parameter and with all."""
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        before = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
        for given in (pipe.parameters(), list(pipe.parameters()), next(pipe.parameters())):
            with raises(zb.InputError, "pipe.clip_grad_norm_", argument="parameters", ranks=group.size()):
                clip_grad_norm_(given, 0.1)
        is_kept = all(torch.equal(parameter.grad, grad) for parameter, grad in zip(pipe.parameters(), before, strict=True))
        other = nn.Linear(3, 3)
        other(torch.ones(3)).sum().backward()
        clip_grad_norm_(other.parameters(), 0.1)
        norm = pipe.clip_grad_norm_(0.1).item()
        nn.utils.clip_grads_with_norm_(pipe.parameters(), 0.1, torch.tensor(norm))  # the caller has the norm of the model
    clip_grad_norm_(pipe.parameters(), 0.01)  # closed: the program may do anything with its stages
    return is_kept, torch.stack([p.grad.norm() for p in other.parameters() if p.grad is not None]).norm().item()


def test_clipping_by_the_norm_of_one_rank_is_refused(world: Ranks) -> None:
    for is_kept, norm in world.run(clip_by_torch, ranks=2):
        assert is_kept
        assert norm == pytest.approx(0.1, rel=1e-5)


def clip_by_value(group: Any) -> list[float]:
    """The largest gradient of each parameter, clipped by itself, after calls without gradients."""
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        for held in ([parameter] for parameter in pipe.parameters()):
            nn.utils.clip_grad_value_(held, 1e-3)
        elsewhere = nn.Parameter(torch.ones(3))
        for foreach in (None, True, False):
            nn.utils.clip_grad_value_([elsewhere], 1e-3, foreach=foreach)
        nn.utils.clip_grad_value_(iter(()), 1e-3)
        return [float(parameter.grad.abs().max()) for parameter in pipe.parameters() if parameter.grad is not None]


def test_clipping_by_value_passes_parameters_without_gradients(world: Ranks) -> None:
    for largest in world.run(clip_by_value, ranks=2):
        assert largest
        assert max(largest) <= 1e-3 * (1 + 1e-6)


def norms(group: Any) -> dict[str, bool]:
    """For each call, whether it is refused."""
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        gradients = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
        other = nn.Linear(3, 3)
        calls: dict[str, Any] = {
            "gradients": lambda: get_total_norm(gradients),
            "one gradient": lambda: nn.utils.get_total_norm(gradients[0], math.inf),
            "parameters": lambda: get_total_norm(pipe.parameters()),
            "LBFGS": lambda: torch.optim.LBFGS(pipe.parameters()).step(lambda: pipe.step(*batch(4))),
            "values": lambda: nn.utils.clip_grad_value_(pipe.parameters(), 0.1),
            "vector": lambda: nn.utils.parameters_to_vector(pipe.parameters()),
            "other": lambda: get_total_norm(other.parameters()),
            "measured": lambda: pipe.clip_grad_norm_(math.inf),
            "LBFGS elsewhere": lambda: torch.optim.LBFGS(other.parameters()).step(lambda: other(torch.ones(3)).sum()),
        }
        refused = {name: is_refused(call, group.size()) for name, call in calls.items()}
        COMBINING.add(__name__)
        try:
            refused["combined"] = is_refused(lambda: get_total_norm(gradients), group.size())
        finally:
            COMBINING.remove(__name__)
    return refused


def is_refused(call: Any, ranks: int) -> bool:
    try:
        call()
    except zb.InputError as error:
        states(error, ranks=ranks)
        return True
    return False


def test_norms_and_optimizers_of_the_whole_model_are_refused(world: Ranks) -> None:
    for refused in world.run(norms, ranks=2):
        assert [name for name, is_so in refused.items() if is_so] == ["gradients", "one gradient", "parameters", "LBFGS"]
    assert not any(world.run(norms, ranks=1)[0].values())


def test_the_page_on_optimizers_computes_the_norms_of_one_device(tmp_path: Path) -> None:
    _, program = programs_of("docs/optimizer.md")
    for line in run_forked(program, tmp_path, 2).splitlines():
        mine, whole = map(float, re.findall(r"[\d.]{6,}", line))
        assert mine == pytest.approx(whole, rel=1e-5)


def clip_alone(group: Any) -> float:
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        return clip_grad_norm_(pipe.parameters(), 0.1).item()


def test_a_pipeline_of_one_rank_may_be_clipped_by_torch(world: Ranks) -> None:
    assert world.run(clip_alone, ranks=1)[0] > 0.1


def sample(group: Any) -> tuple[int, int, int]:
    """The samples of this rank: with a pipeline and one replica, and without a pipeline."""
    data = TensorDataset(torch.arange(8))
    with zb.Pipeline(build, "1f1b", 4, loss_fn):
        with raises(zb.InputError, argument="num_replicas", got=dist.get_world_size(), ranks=dist.get_world_size()):
            next(iter(DataLoader(data, batch_size=2, sampler=DistributedSampler(data))))
        shared = DistributedSampler(data, num_replicas=1, rank=0)
        of_replica = sum(len(x) for (x,) in DataLoader(data, batch_size=2, sampler=shared))
        without = sum(len(x) for (x,) in DataLoader(data, batch_size=2))
    return of_replica, without, len(list(DistributedSampler(data)))


def test_a_sampler_over_all_ranks_is_refused(pair: Ranks) -> None:
    assert pair.run(sample, ranks=2) == [(8, 8, 4)] * 2
