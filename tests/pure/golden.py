"""Reference figures, published or from an independent simulator, to match exactly or to the printed digits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class Profile(NamedTuple):
    """Measured times of F, B, W and a message, in ms, and the bubble rates published for them."""

    model: str
    ranks: int
    microbatches: int
    times: tuple[float, float, float]
    comm: float
    rates: dict[str, float]
    loops: int = 1
    interleaved: float = 0.0


# Zero Bubble (arXiv 2401.10241 v1), Tables 5 and 9: times of a rank. The interleaved rates are not the printed ones, which leave out
# the dependency of a rank's next stage on the last rank for all but one microbatch of p; these hold with every dependency.
TABLE_5 = (
    Profile("1.5B", 8, 24, (18.522, 18.086, 9.337), 0.601, {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}, 3, 0.1090),
    Profile("1.5B", 8, 32, (18.513, 18.086, 9.331), 0.626, {"1f1b": 0.1985, "zb-h1": 0.1242, "zb-h2": 0.0837}, 3, 0.0847),
    Profile("1.5B", 8, 64, (18.546, 18.097, 9.321), 0.762, {"1f1b": 0.1240, "zb-h1": 0.0674, "zb-h2": 0.0444}, 3, 0.0461),
    Profile("6.2B", 8, 24, (29.718, 29.444, 19.927), 0.527, {"1f1b": 0.2347, "zb-h1": 0.1323, "zb-h2": 0.0698}, 4, 0.0827),
    Profile("6.2B", 8, 32, (29.802, 29.428, 19.53), 0.577, {"1f1b": 0.1898, "zb-h1": 0.1045, "zb-h2": 0.0559}, 4, 0.0644),
    Profile("6.2B", 8, 64, (29.935, 29.621, 19.388), 0.535, {"1f1b": 0.1091, "zb-h1": 0.0554, "zb-h2": 0.0294}, 4, 0.0328),
    Profile("14.6B", 16, 48, (11.347, 11.248, 8.132), 0.377, {"1f1b": 0.2552, "zb-h1": 0.1397, "zb-h2": 0.0672}, 3, 0.1136),
    Profile("14.6B", 16, 64, (11.307, 11.254, 8.101), 0.379, {"1f1b": 0.2082, "zb-h1": 0.1088, "zb-h2": 0.0516}, 3, 0.0878),
    Profile("14.6B", 16, 128, (11.325, 11.308, 8.109), 0.378, {"1f1b": 0.1251, "zb-h1": 0.0576, "zb-h2": 0.0266}, 3, 0.0459),
    Profile("28.3B", 32, 96, (10.419, 10.207, 7.715), 0.408, {"1f1b": 0.2646, "zb-h1": 0.1421, "zb-h2": 0.0641}, 2, 0.1528),
    Profile("28.3B", 32, 128, (10.408, 10.204, 7.703), 0.408, {"1f1b": 0.2168, "zb-h1": 0.1106, "zb-h2": 0.0490}, 2, 0.1192),
    Profile("28.3B", 32, 256, (10.402, 10.248, 7.698), 0.46, {"1f1b": 0.1352, "zb-h1": 0.0594, "zb-h2": 0.0257}, 2, 0.0641),
)

# The same paper, Table 8: times of half a rank (two stages per rank), so one stage per rank takes twice these.
TABLE_8 = (
    Profile("6.2B", 16, 48, (14.407, 14.38, 9.676), 1.61, {"1f1b": 0.2668, "zb-h1": 0.1536, "zb-h2": 0.0823}),
    Profile("6.2B", 16, 64, (14.412, 14.393, 9.688), 1.621, {"1f1b": 0.2206, "zb-h1": 0.1198, "zb-h2": 0.0630}),
    Profile("6.2B", 16, 128, (14.316, 14.306, 9.639), 1.619, {"1f1b": 0.1390, "zb-h1": 0.0637, "zb-h2": 0.0325}),
    Profile("14.6B", 24, 72, (6.763, 6.969, 5.251), 0.755, {"1f1b": 0.2699, "zb-h1": 0.1439, "zb-h2": 0.0628}),
    Profile("14.6B", 24, 96, (6.783, 6.984, 5.259), 0.758, {"1f1b": 0.2229, "zb-h1": 0.1121, "zb-h2": 0.0480}),
    Profile("14.6B", 24, 192, (6.785, 6.99, 5.26), 0.77, {"1f1b": 0.1403, "zb-h1": 0.0595, "zb-h2": 0.0247}),
    Profile("28.3B", 32, 96, (9.458, 9.748, 7.288), 0.879, {"1f1b": 0.2676, "zb-h1": 0.1429, "zb-h2": 0.0629}),
    Profile("28.3B", 32, 128, (9.469, 9.744, 7.306), 0.892, {"1f1b": 0.2204, "zb-h1": 0.1111, "zb-h2": 0.0478}),
    Profile("28.3B", 32, 256, (9.447, 9.644, 7.193), 0.887, {"1f1b": 0.1362, "zb-h1": 0.0593, "zb-h2": 0.0251}),
)


class Unit(NamedTuple):
    """A schedule where every pass of a stage takes one unit (BW two) and messages none. Peaks count stage activations."""

    name: str
    ranks: int
    microbatches: int
    stages_per_rank: int
    makespan: int
    span: int
    gaps: tuple[int, ...]
    peak_without_work: tuple[int, ...]
    peak: tuple[int, ...]


UNIT_TIMES = (
    Unit("gpipe", 4, 8, 1, 33, 33, (9, 6, 3, 0), (8, 8, 8, 8), (8, 8, 8, 8)),
    Unit("1f1b", 4, 8, 1, 33, 33, (9, 6, 3, 0), (4, 3, 2, 1), (4, 3, 2, 1)),
    Unit("eager-1f1b", 4, 8, 1, 33, 33, (9, 6, 3, 0), (7, 5, 3, 1), (7, 5, 3, 1)),
    Unit("zb-h1", 4, 8, 1, 27, 27, (3, 2, 1, 0), (4, 3, 2, 1), (4, 4, 4, 4)),
    Unit("zb-h2", 4, 8, 1, 27, 24, (0, 0, 0, 0), (7, 5, 3, 1), (7, 7, 7, 7)),
    Unit("interleaved-1f1b", 4, 8, 2, 57, 57, (9, 6, 3, 0), (11, 9, 7, 5), (11, 9, 7, 5)),
    Unit("interleaved-1f1b", 4, 8, 3, 81, 81, (9, 6, 3, 0), (15, 13, 11, 9), (15, 13, 11, 9)),
    Unit("depth-first", 4, 8, 2, 57, 57, (9, 6, 3, 0), (11, 9, 7, 5), (11, 9, 7, 5)),
    Unit("breadth-first", 4, 8, 2, 57, 57, (9, 6, 3, 0), (16, 16, 16, 16), (16, 16, 16, 16)),
    Unit("forward-only", 4, 8, 1, 11, 8, (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
    Unit("forward-only", 4, 8, 2, 19, 16, (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
    Unit("zb-v", 4, 8, 2, 51, 48, (0, 0, 0, 0), (8, 8, 8, 8), (8, 8, 8, 8)),
    Unit("v-min", 4, 8, 2, 59, 59, (11, 9, 7, 6), (4, 4, 4, 4), (4, 4, 4, 4)),
    Unit("v-half", 4, 8, 2, 53, 53, (5, 3, 3, 2), (6, 6, 6, 6), (6, 6, 6, 6)),
    Unit("v-zb", 4, 8, 2, 51, 48, (0, 0, 0, 0), (8, 8, 8, 8), (8, 8, 8, 8)),
    Unit("1f1b-v", 4, 8, 2, 63, 63, (15, 12, 9, 6), (6, 6, 6, 6), (6, 6, 6, 6)),
    Unit("two-thirds", 4, 8, 1, 29, 29, (5, 3, 1, 0), (3, 2, 2, 1), (4, 4, 2, 2)),
    Unit("interleaved-zb", 4, 8, 2, 51, 51, (3, 2, 1, 0), (8, 7, 6, 5), (8, 8, 8, 8)),
    Unit("interleaved-zb", 4, 8, 3, 75, 75, (3, 2, 1, 0), (12, 11, 10, 9), (12, 12, 12, 12)),
    Unit("gis", 4, 8, 2, 54, 54, (6, 4, 2, 0), (8, 7, 6, 5), (8, 7, 6, 5)),
    Unit("gis-h", 4, 8, 2, 56, 56, (8, 6, 4, 2), (6, 5, 4, 3), (6, 5, 4, 3)),
    Unit("hanayo", 4, 4, 2, 36, 36, (12, 9, 6, 3), (5, 6, 7, 8), (5, 6, 7, 8)),
    Unit("hanayo", 4, 4, 4, 60, 60, (12, 9, 6, 3), (13, 14, 15, 16), (13, 14, 15, 16)),
    Unit("chimera", 4, 4, 2, 16, 16, (4, 1, 1, 4), (3, 4, 4, 3), (3, 4, 4, 3)),
    Unit("chimera", 8, 8, 2, 36, 36, (12, 9, 6, 3, 3, 6, 9, 12), (5, 6, 7, 8, 8, 7, 6, 5), (5, 6, 7, 8, 8, 7, 6, 5)),
    Unit("dualpipe", 8, 20, 2, 66, 66, (6, 5, 4, 3, 3, 4, 5, 6), (9, 9, 9, 9, 9, 9, 9, 9), (9, 9, 9, 9, 9, 9, 9, 9)),
    Unit("dualpipe-v", 4, 10, 2, 66, 66, (6, 5, 4, 3), (9, 9, 9, 9), (9, 9, 9, 9)),
    Unit("interleaved-lean", 4, 8, 2, 57, 57, (9, 6, 3, 0), (8, 7, 6, 5), (8, 7, 6, 5)),
    Unit("1f1b", 8, 24, 1, 93, 93, (21, 18, 15, 12, 9, 6, 3, 0), (8, 7, 6, 5, 4, 3, 2, 1), (8, 7, 6, 5, 4, 3, 2, 1)),
    Unit("zb-h1", 8, 24, 1, 79, 79, (7, 6, 5, 4, 3, 2, 1, 0), (8, 7, 6, 5, 4, 3, 2, 1), (8, 8, 8, 8, 8, 8, 8, 8)),
    Unit("zb-h2", 8, 24, 1, 79, 72, (0, 0, 0, 0, 0, 0, 0, 0), (15, 13, 11, 9, 7, 5, 3, 1), (15, 15, 15, 15, 15, 15, 15, 15)),
    Unit(
        "interleaved-1f1b",
        8,
        24,
        2,
        165,
        165,
        (21, 18, 15, 12, 9, 6, 3, 0),
        (23, 21, 19, 17, 15, 13, 11, 9),
        (23, 21, 19, 17, 15, 13, 11, 9),
    ),
    Unit("zb-v", 8, 24, 2, 151, 144, (0, 0, 0, 0, 0, 0, 0, 0), (16, 16, 16, 16, 16, 16, 16, 16), (16, 16, 16, 16, 16, 16, 16, 16)),
)

# ranks, microbatches, time of a message, makespans of 1F1B and eager 1F1B at unit times.
WITH_COMM = (
    (4, 8, 0.25, 37, 34.5),
    (4, 8, 0.5, 41, 36),
    (4, 8, 1, 49, 39),
    (8, 24, 0.25, 106.5, 96.5),
    (8, 24, 0.5, 120, 100),
    (8, 24, 1, 147, 107),
)

FIGURES = {
    name: rows
    for name, *rows in (block.splitlines() for block in Path(__file__).with_name("figures.txt").read_text().strip().split("\n\n")[1:])
}
"""The printed order of each rank, for 4 ranks and 8 microbatches."""
