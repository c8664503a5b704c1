"""Starts the ranks by `torchrun` in this process, with less output."""

from __future__ import annotations

import logging
import os
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

QUIET = {
    "OMP_NUM_THREADS": "1",  # a thread per rank: the ranks share the machine
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


def is_rank() -> bool:
    """Whether this process is a rank, started here or by the user's `torchrun`."""
    return "RANK" in os.environ


def launch(script: str, arguments: list[str], ranks: int) -> int:
    """Runs `script` in `ranks` processes and returns the exit code. Interrupting this process interrupts them."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.ERROR)  # torchrun's; a failing rank prints its own error
    try:
        run(parse_args(["--standalone", f"--nproc-per-node={ranks}", script, *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"The demo stopped: rank {rank} ended with exit code {failure.exitcode}.", file=sys.stderr)
        return max(1, failure.exitcode)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0
