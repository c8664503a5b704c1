"""A small twin of the 70B model: planned by the same command, trained on four ranks, with the losses and gradients of one device.

torchrun --nproc-per-node 4 examples/big_model/train_twin.py

It trains twice, because a pipeline cannot divide both its head by the vocabulary and its stages by FSDP2: over four ranks with a divided
head, and over two ranks whose stages two replicas share. Both plans recompute forwards.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

import zerobubble as zb
from zerobubble.cli import main as zerobubble
from zerobubble.partition import Layer, layers_to_dict

LAYERS, WIDTH, ROWS, HEADS = 8, 16, 128, 2
MICROBATCHES, SEQUENCES, TOKENS = 8, 2, 12
NUMBER = 8
"""Bytes of a float64. Sums in another order differ by about 1e-15."""
STEPS, TOLERANCE = 3, 1e-12


class Block(nn.Module):
    """Attention and a gated MLP, `inner` wide."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        wide = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(wide)) * self.up(wide))


def units() -> dict[str, nn.Module]:
    """All parts of the model by name, the same on every rank. As in the large model, the MLPs become wider with depth."""
    torch.manual_seed(0)
    blocks = {f"layer{number}": Block(24 + 2 * number) for number in range(LAYERS)}
    made = {"embed": nn.Embedding(ROWS, WIDTH), **blocks, "norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, ROWS, bias=False)}
    return {name: unit.double() for name, unit in made.items()}


def layers() -> list[Layer]:
    """The parts with times at 1 GFLOP/s, in ns, and bytes."""
    tokens, found = SEQUENCES * TOKENS, []
    for name, unit in units().items():
        weights = sum(weight.numel() for weight in unit.parameters())
        product = 0 if name == "embed" else 2 * tokens * weights
        saved = tokens * NUMBER * sum(part.out_features + part.in_features for part in unit.modules() if isinstance(part, nn.Linear))
        message = tokens * WIDTH * NUMBER
        found.append(Layer(product + 1, product + 1, product, saved, saved // 2, 4 * NUMBER * weights, message, name))
    return found


def plan(ranks: int, memory: int, with_head: bool, options: list[str]) -> zb.planning.Plan:
    """The plan that `zerobubble plan` makes for the twin. Rank 0 plans, all ranks read the same file."""
    made = [""]
    if dist.get_rank() == 0:
        given, head = layers(), layers()[-1]
        if with_head:
            given.pop()
            times = ",".join(f"{time / 1e6}" for time in (head.forward, head.backward, head.weight))
            options = [*options, "--head", times, "--head-slowdown", "1.1", "--collective", "0.01"]
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "layers.json", Path(folder) / "plan.json"
            source.write_text(json.dumps(layers_to_dict(given)), encoding="utf-8")
            shape = ["plan", "-p", str(ranks), "-m", str(MICROBATCHES), "--layers", str(source), "--memory", f"{memory}B"]
            shared = ["--recompute", "auto", "--levels", "full:1:0.06", "--evaluations", "300", "-o", str(target)]
            done = CliRunner().invoke(zerobubble, [*shape, *shared, *options])
            if done.exit_code:
                raise SystemExit(done.output)
            made = [target.read_text(encoding="utf-8")]
    dist.broadcast_object_list(made)
    return zb.planning.Plan.from_dict(json.loads(made[0]))


def batch(seed: int, share: int) -> tuple[Tensor, Tensor]:
    """Tokens and the ones that follow them, for one replica."""
    random = torch.Generator().manual_seed(100 * seed + share)
    text = torch.randint(ROWS, (MICROBATCHES * SEQUENCES, TOKENS + 1), generator=random)
    return text[:, :-1], text[:, 1:]


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of a microbatch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class OneDevice:
    """The whole model, which accumulates the same microbatches."""

    def __init__(self) -> None:
        self.units = units()
        self.weights = {f"{name}.{key}": weight for name, unit in self.units.items() for key, weight in unit.named_parameters()}
        self.optimizer = optimizer_of(self.weights.values())

    def step(self, seed: int, shares: int) -> float:
        """Leave the gradients of a step, and give its loss."""
        self.optimizer.zero_grad()
        model, total = nn.Sequential(*self.units.values()), 0.0
        for share in range(shares):
            inputs, targets = batch(seed, share)
            for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
                loss = loss_fn(model(x), y) / (MICROBATCHES * shares)
                loss.backward()
                total += loss.item()
        return total

    def errors(self, pipe: zb.Pipeline) -> Iterator[float]:
        """How far this rank's gradients are from those here, each as a share of the largest entry of its gradient."""
        for module in pipe.modules.values():
            for key, weight in module.named_parameters():
                assert weight.grad is not None
                mine = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
                name, rows = key, slice(None)
                if key.startswith("head_rows_"):
                    first, end = key.removeprefix("head_rows_").split("_to_")
                    name, rows = "head.weight", slice(int(first), int(end))
                whole = self.weights[name].grad
                assert whole is not None
                yield ((mine - whole[rows]).abs().max() / whole.abs().max()).item()


def optimizer_of(weights: Any) -> torch.optim.Optimizer:
    """The optimizer of both runs."""
    return torch.optim.AdamW(weights, lr=3e-3)


def train(found: zb.planning.Plan, mesh: DeviceMesh | None) -> tuple[list[float], float]:
    """The losses of some steps, and the largest relative error of losses and gradients on any rank."""
    sizes, own = found.problem.layers_per_stage, units()
    names = list(own)

    def build(stage: int, num_stages: int) -> nn.Module:
        first = sum(sizes[:stage])
        module = nn.Sequential()
        for name in names[first : first + sizes[stage]]:
            module.add_module(name, own[name])
        if found.problem.head is not None and not found.schedule.has_divided_head and stage == num_stages - 1:
            module.add_module("head", own["head"])
        if mesh is None:
            return module
        for unit in module:
            fully_shard(unit, mesh=mesh["dp_shard"])
        return fully_shard(module, mesh=mesh["dp_shard"])

    head = own["head"]
    assert isinstance(head, nn.Linear)
    loss_of = zb.nn.DividedHead(head) if found.schedule.has_divided_head else loss_fn
    share, shares = (0, 1) if mesh is None else (mesh.get_local_rank("dp_shard"), mesh["dp_shard"].size())
    one, losses, worst = OneDevice(), [], 0.0
    with zb.Pipeline(build, found, MICROBATCHES, loss_of, mesh=mesh) as pipe:
        optimizer = optimizer_of(pipe.parameters())
        for step in range(STEPS):
            loss, expected = pipe.step(*batch(step, share)).item(), one.step(step, shares)
            worst = max(worst, abs(loss / expected - 1), *one.errors(pipe))
            losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
            one.optimizer.step()
    everywhere = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    return losses, everywhere.item()


def report(what: str, found: zb.planning.Plan, losses: list[float], error: float) -> None:
    """Print how the plan divides the model and how close the run is to one device; end with an error if it is not close."""
    if dist.get_rank() == 0:
        kinds = [op.kind for row in found.schedule.rows for op in row]
        recomputed = sum(kind == zb.Kind.R for kind in kinds)
        stages = " ".join(map(str, found.problem.layers_per_stage))
        bound = f"{found.time / found.bound.time - 1:.1%} over its bound"
        print(f"{what}: {found.placement.name}, stages of {stages} layers, {recomputed} forwards recomputed, {bound}")
        print(f"  losses {' '.join(f'{loss:.4f}' for loss in losses)}")
        close = error < TOLERANCE
        print(f"  {'equal to one device' if close else 'NOT equal to one device'}: largest relative error {error:.1e}")
    if error >= TOLERANCE:
        raise SystemExit(1)


def main() -> None:
    """Plans and trains both ways, in one process per rank."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    if dist.get_world_size() != 4:
        raise SystemExit("the twin trains on 4 ranks: torchrun --nproc-per-node 4 examples/big_model/train_twin.py")
    found = plan(4, 540_000, with_head=True, options=["--placement", "linear"])
    head = "head divided by its vocabulary" if found.schedule.has_divided_head else "head on the last stage"
    report(head, found, *train(found, None))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    weights = sum(weight.nbytes for unit in units().values() for weight in unit.parameters()) // 2
    shards = ["--weights", f"{weights}B", "--gathered", f"{weights}B", "--gather-rate", "1GB", "--placement", "vee"]
    found = plan(2, 700_000, with_head=False, options=shards)
    losses, error = train(found, mesh)
    report("stages in shards over two replicas", found, losses, error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
