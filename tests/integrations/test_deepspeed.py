"""DeepSpeed's engine trains with our schedules as with its own, and what it executes cannot stop or mix up microbatches."""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

os.environ["DS_ACCELERATOR"] = "cpu"

from deepspeed.runtime.pipe.schedule import PipeSchedule, TrainSchedule

import zerobubble as zb
from tests.integrations.ranks import run_program
from tests.refusals import raises
from zerobubble.errors import InputError, ScheduleError
from zerobubble.integrations.deepspeed import PlayedSchedule, use_schedule

PROGRAM = Path(__file__).with_name("train_with_deepspeed.py")
NAMES = ("1f1b", "eager-1f1b")
SHAPES = [(stages, microbatches) for stages in (1, 2, 3, 4, 5) for microbatches in (1, 3, 8, 10)]
"""The numbers of microbatches are those of DeepSpeed's own tests of schedules."""
PEER = {"SendActivation": "RecvActivation", "SendGrad": "RecvGrad"}


def execute(schedules: list[PipeSchedule]) -> dict[str, int]:
    """Executes the schedules of all stages, which meet after each step. Returns how often each instruction ran.

    A send and its receive run when both are next on their stages. Buffers hold the microbatch whose tensors they have.
    """
    stages = len(schedules)
    buffers: list[dict[str, dict[int, int]]] = [defaultdict(dict) for _ in schedules]
    received: list[int | None] = [None] * stages
    loaded = [0] * stages
    counts: dict[str, int] = defaultdict(int)
    for step in zip_longest(*(iter(schedule) for schedule in schedules)):
        assert None not in step, "the stages have different numbers of steps"
        queues = [deque(instructions) for instructions in step]
        while any(queues):
            before = sum(map(len, queues))
            for stage, queue in enumerate(queues):
                while queue and (name := type(queue[0]).__name__) not in (*PEER, *PEER.values()):
                    instruction = queue.popleft()
                    counts[name] += 1
                    own = buffers[stage]
                    if name == "LoadMicroBatch":
                        own["loaded"][instruction.buffer_id] = loaded[stage]
                        loaded[stage] += 1
                        if stage == 0:
                            own["inputs"][instruction.buffer_id] = own["loaded"][instruction.buffer_id]
                    elif name == "ForwardPass":
                        microbatch = own["inputs"][instruction.buffer_id]
                        if stage == stages - 1:
                            assert own["loaded"][instruction.buffer_id] == microbatch
                            assert not own["saved"], "the engine keeps one loss"
                        assert instruction.buffer_id not in own["saved"]
                        own["outputs"][instruction.buffer_id] = own["saved"][instruction.buffer_id] = microbatch
                    elif name == "BackwardPass":
                        microbatch = own["saved"].pop(instruction.buffer_id)
                        if stage < stages - 1:
                            assert received[stage] == microbatch, "the engine keeps one received gradient"
                            received[stage] = None
                        own["gradients"][instruction.buffer_id] = microbatch
                if not queue or name not in PEER:
                    continue
                other = stage + (1 if name == "SendActivation" else -1)
                if queues[other] and type(queues[other][0]).__name__ == PEER[name]:
                    sent, taken = queue.popleft(), queues[other].popleft()
                    counts[name] += 1
                    if name == "SendActivation":
                        assert taken.buffer_id not in buffers[other]["saved"]
                        buffers[other]["inputs"][taken.buffer_id] = buffers[stage]["outputs"][sent.buffer_id]
                    else:
                        assert received[other] is None
                        received[other] = buffers[stage]["gradients"].pop(sent.buffer_id)
                        assert buffers[other]["saved"][taken.buffer_id] == received[other]
            assert sum(map(len, queues)) < before, f"every stage waits: {queues}"
    assert not any(own["saved"] for own in buffers)
    return dict(counts)


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_every_stage_executes_its_instructions_without_a_stop(stages: int, microbatches: int) -> None:
    theirs = [TrainSchedule(microbatches, stages, stage) for stage in range(stages)]
    expected = execute(theirs)
    for name in NAMES:
        ours = [PlayedSchedule(zb.make(name, stages, microbatches), stage) for stage in range(stages)]
        assert execute(ours) == expected, name
        if name == "1f1b":
            assert all(mine.num_pipe_buffers() <= other.num_pipe_buffers() for mine, other in zip(ours, theirs, strict=True))
            assert len(list(ours[0])) <= len(list(theirs[0]))


@pytest.mark.feature("losses of one device", "any schedule that fits the engine")
def test_two_ranks_train_as_with_deepspeeds_own_schedule(tmp_path: Path) -> None:
    run_program(PROGRAM, tmp_path / "losses.json", ranks=2)
    own, *others = json.loads((tmp_path / "losses.json").read_text()).values()
    assert own[-1] < own[0]
    for losses in others:
        assert losses == pytest.approx(own, rel=1e-6)


def engine(**attributes: Any) -> Any:
    """What `use_schedule` needs of the engine of stage 0 of 2, with 4 microbatches."""
    return SimpleNamespace(_train_schedule=None, num_stages=2, micro_batches=4, stage_id=0, **attributes)


def test_a_named_schedule_follows_the_number_of_microbatches() -> None:
    used = engine()
    use_schedule(used, "1f1b")
    assert used._train_schedule().micro_batches == 4
    used.micro_batches = 6
    assert used._train_schedule().micro_batches == 6


@pytest.mark.refuses("split backward passes", "several stages per rank", "a schedule for other ranks")
@pytest.mark.parametrize(
    ("schedule", "stated"),
    [
        (lambda: "zb-h1", ("zb-h1", "BW", "1f1b")),
        (lambda: "gpipe", ("gpipe", "1f1b")),
        (lambda: "interleaved-1f1b", ("interleaved-1f1b", "stages", 4)),
        (lambda: zb.make("1f1b", 3, 4), (3, 2, "ranks")),
        (lambda: zb.make("1f1b", 2, 8), (8, 4, "microbatches")),
    ],
)
def test_what_the_engine_cannot_run_is_refused(schedule: Callable[[], Any], stated: tuple[Any, ...]) -> None:
    with raises(InputError, *stated):
        use_schedule(engine(), schedule())


def test_another_engine_and_an_illegal_schedule_are_refused() -> None:
    with raises(InputError, argument="engine", got="SimpleNamespace"):
        use_schedule(SimpleNamespace(), "1f1b")
    short = zb.make("1f1b", 2, 4)
    with pytest.raises(ScheduleError):
        PlayedSchedule(zb.Schedule("cut", short.placement, 4, (short.rows[0][:-1], short.rows[1])), 0)
