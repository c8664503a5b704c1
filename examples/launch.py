"""Starts the ranks: `torchrun` in this process, without its noise."""

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
    """Whether this process is one of the ranks already, started here or by the user's own `torchrun`."""
    return "RANK" in os.environ


def launch(script: str, arguments: list[str], ranks: int) -> int:
    """Run `script` as `ranks` processes and wait; gives the exit code. When this process is interrupted, so are they."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.disable(logging.ERROR)  # torchrun's; a rank that fails tells why by itself
    try:
        run(parse_args(["--standalone", f"--nproc-per-node={ranks}", script, *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"The demo stopped: rank {rank} ended with exit code {failure.exitcode}.", file=sys.stderr)
        return max(1, failure.exitcode)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0
