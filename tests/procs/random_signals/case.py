"""A case: what a few ranks play, and what befalls one of them, and when; all of it follows from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

KILL, FREEZE, PAUSE, WAKE, TERMINATE, INTERRUPT = "SIGKILL", "SIGSTOP", "SIGSTOP, SIGCONT in time", "SIGSTOP, SIGCONT", "SIGTERM", "SIGINT"
"""Deeds from outside. A paused rank goes on before the timeout; one that is woken does so after it."""
CUT = "cut cable"
"""The deed from outside that befalls the host of a rank: nothing reaches the other host any more, and no rank gets a report."""
RAISE, LEAVE, EXIT = "ValueError", "SystemExit", "os._exit"
"""Deeds in code of the user's own."""

START, MEET, MAKE, STEP, CLIP, OWN, EVAL, TIMELINE, PROFILE, CLOSE, END = (
    *("start", "meet", "make", "step", "clip", "own", "eval_step", "timeline", "profile", "close", "end"),
)
"""The calls of a script."""

TOGETHER = (MAKE, STEP, CLIP, EVAL, TIMELINE, PROFILE)
"""Calls that every rank must make, and in which a rank hears of what befell another."""

PLACES = ("build", "forward", "backward", "loss", "on_loss", "hook", "own")
"""Where in the user's own code a deed may be done."""


@dataclass(frozen=True)
class Child:
    """A process that `rank` forks before its call number `before`.

    It "holds" what it inherits, "exits", or "closes" the pipeline and exits.
    """

    rank: int
    before: int
    does: str


@dataclass(frozen=True)
class Case:
    """A case, determined by its seed.

    The rank `victim` suffers the `deed`: one from outside in call number `call`, when the share `within` of the time that such a call takes
    has passed; one in the user's own code when it comes to `place` for the time number `count` + 1. `asleep` are the seconds until a
    stopped rank goes on, None for never. `late` are the seconds by which each rank comes late. `store` says who holds the store: a "file",
    "rank 0" or the "launcher". Where there are `replicas`, the ranks are those of so many pipelines, one after the other, which go on
    without who is gone if it `survives`. `hosts` has the host of each rank, 0 or 1; without it all run on this machine.
    """

    seed: int
    ranks: int
    schedule: str
    num_microbatches: int
    transport: str
    store: str
    timeout: float
    validates: bool
    calls: tuple[str, ...]
    late: tuple[float, ...]
    victim: int
    deed: str
    call: int = 0
    within: float = 0.0
    place: str = ""
    count: int = 0
    asleep: float | None = None
    child: Child | None = None
    replicas: int = 1
    hosts: tuple[int, ...] = ()
    survives: bool = False

    def culprits(self, rank: int) -> set[int]:
        """The ranks that an error on `rank` may name.

        Of two hosts, that with the store names ranks of the other one, and the other one the rank with the store.
        """
        if self.deed != CUT:
            return {self.victim}
        return {0} if self.hosts[rank] else {other for other, host in enumerate(self.hosts) if host}

    @property
    def all_go_on(self) -> bool:
        """Whether every rank lives after the deed and hears of it as an error, so that all can make a new pipeline."""
        return self.deed == RAISE and self.place != "own"

    def __str__(self) -> str:
        where = (
            f"before call {self.place} {self.count}"
            if self.place
            else f"{100 * self.within:.0f} % into {self.calls[self.call]} (call {self.call})"
        )
        child = f", rank {self.child.rank} has a child that {self.child.does}" if self.child else ""
        post = " with PostValidation" if self.validates else ""
        to_survive = " to survive" if self.survives else ""
        mesh = f" ({self.replicas} replicas{to_survive}, hosts {self.hosts or 'none'})" if self.replicas > 1 else ""
        return (
            f"{self.deed} of rank {self.victim} of {self.ranks}{mesh} {where}; {self.schedule}{post} over {self.transport}, "
            f"store in {self.store}, timeout {self.timeout:g} s{child}"
        )


def anywhere(seed: int) -> Case:
    """Any deed, at any time of a whole training."""
    draw = random.Random(seed)
    played = _training(seed, draw)
    deed = draw.choices((KILL, FREEZE, PAUSE, WAKE, TERMINATE, INTERRUPT, RAISE, LEAVE, EXIT), weights=(6, 3, 2, 3, 3, 1, 3, 2, 2))[0]
    if deed in (RAISE, LEAVE, EXIT):
        case = _in_own_code(replace(played, deed=deed), draw)
    else:
        case = _aimed(replace(played, deed=deed), draw.randrange(len(played.calls)), draw)
    return _with_child(case, draw)


def in_construction(seed: int) -> Case:
    """A kill or a freeze while a pipeline is made."""
    draw = random.Random(f"construction {seed}")
    played = replace(_training(seed, draw), deed=draw.choice((KILL, FREEZE)))
    makes = [number for number, name in enumerate(played.calls) if name == MAKE]
    return _aimed(played, draw.choice(makes), draw)


def on_a_mesh(seed: int) -> Case:
    """A deed from outside, at any time of a whole training of two replicas of a pipeline of two ranks; in most cases on two hosts."""
    draw = random.Random(f"mesh {seed}")
    schedule = draw.choice(("1f1b", "zb-h1", "zb-v", "dualpipe"))
    validates = schedule != "dualpipe" and draw.random() < 0.25
    played = replace(
        _training(seed, draw),
        ranks=4,
        schedule=schedule,
        num_microbatches=4,
        validates=validates,
        calls=_calls(draw, validates, plans=False),
        late=(0.0,) * 4,
        victim=draw.randrange(4),
        deed=draw.choices((KILL, FREEZE, CUT, PAUSE, WAKE, TERMINATE), weights=(5, 4, 5, 1, 1, 1))[0],
        replicas=2,
        hosts=draw.choice(((0, 0, 1, 1), (0, 1, 0, 1))),
    )
    if played.deed != CUT and draw.random() < 0.4:
        played = replace(played, hosts=())
    if played.hosts:
        played = replace(played, store="rank 0")
    return _aimed(played, draw.randrange(len(played.calls)), draw)


def to_survive(seed: int) -> Case:
    """A deed from outside in a mesh of two or three replicas of a pipeline of two ranks that are to survive it, some on two hosts."""
    draw = random.Random(f"survive {seed}")
    replicas = draw.choice((2, 2, 3))
    ranks = 2 * replicas
    played = replace(
        _training(seed, draw),
        ranks=ranks,
        schedule=draw.choice(("1f1b", "zb-h1", "zb-v", "dualpipe")),
        num_microbatches=4,
        store=draw.choice(("launcher", "launcher", "file", "rank 0")),
        validates=False,
        calls=_calls(draw, validates=False, plans=False),
        late=(0.0,) * ranks,
        victim=draw.randrange(ranks),
        deed=draw.choices((KILL, FREEZE, CUT, PAUSE, WAKE, TERMINATE), weights=(8, 4, 3, 1, 2, 3))[0],
        replicas=replicas,
        survives=True,
    )
    if played.deed == CUT or draw.random() < 0.3:
        played = replace(played, store="rank 0", hosts=draw.choice(((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0))) + (0, 1) * (replicas - 2))
    return _aimed(played, draw.randrange(len(played.calls)), draw)


def _training(seed: int, draw: random.Random) -> Case:
    ranks = draw.choice((2, 3, 3, 4, 4))
    schedules = ["1f1b", "zb-h1", "zb-v", *(["dualpipe"] if ranks % 2 == 0 else [])] * 8 + ["auto"]
    schedule = draw.choice(schedules)
    validates = schedule in ("1f1b", "zb-h1", "zb-v") and draw.random() < 0.25
    return Case(
        seed=seed,
        ranks=ranks,
        schedule=schedule,
        num_microbatches=2 * ranks,
        transport=draw.choice(("gloo", "auto")),
        store=draw.choice(("file", "rank 0", "launcher")),
        timeout=draw.choice((8.0, 12.0)),
        validates=validates,
        calls=_calls(draw, validates, schedule == "auto"),
        late=tuple(draw.choice((0.0, 0.0, 0.3)) * draw.random() for _ in range(ranks)),
        victim=draw.randrange(ranks),
        deed="",
    )


def _calls(draw: random.Random, validates: bool, plans: bool) -> tuple[str, ...]:
    """One pipeline, often followed by another."""
    calls = [START, MEET]
    for life in range(draw.choice((1, 2, 2))):
        calls.append(MAKE)
        for _ in range(draw.randint(2, 4) + 3 * plans if life == 0 else 2):
            calls += draw.choice(([], [], [EVAL], [OWN]))
            calls += [STEP] if validates else [STEP, CLIP]
        calls += draw.choice(([], [], [TIMELINE], [PROFILE]))
        calls.append(CLOSE)
    return (*calls, END)


def _aimed(case: Case, call: int, draw: random.Random) -> Case:
    asleep = {PAUSE: draw.uniform(0.1, 0.5) * case.timeout, WAKE: case.timeout + draw.uniform(0.5, 9.0)}.get(case.deed)
    return replace(case, call=call, within=draw.random(), asleep=asleep)


def _in_own_code(case: Case, draw: random.Random) -> Case:
    place = draw.choice(PLACES)
    steps = case.calls.count(STEP)
    per_step = {"build": 1, "hook": steps, "own": max(1, case.calls.count(OWN)), "loss": steps * case.num_microbatches}
    count = draw.randrange(per_step.get(place, steps * case.num_microbatches))
    ends = 0 if case.schedule == "zb-v" else case.ranks - 1
    victim = ends if place in ("loss", "on_loss") else case.victim
    return replace(case, place=place, count=count, victim=victim)


def _with_child(case: Case, draw: random.Random) -> Case:
    """One case in four has a forked child, which is mostly the victim's."""
    if draw.random() > 0.25:
        return case
    rank = draw.choice((case.victim, case.victim, draw.randrange(case.ranks)))
    last = case.call if rank == case.victim and case.call > 2 else len(case.calls) - 1
    return replace(case, child=Child(rank, draw.randint(2, last), draw.choice(("holds", "holds", "exits", "closes"))))
