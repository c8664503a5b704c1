"""Splits backward graphs of stages by our minimum cut and by torch's own partitioner, and compares what the two leave for W.

Torch's `default_partition` is meant for a joint graph. A backward graph passes for one if its inputs are renamed to primals and what the
input gradients need is marked as its forward. Both splits compute the gradients of the whole graph, to the bit. Writes `partitioner.json`.
"""

from __future__ import annotations

import copy
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._functorch.partitioners import default_partition

import zerobubble as zb
from zerobubble.runtime.split.graphs.backward_graph import BackwardSplit, split_backward
from zerobubble.runtime.split.graphs.fx_nodes import ancestors, flops, inputs_of, is_getitem, num_bytes, results_of, without_none
from zerobubble.runtime.split.tracing import backward_pass

sys.path.insert(0, str(Path(__file__).parents[1] / "split"))
from run import Block

WIDTH, LENGTH = 64, 32


class SwiGLU(nn.Module):
    """A gated MLP behind an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Experts(nn.Module):
    """Dense experts: the sum of their outputs, weighted by a router."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("blw,ewf->eblf", x, self.up).relu()
        return x + torch.einsum("eblf,efw,ble->blw", hidden, self.down, self.router(x).softmax(-1))


class Scale(nn.Module):
    """The first of two stages: gives the second an input that requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.GELU())


def sequence() -> Tensor:
    return torch.randn(4, LENGTH, WIDTH)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], bool]] = {
    "transformer blocks": (lambda: nn.Sequential(Block(WIDTH), Block(WIDTH)), sequence, False),
    "SwiGLU MLPs": (lambda: nn.Sequential(SwiGLU(), SwiGLU()), sequence, False),
    "dense experts": (lambda: nn.Sequential(Experts(), Experts()), sequence, False),
    "MLP with dropout": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.GELU(), nn.Linear(WIDTH, WIDTH)),
        sequence,
        False,
    ),
    "norm and head": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1000)), sequence, False),
    "convolutions": (convolutions, lambda: torch.randn(4, 8, 16, 16), False),
    "first stage": (lambda: nn.Sequential(nn.Embedding(100, WIDTH), Block(WIDTH)), lambda: torch.randint(100, (4, LENGTH)), True),
}
"""Modules and inputs by name, and whether the module is the first stage, whose input has no gradient."""


def by_torch(backward: fx.GraphModule, num_parameters: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a backward graph with `default_partition`. Raises `ValueError` if no input requires grad: its forward would be empty."""
    graph = fx.GraphModule(backward, copy.deepcopy(backward.graph))
    for index, node in enumerate(inputs_of(graph)):
        node.name = node.target = f"primals_{index}"
    results = results_of(graph)
    gradients, of_inputs = results[:num_parameters], results[num_parameters:]
    first = set(ancestors(without_none(of_inputs)))
    first |= {node for node in graph.graph.nodes if is_getitem(node) and node.args[0] in first}
    if not first:
        raise ValueError("no input requires grad")
    output = next(iter(reversed(graph.graph.nodes)))
    output.args = ((*of_inputs, *gradients),)
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    for node in nodes:
        node.meta["partitioner_tag"] = "is_forward" if node in first else "is_backward"
    for node in (*(node for node in nodes if node in first), *(node for node in nodes if node not in first)):
        output.prepend(node)
    graph.recompile()
    b, w = default_partition(graph, (), num_fwd_outputs=len(of_inputs))
    return b, w


def compared(
    backward: fx.GraphModule, num_parameters: int, free: Collection[str], weight_only: Collection[str]
) -> tuple[Any, dict[str, Any]]:
    """Returns our split of a backward graph, and both splits in numbers."""
    whole = fx.GraphModule(backward, copy.deepcopy(backward.graph))
    begin = time.process_time()
    split = split_backward(backward, num_parameters, free, weight_only)
    row: dict[str, Any] = {"ours_s": time.process_time() - begin}
    row |= {"ours_bytes": total_bytes(inputs_of(split.w), free), "ours_share": share(split.w, split)}
    names = {f"primals_{index}": node.name for index, node in enumerate(inputs_of(whole))}
    begin = time.process_time()
    try:
        b, w = by_torch(whole, num_parameters)
    except ValueError as error:
        return split, row | {"torch": str(error)}
    row |= {"torch_s": time.process_time() - begin}
    given = [node for node in inputs_of(w) if names.get(node.name) not in free]
    row |= {"torch_bytes": total_bytes(given, ()), "torch_share": share(w, split)}
    row["same_bits"] = same_bits(whole, b, w, num_parameters)
    return split, row


def total_bytes(nodes: list[fx.Node], free: Collection[str]) -> int:
    """The bytes that B keeps for W: of tensors that are not kept anyway."""
    return sum(num_bytes(node) for node in nodes if node.name not in free and isinstance(node.meta.get("val"), Tensor))


def share(w: fx.GraphModule, split: BackwardSplit) -> float:
    """The FLOPs of W over those of all products that give weight gradients."""
    return sum(flops(node) for node in w.graph.nodes if node.op == "call_function") / split.weight_flops


def same_bits(whole: fx.GraphModule, b: fx.GraphModule, w: fx.GraphModule, num_parameters: int) -> bool:
    """Whether torch's two parts compute what the whole backward graph computes, for random inputs."""
    torch.manual_seed(0)
    inputs = [random_like(node.meta["val"]) for node in inputs_of(whole)]
    expected = whole(*inputs)
    of_inputs = len(expected) - num_parameters
    found = b(*inputs)
    kept = dict(zip((node.name for node in results_of(b)[of_inputs:]), found[of_inputs:], strict=True))
    gradients = w(*(kept[node.name] for node in inputs_of(w)))
    pairs = zip((*gradients, *found[:of_inputs]), expected, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def random_like(example: Any) -> Any:
    """A tensor of the sizes and strides of `example`; integers and masks are ones."""
    if not isinstance(example, Tensor):
        return example
    made = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)
    return made.normal_() if example.dtype.is_floating_point else made.fill_(1)


def main() -> None:
    """Train one step of each module in a graph stage, compare the splits of its backward graph and write the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    rows = []
    for name, (make, draw, is_first) in KINDS.items():
        found: list[dict[str, Any]] = []

        def spy(backward: fx.GraphModule, *args: Any, found: list[dict[str, Any]] = found) -> Any:
            split, row = compared(backward, *args) if len(list(backward.graph.nodes)) > 10 else (split_backward(backward, *args), None)
            found += [row] if row else []
            return split

        torch.manual_seed(0)
        stages = [make(), Scale()] if is_first else [Scale(), make()]
        x = draw()
        with (
            patch.object(backward_pass, "split_backward", spy),
            zb.Pipeline(stages, zb.make("zb-v", 1, 2), 2, lambda y, _: y.square().mean(), split="graph") as pipe,
        ):
            pipe.step(x, x)
        (row,) = found
        rows.append({"module": name, **{key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}})
        print(rows[-1], flush=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    Path(__file__).with_name("partitioner.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
