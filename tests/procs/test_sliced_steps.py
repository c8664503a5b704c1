"""Steps over slices of a sequence: losses and gradients are those of one device with whole sequences, or the step is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerobubble as zb
from tests.device import DEVICE
from tests.procs.meshes import init_device_mesh
from tests.procs.ranks import Ranks
from tests.refusals import states
from zerobubble.runtime.stage.slices import is_in_slices

WORDS, WIDTH, HEADS, TOKENS, BATCH = 13, 8, 2, 11, 4
EQUAL = 1e-12


class Attention(nn.Module):
    """A block with causal attention, whose keys are joined over slices unless it is `plain`."""

    def __init__(self, *, plain: bool = False, checkpointed: bool = False, adds: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.attention = partial(nn.functional.scaled_dot_product_attention, is_causal=True) if plain else zb.nn.CausalAttention()
        self.checkpointed, self.adds = checkpointed, adds

    def forward(self, x: Tensor) -> Tensor:
        x = x + (checkpoint(self.mixed, x, use_reentrant=False) if self.checkpointed else self.mixed(x))
        if self.adds:
            zb.nn.add_loss("squares", 0.1 * x.square().mean())
        return x + self.mlp(x)

    def mixed(self, x: Tensor) -> Tensor:
        query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed: Tensor = self.out(self.attention(query, key, value).transpose(1, 2).flatten(2))
        return mixed


class Tokens(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH), zb.nn.SlicePositions()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tok(tokens) + self.pos(self.positions(tokens.size(1), tokens.device))


class Convolution(nn.Module):
    """A causal convolution, which lacks the tokens of earlier slices."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x.mT)[..., : x.size(1)].mT


def parts(block: Callable[[], nn.Module] = Attention) -> list[nn.Module]:
    return [Tokens(), *(block() for _ in range(4)), nn.Linear(WIDTH, WORDS, bias=False)]


def build(stage: int, num_stages: int, block: Callable[[], nn.Module] = Attention) -> nn.Module:
    """A stage of the model, which has the same values for every number of stages."""
    torch.manual_seed(0)
    whole = parts(block)
    return nn.Sequential(*whole[round(len(whole) * stage / num_stages) : round(len(whole) * (stage + 1) / num_stages)]).double()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, WORDS, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def on_one_device(block: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """The model with its gradients for the batch, and the loss."""
    model, (inputs, targets) = build(0, 1, block), batch()
    with zb.nn.collecting_losses() as added:
        loss = loss_fn(model(inputs), targets) + sum(added.values(), start=torch.zeros(()))
    loss.backward()
    return model, loss.detach()


def errors(pipe: Any, model: nn.Module, loss: Tensor, expected: Tensor, gradient_of: Callable[[Any], Any] = lambda p: p.grad) -> float:
    """The largest relative error of the loss and of the gradients of this rank's stages."""
    count, whole = pipe.schedule.num_stages, list(model.children())
    worst = float((loss.detach() - expected).abs() / expected)
    for stage, module in pipe.modules.items():
        own = nn.Sequential(*whole[round(len(whole) * stage / count) : round(len(whole) * (stage + 1) / count)])
        for mine, theirs in zip(module.parameters(), own.parameters(), strict=True):
            worst = max(worst, float((gradient_of(mine) - theirs.grad).norm() / theirs.grad.norm()))
    return worst


def step(group: Any, name: str, slices: int, microbatches: int, block: Callable[[], nn.Module], options: Mapping[str, Any]) -> float:
    model, expected = on_one_device(block)
    schedule = zb.make(name, 2, microbatches, slices=slices)
    played = zb.schedules.with_recompute(schedule) if options.get("recompute") == "all" else schedule
    others = {key: value for key, value in options.items() if key != "recompute"}
    stages = partial(build, block=block)
    with zb.Pipeline(stages, played, microbatches, loss_fn, group=group, slices=slices, **others) as pipe:
        loss = pipe.step(*batch())
        gradient_of = (lambda p: p.main_grad) if "main_grad" in others else (lambda p: p.grad)
        return errors(pipe, model, loss, expected, gradient_of)


STEPS: dict[str, tuple[str, int, int, Callable[[], nn.Module], dict[str, Any]]] = {
    "one slice": ("1f1b", 1, 2, Attention, {}),
    "1f1b": ("1f1b", 2, 2, Attention, {}),
    "zb-h1": ("zb-h1", 4, 2, Attention, {}),
    "slices of 1 and 2 tokens": ("zb-h1", 7, 1, Attention, {}),
    "slices of 1 token": ("1f1b", 11, 4, Attention, {}),
    "interleaved": ("interleaved-1f1b", 3, 2, Attention, {}),
    "recomputed": ("zb-h1", 3, 2, Attention, {"recompute": "all"}),
    "checkpointed": ("1f1b", 3, 2, partial(Attention, checkpointed=True), {}),
    "main_grad": ("1f1b", 3, 2, Attention, {"main_grad": torch.float64}),
    "gradients scaled": ("zb-h1", 3, 2, Attention, {"scale": "gradients"}),
    "whole backward": ("1f1b", 3, 2, Attention, {"split": "whole"}),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_step_equals_one_device(world: Ranks, case: str) -> None:
    assert max(world.run(step, *STEPS[case], ranks=2)) <= EQUAL


def planned(group: Any, placement: str) -> float:
    """A step with a plan, which says into how many slices microbatches are cut."""
    model, expected = on_one_device(Attention)
    work = zb.Workload.uniform(2, times=(10, 10, 8), comm=0.5)
    plan = zb.plan(work, 2, memory=2, placements=placement, slices=4, attention=(0.2, 0.3), evaluations=100)
    with zb.Pipeline(build, plan, 2, loss_fn, group=group) as pipe:
        return errors(pipe, model, pipe.step(*batch()), expected, lambda p: p.grad)


@pytest.mark.parametrize("placement", ["linear", "vee", "looped-2"])
def test_a_planned_step_equals_one_device(world: Ranks, placement: str) -> None:
    assert max(world.run(planned, placement, ranks=2)) <= EQUAL


def evaluated(group: Any) -> tuple[float, float] | None:
    inputs, targets = batch()
    with torch.no_grad():
        model = build(0, 1)
        expected = model(inputs)
    with zb.Pipeline(build, "zb-h1", 2, loss_fn, group=group, slices=3) as pipe:
        assert "2 microbatches of 3 slices" in repr(pipe)
        loss, outputs = pipe.eval_step(inputs, targets)
        if outputs is None:
            return None
        return float((loss - loss_fn(expected, targets)).abs()), float((outputs - expected).abs().max())


def test_evaluation_joins_the_slices(world: Ranks) -> None:
    (found,) = [result for result in world.run(evaluated, ranks=2) if result is not None]
    assert max(found) <= EQUAL


def with_ignored(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum") / (targets >= 0).sum()


def weighted(group: Any) -> float:
    """Slices with different numbers of ignored targets, weighted by those that count."""
    inputs, targets = batch()
    targets = torch.where(torch.arange(TOKENS) > torch.arange(BATCH)[:, None] + 2, targets, -1)
    model = build(0, 1)
    expected = with_ignored(model(inputs), targets)
    expected.backward()
    weight = lambda target: (target >= 0).sum()  # noqa: E731
    with zb.Pipeline(build, "1f1b", 1, with_ignored, group=group, slices=2, loss_weight=weight) as pipe:
        return errors(pipe, model, pipe.step(inputs, targets), expected.detach())


def test_losses_are_weighted_by_the_tokens_that_count(world: Ranks) -> None:
    assert max(world.run(weighted, ranks=2)) <= EQUAL


def trained(group: Any, validates: bool) -> float:
    """Three steps of AdamW with clipped gradients, by post-update validation or not."""
    model = build(0, 1)
    with zb.Pipeline(build, "zb-h1", 2, loss_fn, group=group, slices=3) as pipe:
        optimizers = [torch.optim.AdamW(parameters, lr=0.01) for parameters in (pipe.parameters(), model.parameters())]
        validation = zb.PostValidation(optimizers[0], pipe, 0.1) if validates else None
        for seed in range(3):
            inputs, targets = batch(seed)
            pipe.step(inputs, targets)
            loss_fn(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if validation is None:
                pipe.clip_grad_norm_(0.1)
            for optimizer in (validation or optimizers[0], optimizers[1]):
                optimizer.step()
                optimizer.zero_grad()
        if validation is not None:
            validation.settle()
        whole, worst = list(model.children()), 0.0
        for stage, module in pipe.modules.items():
            own = nn.Sequential(*whole[3 * stage : 3 * stage + 3])
            pairs = zip(module.parameters(), own.parameters(), strict=True)
            worst = max(worst, *(float((mine - theirs).norm() / theirs.norm()) for mine, theirs in pairs))
        return worst


@pytest.mark.parametrize("validates", [False, True])
def test_training_with_clipped_gradients(world: Ranks, validates: bool) -> None:
    assert max(world.run(trained, validates, ranks=2)) <= 1e-9


def replicated(group: Any) -> float:
    """Two replicas of a pipeline over slices, each with half of the batch."""
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("dp", "pp"))
    model, expected = on_one_device(Attention)
    inputs, targets = batch()
    half = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
    with zb.Pipeline(build, "zb-h1", 1, loss_fn, mesh=mesh, slices=3) as pipe:
        return errors(pipe, model, pipe.step(inputs[half], targets[half]), expected)


def test_replicas_take_parts_of_the_batch(world: Ranks) -> None:
    assert max(world.run(replicated, ranks=4)) <= EQUAL


def with_arguments(group: Any, given_to: int) -> float | str:
    """Named arguments of the first stage are cut like the inputs; those of another one are refused if they have a sequence."""
    inputs, more = torch.rand(2, BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0)).double()

    def stages(stage: int, num_stages: int) -> nn.Module:
        torch.manual_seed(stage)
        return (Wrapped if stage == given_to else nn.Sequential)(nn.Linear(WIDTH, WIDTH).double())

    class Wrapped(nn.Sequential):
        def forward(self, x: Tensor, more: Tensor, factor: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * factor + more)

    named = {"more": more, "factor": torch.tensor(2.0, dtype=torch.float64)}
    x = inputs
    for stage in range(2):
        x = stages(stage, 2)(x, **named) if stage == given_to else stages(stage, 2)(x)
    expected = x.square().mean()
    try:
        with zb.Pipeline(stages, "1f1b", 2, lambda out, _: out.square().mean(), group=group, slices=3) as pipe:
            return float((pipe.step(inputs, inputs, kwargs=named if group.rank() == given_to else None).detach() - expected).abs())
    except zb.ZeroBubbleError as error:
        return str(error)


def test_named_arguments_of_the_first_stage_are_cut(world: Ranks) -> None:
    assert max(world.run(with_arguments, 0, ranks=2)) <= EQUAL
    for text in world.run(with_arguments, 1, ranks=2):
        states(text, "'more'", 1)


def refused(group: Any, block: Callable[[], nn.Module], options: Mapping[str, Any]) -> str:
    try:
        with zb.Pipeline(
            partial(build, block=block),
            **{"schedule": "1f1b", "num_microbatches": 2, "loss_fn": loss_fn, "group": group, "slices": 3, **options},
        ) as pipe:
            pipe.step(*batch())
    except zb.ZeroBubbleError as error:
        return str(error)
    return ""


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[Any, ...]]] = {
    "plain attention": (partial(Attention, plain=True), {}, (0, "1")),
    "convolution": (Convolution, {}, (0, "1")),
    "more slices than tokens": (Attention, {"slices": 12}, (12, 11)),
    "a schedule without slices": (Attention, {"schedule": "zb-v"}, ("slices",)),
    "a schedule with other slices": (Attention, {"schedule": zb.make("1f1b", 2, 2, slices=2)}, (2, 3)),
    "a traced graph": (Attention, {"split": "graph"}, ("slices", "split='graph'")),
    "auto": (Attention, {"schedule": "auto"}, ("slices", "'auto'")),
    "an order of microbatches": (Attention, {"order_by": "tokens"}, ("slices", "order_by")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_slices_cannot_run_is_refused(world: Ranks, case: str) -> None:
    block, options, stated = REFUSED[case]
    for text in world.run(refused, block, options, ranks=2):
        states(text, *stated)


def test_outside_of_slices_modules_do_what_they_do_on_one_device() -> None:
    assert not is_in_slices()
    query, key, value = torch.randn(3, 1, HEADS, 5, 4, generator=torch.Generator().manual_seed(0)).double()
    expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(zb.nn.CausalAttention()(query, key, value), expected)
    assert zb.nn.SlicePositions()(3).tolist() == [0, 1, 2]
