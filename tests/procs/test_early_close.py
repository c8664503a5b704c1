"""A rank that closes its pipeline cuts off no rank that still reads: the last messages of any call arrive, however late they are read.

Each call is made twice. The first time counts the exchanges of the late rank. The second time, the late rank stops before it waits for the
last of them, until the other rank has closed the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.procs.ranks import Ranks
from tests.procs.signs import await_signs
from zerobubble.runtime.transport.gloo import GlooEndpoint
from zerobubble.runtime.transport.work import Work

X, Y = torch.rand(8, 4), torch.rand(8, 4)
Call = Callable[[zb.Pipeline, Path], object]


def refused(make: Callable[[], object]) -> None:
    with pytest.raises(zb.InputError):
        make()


def optimizer_of(pipe: zb.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=0.1)


def validated_step(pipe: zb.Pipeline, folder: Path) -> None:
    optimizer = zb.PostValidation(optimizer_of(pipe), pipe, max_norm=0.1)
    pipe.step(X, Y)
    optimizer.step()
    optimizer.settle()


def unscaled(pipe: zb.Pipeline, folder: Path) -> None:
    scaler = torch.amp.GradScaler("cpu")
    pipe.step(X, Y, scaler=scaler)
    pipe.unscale_(scaler, optimizer_of(pipe))


def clipped(pipe: zb.Pipeline, folder: Path) -> None:
    pipe.step(X, Y)
    pipe.clip_grad_norm_(1.0)


def drawn(pipe: zb.Pipeline, folder: Path) -> None:
    pipe.step(X, Y)
    pipe.timeline()


def ordered_ahead(pipe: zb.Pipeline, folder: Path) -> None:
    pipe.step(X, Y)
    if pipe.rank == 0:
        pipe.order_ahead(list(X.chunk(4)))


def recorded(pipe: zb.Pipeline, folder: Path) -> None:
    pipe.attach(zb.hooks.Telemetry(lambda figures: None))
    pipe.step(X, Y)


CALLS: dict[str, Call] = {
    "construction": lambda pipe, folder: None,
    "PostValidation": lambda pipe, folder: zb.PostValidation(optimizer_of(pipe), pipe),
    "refused PostValidation": lambda pipe, folder: refused(lambda: zb.PostValidation(optimizer_of(pipe), pipe, max_norm=-1.0)),
    "step of PostValidation": validated_step,
    "step": lambda pipe, folder: pipe.step(X, Y),
    "refused step": lambda pipe, folder: refused(lambda: pipe.step(X, Y, num_microbatches=0)),
    "order_ahead": ordered_ahead,
    "eval_step": lambda pipe, folder: pipe.eval_step(X, Y),
    "eval_step without targets": lambda pipe, folder: pipe.eval_step(X),
    "clip_grad_norm_": clipped,
    "unscale_": unscaled,
    "timeline": drawn,
    "profile": lambda pipe, folder: pipe.profile(X, Y, steps=1),
    "memory_forecast": lambda pipe, folder: pipe.memory_forecast(pipe.profile(X, Y, steps=1)),
    "describe": lambda pipe, folder: pipe.describe(X, Y),
    "Telemetry": recorded,
    "save": lambda pipe, folder: zb.save(folder / "saved", pipe, optimizer_of(pipe)),
    "save in the background": lambda pipe, folder: zb.save(folder / "saved", pipe, optimizer_of(pipe), wait=False).wait(),
}


class Exchanges:
    """Counts the exchanges of this rank that were waited for, and stops before number `stop` until `sign` exists."""

    def __init__(self, stop: int, sign: Path) -> None:
        self.count = 0
        self._stop, self._sign = stop, sign

    def counting(self, of_line: Callable[..., Callable[[Tensor], Work]]) -> Callable[..., Callable[[Tensor], Any]]:
        def make(endpoint: GlooEndpoint, line: Any) -> Callable[[Tensor], Any]:
            start = of_line(endpoint, line)
            return lambda tensor: _Counted(self, start(tensor))

        return make

    def waits(self) -> None:
        self.count += 1
        if self.count == self._stop:
            await_signs(self._sign)


class _Counted:
    def __init__(self, exchanges: Exchanges, work: Work) -> None:
        self._exchanges, self._work = exchanges, work

    def wait(self) -> object:
        self._exchanges.waits()
        return self._work.wait()


def exchanges_of(group: Any, name: str, folder: Path, stop: int, closed: Path) -> int:
    """Makes the call and closes the pipeline; returns the number of exchanges before it closes."""
    exchanges = Exchanges(stop, closed)
    sender, receiver = map(exchanges.counting, (GlooEndpoint.sender, GlooEndpoint.receiver))
    with patch.object(GlooEndpoint, "sender", sender), patch.object(GlooEndpoint, "receiver", receiver):
        order_by = (lambda microbatch: 1.0) if name == "order_ahead" else None
        pipe = zb.Pipeline(
            lambda stage, _: nn.Linear(4, 4), "1f1b", 4, nn.functional.mse_loss, group=group, transport="gloo", order_by=order_by
        )
        CALLS[name](pipe, folder)
        count = exchanges.count
        pipe.close()
    return count


def faults(group: Any, late: int, folder: str, names: list[str]) -> dict[str, str]:
    """Returns the errors of a rank that reads late, by call."""
    found = {}
    for number, name in enumerate(names):
        here, rank = Path(folder) / str(number), torch.distributed.get_rank(group)
        closed = here / "closed"
        count = exchanges_of(group, name, here, 0, closed)
        torch.distributed.barrier(group)
        try:
            exchanges_of(group, name, here, count if rank == late else 0, closed)
        except zb.PipelineError as error:
            found[name] = str(error)
        here.mkdir(exist_ok=True)
        closed.touch()
        torch.distributed.barrier(group)
    return found


@pytest.mark.parametrize(
    ("late", "names"),
    [(1, ["PostValidation"]), pytest.param(0, list(CALLS), marks=pytest.mark.long), pytest.param(1, list(CALLS), marks=pytest.mark.long)],
    ids=["in a constructor", "rank 0 in all calls", "rank 1 in all calls"],
)
def test_a_rank_that_closes_cuts_off_no_late_reader(world: Ranks, late: int, names: list[str], tmp_path: Path) -> None:
    assert world.run(faults, late, str(tmp_path), names, ranks=2) == [{}, {}]
