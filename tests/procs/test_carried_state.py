"""Values of samples that a module carries in an attribute: refused where the next microbatch would continue from them, and only there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.refusals import Stated, raises
from zerobubble.runtime.stage.stage import make_stage

pytestmark = pytest.mark.in_process

ROWS, WIDTH = 3, 4


class Keeping(nn.Module):
    """Recurrent layers, and attributes of several kinds."""

    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.lstm = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.hidden: Any = None
        self.seen: list[Tensor] = []
        self.mean = torch.zeros(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def continuing(m: Any, x: Tensor) -> Tensor:
    y, hidden = m.gru(x, m.hidden)
    m.hidden = hidden.detach()
    return y


def continuing_in_a_pair(m: Any, x: Tensor) -> Tensor:
    y, hidden = m.lstm(x, m.hidden)
    m.hidden = tuple(part.detach() for part in hidden)
    return y


def adding_the_last_output(m: Any, x: Tensor) -> Tensor:
    y = m.gru(x)[0] + (0 if m.hidden is None else m.hidden)
    m.hidden = y.detach()
    return y


def beginning_anew(m: Any, x: Tensor) -> Tensor:
    m.hidden = torch.zeros(1, len(x), WIDTH)
    y, m.hidden = m.gru(x, m.hidden)
    return y


def showing_the_last(m: Any, x: Tensor) -> Tensor:
    m.hidden = m.gru(x)[0]
    return m.hidden


def caching(m: Any, x: Tensor) -> Tensor:
    if m.hidden is None or len(m.hidden) < ROWS:
        m.hidden = torch.arange(ROWS * WIDTH).view(ROWS, 1, WIDTH) / 9
    return m.gru(x)[0] + m.hidden[: len(x)]


def looking_at_the_size(m: Any, x: Tensor) -> Tensor:
    if m.hidden is None or m.hidden.shape[0] < 2 * ROWS:
        m.hidden = torch.ones(ROWS, 1, 1)
    return m.gru(x)[0] * m.hidden[: len(x)]


def averaging(m: Any, x: Tensor) -> Tensor:
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean((0, 1))
    m.average = 0.9 * m.average + 0.1 * x.detach().mean((0, 1))
    return m.gru(x)[0] - m.mean - m.average


WAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Stated | None]] = {
    "a hidden state": (continuing, ("Keeping", "hidden", "num_microbatches=1")),
    "a pair": (continuing_in_a_pair, ("Keeping", "hidden", "num_microbatches=1")),
    "the last output": (adding_the_last_output, ("Keeping", "hidden", "num_microbatches=1")),
    "a new state": (beginning_anew, None),
    "the last output, to show": (showing_the_last, None),
    "a cache": (caching, None),
    "a cache that grows": (looking_at_the_size, None),
    "averages": (averaging, None),
}
"""What a forward does with an attribute, and what the refusal states; None if microbatches do not depend on each other's samples."""


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_a_microbatch_that_continues_from_another_is_refused(name: str, recomputes: bool) -> None:
    way, stated = WAYS[name]
    module = Keeping(way)
    stage = make_stage("deferred", module, 1)
    batches = [torch.randn(ROWS, 5, WIDTH, requires_grad=True) for _ in range(3)]

    def step() -> list[Tensor]:
        stage.begin(None)
        outputs = [(stage.checkpointed_forward if recomputes else stage.forward)(number, (x,))[0] for number, x in enumerate(batches)]
        for number, y in enumerate(outputs):
            if recomputes:
                stage.recompute(number)
            stage.backward(number, (torch.ones_like(y),))
            stage.weight(number)
        return outputs

    if stated is not None:
        with raises(zb.InputError, "stage 1", *stated):
            step()
        return
    alone = Keeping(way)
    for _ in range(3):
        for y, expected in zip(step(), [alone(x) for x in batches], strict=True):
            assert torch.equal(y, expected)
    assert type(module.hidden) is type(alone.hidden)


def test_one_microbatch_continues_from_the_step_before() -> None:
    module, alone = Keeping(continuing), Keeping(continuing)
    stage = make_stage("deferred", module, 1)
    for _ in range(4):
        x = torch.randn(ROWS, 5, WIDTH)
        stage.begin(None)
        (y,) = stage.forward(0, (x,))
        assert torch.equal(y, alone(x))
        stage.backward(0, (torch.ones_like(y),))
        stage.weight(0)
