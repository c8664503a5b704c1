"""Heads divided by vocabulary, simulated and published: MFU by size of the vocabulary for 1F1B and V-Half.

Writes `results.json` next to this file, from `published.json` (arXiv 2411.05288, tables 3, 5 and 6). The costs of layers, embedding and
head are estimated by `zb.cost_model` from the data sheet of an A100, with the parameters of `benchmarks/cost_model`. A part of a divided
head is slower than its even share by the factor of table 3, the mean of its neighbors for 24 GPUs, which that table lacks; it is that of
256K words, and `Overheads` says what comes to smaller parts. Collectives take what their bytes take in a ring over NVLink, beyond a node
over the network of a DGX A100, since the paper does not describe its own, and slow down overlapped passes by
`Efficiency.contention`. Messages between stages use the same links, with the times of `zb.cost_model`. The optimizer step takes the time
of its bytes on the rank with most parameters.

Two numbers are fitted, each to one published row; all other rows are predicted, and `fitted` marks the rows that are not:

- `layers`, by schedule, GPUs and sequence: by how much layers take longer than estimated, from 32K words with the head on the last stage.
- `slowdown`, by schedule, GPUs and whether ranks wait for collectives: the additional slowdown of layers if the head is divided, from
  32K words and the longest sequence, with algorithm 1 or interlaced. `unfitted_off_percent` is the error without it.

The methods are those of the paper: `baseline` has the head on the last stage, `redis` gives that stage fewer layers, `vocab-1` and
`vocab-2` divide the head by these algorithms, and `interlaced` divides it over ranks that wait for all collectives.

For each row `mfu` is the share of the GPU's peak, `over_32K` MFU over that of the same method with a vocabulary of 32K, and `over_vocab-1`
over that of `vocab-1` with the same vocabulary; `off_percent` is the simulated figure against the published one. For `redis`,
`one_layer_more_on_last` is MFU had the last stage one layer more than by the rule of `layers_of_stages`.

`head_rates` is how even the published rows are, without any simulation. With a whole head the last stage is the slowest, so a larger
vocabulary lengthens the step by what it lengthens the head: `implied` is at how many TFLOP/s, between each vocabulary and the next and
between the smallest and the largest, compared with those of `zb.cost_model`. One such figure is a product of the same matrices on the same
GPU wherever hidden size and sequence are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any, NamedTuple

import zerobubble as zb
from zerobubble.cost_model.kernels import HALF, Kernels
from zerobubble.cost_model.step import UPDATE_BYTES
from zerobubble.schedules import with_vocabulary

HERE = Path(__file__).parent
MICROBATCHES = 128
PEAK = {"1f1b": 320e12, "v-half": 312e12}
"""FLOP/s that MFU is a share of. Those of table 5: all 40 step times that the authors published of their runs on 8 GPUs (the repository
sail-sg/VocabularyParallelism, artifact) give 1.0256 times its MFU with the 312 TFLOP/s of the data sheet. Of table 6 nothing is known."""
GPU, EFFICIENCY = zb.cost_model.GPUS["A100"], zb.cost_model.Efficiency()
KERNELS = Kernels(GPU, EFFICIENCY)
GRADIENT_BYTES = 4
MODELS = {
    ("1f1b", 8): (32, 3072),
    ("1f1b", 16): (48, 4096),
    ("1f1b", 32): (64, 5120),
    ("v-half", 16): (32, 4096),
    ("v-half", 24): (48, 5120),
    ("v-half", 32): (64, 6144),
}
"""Layers and hidden size by schedule and GPUs: the paper's table 1 for 1F1B and its table 2 for V-Half."""
HEAD_WIDTH = 128
LEAST = "32K"
MOST_WORDS = 256_000
FIGURES = "mfu", "over_32K", "over_vocab-1"

Times = tuple[float, float, float]
"""Milliseconds of F, B and W."""


class Row(NamedTuple):
    """A published row."""

    schedule: str
    gpus: int
    seq: int
    method: str
    vocabulary: str

    @property
    def words(self) -> int:
        """The words of the vocabulary: the paper's code takes 32K for 32,000."""
        return int(self.vocabulary[:-1]) * 1000

    @property
    def is_divided(self) -> bool:
        """Whether passes S and T divide the head."""
        return self.method.startswith("vocab")

    @property
    def cluster(self) -> tuple[str, int, str]:
        """The key of `slowdown`."""
        return self.schedule, self.gpus, "waiting" if self.method == "interlaced" else "dividing"


class Parts(NamedTuple):
    """What the parts of a model take for a microbatch."""

    layer: Times
    embedding: Times
    head: Times


class Fitted(NamedTuple):
    """By how much layers take longer than estimated: all of them, and those of ranks that divide a head once more."""

    layers: float
    slowdown: float = 1.0


class Overhead(NamedTuple):
    """What a part of a head takes beyond its even share.

    With the largest vocabulary it is `of_largest` of that share. `fixed` of this comes to parts of all sizes, the rest grows with them.
    """

    of_largest: float
    fixed: float


@cache
def parts(hidden: int, seq: int, words: int) -> Parts:
    """What an A100 takes, from the difference between stages of one layer each."""
    heads = hidden // HEAD_WIDTH
    model = zb.cost_model.Model(
        "three layers", 3, hidden, heads, heads, 4 * hidden, words, seq, dropout=False, tied=False, fused_attention=True
    )
    costs = zb.cost_model.transformer(model, gpu=GPU, pp=3, layers=(1, 1, 1)).costs
    first, middle, last = zip(*(costs.column(name) for name in ("forward", "backward", "weight")), strict=True)
    layer, embedding, head = middle, _less(first, middle), _less(last, middle)
    return Parts(_ms(layer), _ms(embedding), _ms(head))


def _less(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(first, second, strict=True))


def _ms(times: tuple[int, ...]) -> Times:
    forward, backward, weight = (time / 1e6 for time in times)
    return forward, backward, weight


def exchange(size: float, gpus: int) -> float:
    """Milliseconds in which a ring of all ranks hands on `size` bytes once: a broadcast or a sum, half of an all-reduce."""
    bandwidth = GPU.link_bandwidth if gpus <= GPU.domain_size else min(GPU.link_bandwidth, GPU.domain_size * GPU.network_bandwidth)
    return 1e3 * (size / (bandwidth * EFFICIENCY.links) + EFFICIENCY.latency)


def messages(row: Row, placement: zb.Placement, hidden: int) -> list[float]:
    """Milliseconds of a message between each stage and the next; `GPU.domain_size` neighboring ranks are a node."""
    (route,) = placement.routes
    pairs = list(pairwise(route))
    sent = {near: 1e3 * KERNELS.send(HALF * row.seq * hidden, near) for near in (True, False)}
    return [sent[here // GPU.domain_size == there // GPU.domain_size] if here != there else 0.0 for here, there in pairs]


def update(row: Row, placement: zb.Placement, hidden: int, layers: Sequence[float]) -> float:
    """Seconds of the optimizer's step on the rank with most parameters; embedding and head are divided where the vocabulary is."""
    (route,) = placement.routes
    ranks = [0.0] * row.gpus
    for rank, count in zip(route, layers, strict=True):
        ranks[rank] += 12 * hidden**2 * count
    vocabulary = hidden * row.words
    if row.is_divided or row.method == "interlaced":
        ranks = [count + 2 * vocabulary / row.gpus for count in ranks]
    else:
        ranks[route[0]] += vocabulary
        ranks[route[-1]] += vocabulary
    return KERNELS.memory_traffic(max(ranks) * (UPDATE_BYTES["fp32"] + GRADIENT_BYTES))


def layers_of_stages(row: Row, num_stages: int, more_on_last: int = 0) -> list[float]:
    """Layers by stage: as many on each, but for `redis`, which can have `more_on_last` than its rule gives.

    That gives the last stage as many as bring it up to an even share together with the head, rounded up, and the others equal numbers, the
    later ones those left over. So the authors' code shares them out (`get_num_layers_to_build`), to which the number on the last stage is
    given by hand; the rule for it is what the operations that they published of their runs on 8 GPUs say.
    """
    layers, hidden = MODELS[row.schedule, row.gpus]
    if row.method != "redis":
        return [layers / num_stages] * num_stages
    head = 6 * row.words / (72 * hidden + 12 * row.seq)  # operations of a head, in layers (the paper's table 4)
    last = max(0, -int(-((layers + head) / num_stages - head) // 1)) + more_on_last
    each, more = divmod(layers - last, num_stages - 1)
    return [each + (stage >= num_stages - 1 - more) for stage in range(num_stages - 1)] + [last]


def part_of_head(row: Row, overhead: Overhead) -> Times:
    """Milliseconds of a rank's part of the head: its even share, and what comes to it."""
    _, hidden = MODELS[row.schedule, row.gpus]
    share = overhead.fixed + (1 - overhead.fixed) * row.words / MOST_WORDS
    whole, largest = parts(hidden, row.seq, row.words).head, parts(hidden, row.seq, MOST_WORDS).head
    forward, backward, weight = ((time + overhead.of_largest * share * most) / row.gpus for time, most in zip(whole, largest, strict=True))
    return forward, backward, weight


def mfu(row: Row, fitted: Fitted, overhead: Overhead, more_on_last: int = 0) -> float:
    """The simulated MFU; a part of a divided head has this overhead, and `redis` has `more_on_last` than by its rule."""
    _, hidden = MODELS[row.schedule, row.gpus]
    schedule = zb.make(row.schedule, row.gpus, MICROBATCHES)
    layer, embedding, head = parts(hidden, row.seq, row.words)
    part = part_of_head(row, overhead)
    once = exchange(2 * row.seq * hidden, row.gpus)
    layers_here = layers_of_stages(row, schedule.num_stages, more_on_last)
    columns = [[count * time * fitted.layers for count in layers_here] for time in layer]
    sent = messages(row, schedule.placement, hidden)
    if row.is_divided or row.method == "interlaced":
        columns = [[time * fitted.slowdown for time in column] for column in columns]
    if row.is_divided:
        slowed = EFFICIENCY.contention * once * row.gpus / schedule.num_stages  # a broadcast during F, a sum during B
        columns = [[time + more for time in column] for column, more in zip(columns, (slowed, slowed, 0), strict=True)]
        costs = zb.Costs.from_ms(*columns, comm=sent).with_divided_head(part, collective=once)
        schedule = with_vocabulary(schedule, int(row.method[-1]), costs)
    elif row.method == "interlaced":
        waited = once, 2 * once, 0.0  # the output goes to all ranks, its gradient is summed over them
        shares = [(time + more) * row.gpus / schedule.num_stages for time, more in zip(part, waited, strict=True)]
        costs = zb.Costs.from_ms(*([time + share for time in column] for column, share in zip(columns, shares, strict=True)), comm=sent)
    else:
        for column, first, last in zip(columns, embedding, head, strict=True):
            column[0] += first
            column[-1] += last
        costs = zb.Costs.from_ms(*columns, comm=sent)
    seconds = zb.simulate(schedule, costs).makespan / 1e9 + update(row, schedule.placement, hidden, layers_here)
    return seconds_of(row, 1.0) / seconds


def seconds_of(row: Row, share: float) -> float:
    """The seconds of a step with that MFU."""
    layers, hidden = MODELS[row.schedule, row.gpus]
    operations = 6 * row.seq * hidden * row.words + layers * row.seq * hidden * (72 * hidden + 12 * row.seq)
    return operations * MICROBATCHES / row.gpus / PEAK[row.schedule] / share


def scaling_factors(table: dict[str, Any]) -> dict[Any, float]:
    """By sequence, algorithm and GPUs; of 24 GPUs the mean of 16 and 32."""
    found = {(seq, way, gpus): value / 100 for seq, way, *values in table["rows"] for gpus, value in zip((8, 16, 32), values, strict=True)}
    return found | {(seq, way, 24): (found[seq, way, 16] + found[seq, way, 32]) / 2 for seq, way, _ in found}


class Overheads:
    """What comes to parts of heads beyond their even share.

    For 8 GPUs the authors' repository has table 3's factors by vocabulary, and those of 256K words are the table's to the digit. So
    smaller parts on more GPUs are taken to have as much less than the table says as on 8, and `interlaced`, which the table lacks, as
    much less than algorithm 1.
    """

    def __init__(self, table: dict[str, Any], on_8: dict[str, Any]) -> None:
        self._of_largest = {key: 1 / factor - 1 for key, factor in scaling_factors(table).items()}
        _, _, *methods = on_8["columns"]
        self._on_8: dict[tuple[int, str], dict[str, float]] = {}
        for seq, size, *percents in on_8["rows"]:
            for method, percent in zip(methods, percents, strict=True):
                self._on_8.setdefault((seq, method), {})[size] = 100 / percent - 1
        shares = {method: mean(_fixed(by_size) for (_, other), by_size in self._on_8.items() if other == method) for method in methods}
        self.fixed = {"dividing": round(mean((shares["vocab-1"], shares["vocab-2"])), 3), "waiting": round(shares["interlaced"], 3)}

    def of(self, row: Row) -> Overhead:
        """That of the row's parts, which are those of a divided head."""
        waiting = row.method == "interlaced"
        of_largest = self._of_largest[row.seq, 1 if waiting else int(row.method[-1]), row.gpus]
        if waiting:
            of_largest *= self._on_8[row.seq, row.method]["256K"] / self._on_8[row.seq, "vocab-1"]["256K"]
        return Overhead(of_largest, self.fixed[row.cluster[2]])


def _fixed(by_size: dict[str, float]) -> float:
    """The share of the largest part's overhead that comes to all sizes: the line of least squares at no words over that at 256K."""
    words = [int(size[:-1]) * 1000 for size in by_size]
    slope, start = linear_regression(words, [overhead * size for overhead, size in zip(by_size.values(), words, strict=True)])
    return start / (start + slope * MOST_WORDS)


class Prediction:
    """All published rows, what is fitted to some of them, and what is simulated for the others."""

    def __init__(self, published: dict[str, Any]) -> None:
        self.overheads = Overheads(published["scaling_percent"], published["scaling_percent_8_gpus"])
        self.published = {
            Row(schedule, gpus, seq, method, size): value / 100
            for schedule in ("1f1b", "v-half")
            for gpus, seq, method, size, value in published[schedule]
        }
        self.layers = {self._key(row): self._layers(row) for row in self.published if (row.method, row.vocabulary) == ("baseline", LEAST)}
        longest = sorted((row for row in self.published if row.vocabulary == LEAST), key=lambda row: row.seq)
        of_cluster = {row.cluster: row for row in longest if row.method in ("vocab-1", "interlaced")}
        self.fitted_slowdown = tuple(of_cluster[cluster] for cluster in sorted(of_cluster))
        self.slowdown = {row.cluster: self._slowdown(row) for row in self.fitted_slowdown}

    @staticmethod
    def _key(row: Row) -> tuple[str, int, int]:
        return row.schedule, row.gpus, row.seq

    def simulated(self, row: Row, fitted: Fitted) -> float:
        overhead = self.overheads.of(row) if row.is_divided or row.method == "interlaced" else Overhead(0, 0)
        return mfu(row, fitted, overhead)

    def _layers(self, row: Row) -> float:
        return self._factor(lambda factor: self.simulated(row, Fitted(factor)), self.published[row])

    def _slowdown(self, row: Row) -> float:
        layers = self.layers[self._key(row)]
        return self._factor(lambda factor: self.simulated(row, Fitted(layers, factor)), self.published[row])

    @staticmethod
    def _factor(simulated: Callable[[float], float], wanted: float) -> float:
        """The factor with which the simulation has the wanted MFU: its reciprocal is all but linear in it."""
        low, high = 1.0, 1.1
        for _ in range(3):
            at_low, at_high = 1 / simulated(low), 1 / simulated(high)
            low, high = high, low + (high - low) * (1 / wanted - at_low) / (at_high - at_low)
            if abs(high - low) < 1e-5:
                break
        return round(high, 4)

    def is_fitted(self, row: Row) -> bool:
        """Whether a number is fitted to the row."""
        return row in self.fitted_slowdown or (row.method, row.vocabulary) == ("baseline", LEAST)

    def cases(self) -> list[dict[str, Any]]:
        """Each published row with its simulation."""
        simulated, unfitted = {}, {}
        for row in self.published:
            layers = self.layers[self._key(row)]
            simulated[row] = self.simulated(row, Fitted(layers, self.slowdown.get(row.cluster, 1.0)))
            if row.is_divided or row.method == "interlaced":
                unfitted[row] = self.simulated(row, Fitted(layers))
        found = []
        for row, value in self.published.items():
            smallest, divided = row._replace(vocabulary=LEAST), row._replace(method="vocab-1")
            case: dict[str, Any] = {**row._asdict(), "fitted": self.is_fitted(row), "mfu": compared(value, simulated[row])}
            if row.method == "redis":
                one_more = mfu(row, Fitted(self.layers[self._key(row)]), Overhead(0, 0), more_on_last=1)
                case["one_layer_more_on_last"] = compared(value, one_more)
            if row in unfitted:
                case["unfitted_off_percent"] = compared(value, unfitted[row])["off_percent"]
            if row != smallest:
                case["over_32K"] = compared(value / self.published[smallest], simulated[row] / simulated[smallest])
            if row != divided:
                case["over_vocab-1"] = compared(value / self.published[divided], simulated[row] / simulated[divided])
            found.append(case)
        return found


def head_rates(published: dict[Row, float]) -> list[dict[str, Any]]:
    """At how many TFLOP/s heads run by the published steps, and by `zb.cost_model`, for each schedule, number of GPUs and sequence."""
    found = []
    for row in published:
        if (row.method, row.vocabulary) != ("baseline", LEAST):
            continue
        _, hidden = MODELS[row.schedule, row.gpus]
        rows = [other for other in published if other.method == "baseline" and other[:3] == row[:3]]
        implied = {
            f"{less.vocabulary} to {more.vocabulary}": MICROBATCHES * _head_operations(less, more) / _longer(less, more, published)
            for less, more in [*pairwise(rows), (rows[0], rows[-1])]
        }
        heads = [sum(parts(hidden, row.seq, other.words).head) / 1e3 for other in (rows[0], rows[-1])]
        estimated = _head_operations(rows[0], rows[-1]) / (heads[1] - heads[0])
        rates = {"implied": {pair: round(rate / 1e12, 1) for pair, rate in implied.items()}, "estimated": round(estimated / 1e12, 1)}
        found.append({"schedule": row.schedule, "gpus": row.gpus, "seq": row.seq, "hidden": hidden, **rates})
    return found


def _head_operations(less: Row, more: Row) -> float:
    """By how many operations for a microbatch the larger head exceeds the smaller one."""
    return 6 * less.seq * MODELS[less.schedule, less.gpus][1] * (more.words - less.words)


def _longer(less: Row, more: Row, published: dict[Row, float]) -> float:
    """By how many seconds the published step with the larger head exceeds that with the smaller one."""
    return seconds_of(more, published[more]) - seconds_of(less, published[less])


def compared(published: float, simulated: float) -> dict[str, float]:
    off = 100 * (simulated / published - 1)
    return {"published": round(published, 4), "simulated": round(simulated, 4), "off_percent": round(off, 2)}


def within(found: list[dict[str, Any]], key: str, schedule: str, methods: tuple[str, ...], percent: float) -> str:
    """How many of the predicted rows have that figure within so many percent."""
    rows = (case for case in found if key in case and case["schedule"] == schedule and case["method"] in methods and not case["fitted"])
    offs = [abs(case[key] if key == "unfitted_off_percent" else case[key]["off_percent"]) for case in rows]
    return f"{sum(off <= percent for off in offs)} of {len(offs)} within {percent:g} %, worst {max(offs):.1f} %"


def main() -> None:
    prediction = Prediction(json.loads((HERE / "published.json").read_text()))
    found = prediction.cases()
    whole, divided = ("baseline",), ("vocab-1", "vocab-2")
    asked = [
        *(
            ("1f1b", key, methods)
            for methods in (whole, ("redis",), divided, ("interlaced",))
            for key in ("mfu", "over_32K", "over_vocab-1")
        ),
        *(("v-half", key, methods) for methods in (whole, divided) for key in ("mfu", "over_32K", "over_vocab-1")),
        *((schedule, "unfitted_off_percent", divided) for schedule in ("1f1b", "v-half")),
        ("1f1b", "unfitted_off_percent", ("interlaced",)),
    ]
    summary = {
        f"{schedule}, {' and '.join(methods)}, {key}": within(found, key, schedule, methods, 2)
        for schedule, key, methods in asked
        if any(key in case for case in found if case["schedule"] == schedule and case["method"] in methods)
    }
    fitted = {
        "layers": {", ".join(map(str, key)): factor for key, factor in prediction.layers.items()},
        "slowdown": {", ".join(map(str, key)): factor for key, factor in prediction.slowdown.items()},
        "fixed": prediction.overheads.fixed,
    }
    rates = head_rates(prediction.published)
    written = {"summary": summary, "fitted": fitted, "head_rates": rates, "cases": found}
    (HERE / "results.json").write_text(json.dumps(written, indent=1) + "\n")
    for key, text in (summary | {name: str(factors) for name, factors in fitted.items()}).items():
        print(f"{key}: {text}")
    for rate in rates:
        print(rate)


if __name__ == "__main__":
    main()
