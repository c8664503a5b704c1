"""Whether heads divided by vocabulary over 4 ranks train with the numbers of one device, by schedule, algorithm and precision.

Three steps with momentum, a vocabulary that is not a multiple of 4, and ignored tokens. `loss` and `gradient` are the largest absolute
differences from one device over all losses of microbatches and all gradients, `parameter` that of the parameters after the steps, and
`evaluation` that of the mean loss of `eval_step`. Every run gives the same numbers up to rounding. Writes `results.json`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import zerobubble as zb

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import in_ranks

RANKS, MICROBATCHES, STEPS = 4, 8, 3
ROWS, WIDTH = 1003, 32
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "hanayo")


def main() -> None:
    """Train with every schedule and write the table."""
    cases = [(name, algorithm, dtype) for name in SCHEDULES for algorithm in (1, 2) for dtype in ("float64", "float32")]
    rows = []
    for case, gathered in zip(cases, in_ranks(run_all, RANKS, cases), strict=True):
        rows.append(dict(zip(("schedule", "algorithm", "type"), case, strict=True)) | gathered)
        print(rows[-1], flush=True)
    worst = {
        dtype: {
            key: max(row[key] for row in rows if row["type"] == dtype) for key in rows[0] if key not in ("schedule", "algorithm", "type")
        }
        for dtype in ("float64", "float32")
    }
    setting = {"ranks": RANKS, "microbatches": MICROBATCHES, "steps": STEPS, "vocabulary": ROWS, "width": WIDTH}
    text = json.dumps({"setting": setting, "worst": worst, "rows": rows}, indent=1)
    (Path(__file__).parent / "results.json").write_text(text + "\n", encoding="utf-8")


def run_all(cases: list[Any]) -> list[dict[str, float]]:
    """The largest differences of each case, over all ranks."""
    return [differences(*case) for case in cases]


def body(stage: int, num_stages: int, dtype: torch.dtype) -> nn.Module:
    """A stage of a model without its head."""
    torch.manual_seed(stage)
    parts: list[nn.Module] = [nn.Embedding(ROWS, WIDTH)] if stage == 0 else []
    return nn.Sequential(*parts, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()).to(dtype)


def whole_head(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(100)
    return nn.Linear(WIDTH, ROWS).to(dtype)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, ROWS, (2 * MICROBATCHES, 17), generator=draw)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=draw) < 0.2] = -100
    return tokens[:, :-1], targets


def differences(name: str, algorithm: int, type_name: str) -> dict[str, float]:
    """Those of a case."""
    dtype = getattr(torch, type_name)
    schedule = zb.schedules.with_vocabulary(zb.make(name, RANKS, MICROBATCHES), algorithm)
    stages = [body(stage, schedule.num_stages, dtype) for stage in range(schedule.num_stages)]
    head = whole_head(dtype)
    model = nn.Sequential(*stages, head)
    one_device = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "evaluation": 0.0}

    def differ(key: str, mine: Tensor, whole: Tensor) -> None:
        found[key] = max(found[key], (mine - whole).abs().max().item())

    with zb.Pipeline(partial(body, dtype=dtype), schedule, MICROBATCHES, zb.nn.DividedHead(whole_head(dtype))) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        pairs = [pair for stage, module in pipe.modules.items() for pair in alike(module, stages[stage], head)]
        for step in range(STEPS):
            inputs, targets = batch(step)
            pipe.step(inputs, targets)
            losses = []
            for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
                losses.append(functional.cross_entropy(model(x).flatten(0, 1), y.flatten()))
                (losses[-1] / MICROBATCHES).backward()
            assert pipe.losses is not None
            differ("loss", pipe.losses, torch.stack(losses).detach())
            for mine, whole, rows in pairs:
                assert mine.grad is not None
                assert whole.grad is not None
                differ("gradient", mine.grad, whole.grad[rows])
            for each in (optimizer, one_device):
                each.step()
                each.zero_grad()
        for mine, whole, rows in pairs:
            differ("parameter", mine.detach(), whole.detach()[rows])
        inputs, targets = batch(STEPS)
        evaluated, _ = pipe.eval_step(inputs, targets)
        with torch.no_grad():
            parts = zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
            expected = torch.stack([functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in parts]).mean()
        assert evaluated is not None
        differ("evaluation", evaluated, expected)
    gathered: list[Any] = [None] * RANKS
    torch.distributed.all_gather_object(gathered, found)
    return {key: max(each[key] for each in gathered) for key in found}


def alike(module: nn.Module, stage: nn.Module, head: nn.Linear) -> list[tuple[nn.Parameter, nn.Parameter, slice]]:
    """The parameters of a rank's stage, each with that of one device and its rows there."""
    own, found = dict(stage.named_parameters()), []
    for name, parameter in module.named_parameters():
        if name in own:
            found.append((parameter, own[name], slice(None)))
        else:
            first, end = name.removeprefix("head_rows_").removesuffix("_bias").split("_to_")
            found.append((parameter, head.bias if name.endswith("_bias") else head.weight, slice(int(first), int(end))))
    return found


if __name__ == "__main__":
    main()
