"""Every call is guarded throughout: any failure on one rank is reported on all ranks, or leaves all ranks in step.

A rank that is out of step is refused. One thread uses a pipeline at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import DEVICE, use_device
from tests.procs.models import batch, build, loss_fn
from tests.procs.ranks import Ranks
from tests.procs.test_fault_injection import Moment, boom, interrupt, struck
from tests.procs.test_hooks import Exploding
from tests.refusals import raises, states
from zerobubble.runtime import pipeline as front
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.hooks import clip
from zerobubble.runtime.stage.rank_stages import Stages

M = 4
TIMEOUT = 30.0
"""Seconds that no test here needs, because errors are reported at once."""


def pipeline(group: Any, schedule: Any = "zb-h1", **options: Any) -> zb.Pipeline:
    return zb.Pipeline(build, schedule, M, loss_fn, group=group, timeout=TIMEOUT, **options)


class Fault(NamedTuple):
    """A call that fails on one rank only: the `moment` at which `boom` raises, if any, and `words` of the error."""

    right: Callable[[zb.Pipeline], object]
    wrong: Callable[[zb.Pipeline], object]
    words: str
    victim: int = 1
    moment: tuple[Any, str] | None = None


def step(pipe: zb.Pipeline) -> Tensor:
    return pipe.step(*batch(M))


def evaluate(pipe: zb.Pipeline) -> Any:
    return pipe.eval_step(*batch(M))


def clip_(pipe: zb.Pipeline) -> Tensor:
    return pipe.clip_grad_norm_(1.0)


def step_without_gradients(pipe: zb.Pipeline) -> Tensor:
    with torch.inference_mode():
        return step(pipe)


def settle_and_clip(pipe: zb.Pipeline) -> Tensor:
    pipe.attach(Exploding("settle"))
    return clip_(pipe)


def unscale_(pipe: zb.Pipeline) -> None:
    scaler = torch.amp.GradScaler(DEVICE.type)
    pipe.step(*batch(M), scaler=scaler)
    pipe.unscale_(scaler, torch.optim.SGD(pipe.parameters()))


def attach(*hooks: zb.hooks.StepHook) -> Callable[[zb.Pipeline], object]:
    return lambda pipe: [pipe.attach(hook) for hook in hooks]


FAULTS = {
    "unknown argument": Fault(step, lambda pipe: pipe.step(*batch(M), inputz=None), "in step: InputError"),  # type: ignore[call-arg]
    "inference mode": Fault(step, step_without_gradients, "in step: InputError: there are no gradients inside torch.inference_mode()"),
    "number of microbatches": Fault(
        step, lambda pipe: pipe.step(*batch(M), num_microbatches=2.5), "in step: InputError: num_microbatches must be a whole number"
    ),
    "evaluation mode": Fault(evaluate, evaluate, "in eval_step: ValueError: boom", 1, (Stages, "evaluating")),
    "outputs joined": Fault(evaluate, evaluate, "in eval_step: ValueError: boom", 2, (front, "join_outputs")),
    "gradients settled": Fault(clip_, settle_and_clip, "in settle of Exploding: ValueError: boom"),
    "gradients scaled": Fault(clip_, clip_, "while clipping gradients: ValueError: boom", 1, (clip, "scale")),
    "scaler": Fault(unscale_, lambda pipe: pipe.unscale_(None, None), "in unscale_: InputError"),
    "description": Fault(
        lambda pipe: pipe.describe(*batch(M)),
        lambda pipe: pipe.describe(*batch(M), 1),
        "in describe: InputError",  # type: ignore[misc]
    ),
    "timeline": Fault(lambda pipe: pipe.timeline(), lambda pipe: pipe.timeline(1), "in timeline: InputError"),  # type: ignore[call-arg]
    "hook attached": Fault(attach(), attach(Exploding("on_attach")), "in attach: ValueError: boom"),
}


def go_wrong(group: Any, names: list[str]) -> list[tuple[str, str]]:
    """Per fault: what ended the call, or the step after it."""
    return [ended(group, FAULTS[name]) for name in names]


def ended(group: Any, fault: Fault) -> tuple[str, str]:
    pipe = pipeline(group)
    step(pipe)
    with ExitStack() as stack:
        is_victim = pipe.rank == fault.victim
        if is_victim and fault.moment is not None:
            stack.enter_context(struck(Moment(*fault.moment, 0, ""), boom))
        try:
            (fault.wrong if is_victim else fault.right)(pipe)
            assert not is_victim
            step(pipe)
        except (zb.PipelineError, ValueError, TypeError, AttributeError) as error:
            return type(error).__name__, str(error)
    return "nothing", "raised"


@pytest.mark.long
def test_a_failed_call_on_one_rank_is_reported_on_all(world: Ranks) -> None:
    results = world.run(go_wrong, list(FAULTS), ranks=3)
    for (name, fault), ends in zip(FAULTS.items(), zip(*results, strict=True), strict=True):
        assert len(set(ends)) == 1, f"{name}: {ends}"
        kind, text = ends[0]
        assert kind == "PipelineError", f"{name}: {ends}"
        assert text.startswith(f"rank {fault.victim} failed {fault.words}"), f"{name}: {text}"


def make_wrongly(group: Any) -> str:
    hooks = [Exploding("on_attach")] if torch.distributed.get_rank(group) == 1 else []
    with pytest.raises(zb.PipelineError) as caught:
        pipeline(group, hooks=hooks)
    return str(caught.value)


def test_a_hook_that_fails_as_the_pipeline_is_made_is_reported_on_all(world: Ranks) -> None:
    assert set(world.run(make_wrongly, ranks=3)) == {"rank 1 failed while attaching hooks: ValueError: boom"}


NUMBERS: list[Any] = [2.5, "8", True, 10**6, 0, 3]


def wrong_numbers(group: Any) -> tuple[list[str], float, float]:
    """The error for each number, and the loss of a step before and after."""
    with pipeline(group, zb.make("zb-h1", group.size(), M)) as pipe:
        before = step(pipe).item()
        seen = []
        for number in NUMBERS:
            for method in (pipe.step, pipe.eval_step):
                with pytest.raises(zb.InputError) as caught:
                    method(*batch(M), num_microbatches=number)  # type: ignore[operator]
                seen.append(str(caught.value))
        return seen, before, step(pipe).item()


def test_a_wrong_number_of_microbatches_leaves_the_pipeline_open(world: Ranks) -> None:
    for result, before, after in world.run(wrong_numbers, ranks=3):
        assert before == after
        for number, text in zip([number for number in NUMBERS for _ in range(2)], result, strict=True):
            if number == 3:
                assert text.startswith("schedule 'zb-h1' has 4 microbatches, but num_microbatches is 3: ")
            else:
                states(text, "num_microbatches", number)


def wrong_on_one_rank(group: Any, victim: int) -> tuple[str, int | None]:
    pipe = pipeline(group, zb.make("zb-h1", group.size(), M))
    with pytest.raises(zb.PipelineError) as caught:
        pipe.step(*batch(M), num_microbatches=2 if pipe.rank == victim else None)
    with raises(zb.PipelineError, "new", "Pipeline"):
        step(pipe)
    return str(caught.value), caught.value.rank


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_number_of_microbatches_that_is_wrong_on_one_rank_is_reported_on_all(world: Ranks, victim: int) -> None:
    ((text, rank),) = set(world.run(wrong_on_one_rank, victim, ranks=3))
    assert rank == victim
    states(text, f"rank {victim}", "InputError", "zb-h1", 4, "num_microbatches", 2)


def refused_together(group: Any) -> list[str]:
    """Calls that no rank can make; the pipeline goes on."""
    seen = []
    with pipeline(group) as pipe:
        for wrong in (step_without_gradients, lambda pipe: pipe.profile(*batch(M), steps=0)):
            with pytest.raises(zb.InputError) as caught:
                wrong(pipe)
            seen.append(str(caught.value))
        step(pipe)
    with pipeline(group, "forward-only") as pipe:
        for wrong in (step, lambda pipe: pipe.profile(*batch(M)), lambda pipe: pipe.describe(*batch(M))):
            with pytest.raises(zb.InputError) as caught:
                wrong(pipe)
            seen.append(str(caught.value))
        evaluate(pipe)
    return seen


def test_a_call_that_no_rank_can_make_leaves_the_pipeline_open(world: Ranks) -> None:
    for result in world.run(refused_together, ranks=3):
        states(result[0], "torch.inference_mode", "gradients")
        states(result[1], 1, 0, "profile")
        assert set(result[2:]) == {"schedule 'forward-only' has no backward passes: evaluate with eval_step, or choose one that trains"}


def out_of_step(group: Any, victim: int) -> str:
    """An interrupt strikes one rank where nothing of its call is guarded yet; it goes on, as if that had been nothing."""
    pipe = pipeline(group)
    step(pipe)
    if pipe.rank == victim:
        with struck(Moment(FailureGuard, "refuse_if_closed", 0, ""), interrupt), pytest.raises(KeyboardInterrupt):
            step(pipe)
    try:
        losses = [step(pipe).item() for _ in range(2)]
    except zb.PipelineError as error:
        return str(error)
    return f"losses {losses}"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_out_of_step_is_refused(world: Ranks, victim: int) -> None:
    (text,) = set(world.run(out_of_step, victim, ranks=3))
    calls = "rank 0 is at call 3 of step, eval_step, profile or describe, and rank 1 at call 2: "
    assert (calls if victim == 0 else "rank 1 is at call 2 of step, eval_step, profile or describe, and rank 2 at call 3: ") in text


class Intruder(nn.Module):
    """Before its third microbatch, another thread calls the pipeline."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls: list[Callable[[], object]] = []
        self.messages: list[str] = []
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count == 3:
            thread = threading.Thread(target=self.intrude)
            thread.start()
            thread.join()
        y: Tensor = self.inner(x)
        return y

    def intrude(self) -> None:
        for call in self.calls:
            try:
                call()
                self.messages.append("nothing")
            except zb.InputError as error:
                self.messages.append(str(error))


def call_from_two_threads(group: Any) -> tuple[list[str], list[float]]:
    """The errors in a second thread while the first one steps, and the losses of this step and of undisturbed ones."""
    pipe = zb.Pipeline(lambda s, n: Intruder(build(s, n)), "zb-h1", M, loss_fn, group=group, timeout=TIMEOUT, hooks=[zb.hooks.StepHook()])
    (stage,) = pipe.modules.values()
    assert isinstance(stage, Intruder)
    stage.count = M
    losses = [step(pipe).item()]
    stage.count = 0
    stage.calls = [
        lambda: step(pipe),
        lambda: evaluate(pipe),
        lambda: clip_(pipe),
        pipe.timeline,
        lambda: pipe.attach(zb.hooks.StepHook()),
        pipe.step_state,
        pipe.close,
    ]
    losses.append(step(pipe).item())
    found = stage.messages

    def step_later() -> None:
        use_device()
        losses.append(step(pipe).item())

    later = threading.Thread(target=step_later)
    later.start()
    later.join()
    pipe.close()
    return found, losses


def test_a_second_thread_is_refused_and_the_first_goes_on(world: Ranks) -> None:
    for result, losses in world.run(call_from_two_threads, ranks=3):
        assert len(result) == 7
        assert {text.split(", which")[0] for text in result} == {"another thread, 'MainThread', is using this pipeline (in step)"}
        assert len(losses) == 3
        assert len(set(losses)) == 1
