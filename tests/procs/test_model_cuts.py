"""What `zb.split` cuts and how, and what it refuses: each by the name of the culprit and with a way out. No ranks are needed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import zerobubble as zb
from tests.libraries import library
from zerobubble.cli import main
from zerobubble.models.factory import make_model


class Two(nn.Module):
    """Two parts, for classes whose code between them is the point."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))


class DecidesByNumbers(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x if x.sum() > 0 else -x)


class ReadsAList(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) * max(x.detach().flatten().tolist())


class ComesBack(Two):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(self.second(self.first(x)))
        return result


class WritesABuffer(Two):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.mean.copy_(x.detach().mean(0))
        result: Tensor = self.second(x - self.mean)
        return result


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x.relu_())
        return result


class ChangesItsInput(Two):
    def __init__(self) -> None:
        super().__init__()
        self.second = InPlace()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) + x


class Records(nn.Linear):
    def forward(self, x: Tensor, kept: dict[str, Tensor] | None = None) -> Tensor:
        y = super().forward(x)
        if kept is not None:
            kept["y"] = y.tanh()
        return y


class LeavesTensors(Two):
    def __init__(self) -> None:
        super().__init__()
        self.first = Records(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept: dict[str, Tensor] = {}
        result: Tensor = self.second(self.first(x, kept))
        return result + kept["y"]


REFUSED: list[tuple[type[nn.Module], str]] = [
    (DecidesByNumbers, "looks at numbers that come from 'first' .* and decides by them"),
    (ReadsAList, r"looks at numbers that come from 'first' \(by tolist\)"),
    (ComesBack, "call 1 of 'first' of stage 0 runs after 'second' of stage 1"),
    (WritesABuffer, "writes what it gets from 'first' into buffer 'mean'"),
    (ChangesItsInput, "'second' changes its input in place, and the model uses that input again"),
    (LeavesTensors, "part 'first' leaves tensors elsewhere than in its output"),
]


@pytest.mark.parametrize(("kind", "words"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_code_that_stages_cannot_run_is_refused_by_the_name_of_the_part(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(zb.InputError, match=words):
        zb.split(kind(), example=torch.randn(2, 4))(0, 2)


def replaced() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: zb.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), r"Sequential brings no example .* zb.split\(model, example=...\)"),
    (lambda: zb.split(nn.Linear(4, 4), example=torch.ones(1, 4)), "a model of 0 parts cannot be cut into 2 stages"),
    (lambda: zb.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)), example=torch.ones(1, 4)), "fails on the example"),
    (lambda: zb.split(replaced(), example=torch.ones(1, 4)), "the forward of 'Sequential' was replaced on the object"),
    (lambda: zb.split(on_meta(), example=torch.ones(1, 4)), "on the meta device"),
    (lambda: zb.split(lambda: 3, example=torch.ones(1, 4)), "the function gave a int"),  # type: ignore[arg-type, return-value]
    (lambda: zb.split("model"), "model"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_call_is_one_sentence(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(zb.InputError, match=words):
        make()(0, 2)


class Deep(nn.Module):
    """An embedding, six layers, a norm and a head, the layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).relu()
        result: Tensor = self.head(self.norm(x))
        return result


def held(split: Any, num_stages: int) -> list[list[str]]:
    """The units of each stage."""
    cut = split.cut(num_stages)
    return [[unit for unit, home in cut.stage_of.items() if home == stage] for stage in range(num_stages)]


BY_HAND: list[tuple[Any, list[list[str]]]] = [
    (["layers.2", "head"], [["embed", "layers.0", "layers.1"], ["layers.2", "layers.3", "layers.4", "layers.5", "norm"], ["head"]]),
    ([1, 3, 2], [["embed", "layers.0"], ["layers.1", "layers.2", "layers.3"], ["layers.4", "layers.5", "norm", "head"]]),
    ([0, 6, 0], [["embed"], ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5"], ["norm", "head"]]),
    ("E|t*5|tL", [["embed"], ["layers.0", "layers.1", "layers.2", "layers.3", "layers.4"], ["layers.5", "norm", "head"]]),
]
WRONG_CUTS: list[tuple[Any, str]] = [
    (["layers.2"], "make 2 stages, and the schedule has 3"),
    (["layers.2", "layers.9"], "a stage cannot begin with 'layers.9'"),
    (["head", "layers.2"], "in the order of the model"),
    ([2, 2], "4 layers together, and the model has 6"),
    ([3, 0, 3], "stage 1 would hold no part"),
    ("Et|tt|ttmtL", "layers m"),
    ("Et|x|L", "character 4"),
    (7, "cuts"),
]


@pytest.mark.parametrize(("cuts", "stages"), BY_HAND, ids=str)
def test_cuts_by_hand_are_where_they_say(cuts: Any, stages: list[list[str]]) -> None:
    found = held(zb.split(Deep(), example=torch.ones(1, 3), cuts=cuts), len(stages))
    assert found == stages


@pytest.mark.parametrize(("cuts", "words"), WRONG_CUTS, ids=str)
def test_wrong_cuts_by_hand_say_what_the_model_has(cuts: Any, words: str) -> None:
    with pytest.raises(zb.InputError, match=words):
        zb.split(Deep(), example=torch.ones(1, 3), cuts=cuts)(0, 3)


def test_a_function_makes_the_numbers_of_one_device_and_each_stage_has_its_own_alone() -> None:
    """What is drawn for other stages' parameters is drawn in pieces and thrown away."""
    torch.manual_seed(3)
    whole = dict(Deep().named_parameters())

    def make() -> nn.Module:
        torch.manual_seed(3)
        return Deep()

    split = zb.split(make, example=torch.ones(1, 3))
    names: list[str] = []
    for stage in range(3):
        for name, parameter in split(stage, 3).named_parameters():
            assert torch.equal(parameter, whole[name])
            names.append(name)
    assert sorted(names) == sorted(whole)


def test_numbers_are_drawn_in_pieces_as_at_once() -> None:
    sizes = [1 << 20, (1 << 21) + 7, (1 << 22) + 17]
    for draw in (nn.init.normal_, nn.init.uniform_):

        def make(size: int, draw: Any = draw) -> nn.Module:
            torch.manual_seed(1)
            model = Deep()
            model.big = nn.Parameter(torch.empty(size))  # type: ignore[assignment]
            draw(model.big)
            draw(model.head.weight)
            return model

        for size in sizes:
            kept = make_model(lambda size=size: make(size), ["head.weight"])  # type: ignore[misc]
            assert torch.equal(kept.head.weight, make(size).head.weight)
            assert kept.big.is_meta


class Optional(Two):
    """Uses a parameter of its own, and only with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        if mask is not None:
            x = x * self.own * mask
        result: Tensor = self.second(x)
        return result


def test_arguments_that_need_more_than_the_example_did_are_refused() -> None:
    """A parameter that only they use is not on the stage that needs it; one given to a later stage alone is not known to others."""
    split = zb.split(Optional(), example={"x": torch.ones(2, 4)})
    first, second = split(0, 2), split(1, 2)
    message = first(x=torch.ones(2, 4))
    with pytest.raises(zb.InputError, match=r"gives 'mask' to stage 1 alone"):
        second(**message, mask=torch.ones(4))
    with pytest.raises(zb.InputError, match=r"code of stage 1 uses parameter 'own', which it was not given"):
        first(x=torch.ones(2, 4), mask=torch.ones(4))


class CallsForwardItself(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.second.forward(self.first.forward(x))


def test_a_part_that_is_passed_by_is_told() -> None:
    with pytest.raises(zb.InputError, match=r"'first' did not run .* call the part as a module"):
        zb.split(CallsForwardItself(), example=torch.ones(2, 4))(0, 2)


class SharesState(Two):
    """Its second part looks at an attribute that its first part sets, which is a number and no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Counting()
        self.second = Using(self.first)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x))
        return result


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Using(nn.Linear):
    def __init__(self, counting: Counting) -> None:
        super().__init__(4, 4)
        self.__dict__["counting"] = counting

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.__dict__["counting"].calls


def test_the_proof_finds_what_passes_the_parts_by() -> None:
    with pytest.raises(zb.InputError, match="gives other numbers than uncut"):
        zb.split(SharesState(), example=torch.ones(2, 4))(0, 2)


def test_the_cut_in_words_names_stages_parts_and_shares() -> None:
    told = zb.split(Deep(), example=torch.ones(1, 3)).describe(2)
    assert told.splitlines()[0].startswith("stage 0: embed to layers.")
    assert told.count("parameters") == 2


def test_using_what_does_not_cross_a_boundary_cannot_go_unnoticed() -> None:
    """An output that nobody behind a boundary needs is NaN there, not a number that looks right."""
    model = copy.deepcopy(Deep()).double()
    split = zb.split(model, example=torch.ones(1, 3, dtype=torch.float64))
    stage = split(1, 2)
    seen: list[Tensor] = []
    stage.layers[0].register_forward_hook(lambda _, __, output: seen.append(output))
    stage(**split(0, 2)(torch.ones(1, 3, dtype=torch.float64)))
    assert seen[0].isnan().all()


def test_the_command_line_shows_the_cut_of_a_configuration(tmp_path: Path) -> None:
    """A Llama of 8 billion parameters, of which none is made."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    text = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256} | sizes)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    library("transformers")
    told = CliRunner().invoke(main, ["split", str(tmp_path), "--stages", "4", "--cuts", "Et*7|t*9|t*9|t*7L"])
    assert told.exit_code == 0
    assert "stage 1: model.layers.7 to model.layers.15: 1,963,008,000 parameters" in told.output
    rows = json.loads(CliRunner().invoke(main, ["split", str(tmp_path), "--stages", "8", "--json"]).output)["stages"]
    assert sum(row["parameters"] for row in rows) == 8_030_261_248
    wrong = CliRunner().invoke(main, ["split", str(tmp_path), "--stages", "4", "--cuts", "7,9,9"])
    assert wrong.exit_code == 2
    assert "cuts have 25 layers together, and the model has 32" in wrong.output
