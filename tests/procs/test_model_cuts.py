"""Models that `zb.split` splits, and those it refuses, with the name of the culprit and a workaround. Runs in one process.

A value that does not cross a boundary is NaN in the other stages. A large model's cut is proved on a tiny model of its class, and the
first stage that differs is named.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.libraries import library
from tests.refusals import Stated, raises, states
from zerobubble.cli import main
from zerobubble.models.making.factory import ModelFactory
from zerobubble.models.observation.observed_model import ObservedModel
from zerobubble.models.observation.shape_only import tensors_inside
from zerobubble.models.observation.units import find_units

pytestmark = pytest.mark.in_process


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


class MakesItsBuffer(nn.Linear):
    """Puts another tensor in the place of its buffer where that has another size, as ConViT does."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width, width)
        self.register_buffer("factors", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.factors.shape != x.shape[1:]:
            self.factors = torch.ones(x.shape[1:])
        return super().forward(x * self.factors)


class MakesManyTensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MakesItsBuffer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.stack([block(x), *(x * float(i) for i in range(500))]).mean(0)
        return x


class WritesIntoNewTensors(nn.Module):
    """The code after its parts writes only into new tensors, after most outputs of the parts have been freed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        gc.collect()  # as Python's garbage collection may do at any time
        new = [x * float(i) for i in range(50)]
        for each in new:
            each += 1.0
        return torch.stack(new).mean(0)


class ComputedValues(Mapping[int, Any]):
    """A mapping that makes a new tensor on each access to a value."""

    tensors = tuple(torch.ones(1) for _ in range(50))

    def __init__(self, numbers: Sequence[int], depth: int) -> None:
        self.numbers, self.depth = numbers, depth

    def __getitem__(self, number: int) -> Any:
        return ComputedValues([number], self.depth - 1) if self.depth else (self.tensors[number],)

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)


REFUSED: list[tuple[type[nn.Module], Stated]] = [
    (DecidesByNumbers, ("first", "values", "branch")),
    (ReadsAList, ("first", "values", "tolist")),
    (WritesABuffer, ("first", "mean")),
    (ChangesItsInput, ("second", "input", "place")),
    (LeavesTensors, ("first", "argument 1", "dict")),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "stated"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_code_that_stages_cannot_run_is_refused_by_the_name_of_the_part(kind: type[nn.Module], stated: Stated) -> None:
    with raises(zb.InputError, *stated):
        zb.split(kind(), example=torch.randn(2, 4))(0, 2)


def replaced() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


WRONG: list[tuple[Callable[[], Any], Stated]] = [
    (lambda: zb.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))), ("zb.split", "Sequential", "example")),
    (lambda: zb.split(nn.Linear(4, 4), example=torch.ones(1, 4)), ("0 parts", "2 stages")),
    (lambda: zb.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)), example=torch.ones(1, 4)), ("example", "fails")),
    (
        lambda: zb.split(ComesBack(), example=torch.ones(1, 4), cuts=["second"]),
        (1, "first", "stage 0", "second", "stage 1"),
    ),
    (lambda: zb.split(replaced(), example=torch.ones(1, 4)), ("Sequential", "forward", "replaced")),
    (lambda: zb.split(on_meta(), example=torch.ones(1, 4)), ("zb.split", "meta")),
    (lambda: zb.split(lambda: 3, example=torch.ones(1, 4)), ("function", "int")),  # type: ignore[arg-type, return-value]
    (lambda: zb.split("model"), ("model",)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "stated"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_call_is_one_sentence(make: Callable[[], Any], stated: Stated) -> None:
    with raises(zb.InputError, *stated):
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


class SeveralHeads(nn.Module):
    """Predicts further tokens: the embedding, the norm and the head are called again for each, unless each has a head of its own."""

    def __init__(self, num_layers: int = 4, num_further: int = 2, num_heads: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.further = nn.ModuleList(nn.Linear(8, 4) for _ in range(num_further))
        self.norm = nn.LayerNorm(4)
        self.heads = nn.ModuleList(nn.Linear(4, 7) for _ in range(num_heads))
        for head in self.heads:
            head.weight = self.heads[0].weight

    def forward(self, tokens: Tensor) -> list[Tensor]:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh() + x
        outputs = [self.heads[0](self.norm(x))]
        for depth, mix in enumerate(self.further, 1):
            x = mix(torch.cat([x[:, :-1], self.embed(tokens[:, depth:])], -1))
            outputs.append(self.heads[depth % len(self.heads)](self.norm(x)))
        return outputs


def test_parts_that_are_called_again_lie_behind_all_whose_outputs_they_take() -> None:
    split = zb.split(SeveralHeads(), example=torch.ones(2, 5, 3), cuts=["layers.2", "further.0", "further.1"])
    assert held(split, 4) == [["embed", "layers.0", "layers.1"], ["layers.2", "layers.3"], ["further.0"], ["further.1", "norm", "heads.0"]]
    assert "Proved" in split.describe(4)


@pytest.mark.long
def test_megatrons_layout_with_layers_that_predict_further_tokens() -> None:
    model = SeveralHeads(10, 3, 4)
    split = zb.split(model, example=torch.ones(2, 5, 3), cuts="E|(t|)*10m|m|m|LL|LL")
    layers, further = ([[f"{name}.{i}"] for i in range(count)] for name, count in (("layers", 10), ("further", 3)))
    assert held(split, 16) == [["embed"], *layers, *further, ["norm", "heads.0", "heads.1"], ["heads.2", "heads.3"]]
    states(split.describe(16), "heads.0.weight", "stage 14", "heads.2.weight", "stage 15")
    one_head, one_further = (zb.split(SeveralHeads(2, *sizes), example=torch.ones(2, 5, 3), cuts=cuts) for sizes, cuts in ONE)
    assert held(one_head, 3) == [["embed", "layers.0"], ["layers.1", "further.0"], ["further.1", "norm", "heads.0"]]
    assert held(one_further, 2) == [["embed", "layers.0"], ["layers.1", "further.0", "norm", "heads.0"]]


ONE = [((2, 1), "Et|tm|mLLL"), ((1, 1), "Et|tmL")]


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_more_stages_than_parts_that_the_model_goes_back_to_are_made_of_its_operations() -> None:
    for source in (ComesBack(), lambda: ComesBack()):
        split = zb.split(source, example=torch.ones(2, 4))
        assert [name for name, _ in split(1, 2).named_parameters()] == ["first.weight", "first.bias"]
        states(split.describe(2), "first.weight", "stage 0", "stage 1")


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
WRONG_CUTS: list[tuple[Any, Stated]] = [
    (["layers.2"], ("2 stages", "schedule", 3)),
    (["layers.2", "layers.9"], ("layers.9", "stage")),
    (["head", "layers.2"], ("order", "model")),
    ([2, 2], ("4 layers", 6)),
    ([3, 0, 3], ("stage 1", "part")),
    ("Et|tt|ttmtL", ("one E", "t", "m", "L")),
    ("Et|ttt|tmL", (5, "t", 1, "m", "layers", 6)),
    ("Et*6|L|L", (2, "L", 1, "head")),
    ("Et|x|L", ("character 4",)),
    (7, ("cuts",)),
]


@pytest.mark.parametrize(("cuts", "stages"), BY_HAND, ids=str)
def test_cuts_by_hand_are_where_they_say(cuts: Any, stages: list[list[str]]) -> None:
    found = held(zb.split(Deep(), example=torch.ones(1, 3), cuts=cuts), len(stages))
    assert found == stages


@pytest.mark.parametrize(("cuts", "stated"), WRONG_CUTS, ids=str)
def test_wrong_cuts_by_hand_say_what_the_model_has(cuts: Any, stated: Stated) -> None:
    with raises(zb.InputError, *stated):
        zb.split(Deep(), example=torch.ones(1, 3), cuts=cuts)(0, 3)


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_a_function_makes_the_numbers_of_one_device_and_each_stage_has_its_own_alone() -> None:
    """Random numbers for other stages' parameters are drawn in pieces and discarded."""
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


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
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
            kept = ModelFactory(lambda size=size: make(size)).make(["head.weight"])  # type: ignore[misc]
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
    with raises(zb.InputError, "mask", "stage 1"):
        second(**message, mask=torch.ones(4))
    with raises(zb.InputError, "stage 1", "own"):
        first(x=torch.ones(2, 4), mask=torch.ones(4))


class CallsForwardItself(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.second.forward(self.first.forward(x))


def test_parts_whose_forward_is_called_run_in_their_stages() -> None:
    model, x = CallsForwardItself(), torch.randn(2, 4)
    split = zb.split(model, example={"x": x})
    first, second = split(0, 2), split(1, 2)
    torch.testing.assert_close(second(**first(x=x)), model(x), rtol=0, atol=0)


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
    def __init__(self, width: int = 4) -> None:
        super().__init__(width, width)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Using(nn.Linear):
    def __init__(self, counting: Counting, width: int = 4) -> None:
        super().__init__(width, width)
        self.__dict__["counting"] = counting

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.__dict__["counting"].calls


@pytest.mark.long
def test_a_new_tensor_is_not_taken_for_a_buffer_that_is_gone() -> None:
    """Its memory, and with it its id in Python, may be those of the buffer in whose place a part has put another."""
    for _ in range(5):
        zb.split(MakesManyTensors(), example=torch.ones(2, 4))(0, 2)


@pytest.mark.long
def test_memory_of_an_output_that_is_gone_is_another_tensors() -> None:
    """What is written into a new tensor there is no change of that output."""
    model = WritesIntoNewTensors()
    flow = ObservedModel(model, find_units(model)).flow((torch.ones(2, 4),), {}, training=True)
    assert [called.changed_later for called in flow.calls.values()] == [False] * 4


def test_tensors_are_found_in_values_that_a_mapping_computes() -> None:
    """Two of them may have one id, one after the other."""
    found = {id(tensor) for _, tensor in tensors_inside(ComputedValues(range(50), 2))}
    assert found == set(map(id, ComputedValues.tensors))


def test_the_proof_finds_what_passes_the_parts_by() -> None:
    with raises(zb.InputError, "numbers", "uncut"):
        zb.split(SharesState(), example=torch.ones(2, 4))(0, 2)


def test_the_cut_in_words_names_stages_parts_and_shares() -> None:
    message = zb.split(Deep(), example=torch.ones(1, 3)).describe(2)
    states(message.splitlines()[0], "stage 0", "embed")
    assert message.count("parameters") == 2
    states(message, "1 GFLOP/s", "estimates")


def test_using_what_does_not_cross_a_boundary_cannot_go_unnoticed() -> None:
    """An output that no later stage needs is NaN there, not a plausible number."""
    model = copy.deepcopy(Deep()).double()
    split = zb.split(model, example=torch.ones(1, 3, dtype=torch.float64))
    stage = split(1, 2)
    seen: list[Tensor] = []
    forward = stage.layers[0].forward  # of the stand-in for the part, on which no hooks run

    def watched(*args: Any) -> Any:
        seen.append(forward(*args))
        return seen[-1]

    stage.layers[0].forward = watched
    stage(**split(0, 2)(torch.ones(1, 3, dtype=torch.float64)))
    assert seen[0].isnan().all()


@pytest.mark.long
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_the_command_line_shows_the_cut_of_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama of 8 billion parameters, which is made once, without its numbers."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    text = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256} | sizes)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    kind = library("transformers").LlamaForCausalLM
    make, widths = kind.__init__, []
    monkeypatch.setattr(kind, "__init__", lambda self, config: widths.append(config.hidden_size) or make(self, config))
    output = CliRunner().invoke(main, ["split", str(tmp_path), "--stages", "4", "--cuts", "Et*7|t*9|t*9|t*7L"])
    assert output.exit_code == 0
    assert widths.count(4096) == 1
    assert "stage 1: model.layers.7 to model.layers.15: 1,963,008,000 parameters" in output.output
    rows = json.loads(CliRunner().invoke(main, ["split", str(tmp_path), "--stages", "8", "--json"]).output)["stages"]
    assert sum(row["parameters"] for row in rows) == 8_030_261_248
    wrong = CliRunner().invoke(main, ["split", str(tmp_path), "--stages", "4", "--cuts", "7,9,9"])
    assert wrong.exit_code == 2
    states(wrong.output, 25, 32, "cuts", "layers")


def test_without_transformers_the_command_line_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    monkeypatch.setitem(sys.modules, "transformers", None)
    output = CliRunner().invoke(main, ["split", str(tmp_path), "--stages", "2"])
    assert (output.exit_code, output.stdout, len(output.stderr.splitlines())) == (2, "", 1)
    states(output.stderr, "pip", "transformers")


class LargeShares(SharesState):
    """Too large to be copied for a proof, with a configuration of which a tiny one is made."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.first = Counting(config.width)
        self.second = Using(self.first, config.width)  # type: ignore[assignment]

    @classmethod
    def _from_config(cls, config: Any) -> LargeShares:
        return cls(config)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, : self.config.width])


class Config:
    """As those of Transformers."""

    model_type = "large"

    def __init__(self, width: int) -> None:
        self.width = width

    def to_dict(self) -> dict[str, int]:
        return vars(self)


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_the_proof_of_a_large_model_is_that_of_a_tiny_one_and_names_the_first_stage_that_differs() -> None:
    config = Config(4096)
    for model in (LargeShares(config), lambda: LargeShares(config)):
        with raises(zb.InputError, "LargeShares", "stage 1", "second"):
            zb.split(model, example=torch.ones(2, 4096))(0, 2)


@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_the_proof_shows_what_was_compared() -> None:
    transformers = library("transformers")
    config = transformers.LlamaConfig(num_hidden_layers=4)
    message = zb.split(lambda: transformers.AutoModelForCausalLM.from_config(config)).describe(4).splitlines()[-1]
    states(message, "LlamaForCausalLM", "Proved", "uncut")
    states(zb.split(Deep(), example=torch.ones(1, 3)).describe(2).splitlines()[-1], "Proved", "uncut")
    cannot_train = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.ReLU(inplace=True), nn.Linear(3, 3))
    states(zb.split(cannot_train, example=torch.ones(1, 3)).describe(2).splitlines()[-1], foreign="modified by an inplace operation")
    large = zb.split(lambda: nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(2))), example=torch.ones(1, 4096))
    states(large.describe(2).splitlines()[-1], "33,562,624", "parameters")


def test_a_loss_that_is_a_share_of_a_sum_is_refused() -> None:
    """Its mean over microbatches, which a step takes, would be too small by their number."""
    with raises(zb.InputError, "num_items_in_batch", "loss_weight"):
        zb.split(Deep(), example=torch.ones(2, 3))(0, 2)(x=torch.ones(2, 3), num_items_in_batch=7)
