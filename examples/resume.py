"""Resume a killed run in other layouts, with the losses of an uninterrupted run.

python examples/resume.py

Four ranks train with zb-v and write a checkpoint every third step during training; one of them kills itself. Two ranks resume with 1f1b
from the last complete checkpoint, and stop. One device resumes from theirs, without a pipeline. For comparison, one device trains without
a stop.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import zerobubble as zb

STEPS, EVERY, KILLED_BEFORE, STOPPED_BEFORE = 16, 3, 8, 13
MICROBATCHES, ROWS, WIDTH = 8, 32, 48


def main() -> None:
    """Starts the ranks, twice, and compares."""
    with tempfile.TemporaryDirectory() as folder:
        losses: dict[int, float] = {}
        for ranks, schedule, victim, last in ((4, "zb-v", 2, STEPS), (2, "1f1b", None, STOPPED_BEFORE)):
            who = f"{ranks} ranks, {schedule}"
            try:
                mp.spawn(train_pipeline, (folder, ranks, schedule, victim, last), nprocs=ranks)
            except mp.ProcessExitedException as ended:
                who += f", until rank {ended.error_index} ended by {ended.signal_name}"
            losses |= losses_of(folder, who)
        train_alone(Path(folder), range(STEPS), resume=True)
        losses |= losses_of(folder, "one device")
        train_alone(Path(folder), range(STEPS), resume=False)
        uninterrupted = losses_of(folder, "one device, never stopped")
    worst = max(abs(losses[step] / uninterrupted[step] - 1) for step in range(STEPS))
    print(f"largest relative difference of {len(losses)} losses: {worst:.1e}")
    assert worst < 1e-12


def unsplit() -> nn.Module:
    """Returns the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))).double()


def batch(step: int) -> Tensor:
    """Returns the inputs of a step."""
    return torch.rand(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train_pipeline(rank: int, folder: str, ranks: int, schedule: str, victim: int | None, last: int) -> None:
    """Trains from the last checkpoint, if there is one. Rank `victim` kills itself in the middle."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{schedule}", rank=rank, world_size=ranks)
    split = zb.split(unsplit(), example=torch.ones(1, WIDTH, dtype=torch.float64))
    with zb.Pipeline(split, schedule, MICROBATCHES, nn.functional.mse_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        checkpoint = Path(folder, "checkpoint")
        first = zb.load(checkpoint, pipe, optimizer)["next"] if checkpoint.exists() else 0
        for step in range(first, last):
            if rank == victim and step == KILLED_BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)
            x = batch(step)
            loss = pipe.step(x, torch.sin(x))
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                record(folder, step, loss)
            if step % EVERY == EVERY - 1:
                zb.save(checkpoint, pipe, optimizer, extra={"next": step + 1}, wait=False)
    dist.destroy_process_group()


def train_alone(folder: Path, steps: range, *, resume: bool) -> None:
    """Trains the unsplit model in this process, microbatch by microbatch."""
    model = unsplit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = zb.load(folder / "checkpoint", model, optimizer)["next"] if resume else 0
    for step in steps[first:]:
        losses = [nn.functional.mse_loss(model(x), torch.sin(x)) for x in batch(step).chunk(MICROBATCHES)]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        record(str(folder), step, loss)


def record(folder: str, step: int, loss: Tensor) -> None:
    """Records the loss of a step for `losses_of`, even if this process ends."""
    with Path(folder, "losses").open("a") as file:
        file.write(f"{step} {loss.item()!r}\n")


def losses_of(folder: str, who: str) -> dict[int, float]:
    """Returns the losses recorded since the last call, and prints the last one."""
    file = Path(folder, "losses")
    losses = {int(step): float(loss) for step, loss in (line.split() for line in file.read_text().splitlines())}
    file.unlink()
    print(f"{who}: steps {min(losses)} to {max(losses)}, loss {losses[max(losses)]:.12f}")
    return losses


if __name__ == "__main__":
    main()
