"""Which kinds of modules keep their gradients when the backward pass is split, by us and by PyTorch, compared with plain autograd.

Writes `results.json` next to this file. Every kind trains four microbatches in one process and double precision.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
import warnings
from pathlib import Path

import torch
from kinds import KINDS, Kind
from ways import Ours, Outcome, Plain, PyTorch, PyTorchCopied, difference, train

ROUNDING, ROUNDING_UNDER_AUTOCAST = 1e-12, 2**-7
"""Relative errors that come of summing in another order: in float64, and in bfloat16, in which autocast sums."""
WAYS = {"ours": Ours, "pytorch": PyTorch, "pytorch, outputs copied": PyTorchCopied}


def main() -> None:
    """Try every kind and write the table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = {}
    for name, kind in KINDS.items():
        oracle = train(kind.build, kind.takes, Plain)
        rounding = ROUNDING_UNDER_AUTOCAST if name.startswith("autocast") else ROUNDING
        rows[name] = {who: diagnose(kind, way, oracle, rounding) for who, way in WAYS.items()}
        print(f"{name:45}", "  ".join(f"{who}: {result}" for who, result in rows[name].items()), flush=True)
    right = {who: sum(result[who].startswith("equal") for result in rows.values()) for who in WAYS}
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    found = {"machine": machine, "kinds": len(rows), "right": right, "matrix": rows}
    Path(__file__).with_name("results.json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"right of {len(rows)}: {right}")


def diagnose(kind: Kind, way: type[Plain] | type[Ours], oracle: Outcome, rounding: float) -> str:
    """`equal` to the last bit or within rounding, else what is wrong in a few words."""
    try:
        error = difference(train(kind.build, kind.takes, way), oracle)
    except Exception as raised:
        cause = raised.__cause__ or raised
        return f"{type(cause).__name__}: {str(cause).strip().splitlines()[0].split('. ')[0]}"
    if error <= rounding:
        return "equal" if error == 0 else "equal within rounding"
    return "SILENTLY WRONG: something is missing" if math.isinf(error) else f"SILENTLY WRONG: relative error {error:.2g}"


if __name__ == "__main__":
    main()
