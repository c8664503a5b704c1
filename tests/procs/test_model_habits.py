"""Usage patterns of hand-written models: split without the proof, as large models are, each matches one device or is refused by name.

The stages run one after the other, each made from its own copy of the model, as on ranks. Values that cross a boundary are copied.
"""

from __future__ import annotations

import copy
import functools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.refusals import Stated, raises
from zerobubble.models.proof import prove

pytestmark = pytest.mark.in_process

STEPS, MICROBATCHES, WIDTH = 2, 2, 4


class Layers(nn.Module):
    """Four layers in a list and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.set_up()

    def set_up(self) -> None: ...

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        result: Tensor = self.head(x)
        return result

    forward = body


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return x + self.b(self.a(x).tanh())


class Blocks(Layers):
    def set_up(self) -> None:
        self.layers = nn.ModuleList(Block() for _ in range(4))


class CallsForward(Blocks):
    """Calls the forward of its parts, and of one of them the part."""

    def body(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x) if number == 1 else layer.forward(x)
        result: Tensor = self.head.forward(self.layers[3](x))
        return result

    forward = body


class Prompt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, WIDTH)

    def forward(self, tokens: Tensor) -> Any:
        return self.embedding(tokens)


class ReadsDevicesInsideParts(Layers):
    """Moves tensors to the devices of tensors deep in its parts, and goes through the layers of a part."""

    def set_up(self) -> None:
        self.prompt = Prompt()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.BatchNorm1d(WIDTH)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.arange(3).to(self.prompt.embedding.weight.device)
        like = self.layers[3][0].weight
        x = x + self.prompt(tokens).sum(0) + torch.ones(WIDTH, dtype=like.dtype, device=like.device)
        assert [type(inner) for inner in self.layers[2]] == [nn.Linear, nn.Tanh, nn.BatchNorm1d]
        assert len(self.layers[1]) == 3
        for layer in self.layers:
            x = layer(x).to(layer[2].running_mean.device)
        result: Tensor = self.head(x)
        return result


class InAPlainDict(nn.Module):
    """The layers are reached through a dict in addition to their list, and through a method that the model stores."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.by_name = {f"layer {number}": layer for number, layer in enumerate(self.layers)}
        self.function = self.run

    def run(self, x: Tensor) -> Tensor:
        for number in range(4):
            x = self.by_name[f"layer {number}"](x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class InAModuleDict(Layers):
    def set_up(self) -> None:
        self.layers = nn.ModuleDict({f"k{number}": nn.Linear(WIDTH, WIDTH) for number in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        result: Tensor = self.head(x)
        return result


class ListsOfParameters(Layers):
    def set_up(self) -> None:
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(4))
        self.shifts = nn.ParameterDict({str(number): nn.Parameter(torch.ones(WIDTH)) for number in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh() * self.scales[number] + self.shifts[str(number)]
        result: Tensor = self.head(x)
        return result


class Parametrized(Layers):
    def set_up(self) -> None:
        norms = nn.utils.parametrizations
        self.layers = nn.ModuleList(
            norms.weight_norm(layer) if n % 2 else norms.spectral_norm(layer) for n, layer in enumerate(self.layers)
        )


class TellsLayersApart(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * 2 if isinstance(layer, nn.Linear) else layer(x)
            x = x * 3 if layer.training else x
            x = x + 1 if layer.weight.requires_grad else x
        result: Tensor = self.head(x)
        return result

    def set_up(self) -> None:
        self.layers[2].eval()


class BackwardHooks(Blocks):
    def set_up(self) -> None:
        super().set_up()
        for layer in self.layers[1:]:
            layer.register_full_backward_hook(lambda _, given, __: tuple(g if g is None else 2 * g for g in given))
            layer.register_full_backward_pre_hook(lambda _, given: tuple(3 * g for g in given))


class NormsWithoutParameters(Layers):
    """Batch norms that have running statistics and nothing that trains."""

    def set_up(self) -> None:
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH, affine=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).tanh()
        result: Tensor = self.head(x)
        return result


class ChangesItsArgument(Layers):
    def forward(self, x: Tensor) -> Tensor:
        given = x
        x *= 2
        return self.body(x).add(given)


class Checkpoints(Blocks):
    """Two blocks in each checkpoint, which run again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for first in (0, 2):
            x = checkpoint(lambda x, first=first: self.layers[first + 1](self.layers[first](x)), x, use_reentrant=False)
        result: Tensor = self.head(x)
        return result


class TrainsTheParent(Layers):
    """Layers with a reference to the model, of which they use a parameter: on other stages its gradient would be lost."""

    class Layer(nn.Linear):
        def __init__(self, parent: Any) -> None:
            super().__init__(WIDTH, WIDTH)
            self.__dict__["parent"] = parent

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = super().forward(x) * self.__dict__["parent"].scale
            return result

    def set_up(self) -> None:
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(self.Layer(self) for _ in range(4))


class SharedStatistics(Layers):
    def set_up(self) -> None:
        norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(layer, norm) for layer in self.layers)


class UsesAWeightInside(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x) @ self.layers[0].a.weight
        return result


class SumsAllParameters(Blocks):
    def forward(self, x: Tensor) -> Any:
        return self.body(x), sum(parameter.square().sum() for parameter in self.parameters())


class SumsWhatLayersKeep(Blocks):
    class Keeps(Block):
        def forward(self, x: Tensor) -> Any:
            self.kept = x.square().mean()
            return super().forward(x)

    def set_up(self) -> None:
        self.layers = nn.ModuleList(self.Keeps() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        return self.body(x), sum(module.kept for module in self.layers)


class Counts(Blocks):
    """Layers that count in a dict which is handed from one to the next."""

    class Layer(Block):
        def forward(self, x: Tensor, counted: dict[str, int] | None = None) -> Any:
            assert counted is not None
            counted["calls"] += 1
            return super().forward(x) * counted["calls"]

    def set_up(self) -> None:
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        counted = {"calls": 0}
        for layer in self.layers:
            x = layer(x, counted)
        return x


class GivesNumbers(Blocks):
    class Layer(Block):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return y, y.detach().sum().item()

    def set_up(self) -> None:
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        numbers = []
        for layer in self.layers:
            x, number = layer(x)
            numbers.append(number)
        return x * numbers[0]


class GivesGenerators(Blocks):
    class Layer(Block):
        def forward(self, x: Tensor) -> Any:
            return (super(GivesGenerators.Layer, self).forward(x) for _ in range(2))

    def set_up(self) -> None:
        self.layers = nn.ModuleList(self.Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = sum(layer(x))
        return x


class UsesABufferInside(Layers):
    def set_up(self) -> None:
        for number, layer in enumerate(self.layers):
            layer.register_buffer("gain", torch.full((WIDTH,), number + 1.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * layer.gain
        result: Tensor = self.head(x)
        return result


class UsesAChangedBuffer(UsesABufferInside):
    class Layer(nn.Linear):
        gain: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.gain.add_(1)
            return super().forward(x)

    def set_up(self) -> None:
        self.layers = nn.ModuleList(self.Layer(WIDTH, WIDTH) for _ in range(4))
        super().set_up()


class SetsAttributes(Layers):
    class Layer(nn.Linear):
        condition: Any = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (0 if self.condition is None else self.condition)

    def set_up(self) -> None:
        self.layers = nn.ModuleList(self.Layer(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        condition = self.head(x)
        for layer in self.layers:
            layer.condition = condition
        return self.body(x)


class ClampsWeights(Layers):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.clamp_(-0.1, 0.1)
        return self.body(x)


class RescalesItsBlocks(Blocks):
    """Divides weights inside of its blocks for evaluation, and multiplies them for training, as RWKV does."""

    def set_up(self) -> None:
        super().set_up()
        self.is_rescaled = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training == self.is_rescaled:
            self.is_rescaled = not self.training
            with torch.no_grad():
                for layer in self.layers:
                    layer.b.weight.mul_(2.0 if self.training else 0.5)
        return self.body(x)


class RescalesBehindItsBlocks(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        result = self.body(x)
        with torch.no_grad():
            self.layers[0].b.weight.mul_(0.5)
        return result


class TiedInsideAndRescaled(RescalesItsBlocks):
    def set_up(self) -> None:
        super().set_up()
        self.layers[0].b.weight = self.layers[3].b.weight


class DifferentiatesInside(Blocks):
    """Each block takes the gradient of what it computes, in one of the two ways of torch, and trains through it."""

    def set_up(self) -> None:
        self.layers = nn.ModuleList([GradientBlock(), TransformedBlock(), GradientBlock(), TransformedBlock()])


class GradientBlock(Block):
    def forward(self, x: Tensor) -> Any:
        of_weights = torch.autograd.grad(self.a(x).tanh().sum(), list(self.a.parameters()), create_graph=True)
        return x + self.b(x @ of_weights[0] + of_weights[1])


class TransformedBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return x + self.b(torch.func.grad(lambda y: self.a(y).tanh().sum())(x))


class NumpyBlock(Block):
    """Reads values in ways that fail with other errors than torch's on the meta device."""

    def forward(self, x: Tensor) -> Any:
        seen = x.detach()
        mean = torch.from_numpy(seen.numpy().mean(0)) + np.quantile(seen, 0.5) + float(f"{seen.mean():.2f}")
        return super().forward(x) * (1 + mean + torch.from_dlpack(seen).mean())


class ReadsByNumpy(Blocks):
    def set_up(self) -> None:
        self.layers = nn.ModuleList(NumpyBlock() for _ in range(4))


class SpectrumBlock(Block):
    """Fails on a window of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(4))

    def forward(self, x: Tensor) -> Any:
        spectrum = torch.stft(super().forward(x).flatten()[None], 4, 1, window=self.window, return_complex=True)  # type: ignore[arg-type]
        return torch.istft(spectrum * 0.5, 4, 1, window=self.window, length=x.numel()).view_as(x)  # type: ignore[arg-type]


class InvertsSpectra(Blocks):
    def set_up(self) -> None:
        self.layers = nn.ModuleList(SpectrumBlock() for _ in range(4))


class NamesAModuleTwice(Layers):
    """One module under two names, whose weight is also that of another stage, as T5's embedding after `resize_token_embeddings`."""

    def set_up(self) -> None:
        layers, head = self.layers, self.head
        del self.layers, self.head
        self.first, self.layers, self.head = layers[0], layers, head
        self.head.weight = self.first.weight


class CompiledIntoOthers(Blocks):
    def set_up(self) -> None:
        self.layers = nn.ModuleList(torch.compile(Block(), backend="eager") for _ in range(4))


class Scripted(Blocks):
    def set_up(self) -> None:
        self.head = torch.jit.trace(self.head, torch.zeros(2, WIDTH))


class DifferentiatesThroughParts(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            result: Tensor = torch.autograd.grad(self.body(x).sum(), x, create_graph=True)[0]
        return result


class TransformsParts(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: self.body(y).sum())(x)


class Nests(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.body(torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, len(x)]))).values()


class NestingBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return self.a(torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, len(x)]))).values()


class NestsInside(Blocks):
    def set_up(self) -> None:
        self.layers = nn.ModuleList(NestingBlock() for _ in range(4))


class ReentrantCheckpoints(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        result: Tensor = self.head(x)
        return result


class Reverses(torch.autograd.Function):
    """Runs layers without gradient, and again in its backward pass, as Reformer does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Any:
        for layer in layers:
            x = layer(x)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Reverses.apply(x, self.layers)
        return result


class Remembers(Blocks):
    """Blocks that attend to what they have kept of earlier batches, as Transformer-XL does: nothing in the first."""

    def set_up(self) -> None:
        self.layers = nn.ModuleList(Remembering() for _ in range(4))


class Remembering(Block):
    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.memory is None else torch.cat([self.memory, x])
        mask = torch.ones(len(x), len(kept), dtype=torch.bool).tril(len(kept) - len(x))
        attended = nn.functional.scaled_dot_product_attention(self.a(x)[None], self.b(kept)[None], kept[None], mask[None])[0]
        self.memory = x.detach()[-1:]
        return x + attended


class Queue(nn.Module):
    """Compares with the keys of earlier batches, as MoCo does; with `width`, keys go through a last layer here."""

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.last = nn.Linear(width, width) if width else nn.Identity()
        self.register_buffer("keys", torch.ones(16, WIDTH))
        self.register_buffer("next", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.last(x), int(self.next)
        similarities = x @ self.keys.clone().mT
        self.keys[first : first + len(x)] = x.detach()
        self.next.add_(len(x)).remainder_(16)
        return similarities


class Queues(Layers):
    """A queue and the layers that give it keys, in one module."""

    def set_up(self) -> None:
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Queue())


class QueuesInAPart(Layers):
    def set_up(self) -> None:
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Queue(WIDTH))


class HooksOnTheModel(Layers):
    def set_up(self) -> None:
        self.register_forward_hook(lambda _, __, output: 2 * output)


RIGHT: list[type[nn.Module]] = [
    ReadsDevicesInsideParts,
    *(Layers, Blocks, InAPlainDict, InAModuleDict, ListsOfParameters, Parametrized, TellsLayersApart, BackwardHooks),
    *(NormsWithoutParameters, ChangesItsArgument, Checkpoints, UsesABufferInside, CallsForward, DifferentiatesInside, Remembers),
    *(ReadsByNumpy, InvertsSpectra, NamesAModuleTwice, QueuesInAPart),
]
REFUSED: list[tuple[type[nn.Module], Stated]] = [
    (TrainsTheParent, ("layers.0", 4)),
    (SharedStatistics, ("layers.0.1.num_batches_tracked", "stage", "buffer")),
    (UsesAWeightInside, ("layers.0.a.weight", "tensor")),
    (SumsAllParameters, ("parameters", "modules", "zb.nn.add_loss")),
    (SumsWhatLayersKeep, ("tensor", "inside")),
    (Counts, ("layers.0", "arguments")),
    (GivesNumbers, ("layers.0", "Python")),
    (GivesGenerators, ("layers.0", "generator")),
    (UsesAChangedBuffer, ("gain", "layers.0")),
    (SetsAttributes, ("condition", "layers.0", "head")),
    (ClampsWeights, ("layers.0.weight", "parameter")),
    (RescalesBehindItsBlocks, ("layers.0.b.weight", "layers.0")),
    (CompiledIntoOthers, ("layers.0", "torch.compile")),
    (Scripted, ("head", "TorchScript")),
    (DifferentiatesThroughParts, ("head", "autograd", "values")),
    (TransformsParts, ("layers.0", "torch.func")),
    (Nests, ("tensor", "jagged")),
    (NestsInside, ("layers.0", "tensor")),
    (ReentrantCheckpoints, ("layers.0", "torch.utils.checkpoint", "use_reentrant=True")),
    (Reversible, ("layers.0", "torch.autograd.Function")),
    (Queues, ("head.1", "head.2.keys")),
    (HooksOnTheModel, ("HooksOnTheModel", "zb.split", "forward_hooks")),
]


def logs(_: nn.Module, __: Any, output: Tensor) -> None:
    float(output.sum())


class ReadsInput:
    def __call__(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        assert not kwargs
        float(args[0].sum())


@pytest.mark.parametrize("is_before", [False, True])
def test_a_hook_on_a_module_around_parts_that_reads_values_is_named(is_before: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    if is_before:
        model[1].register_forward_pre_hook(ReadsInput(), with_kwargs=True)
    else:
        model[1].register_forward_hook(functools.partial(logs))
    with pytest.raises(zb.InputError) as caught:
        zb.split(model, example=torch.ones(2, WIDTH))
    assert caught.value.fields["module"] == "Sequential"
    assert caught.value.fields["sources"] == ("'0'" if is_before else "'1.2'")


class DropsAll(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:1]:
            x = layer(x)
        return x


def test_an_example_that_skipped_layers_is_named() -> None:
    with pytest.raises(zb.InputError) as caught:
        zb.split(DropsAll(), example=torch.ones(2, WIDTH))(0, 4)
    assert "'layers.1'" in caught.value.fields["reason"]
    assert "layerdrop" in caught.value.fields["remedy"]


def batch(width: int = WIDTH) -> list[list[Tensor]]:
    torch.manual_seed(5)
    return [[torch.randn(2, width).double() for _ in range(MICROBATCHES)] for _ in range(STEPS)]


def loss_of(output: Any) -> Tensor:
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    total: Tensor = sum((leaf.square().sum() for leaf in leaves), torch.zeros((), dtype=torch.float64))
    return total


class WholeAndStages:
    """A model, and the stages that are made of copies of it, which train together on the same numbers."""

    def __init__(self, model: nn.Module, num_stages: int, example: Tensor) -> None:
        self.whole = copy.deepcopy(model)
        splits = [zb.split(copy.deepcopy(model), example=example) for _ in range(num_stages)]
        self.stages = [split(stage, num_stages) for stage, split in enumerate(splits)]
        self.tied = splits[0].tied(num_stages)
        self.held = [dict(stage.named_parameters(remove_duplicate=False)) for stage in self.stages]

    def run(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of a microbatch, uncut and cut, after their backward passes."""
        expected = loss_of(self.whole(x.clone()))
        given = self.stages[0](x.clone())
        for stage in self.stages[1:]:
            given = stage(**pytree.tree_map_only(Tensor, Tensor.clone, given))
        ours = loss_of(given)
        for loss in (expected, ours):
            loss.backward()  # type: ignore[no-untyped-call]
        return expected, ours

    def update(self) -> list[str]:
        """The names of parameters whose gradients differ, all of which are then trained."""
        for group in self.tied:
            found = [self.held[stage][name].grad for stage, name in group]
            total = sum(gradient for gradient in found if gradient is not None)
            for stage, name in group:
                self.held[stage][name].grad = total.clone() if isinstance(total, Tensor) else None
        whole = dict(self.whole.named_parameters(remove_duplicate=False))
        wrong = [name for held in self.held for name, ours in held.items() if not _equal(ours.grad, whole[name].grad)]
        for parameters in (whole, *self.held):
            unique = {id(parameter): parameter for parameter in parameters.values()}
            torch.optim.SGD(unique.values(), lr=0.01).step()
            for parameter in unique.values():
                parameter.grad = None
        return wrong


def _equal(ours: Tensor | None, expected: Tensor | None) -> bool:
    if ours is None or expected is None:
        return all(gradient is None or not bool(gradient.any()) for gradient in (ours, expected))
    return bool((ours - expected).norm() <= 1e-12 * expected.norm().clamp_min(1e-4))


def check(model: nn.Module, num_stages: int) -> None:
    """Two steps of two microbatches: losses, gradients, and the buffers that eval mode and a checkpoint would read."""
    steps = batch()
    models = WholeAndStages(model, num_stages, steps[0][0])
    assert set().union(*models.held) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for microbatches in steps:
        for x in microbatches:
            expected, ours = models.run(x)
            assert bool((ours - expected).norm() <= 1e-12 * expected.norm())
        assert not models.update()
    buffers = dict(models.whole.named_buffers())
    held = [(name, buffer) for stage in models.stages for name, buffer in stage.named_buffers() if not buffer.is_meta]
    assert all(torch.allclose(buffer, buffers[name], rtol=1e-12) for name, buffer in held)


@pytest.fixture(autouse=True)
def without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models are not proved, so nothing here may rest on the proof."""
    monkeypatch.setattr(prove, "prove", lambda *_, **__: None)


def made(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


@pytest.mark.sweep
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", RIGHT, ids=lambda kind: kind.__name__)
def test_a_usage_pattern_has_the_numbers_of_one_device(kind: type[nn.Module], num_stages: int) -> None:
    if kind is Checkpoints and num_stages == 3:
        with raises(zb.InputError, "layers.2", "layers.3", "torch.utils.checkpoint"):
            check(made(kind), num_stages)
        return
    check(made(kind), num_stages)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("kind", "stated"), REFUSED, ids=[kind.__name__ for kind, _ in REFUSED])
def test_an_unsupported_usage_pattern_is_refused_by_name(kind: type[nn.Module], stated: Stated) -> None:
    with raises(zb.InputError, *stated):
        check(made(kind), 2)


def evaluated(stages: list[nn.Module], x: Tensor) -> Any:
    given: Any = {"x": x}
    for stage in stages:
        given = stage(**given)
    return given


class Logged(nn.Module):
    """A child without parameters that holds what has no copy: directly, and deep in an object. It copies in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.calls = threading.Lock(), {"by": [threading.Condition()]}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def forward(self, x: Tensor) -> Tensor:
        with self.lock, self.calls["by"][0]:
            return x * 2


class Logs(Layers):
    def set_up(self) -> None:
        self.log = Logged()

    def forward(self, x: Tensor) -> Tensor:
        return self.log(self.body(x))


def test_locks_of_modules_around_parts_are_shared() -> None:
    model, x = made(Logs), batch()[0][0]
    split = zb.split(model, example=x)
    first, second = split(0, 2), split(1, 2)
    torch.testing.assert_close(loss_of(second(**first(x))), loss_of(model(x)), rtol=1e-12, atol=0)


def test_weights_that_code_outside_of_a_part_rescales_are_rescaled_on_the_stage_of_the_part() -> None:
    model, x = made(RescalesItsBlocks), batch()[0][0]
    whole, split = copy.deepcopy(model), zb.split(model, example=x)
    stages = [split(stage, 2) for stage in range(2)]
    for training in (True, False, True, False, True):
        for module in (whole, *stages):
            module.train(training)
        assert torch.equal(evaluated(stages, x), whole(x))
    assert whole.layers[3].b.weight.equal(stages[1].layers[3].b.weight)


RATE = {"skipped": 0.0}
"""The share of layers that are skipped."""


class DropsLayers(Layers):
    """Skips layers at random, between its parts or `inside` of them."""

    inside = False

    def body(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.inside or random.random() >= RATE["skipped"]:
                x = layer(x).tanh()
        result: Tensor = self.head(x)
        return result

    forward = body


class Dropped(Block):
    def forward(self, x: Tensor) -> Any:
        return x if random.random() < RATE["skipped"] else super().forward(x)


class DropsInside(DropsLayers):
    inside = True

    def set_up(self) -> None:
        self.layers = nn.ModuleList(Dropped() for _ in range(4))


@pytest.mark.parametrize("kind", [DropsLayers, DropsInside])
def test_layers_are_skipped_at_random_inside_of_parts_only(kind: type[DropsLayers], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(kind), batch()[0][0]
    split = zb.split(model, example=x)
    stages = [split(stage, 2) for stage in range(2)]
    torch.testing.assert_close(evaluated(stages, x), model(x))
    monkeypatch.setitem(RATE, "skipped", 1.0)
    if kind is DropsInside:
        torch.testing.assert_close(evaluated(stages, x), model(x))
        return
    with raises(zb.InputError, "layers.2"):
        evaluated(stages, x)


def test_a_parameter_of_two_parts_that_code_outside_rescales_is_refused() -> None:
    model = made(TiedInsideAndRescaled).eval()
    with raises(zb.InputError, "part", "tensor", "code"):
        zb.split(model, example=batch()[0][0])


def double_weights(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        with torch.no_grad():
            part.weight.mul_(2)


def test_loops_over_the_parts_of_a_stage_meet_its_own_parts() -> None:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    plain = Blocks()
    split = zb.split(copy.deepcopy(plain), example=x)
    stages = [split(stage, 2) for stage in range(2)]
    for stage in stages:
        seen: list[str] = []
        for name, part in stage.named_modules():
            if isinstance(part, nn.Linear):
                seen += [f"{name}.{own}" for own, _ in part.named_parameters()]
                double_weights(part)
        assert seen == [name for name, _ in stage.named_parameters()]
        stage.apply(double_weights)
        for block in stage.layers:
            handle = block.register_forward_pre_hook(lambda *_: None)
            handle.remove()
            assert isinstance(block, Block)
        assert len(list(stage.layers)) == 4
    for _ in range(2):
        plain.apply(double_weights)
    torch.testing.assert_close(stages[1](**stages[0](x)), plain(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which torch's compiler reads
def test_blocks_that_are_compiled_in_place_are_compiled_on_their_stages() -> None:
    """As torchtitan compiles; a copy of a compiled module is not compiled."""
    model, x = made(Blocks), batch()[0][0]
    whole, graphs = copy.deepcopy(model), []
    for layer in (*model.layers, model.head):
        layer.compile(backend=lambda graph, _: graphs.append(graph) or graph.forward)
    split = zb.split(model, example=x)
    stages = [split(stage, 2) for stage in range(2)]
    assert not graphs
    for training in (True, False):
        for module in (whole, *stages):
            module.train(training)
        for output in (whole(x), evaluated(stages, x)):
            output.sum().backward()
        assert torch.equal(evaluated(stages, x), whole(x))
    assert graphs
    held = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    assert held.keys() == dict(whole.named_parameters()).keys()
    assert all(_equal(held[name].grad, parameter.grad) for name, parameter in whole.named_parameters())


def test_a_model_that_is_compiled_in_place_as_a_whole_is_refused() -> None:
    model = made(Blocks)
    model.compile(backend="eager")
    with raises(zb.InputError, "compile()", "stages"):
        zb.split(model, example=batch()[0][0])
