"""Settings shared by all tests: what hypothesis tries, which long cases are played, and how two workers share the tests.

`make test` is the same in every run. A long run plays a random share of the long cases, and tests of hypothesis on fresh examples. Both
follow from one seed, which it prints; ZEROBUBBLE_SEED=N repeats it.

Process tests say by a marker how they use the machine: `ranks_wait`, `in_process` or `spread` (pyproject.toml describes them). Both workers
begin with process tests: one with ranks that compute, the other with ranks that mostly wait. So both cores are busy, and no measured time
is disturbed by other ranks. Then the workers share all other tests.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import TypeVar
from zlib import crc32

import pytest
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, is_hypothesis_test, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.procs.exhaustive import EXHAUSTIVE, SEED

ROOT = Path(__file__).parents[1]

# No deadline and no health check: on a busy machine, and with fresh examples, they fail at random.
settings.register_profile("steady", deadline=None, max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)
settings.register_profile("fresh", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")


ONE_IN = 8
"""The share of the long cases of each test that is played."""
TURNS = 8
"""The number of long runs with consecutive seeds that play each long test once."""
T = TypeVar("T")
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, help="skip the tests that have not begun after so many seconds; `make quick` sets it")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Begin the time that `--seconds` limits. Print the seed of a long run here, so that a run that is stopped has it, too."""
    session.stash[BEGAN] = time.monotonic()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if is_long_run(session.config) and reporter is not None:
        reporter.write_line(f"{SEED}={os.environ[SEED]} repeats the cases and examples of this run")


def pytest_runtest_setup(item: pytest.Item) -> None:
    seconds = item.config.getoption("seconds")
    if seconds is not None and time.monotonic() > item.session.stash[BEGAN] + seconds:
        pytest.skip(f"{seconds:g} s are over")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Look for doctests in `src` alone: the modules of the tests have none, and to import and search them all takes seconds."""
    found = yield
    return [collector for collector in found if not isinstance(collector, DoctestModule)]


def is_long_run(config: pytest.Config) -> bool:
    """Whether long tests are asked for, alone or with others."""
    return "long" in config.getoption("markexpr").replace("not long", "") or EXHAUSTIVE


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of a long run, which the workers inherit by their environment."""
    if is_long_run(config):
        seed = os.environ.setdefault(SEED, str(random.SystemRandom().randrange(10**6)))
        if config.option.hypothesis_seed is None:
            config.option.hypothesis_seed = seed
        settings.load_profile("fresh")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the long cases, and leave out of a long run what it does not play.

    Of a test marked `sweep`, all cases but the first are long. A long run plays the long tests of its turn, which is its seed modulo
    `TURNS`, and one in `ONE_IN` cases of each. It always plays tests marked `long(all=True)`, and tests of hypothesis that are not long
    otherwise. All are played with ZEROBUBBLE_EXHAUSTIVE=1, and so is what is asked for by its name.
    """
    by_name = any("::" in argument for argument in config.args)
    if not by_name:
        mark_sweeps(items)
    if not is_long_run(config):
        return
    for item in items:
        if item.get_closest_marker("long") is None and is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.long(all=True))
    if EXHAUSTIVE or by_name:
        return
    left_out = {item for test, cases in long_cases(items).items() for item in not_played(test, cases, os.environ[SEED])}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def mark_sweeps(items: list[pytest.Item]) -> None:
    """Make the cases of each sweep long that `make test` does not play."""
    seen = set()
    for item in items:
        if item.get_closest_marker("sweep") is not None and item.get_closest_marker("long") is None:
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.long)
            seen.add(test)


def long_cases(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The long cases of each test of which a share is played."""
    cases = defaultdict(list)
    for item in items:
        long = item.get_closest_marker("long")
        if long is not None and not long.kwargs.get("all"):
            cases[item.nodeid.partition("[")[0]].append(item)
    return cases


def not_played(test: str, cases: list[T], seed: str) -> list[T]:
    """The cases of a test that a long run leaves out: all in the turns of others, or else all but one in `ONE_IN`."""
    if crc32(test.encode()) % TURNS != int(seed) % TURNS:
        return cases
    played = random.Random(f"{seed} {test}").sample(cases, -(-len(cases) // ONE_IN))
    return [case for case in cases if case not in played]


MARKS = ("ranks_wait", "in_process", "spread")


@cache
def mark_of(file: str) -> str:
    """The marker of a file of process tests, empty for ranks that compute.

    The scheduler runs in a process that collects no tests and only knows their names, so it reads the marker from the file's text.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((mark for mark in MARKS if f"pytest.mark.{mark}" in text), "")


class RanksTogether(LoadScopeScheduling):
    """Assigns tests to workers in groups, the largest first.

    The ranks of all process tests that compute form one group, and those that wait another: each worker starts its ranks once. Of files
    marked `spread`, every test is a group. Every other file is a group, so that what its tests share, such as a browser, a plan or compiled
    kernels, is made once.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if not file.startswith("tests/procs/"):
            return file
        mark = mark_of(file)
        return {"spread": nodeid, "in_process": file, "ranks_wait": "ranks that wait"}.get(mark, "ranks that compute")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> RanksTogether:
    return RanksTogether(config, log)
