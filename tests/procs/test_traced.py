"""Models whose forward is a long list of operations: traced by torch.export, and cut between operations.

Losses, gradients and names are those of one device, or the error says why the model cannot be cut.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.libraries import library
from tests.procs.ranks import Ranks
from tests.procs.test_models import differences, judge
from tests.refusals import Stated, raises, states
from zerobubble.models.model_split import ModelSplit
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS

WIDTH, LAYERS = 8, 6


class Functional(nn.Module):
    """A transformer without modules: lists of parameters, a head that is the embedding, positions in a buffer, a counter of sizes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(11, WIDTH) / 3)
        self.head = self.embedding
        self.mixing = nn.ParameterList(torch.randn(WIDTH, 3 * WIDTH) / 3 for _ in range(LAYERS))
        self.update = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(LAYERS))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("positions", torch.randn(32, WIDTH) / 3)
        self.unused = nn.Parameter(torch.zeros(2))
        self.dropout = dropout

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        assert isinstance(self.positions, Tensor)
        count, length = tokens.shape
        x = nn.functional.embedding(tokens, self.embedding) + self.positions[:length]
        for mixing, update in zip(self.mixing, self.update, strict=True):
            normed = nn.functional.layer_norm(x, (WIDTH,), self.gain)
            query, key, value = (normed @ mixing).chunk(3, -1)
            scores = (query @ key.mT / WIDTH).masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
            mixed = (scores.softmax(-1) @ value).reshape(count * length, WIDTH)
            x = x + nn.functional.dropout((mixed @ update).tanh().reshape(count, length, WIDTH), self.dropout, self.training)
        x *= scale
        return {"logits": x @ self.head.T, "last": x[:, -1]}


class Small(nn.Module):
    """Norms are all the modules that it has, and one of them alone is a part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for weight in (self.first, self.second):
            x = (x @ weight).relu()
        return ((self.norm(x) @ self.third).tanh() @ self.fourth).tanh()


def made(kind: str) -> tuple[nn.Module, dict[str, Any], Tensor]:
    torch.manual_seed(0)
    if kind == "small":
        return Small().double(), {"x": torch.randn(8, WIDTH).double()}, torch.randn(8, WIDTH).double()
    tokens = torch.randint(0, 11, (8, 5))
    return Functional().double(), {"tokens": tokens}, tokens


def loss_of(output: Any, target: Tensor) -> Tensor:
    if isinstance(output, Tensor):
        return nn.functional.mse_loss(output, target)
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten()) + output["last"].square().mean()


def trained(group: Any, kind: str, schedule: str, by: str) -> dict[str, float]:
    model, inputs, targets = made(kind)
    example = {name: value[:1] for name, value in inputs.items()}

    def split(given: nn.Module) -> Any:
        return zb.split(given if by == "model" else lambda: made(kind)[0], example=example)

    return differences(group, model, schedule, inputs, targets, loss_of, split)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "schedule", "by"),
    [pytest.param("functional", "1f1b", "model", marks=pytest.mark.long), ("functional", "zb-v", "function"), ("small", "zb-v", "model")],
)
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_a_list_of_operations_trains_with_the_numbers_and_names_of_one_device(world: Ranks, kind: str, schedule: str, by: str) -> None:
    judge(world.run(trained, kind, schedule, by, ranks=2), made(kind)[0])


@pytest.mark.long
@cpu_only("zb.split draws the numbers of a model that a function creates on the CPU")
def test_of_a_function_each_stage_has_its_own_numbers_alone() -> None:
    whole, inputs, _ = made("functional")
    split = zb.split(lambda: made("functional")[0], example=inputs)
    held = [dict(split(stage, 3).named_parameters()) for stage in range(3)]
    assert [name for name, parameter in held[1].items() if parameter.is_meta] == []
    assert held[1].keys() < dict(whole.named_parameters()).keys()
    for name, parameter in [each for of_stage in held for each in of_stage.items()]:
        assert torch.equal(parameter, whole.get_parameter(name))


@pytest.mark.long
def test_a_configuration_of_fewer_parts_than_stages_is_cut_between_operations() -> None:
    """A layer of Llama over six stages, with its mask and its own loss."""
    transformers = library("transformers")
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99)
    ids = torch.randint(0, 99, (2, 7))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0), "labels": ids}
    torch.manual_seed(0)
    split = zb.split(config, example=inputs)
    whole = transformers.AutoModelForCausalLM.from_config(config)
    passed: Any = inputs
    for stage in [split(number, 6) for number in range(6)]:
        passed = stage(**passed)
    assert split.describe(6).endswith("the same outputs and gradients in its own types, as it does not run in float64.")
    expected = whole(**inputs)
    assert type(passed) is type(expected)
    assert torch.allclose(passed.loss, expected.loss, rtol=1e-6)
    assert torch.allclose(passed.logits, expected.logits, atol=1e-6)


def shares(group: Any) -> list[float | None]:
    model, inputs, targets = made("functional")
    with zb.Pipeline(zb.split(model, example=inputs), "zb-h1", 4, loss_of, group=group) as pipe:
        return [report.share for report in pipe.describe(inputs, targets)]


@pytest.mark.long
@pytest.mark.skipif(not CAN_SEE_HOOKS, reason="before 2.8, torch does not show who saves tensors: matrices of modules stay in B")
def test_products_of_its_parameters_wait_for_w(world: Ranks) -> None:
    for found in world.run(shares, ranks=2):
        assert all(share is not None and share > 0.7 for share in found), found


def evaluated(group: Any) -> tuple[float, float]:
    """What a model with dropout gives in evaluation, and by how much it is off."""
    torch.manual_seed(0)
    model, (_, inputs, targets) = Functional(dropout=0.5).double(), made("functional")
    with zb.Pipeline(zb.split(model, example=inputs), "1f1b", 4, loss_of, group=group) as pipe:
        noisy = [pipe.step(inputs, targets).item() for _ in range(2)]
        loss, _ = pipe.eval_step(inputs, targets)
    model.eval()
    return abs(noisy[0] - noisy[1]), abs(loss.item() - loss_of(model(**inputs), targets).item())


@pytest.mark.long
def test_dropout_is_that_of_the_mode(world: Ranks) -> None:
    for apart, off in world.run(evaluated, ranks=2):
        assert apart > 1e-3
        assert off < 1e-12


@functools.cache
def functional_split() -> ModelSplit:
    """The cut of one model, which takes seconds: for tests that change nothing of it."""
    model, inputs, _ = made("functional")
    return zb.split(model, example=inputs)


@pytest.mark.long
def test_the_cut_is_reported_and_proved() -> None:
    message = functional_split().describe(3)
    states(message, "torch.export", "operations")
    states(message, "Proved", "uncut")
    states(message, "stage 0", "stage 2")
    assert "stage 0: operations.embedding to operations." in message


class Counting(nn.Module):
    """Its numbers depend on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(4))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        for weight in self.weights:
            x = (x @ weight).tanh() * self.count
        return x


class Running(Counting):
    """Running statistics, in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))  # type: ignore[operator, union-attr]
        for weight in self.weights:
            x = (x @ weight).tanh() - self.mean  # type: ignore[operator]
        return x


class Deciding(Counting):
    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
            if x.sum() > 0:
                x = -x
        return x


class Otherwise(Counting):
    """Another list of operations in training."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight).tanh()
            if self.training:
                x = x + 1
        return x


REFUSED: list[tuple[type[nn.Module], Stated]] = [
    (
        Counting,
        (0, 2, "count", "ModuleList"),
    ),
    (Running, ("mean", "ModuleList")),
    (Deciding, ("weights.0", "values", "reads")),
    (Otherwise, ("Otherwise", "operations", "evaluation")),
]


@pytest.mark.parametrize(("kind", "stated"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_what_a_graph_cannot_say_is_refused(kind: type[nn.Module], stated: Stated) -> None:
    with raises(zb.InputError, *stated):
        zb.split(kind(), example=torch.randn(2, WIDTH)).cut(2)


class Acting(nn.Module):
    """One part and four matrices, with code on gradients in between: `act` gets the model and a hidden tensor."""

    def __init__(self, act: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(4))
        self.calls: list[int] = []
        self.cache: dict[int, Tensor] = {}
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        for weight in self.weights:
            x = (x @ weight).tanh()
        if x.requires_grad:
            acted = self.act(self, x)
            x = acted if isinstance(acted, Tensor) else x
        return x @ self.weights[0]


def limited(gradient: Tensor) -> Tensor:
    """Changes no gradient of the example."""
    return gradient.clamp(-1e9, 1e9)


def logged(*_: Any) -> None:
    """Changes nothing at all."""


def saved(_: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(limited, limited):
        return x * x


def on_cpu(_: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x * x


def hooked_module(model: Any, x: Tensor) -> Tensor:
    handle = model.part.register_full_backward_hook(logged)
    x = model.part(x)
    handle.remove()
    return x  # type: ignore[no-any-return]


def cached(model: Any, x: Tensor) -> Tensor:
    if x.shape[-1] not in model.cache:
        model.cache[x.shape[-1]] = torch.ones(x.shape[-1])
    return x * model.cache[x.shape[-1]]  # type: ignore[no-any-return]


def noise(_: nn.Module, x: Tensor) -> Tensor:
    return x * (1 if random.random() < 2 else 2)


class Limited(torch.autograd.Function):
    """An identity whose backward changes no gradient of the example."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return limited(gradient)


class Exponential(torch.autograd.Function):
    """Its backward differs from the derivative for large values."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0].clamp(max=15).exp()  # type: ignore[no-any-return]


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An operation with a backward that a graph has, too."""
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: limited(2 * gradient))


LOST: dict[str, tuple[Callable[[Any, Tensor], object], Stated]] = {
    "hook that limits": (lambda _, x: x.register_hook(limited), ("register_hook", "test_traced.py")),
    "hook that logs": (lambda _, x: x.register_hook(logged), ("register_hook", "test_traced.py")),
    "hook of a parameter": (lambda model, _: model.weights[1].register_hook(limited), ("register_hook",)),
    "hook after a gradient": (
        lambda model, _: model.weights[1].register_post_accumulate_grad_hook(logged),
        ("register_post_accumulate_grad_hook",),
    ),
    "hook of a node": (lambda _, x: x.grad_fn.register_hook(logged), ("grad_fn.register_hook",)),  # type: ignore[union-attr]
    "hook before a node": (lambda _, x: x.grad_fn.register_prehook(logged), ("grad_fn.register_prehook",)),  # type: ignore[union-attr]
    "hook of an earlier node": (
        lambda _, x: x.grad_fn.next_functions[0][0].register_hook(logged),  # type: ignore[union-attr]
        ("grad_fn.register_hook",),
    ),
    "hook on several": (lambda _, x: torch.autograd.graph.register_multi_grad_hook([x], logged), ("register_hook",)),
    "kept gradient": (lambda _, x: x.retain_grad(), ("retain_grad",)),
    "read gradient": (lambda model, x: x if model.weights[0].grad is None else 2 * x, (".grad",)),
    "saved tensors": (saved, ("saved_tensors_hooks",)),
    "saved on the CPU": (on_cpu, ("saved_tensors_hooks",)),
    "hook of a module": (hooked_module, ("hook",)),
    "limiting function": (lambda _, x: Limited.apply(x), ("Limited",)),
    "truncated function": (lambda _, x: Exponential.apply(x), ("Exponential",)),
    "list": (lambda model, _: model.calls.append(1), ("calls",)),
    "attribute": (lambda model, x: setattr(model, "last", x.detach()), ("last",)),
    "number": (lambda model, _: setattr(model, "count", getattr(model, "count", 0) + 1), ("count",)),
    "numbers of Python": (noise, ("random",)),
    "seed": (lambda _, x: x * torch.manual_seed(3).initial_seed() * torch.rand(WIDTH), ("seed",)),
    "vmap": (lambda _, x: torch.func.vmap(lambda row: row * row.sum())(x), ("RuntimeError",)),
}
"""Code that a graph of torch.export silently drops, with what the refusal states; it changes no number on the example."""


@pytest.mark.parametrize("kind", LOST)
def test_code_that_a_graph_loses_is_refused(kind: str) -> None:
    act, stated = LOST[kind]
    model, example = Acting(act), torch.randn(2, WIDTH)
    state, generator = random.getstate(), torch.get_rng_state()
    with raises(zb.InputError, "ModuleList", *stated):
        zb.split(model, example=example).cut(4)
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), generator)
    assert not model.calls
    assert not hasattr(model, "count")
    assert all(parameter._backward_hooks is None for parameter in model.parameters())


@pytest.mark.parametrize("act", [cached, lambda _, x: doubled(x)], ids=["cache", "operation"])
def test_what_a_graph_keeps_is_not_refused(act: Callable[[Any, Tensor], object]) -> None:
    split = zb.split(Acting(act), example=torch.randn(2, WIDTH))
    states(split.describe(4), "torch.export")


def test_a_hook_around_parts_is_refused_where_a_stage_has_no_gradient() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                x.register_hook(limited)
            return x

    with raises(zb.InputError, "requires_grad", function="register_hook"):
        zb.split(Hooked(), example=torch.randn(2, WIDTH))


CALLS: list[tuple[dict[str, Any], Stated]] = [
    ({"tokens": torch.ones(2, 5, dtype=torch.long), "scale": 2.0}, ("1.0", "2.0")),
    ({"tokens": torch.ones(2, 33, dtype=torch.long)}, (2, 1, 32, 33, "tensor")),
    ({"tokens": torch.ones(2, dtype=torch.long)}, ("torch.int64", 2, 1)),
    ({"words": torch.ones(2, 5, dtype=torch.long)}, ("argument", "tokens")),
]


@functools.cache
def first_stage() -> nn.Module:
    return functional_split()(0, 2)


@pytest.mark.parametrize(("call", "stated"), CALLS, ids=range(len(CALLS)))
def test_calls_that_the_graph_does_not_hold_for_are_refused(call: dict[str, Any], stated: Stated) -> None:
    stage = first_stage()
    stage(torch.ones(3, 7, dtype=torch.long))
    with raises(zb.InputError, *stated):
        stage(**call)


def test_too_few_operations_are_reported() -> None:
    with raises(zb.InputError, "torch.export", 5, 8, num_stages=8) as caught:
        zb.split(Small(), example=torch.randn(2, WIDTH)).cut(8)
    assert str(caught.value).count("fewer stages") == 1
