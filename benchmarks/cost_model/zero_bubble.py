"""Published throughputs of the Zero Bubble paper: Qi et al., arXiv 2401.10241v1, on A100 SXM 80 GB over NVLink and RoCE.

The schedules are called "1f1b", "interleaved-1f1b" (1F1B-I), "zb-h1" (ZB-1p), "zb-2p" and "zb-v".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from zerobubble.cost_model import Model


class Run(NamedTuple):
    """A run of table `table`: `samples` per second and GPU of a model with `microbatches` of `microbatch` sequences on so many ranks."""

    table: int
    model: str
    ranks: int
    microbatch: int
    microbatches: int
    schedule: str
    samples: float


class Shape(NamedTuple):
    """A model of table 3, and the stages per rank of its 1F1B-I: one layer each, with the embedding and the head as layers."""

    layers: int
    heads: int
    hidden: int
    v: int


SHAPES = {
    "1.5B": Shape(22, 24, 2304, 3),
    "6.2B": Shape(30, 32, 4096, 4),
    "14.6B": Shape(46, 40, 5120, 3),
    "28.3B": Shape(62, 48, 6144, 2),
}
TOKENS = 1024
"""Tokens of a sequence (table 3)."""
VOCABULARY = 32_000
"""Words. The paper does not state them. The names of the models are their sizes with 27,000 to 35,000 words and a tied head: 46 layers of
12 * 5120^2 parameters and 5120 a word are 14.6 B up to 35,000 words, and 62 layers of 12 * 6144^2 and 6144 a word 28.3 B from 27,000."""

THREE = {
    4: {
        ("1.5B", 8, 6, (24, 32, 64)): {
            "1f1b": (11.8, 12.5, 13.6), "interleaved-1f1b": (13.1, 13.4, 13.9), "zb-h1": (12.9, 13.4, 14.2), "zb-2p": (14.5, 14.8, 14.9),
        },
        ("6.2B", 8, 3, (24, 32, 64)): {
            "1f1b": (3.50, 3.70, 4.03), "interleaved-1f1b": (4.01, 4.08, 4.19), "zb-h1": (3.88, 4.00, 4.20), "zb-2p": (4.32, 4.35, 4.39),
        },
        ("14.6B", 16, 1, (48, 64, 128)): {
            "1f1b": (1.40, 1.49, 1.64), "interleaved-1f1b": (1.54, 1.59, 1.66), "zb-h1": (1.61, 1.67, 1.76), "zb-2p": (1.81, 1.83, 1.85),
        },
        ("28.3B", 32, 1, (96, 128, 256)): {
            "1f1b": (0.76, 0.80, 0.88), "interleaved-1f1b": (0.82, 0.85, 0.90), "zb-h1": (0.87, 0.90, 0.96), "zb-2p": (0.99, 1.00, 1.00),
        },
    },
    6: {
        ("6.2B", 16, 6, (48, 64, 128)): {"1f1b": (3.38, 3.57, 3.91), "zb-h1": (3.87, 4.00, 4.29), "zb-v": (4.15, 4.21, 4.35)},
        ("14.6B", 24, 2, (72, 96, 192)): {"1f1b": (1.52, 1.61, 1.76), "zb-h1": (1.72, 1.78, 1.89), "zb-v": (1.85, 1.88, 1.93)},
        ("28.3B", 32, 2, (96, 128, 256)): {"1f1b": (0.82, 0.87, 0.95), "zb-h1": (0.94, 0.97, 1.03), "zb-v": (1.01, 1.02, 1.06)},
    },
}  # fmt: skip
"""Samples per second and GPU of tables 4 and 6, by model, ranks, sequences per microbatch and microbatches, then by schedule.

ZB-2p of table 6 repeats table 4's settings and is left out.
"""
RUNS = [
    Run(table, model, ranks, size, microbatches, schedule, samples)
    for table, groups in THREE.items()
    for (model, ranks, size, counts), schedules in groups.items()
    for schedule, three in schedules.items()
    for microbatches, samples in zip(counts, three, strict=True)
]

BUBBLES = {
    ("1.5B", 8, 6): {"1f1b": (0.2431, 0.1985, 0.1240), "interleaved-1f1b": (0.1055, 0.0818, 0.0443),
                     "zb-h1": (0.1585, 0.1242, 0.0674), "zb-2p": (0.0433, 0.0039, 0.0026)},
    ("6.2B", 8, 3): {"1f1b": (0.2347, 0.1898, 0.1091), "interleaved-1f1b": (0.0808, 0.0628, 0.0320),
                     "zb-h1": (0.1323, 0.1045, 0.0554), "zb-2p": (0.0029, 0.0022, 0.0010)},
    ("14.6B", 16, 1): {"1f1b": (0.2552, 0.2082, 0.1251), "interleaved-1f1b": (0.1104, 0.0852, 0.0445),
                       "zb-h1": (0.1397, 0.1088, 0.0576), "zb-2p": (0.0066, 0.0054, 0.0028)},
    ("28.3B", 32, 1): {"1f1b": (0.2646, 0.2168, 0.1352), "interleaved-1f1b": (0.1493, 0.1164, 0.0624),
                       "zb-h1": (0.1421, 0.1106, 0.0594), "zb-2p": (0.0038, 0.0029, 0.0018)},
    ("6.2B", 16, 6): {"1f1b": (0.2668, 0.2206, 0.1390), "zb-h1": (0.1536, 0.1198, 0.0637), "zb-v": (0.0697, 0.0533, 0.0274)},
    ("14.6B", 24, 2): {"1f1b": (0.2699, 0.2229, 0.1403), "zb-h1": (0.1439, 0.1121, 0.0595), "zb-v": (0.0638, 0.0483, 0.0250)},
    ("28.3B", 32, 2): {"1f1b": (0.2676, 0.2204, 0.1362), "zb-h1": (0.1429, 0.1111, 0.0593), "zb-v": (0.0593, 0.0451, 0.0236)},
}  # fmt: skip
"""The authors' own bubble rates, from times that they measured: tables 5 and 8, for the same three numbers of microbatches.

ZB-1p is ZB-H1 in all rows of table 5.
"""

_DOUBLED = (
    ("6.2B", 16, 64, 3, {"1f1b": (3.48, 3.57), "zb-h1": (3.91, 4.00), "zb-v": (4.13, 4.21)}),
    ("14.6B", 24, 96, 1, {"1f1b": (1.47, 1.61), "zb-h1": (1.65, 1.78), "zb-v": (1.75, 1.88)}),
    ("28.3B", 32, 128, 1, {"1f1b": (0.80, 0.87), "zb-h1": (0.90, 0.97), "zb-v": (0.95, 1.02)}),
)
DOUBLED = [
    (
        Run(7, model, ranks, size, microbatches, schedule, small),
        Run(7, model, ranks, 2 * size, microbatches, schedule, large),
    )
    for model, ranks, microbatches, size, schedules in _DOUBLED
    for schedule, (small, large) in schedules.items()
]
"""Pairs of runs with microbatches of one and of two sizes (table 7)."""

_FEW = {
    ("1.5B", 8, 6, (2, 4, 8)): ((3.56, 5.74, 8.26), (4.25, 6.92, 9.90)),
    ("6.2B", 8, 3, (2, 4, 8)): ((1.04, 1.69, 2.45), (1.33, 2.16, 3.07)),
    ("14.6B", 16, 1, (4, 8, 16)): ((0.39, 0.65, 0.95), (0.52, 0.85, 1.25)),
}


def _few() -> Iterator[tuple[Run, Run]]:
    for (model, ranks, size, counts), both in _FEW.items():
        for count, before, after in zip(counts, *both, strict=True):
            yield Run(12, model, ranks, size, count, "1f1b", before), Run(12, model, ranks, size, count, "zb-2p", after)


FEW = list(_few())
"""Pairs of 1F1B and ZB-2p with at most as many microbatches as ranks (table 12)."""


def model_of(name: str) -> Model:
    """Returns the shape of a model of table 3. Attention writes its scores: the paper's activations have 5 bytes of each (table 1)."""
    shape = SHAPES[name]
    return Model(name, shape.layers, shape.hidden, shape.heads, shape.heads, 4 * shape.hidden, VOCABULARY, TOKENS)
