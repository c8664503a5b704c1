"""Continue without a lost machine: the ranks of one torchrun agent end, and those of the other continue with the same losses.

    python examples/go_on.py --open-store 29500 &
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint localhost:29500 --rdzv-conf is_host=0 \\
        examples/go_on.py --store localhost:29500

Run the second command twice, as on two machines (with the address of the first command's machine), and kill any of the printed ranks. Its
agent then ends its other rank and itself. The store is a separate process, so it survives every rank and agent.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from survive import MICROBATCHES, batch, build
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zerobubble as zb

RANKS = [[0, 2], [3, 1]]
"""The ranks of each replica. Agent 0 has ranks 0 and 1, agent 1 has 2 and 3: each has one rank of each replica and of each stage."""


def say(line: str) -> None:
    """Prints a line in one write. Under torchrun output is unbuffered: `print` would write twice, and lines of ranks would mix."""
    print(line + "\n", end="", flush=True)


def keep_store(port: int) -> None:
    """Hosts the store of a training until this process is ended."""
    store = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    say(f"the store is open at port {store.port}")
    while True:
        time.sleep(3600)


def train(steps: int, pause_s: float) -> None:
    """Trains; each replica gets its half of the batch."""
    rank = dist.get_rank()
    say(f"rank {rank} of agent {os.environ['GROUP_RANK']} is process {os.getpid()}")
    mesh = DeviceMesh("cpu", RANKS, mesh_dim_names=("dp", "pp"))
    replica = next(number for number, ranks in enumerate(RANKS) if rank in ranks)
    with zb.Pipeline(build, "zb-h1", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, survive=True, timeout=20.0) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for step in range(steps):
            loss = pipe.step(*(tensor.chunk(len(RANKS))[replica] for tensor in batch(step)))
            optimizer.step()
            optimizer.zero_grad()
            say(f"rank {rank} step {step} loss {loss.item():.17g}")
            time.sleep(pause_s)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open-store", type=int, metavar="PORT", help="host the store")
    parser.add_argument("--store", default="localhost:29500", metavar="HOST:PORT", help="where the store is")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two steps, in which you can kill a rank")
    given = parser.parse_args()
    if given.open_store is not None:
        keep_store(given.open_store)
    torch.set_num_threads(1)
    host, port = given.store.split(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    train(given.steps, given.pause)
    say(f"rank {dist.get_rank()} is through")
