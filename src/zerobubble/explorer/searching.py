"""Searches of the planner, each in its own process, reported to the page as server-sent events."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from signal import SIGKILL
from typing import Any

from zerobubble.explorer.places import Places
from zerobubble.explorer.question import MOST_SECONDS, FieldError, Question, read_question, require_range
from zerobubble.planning import Objective

MOST_SEARCHES = 2
"""Maximum number of concurrent searches."""
MOST_LIMITS = 32
"""Maximum number of memory limits of a Pareto front."""
LONGEST_LINE = 64_000_000
"""Maximum size of an event in bytes: a front has a plan for each of its limits."""


@dataclass
class Searches:
    """The running searches by number. A search ends when its client disconnects."""

    places: Places = field(
        default_factory=lambda: Places(MOST_SEARCHES, f"{MOST_SEARCHES} searches are running", "stop one, or wait until it ends")
    )
    running: dict[int, Process] = field(default_factory=dict)

    async def events(self, number: int, question: dict[str, Any]) -> AsyncGenerator[str, None]:
        """Yield the progress of a search as server-sent events; the first one has the number to stop it by."""
        command = (sys.executable, "-P", "-m", "zerobubble.explorer.search_worker")
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, limit=LONGEST_LINE)
        try:
            await _write(process, json.dumps(question))
            self.running[number] = process  # a client can stop it only after this
            yield _event({"event": "began", "number": number})
            async for news in _lines(process):
                yield news
            await process.wait()
        finally:
            self.running.pop(number, None)
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, SIGKILL)  # process.kill() would reap an ended process, whose status asyncio needs
                await process.wait()

    async def stop(self, number: int) -> bool:
        """End a search with the best schedule so far. Returns False if there is no such search."""
        process = self.running.get(number)
        if process is None:
            return False
        await _write(process, "stop")
        return True


async def _lines(process: Process) -> AsyncIterator[str]:
    assert process.stdout is not None
    answered = False
    while line := await process.stdout.readline():
        answered = json.loads(line)["event"] not in ("progress", "points")
        yield f"data: {line.decode().strip()}\n\n"
    if not answered:
        yield _event(
            {
                "event": "refused",
                "error": f"the search ended with status {await process.wait()} and no answer: see the terminal of zerobubble explore",
            }
        )


async def _write(process: Process, line: str) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(f"{line}\n".encode())
        await process.stdin.drain()
    except ConnectionError:
        return  # it has ended; the reader of its output reports that


def _event(news: dict[str, Any]) -> str:
    return f"data: {json.dumps(news, separators=(',', ':'))}\n\n"


def read_search(data: Any) -> dict[str, Any]:
    """Return the request to the search process for the JSON from the page: the fields of the question, the budget and the objective.

    `stages_of` is the whole question if its times belong to the stages of a model or a file, and None if they belong to equal ranks.
    Raises `FieldError` naming the field of a value that cannot be used.
    """
    if not isinstance(data, Mapping):
        raise FieldError("", f"a search must be an object with the fields of the page, got {type(data).__name__}")
    search = {name: data[name] for name in ("seconds", "evaluations", "objective", "limits") if name in data}
    question = read_question({name: value for name, value in data.items() if name not in search})
    of_stages = bool(question.costs or question.file or question.model)
    objective = search.get("objective") or Objective.PERIOD.value
    if objective not in list(Objective):
        raise FieldError("objective", f"there is no objective {objective!r:.40}", f"give {' or '.join(Objective)}")
    evaluations = None if search.get("evaluations") is None else int(_amount("evaluations", search["evaluations"], 1e9))
    return {
        "stages_of": asdict(question) if of_stages else None,
        "ranks": question.ranks,
        "microbatches": question.microbatches,
        "times": question.times,
        "comm": [] if of_stages else _comm(question),
        "held": question.held,
        "memory": question.memory,
        "objective": str(objective),
        "seconds": _amount("seconds", search.get("seconds", 5), MOST_SECONDS) if evaluations is None else None,
        "evaluations": evaluations,
        "limits": _limits(search.get("limits") or []),
    }


def _comm(question: Question) -> list[float]:
    """Return the time of a message from each rank to the next one, and from the last to the first."""
    comm = [question.comm] * question.ranks
    if question.slow_link is None:
        return comm
    if question.slow_link + 1 >= question.ranks or question.slow_comm is None:
        remedy = f"give both, with a rank from 0 to {question.ranks - 2}, or leave both empty"
        raise FieldError("slow_link", "the slow link needs a time, and a rank before it", remedy)
    comm[question.slow_link] = question.slow_comm
    return comm


def _amount(field_name: str, value: Any, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise FieldError(field_name, f"{value!r:.40} is not a number") from None
    require_range(field_name, value, number, 0, most)
    return number


def _limits(values: Any) -> list[float]:
    if not isinstance(values, list) or len(values) > MOST_LIMITS:
        raise FieldError("limits", f"the limits of a front are a list of at most {MOST_LIMITS} numbers of microbatches")
    return [_amount("limits", value, 1e6) for value in values]
