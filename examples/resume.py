"""A run that is killed goes on in other layouts, with the losses of a run that nobody stops.

python examples/resume.py

Four ranks train by zb-v and write a checkpoint every third step while they train; one of them kills itself. Two ranks go on by 1f1b from
the last whole checkpoint, and stop; one device goes on from theirs, with no pipeline at all. Beside them one device trains without a stop.
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
    """Start the ranks, twice, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        losses: dict[int, float] = {}
        for ranks, schedule, victim, last in ((4, "zb-v", 2, STEPS), (2, "1f1b", None, STOPPED_BEFORE)):
            note = f"{ranks} ranks, {schedule}"
            try:
                mp.spawn(train_pipeline, (folder, ranks, schedule, victim, last), nprocs=ranks)
            except mp.ProcessExitedException as ended:
                note += f", until rank {ended.error_index} ended by {ended.signal_name}"
            losses |= told(folder, note)
        train_alone(Path(folder), range(STEPS), resume=True)
        losses |= told(folder, "one device")
        train_alone(Path(folder), range(STEPS), resume=False)
        uninterrupted = told(folder, "one device, never stopped")
    worst = max(abs(losses[step] / uninterrupted[step] - 1) for step in range(STEPS))
    print(f"largest relative difference of {len(losses)} losses: {worst:.1e}")
    assert worst < 1e-12


def unsplit() -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))).double()


def batch(step: int) -> Tensor:
    """The inputs of a step."""
    return torch.rand(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train_pipeline(rank: int, folder: str, ranks: int, schedule: str, victim: int | None, last: int) -> None:
    """Train from the last checkpoint, if there is one; rank `victim` kills itself in the middle."""
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
                note(folder, step, loss)
            if step % EVERY == EVERY - 1:
                zb.save(checkpoint, pipe, optimizer, extra={"next": step + 1}, wait=False)
    dist.destroy_process_group()


def train_alone(folder: Path, steps: range, *, resume: bool) -> None:
    """Train the unsplit model in this process, microbatch by microbatch."""
    model = unsplit()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = zb.load(folder / "checkpoint", model, optimizer)["next"] if resume else 0
    for step in steps[first:]:
        losses = [nn.functional.mse_loss(model(x), torch.sin(x)) for x in batch(step).chunk(MICROBATCHES)]
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        note(str(folder), step, loss)


def note(folder: str, step: int, loss: Tensor) -> None:
    """Keep the loss of a step for `told`, whatever becomes of this process."""
    with Path(folder, "losses").open("a") as file:
        file.write(f"{step} {loss.item()!r}\n")


def told(folder: str, who: str) -> dict[int, float]:
    """The losses that were noted since it was asked last."""
    file = Path(folder, "losses")
    losses = {int(step): float(loss) for step, loss in (line.split() for line in file.read_text().splitlines())}
    file.unlink()
    print(f"{who}: steps {min(losses)} to {max(losses)}, loss {losses[max(losses)]:.12f}")
    return losses


if __name__ == "__main__":
    main()
