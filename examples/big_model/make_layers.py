"""Estimates the layers of a Llama-70B-like model on H100s, as `zerobubble plan --layers` reads them.

python examples/big_model/make_layers.py

writes `layers.json` and `layers_fused.json` next to this program and prints the times of the head, for `--head`. The second file also has
the time of B and W in one pass, which tensor parallelism makes shorter than B and W apart.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import zerobubble as zb
from zerobubble.cost_model import MODELS, Estimate
from zerobubble.partition import Layer, layers_to_dict

FOLDER = Path(__file__).parent
TP, SHARDS, SEQUENCES = 8, 8, 6
"""GPUs that share a layer, replicas over which FSDP2 divides weights and optimizer state, and sequences of 8,192 tokens in a microbatch."""
RANKS, NUM_LAYERS, EMBEDDING, BLOCK, HEAD = 8, 80, 0, 1, 2


def inner_width(number: int) -> int:
    """The width of the MLP, which grows with depth from 0.75 to 1.25 times that of Llama-3-70B. So layers are uneven."""
    return 1024 * round(28 * (0.75 + 0.5 * number / (NUM_LAYERS - 1)))


def estimate(width: int) -> Estimate:
    """Three stages: the embedding, one layer with an MLP of this width, and the head."""
    model = replace(MODELS["llama3-70b"], layers=1, inner=width)
    return zb.cost_model.transformer(model, gpu="H100", tp=TP, pp=3, layers=[0, 1, 0], microbatch=SEQUENCES)


def kept_bytes(found: Estimate, stage: int) -> int:
    """Bytes that one GPU keeps: its shard of weights and optimizer state, and gradients in full, which FSDP2 reduces once a step."""
    return (found.weights[stage] + found.optimizer[stage]) // SHARDS + found.gradients[stage]


def layer(found: Estimate, stage: int, name: str) -> Layer:
    """A stage of the estimate as a layer, in ns and bytes."""
    costs = found.costs
    times = costs.forward[stage], costs.backward[stage], costs.weight[stage]
    held = costs.held_after_f[stage], costs.held_after_b[stage]
    return Layer(*times, *held, kept_bytes(found, stage), costs.comm[0], name, fused=costs.fused[stage])


def layers() -> list[Layer]:
    """Embedding, 80 layers, and the last norm, whose rank also keeps the weights of the head. The head's times go into `--head`."""
    found = [estimate(inner_width(number)) for number in range(NUM_LAYERS)]
    blocks = [layer(each, BLOCK, f"layers.{number}") for number, each in enumerate(found)]
    norm = Layer(1, 1, 1, 0, 0, kept_bytes(found[-1], HEAD), found[-1].costs.comm[0], "norm")
    return [layer(found[0], EMBEDDING, "embed_tokens"), *blocks, norm]


def files() -> dict[str, str]:
    """The text of each file. One is without `fused`, the price of splitting backwards."""
    whole = layers()
    return {"layers.json": text([replace(each, fused=0) for each in whole]), "layers_fused.json": text(whole)}


def text(given: list[Layer]) -> str:
    """The JSON form, a line for each layer."""
    data = layers_to_dict(given)
    lines = ",\n".join(json.dumps(each) for each in data["layers"])
    return f'{{"format": {json.dumps(data["format"])}, "layers": [\n{lines}\n]}}\n'


def options() -> dict[str, str]:
    """The options of `zerobubble plan` that the layers do not hold."""
    found = estimate(inner_width(NUM_LAYERS - 1))
    costs, whole = found.costs, layers()
    times = (costs.forward[HEAD], costs.backward[HEAD], costs.weight[HEAD])
    held = costs.held_after_f[HEAD] / (sum(each.held_after_f for each in whole) / RANKS)
    weights = sum(estimate(inner_width(number)).weights[BLOCK] for number in range(NUM_LAYERS)) + 2 * found.weights[EMBEDDING]
    return {
        "--head": ",".join(f"{time / 1e6:.2f}" for time in times),
        "--head-held": f"{held:.2f}",
        "--collective": f"{costs.comm[0] / 1e6:.2f}",
        "--weights": f"{weights / RANKS / 1e9:.2f}GB",
    }


def main() -> None:
    """Write both files and print the options that go with them."""
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
    print(*(f"{option} {value}" for option, value in options().items()))


if __name__ == "__main__":
    main()
