"""Ranks exchange only data: no received value is called, and values other than plain ones are refused with the remedy."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import zerobubble as zb
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.refusals import raises, states
from zerobubble.hooks import StepHook
from zerobubble.runtime.values.payload import flatten_pytree, unflatten_pytree
from zerobubble.runtime.values.plain_values import dataclass_named, read_plain, write_plain
from zerobubble.runtime.values.shapes import read_announcement, shapes_of, write_announcement


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Color(Enum):
    RED = 1


PLAIN = [
    None,
    True,
    3,
    -0.0,
    float("inf"),
    2**100,
    1j,
    "text",
    "\ud800",
    b"bytes",
    (1, (2,)),
    [1, None],
    {"a": {1: (2,)}},
    {1, 2},
    frozenset({"a"}),
    OrderedDict(a=1),
    Point(1),
    Color.RED,
    torch.float8_e4m3fn,
    torch.device("cuda", 1),
    torch.Size([2, 3]),
    int,
    type(None),
    OrderedDict,
    torch.dtype,
    Point,
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back(value: Any) -> None:
    found = read_plain(write_plain(value))
    assert found == value
    assert type(found) is type(value)


def test_the_structure_of_a_message_comes_back() -> None:
    nest = {"a": (torch.zeros(2), Point(1)), Color.RED: [None, 0.1, "x", torch.bfloat16, OrderedDict(k=torch.ones(1))]}
    tensors, structure = flatten_pytree(nest)
    found = write_announcement(shapes_of(tensors), structure, torch.device("cpu"))
    assert read_announcement(found) == (shapes_of(tensors), structure)


@dataclass
class Striking:
    """A dataclass whose constructor does something."""

    x: Any

    def __post_init__(self) -> None:
        Path("struck").touch()


def test_a_dataclass_comes_back_by_its_name_without_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value = Striking(torch.zeros(2))
    Path("struck").unlink()
    tensors, structure = flatten_pytree({"a": [value]})
    found = read_announcement(write_announcement(shapes_of(tensors), structure, torch.device("cpu")))
    assert found == (shapes_of(tensors), structure)
    back = unflatten_pytree(found[1], iter(tensors))["a"][0]
    assert (type(back), back.x is value.x) == (Striking, True)
    assert list(tmp_path.iterdir()) == []


def test_a_dataclass_that_other_ranks_cannot_find_is_refused() -> None:
    @dataclass
    class Local:
        x: Any

    _, structure = flatten_pytree([Local(torch.zeros(2))])
    with raises(zb.InputError, name=f"{Local.__module__}.{Local.__qualname__}"):
        read_plain(write_plain(structure))


class Calls:
    """Pickled, a call of any function there is."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "value",
    [
        Calls(os.system, "touch struck"),
        Calls(eval, "open('struck', 'w')"),
        Calls(getattr, "text", "upper"),
        Calls(type, "Made", (), {}),
        Calls(Striking, 1),
        Calls(io.open, "struck", "w"),
        {"deep": [(Calls(os.mkdir, "struck"),)]},
        torch.zeros(2),
        nn.Linear(1, 1),
        Path("a"),
        print,
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_that_arrives_is_called(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((zb.InputError, TypeError)) as caught:
        read_plain(write_plain(value))
    assert list(tmp_path.iterdir()) == []
    if isinstance(caught.value, zb.InputError):
        states(str(caught.value), "None", "ranks")


@pytest.mark.parametrize("names", [("os", "system"), ("builtins", "eval"), ("no.such", "C"), ("os", "path.join"), (__name__, "Point")])
def test_only_dataclasses_are_found_by_name(names: tuple[str, str]) -> None:
    with raises(zb.InputError, name=".".join(names)):
        read_plain(write_plain(Calls(dataclass_named, *names)))


def test_a_name_inside_a_class_is_refused() -> None:
    """Dots lead from a class that is allowed to functions that are not."""
    with raises(zb.InputError, "Point._make"):
        read_plain(
            torch.frombuffer(
                bytearray(b"\x80\x04\x8c" + _text(Point.__module__) + b"\x8c" + _text("Point._make") + b"\x93."), dtype=torch.uint8
            )
        )


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


class Gathers(StepHook):
    def on_attach(self, pipeline: Any) -> None:
        self.pipeline = pipeline

    def on_step_end(self, step: Any) -> None:
        self.pipeline.gather(torch.zeros(2), "sharing a tensor")


def gathers(group: Any) -> str:
    pipe = zb.Pipeline(build, "1f1b", 4, loss_fn, group=group, hooks=[Gathers()])
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(4))
    return str(caught.value)


def test_a_hook_that_gathers_a_tensor_gets_the_remedy(world: Ranks) -> None:
    first, second = world.run(gathers, ranks=2)
    assert first == second
    states(first, "InputError", "torch._utils._rebuild_tensor_v2")
    states(first, "tensor.tolist()")


def keeps(group: Any, file: str) -> bool:
    with zb.Pipeline(build, "1f1b", 4, loss_fn, group=group) as pipe:
        pipe.step(*batch(4))
        torch.save(pipe.step_state(), file)
        return bool(torch.load(file, weights_only=True) == pipe.step_state())


def test_the_state_of_a_pipeline_is_plain(world: Ranks, tmp_path: Path) -> None:
    assert world.run(keeps, str(tmp_path / "state"), ranks=1) == [True]


def test_pickle_would_have_called() -> None:
    """Shows why the values above are refused."""
    assert pickle.loads(bytes(write_plain(Calls(getattr, "text", "upper")).tolist()))() == "TEXT"
