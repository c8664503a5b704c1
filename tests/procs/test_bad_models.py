"""Models that cannot be split, on real ranks: every rank raises the same error, with the culprit and a workaround."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.ranks import Ranks
from tests.refusals import Stated, states
from tests.thinned import long_if

WIDTH = 6
X = torch.ones(2, WIDTH)
IDS = torch.arange(8).view(2, 4)


def row(*others: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), *others)


class Named(nn.Module):
    """Takes two required arguments and an optional one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, scale: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh() * scale
        return x if mask is None else x * mask


class Deciding(Named):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x = layer(x) if x.sum() > 0 else x
        return x


class Single(Deciding):
    """One part, and operations that torch cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        import os

        for layer in self.layers:
            x = layer(x)
        return x * len(os.environ.get("HOME", "")) + torch.frombuffer(bytearray(8), dtype=torch.float64).float()[0]


class LanguageModel(nn.Module):
    """A head whose weight is `share` of the embedding's."""

    def __init__(self, share: Callable[[nn.Parameter], nn.Parameter]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = share(self.tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        logits: Tensor = self.head(x)
        return logits


def of_one_memory() -> nn.Module:
    """Tied below autograd: the head's weight is a view of the embedding's."""
    return LanguageModel(lambda weight: nn.Parameter(weight.detach()))


def divided(group: Any, *names: str) -> nn.Module:
    """A model in which `fully_shard` has sharded these modules."""
    model = row()
    for name in names:
        fully_shard(model.get_submodule(name), mesh=DeviceMesh.from_group(group, DEVICE.type))
    return model


class Packed(nn.Module):
    """A recurrent layer on sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.size(1))[0]


class Tagger(nn.Module):
    """Packs sequences between its parts, or inside of a part."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(8, WIDTH)
        self.packed = Packed()
        self.layer = self.packed if inside else self.packed.layer
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = self.layer(x, lengths) if isinstance(self.layer, Packed) else Packed.forward(self, x, lengths)  # type: ignore[arg-type]
        return self.head(x)


class Norm(nn.Module):
    """Divides by a deviation, which it keeps, and multiplies by it again."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, back: bool = False) -> Tensor:
        if back:
            return x * self.deviation / self.scale
        self.deviation = x.std(1, keepdim=True).detach()
        return x / self.deviation * self.scale


class Renorm(nn.Module):
    """Multiplies by the deviation that it gets."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.scale = norm.scale

    def forward(self, x: Tensor, deviation: Tensor) -> Tensor:
        return x * deviation / self.scale


class Returning(nn.Module):
    """Returns to its first part at the end, or calls another part with what the first one would keep."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__()
        self.layers = row()
        self.norm = Norm()
        self.renorm = None if returns else Renorm(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(self.norm(x))
        return self.norm(y, back=True) if self.renorm is None else self.renorm(y, x.std(1, keepdim=True).detach())


class Momentum(nn.Module):
    """Two encoders, of which the second follows the first, in the forward unless `in_loop`."""

    def __init__(self, *, in_loop: bool) -> None:
        super().__init__()
        self.in_loop = in_loop
        self.query = nn.ModuleList(nn.Sequential(layer, nn.Tanh()) for layer in row())
        self.key = copy.deepcopy(self.query).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def update(self) -> None:
        for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
            key.mul_(0.9).add_(query, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_loop:
            self.update()
        query, key = x, x
        for layer in self.query:
            query = layer(query)
        for layer in self.key:
            key = layer(key)
        return torch.cat((query, key.detach()), 1)


class OneHot(nn.Module):
    """A module without parameters, which reads the largest number of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot(x.argmax(-1), WIDTH).to(x)


class Collects(Named):
    """Adds what its layers keep for a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeps(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x = layer(x)
        return x + sum(layer.kept for layer in self.layers)


class Keeps(nn.Linear):
    """Keeps a number that it computes."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x.square().mean()
        return super().forward(x)


class KeepsOnParameter(nn.Linear):
    """Keeps a copy of its weight in an attribute of the weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.org = self.weight.detach().clone()
        return super().forward(x)


class Flex(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)[None, None]
        attended: Tensor = flex_attention(y, y, y)  # type: ignore[assignment]
        return attended[0, 0]


def sparse() -> nn.Module:
    model = row()
    model[1].weight = nn.Parameter(torch.eye(WIDTH).to_sparse())
    return model


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(row().eval(), {nn.Linear})


BOTH = {"x": X, "scale": X}
CASES: dict[str, tuple[Callable[[Any], Any], Stated]] = {
    "DistributedDataParallel": (
        lambda group: zb.split(DistributedDataParallel(row(), process_group=group), example=X),
        ("zb.split", "DistributedDataParallel", "mesh="),
    ),
    "packed between parts": (
        lambda _: zb.split(Tagger(inside=False), example=(IDS, torch.tensor([4, 2]))),
        ("PackedSequence", "pack_padded_sequence", "pad_packed_sequence"),
    ),
    "returning to a part": (lambda _: zb.split(Returning(returns=True), example=torch.eye(WIDTH)), ("'norm'", 1)),
    "DataParallel inside": (lambda _: zb.split(row(DataParallel(row())), example=X), ("module '3'", "DataParallel")),
    "FullyShardedDataParallel": (
        lambda group: zb.split(FullyShardedDataParallel(row(), process_group=group, device_id=DEVICE), example=X),
        ("zb.split", "FullyShardedDataParallel", "fully_shard(split(stage, num_stages)"),
    ),
    "fully_shard": (
        lambda group: zb.split(divided(group, "0", ""), example=X),
        ("zb.split", "sharded", "fully_shard", "fully_shard(split(stage, num_stages)"),
    ),
    "fully_shard inside": (lambda group: zb.split(divided(group, "1"), example=X), ("module '1'", "fully_shard")),
    "replicate": (lambda group: zb.split(replicate(row(), process_group=group), example=X), ("replicate()", "mesh=")),
    "one memory": (
        lambda _: zb.split(of_one_memory(), example=IDS),
        ("tokens.weight", "stage 0", "head.weight", "stage 3"),
    ),
    "one memory, made by a function": (lambda _: zb.split(of_one_memory, example=IDS), ("tokens.weight", "stage 0", "head.weight")),
    "compiled": (lambda _: zb.split(torch.compile(row()), example=X), ("torch.compile", "_orig_mod")),
    "SyncBatchNorm": (lambda _: zb.split(row(nn.SyncBatchNorm(WIDTH)), example=X), ("module '3'", "SyncBatchNorm")),
    "sparse": (lambda _: zb.split(sparse(), example=X), ("parameter '1.weight'", "sparse")),
    "quantized": (lambda _: zb.split(quantized(), example=X), ("module '0'", "quantized Linear")),
    "argument missing": (lambda _: zb.split(Named(), example={"x": X}), ("example", "scale")),
    "argument unknown": (lambda _: zb.split(Named(), example={**BOTH, "bias": X}), ("example", "bias")),
    "deciding": (lambda _: zb.split(Deciding(), example=X), ("values", "layers.0")),
    "one_hot": (lambda _: zb.split(row(OneHot(), nn.Linear(WIDTH, WIDTH)), example=X), ("'2'", "test_bad_models.py")),
    "momentum": (lambda _: zb.split(Momentum(in_loop=False), example=X), ("test_bad_models.py", "zb.gathered(model)", [WIDTH, WIDTH])),
    "collected losses": (lambda _: zb.split(Collects(), example=X), ("zb.nn.add_loss",)),
    "attribute of a parameter": (lambda _: zb.split(row(KeepsOnParameter(WIDTH, WIDTH)), example=X), ("'3'", "'org'", "'weight'")),
    "flex_attention": (lambda _: zb.split(row(Flex()), example=X), ("'3'", "flex_attention", "sdpa")),
    "too few layers": (lambda _: zb.split(lambda: row(), example=X), ("3 parts", "4 stages", "'0'")),
    "no layers": (lambda _: zb.split(nn.Tanh(), example=X), ("parameters", "torch.export", 0)),
}


MADE_BY_FUNCTIONS = ("one memory, made by a function", "too few layers")


def refused(group: Any, case: str) -> str:
    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(CASES[case][0](group), "zb-v", 4, nn.functional.mse_loss, group=group)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", long_if({"compiled"}, CASES))
def test_a_model_that_cannot_be_cut_is_one_error_on_every_rank(world: Ranks, case: str) -> None:
    if DEVICE.type != "cpu" and case in MADE_BY_FUNCTIONS:
        pytest.skip("zb.split draws the numbers of a model that a function creates on the CPU")
    first, second = world.run(refused, case, ranks=2)
    assert first == second
    states(first, *CASES[case][1])


def remedied(group: Any) -> float:
    """The largest error of the loss of models that follow the remedies of two errors."""
    x, ids = torch.eye(8, WIDTH), torch.arange(32).view(8, 4) % 8
    lengths = torch.tensor([4, 2, 3, 4, 1, 2, 3, 4])
    errors = []
    for model, arguments in ((Tagger(inside=True), (ids, lengths)), (Returning(returns=False), (x,))):
        target = torch.zeros_like(model(*arguments)).detach()
        example = tuple(argument[:2] for argument in arguments)
        with zb.Pipeline(zb.split(model, example=example), "1f1b", 4, nn.functional.mse_loss, group=group) as pipe:
            expected = nn.functional.mse_loss(model(*arguments), target)
            errors.append(abs(pipe.step(arguments, target) - expected).item())
    return max(errors)


def test_remedies_make_models_right(world: Ranks) -> None:
    assert max(world.run(remedied, ranks=2)) < 1e-6


def follows(group: Any) -> float:
    """The largest error of losses and weights of a momentum encoder that the loop updates inside zb.gathered."""
    model = Momentum(in_loop=True).double()
    plain = copy.deepcopy(model)
    batches = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(0)).double()
    target, errors = torch.zeros(8, 2 * WIDTH).double(), []
    pipe = zb.Pipeline(zb.split(model, example=batches[0]), "1f1b", 4, nn.functional.mse_loss, group=group)
    optimizers = [torch.optim.SGD(parameters, lr=0.5) for parameters in (pipe.parameters(), plain.query.parameters())]
    for x in batches:
        with zb.gathered(model):
            model.update()
        plain.update()
        loss = nn.functional.mse_loss(plain(x), target)
        loss.backward()
        errors.append(float((pipe.step(x, target) - loss).detach().abs()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with zb.gathered(model), pipe:
        pass
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(errors + [float((ours - theirs).detach().abs().max()) for ours, theirs in pairs])


def test_a_momentum_encoder_that_the_loop_updates_is_that_of_one_device(world: Ranks) -> None:
    assert max(world.run(follows, ranks=2)) < 1e-12


def around_the_split(group: Any) -> tuple[str, float]:
    """The error for tied parameters hidden by a function around the split, and the loss's distance from one device with the remedy."""
    split = zb.split(LanguageModel(lambda weight: weight), example=IDS)

    def build(stage: int, num_stages: int) -> nn.Module:
        return split(stage, num_stages).train()

    def loss_fn(logits: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    with pytest.raises(zb.InputError) as caught:
        zb.Pipeline(build, "1f1b", 2, loss_fn, group=group)
    plain = LanguageModel(lambda weight: weight)
    with zb.Pipeline(build, "1f1b", 2, loss_fn, group=group, tied=split.tied(2)) as pipe:
        pipe.step(IDS, IDS)
        loss_fn(plain(IDS), IDS).backward()
        (module,) = pipe.modules.values()
        ours = module.get_parameter("tokens.weight" if group.rank() == 0 else "head.weight").grad
    assert ours is not None
    return str(caught.value), (ours - plain.tokens.weight.grad).abs().max().item()


def test_tied_parameters_that_nobody_shows_pipeline_of_are_refused(world: Ranks) -> None:
    for text, error in world.run(around_the_split, ranks=2):
        states(text, "tokens.weight", "stage 0", "head.weight", "stage 1")
        assert "tied=split.tied(num_stages)" in text
        assert error < 1e-6


def steps(group: Any, case: str) -> str:
    split = zb.split(Named(), example=BOTH)
    batch: dict[str, Any] = {"x": torch.ones(8, WIDTH), "scale": torch.ones(8, WIDTH)}
    options: dict[str, Any] = {}
    if case == "mask":  # given only to the last rank
        options = {"kwargs": {"mask": torch.ones(8, WIDTH)}} if group.rank() == 1 else {}
    elif case == "missing":
        del batch["scale"]
    elif case == "too few samples":
        batch = {name: rows[:3] for name, rows in batch.items()}
    else:
        batch["bias"] = torch.ones(8, WIDTH)
    with zb.Pipeline(split, "1f1b", 4, nn.functional.mse_loss, group=group) as pipe:
        with pytest.raises((zb.InputError, zb.PipelineError)) as caught:
            pipe.step(batch, torch.zeros(len(batch["x"]), WIDTH), **options)
        return f"{type(caught.value).__name__}: {caught.value}"


WRONG_STEPS: dict[str, Stated] = {
    "mask": ("step(kwargs=...)", "'mask'", "stage 1"),
    "missing": ("'scale'",),
    "unknown": ("'bias'",),
    "too few samples": (3, 4, "microbatches"),
}


@pytest.mark.parametrize("case", WRONG_STEPS)
def test_a_step_with_other_arguments_is_reported_on_every_rank(world: Ranks, case: str) -> None:
    for text in world.run(steps, case, ranks=2):
        states(text, *WRONG_STEPS[case])


def uneven(group: Any, samples: int) -> float:
    """A step with a batch that the microbatches do not divide evenly: the distance of loss and gradients from one device."""
    model = Named().double()
    plain = copy.deepcopy(model)
    x, scale = torch.randn(2, samples, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    with zb.Pipeline(zb.split(model, example={"x": x, "scale": scale}), "zb-h1", 4, nn.functional.mse_loss, group=group) as pipe:
        loss, expected = pipe.step({"x": x, "scale": scale}, x), nn.functional.mse_loss(plain(x, scale), x)
        expected.backward()
        named = [each for module in pipe.modules.values() for each in module.named_parameters()]
        found = [(parameter.grad - plain.get_parameter(name).grad).abs().max().item() for name, parameter in named]
        return max(*found, (loss - expected).abs().item())


@pytest.mark.parametrize("samples", [5, 7])
def test_a_batch_that_is_no_multiple_of_the_microbatches_trains_as_on_one_device(world: Ranks, samples: int) -> None:
    assert max(world.run(uneven, samples, ranks=2)) < 1e-14
