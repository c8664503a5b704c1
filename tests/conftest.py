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
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
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


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed, for runs that are stopped, too."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if is_long_run(session.config) and reporter is not None:
        reporter.write_line(f"{SEED}={os.environ[SEED]} repeats the cases and examples of this run")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out seven in eight long cases of each test at random, but for tests marked `long(all=True)`.

    All are played with ZEROBUBBLE_EXHAUSTIVE=1, and so is what is asked for by its name. Tests of hypothesis are long, too, in a long run.
    """
    long_run = is_long_run(config)
    for item in items:
        if long_run and item.get_closest_marker("long") is None and is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker(pytest.mark.long(all=True))
    if EXHAUSTIVE or any("::" in argument for argument in config.args):
        return
    cases = defaultdict(list)
    for item in items:
        long = item.get_closest_marker("long")
        if long is not None and not long.kwargs.get("all"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for test, each in cases.items() for item in _left_out(test, each)}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _left_out(test: str, cases: list[pytest.Item]) -> set[pytest.Item]:
    """The long cases of one test that are not played: at least one is."""
    played = -(-len(cases) // ONE_IN)
    return {*cases} - {*random.Random(os.environ.get(SEED, "") + test).sample(cases, played)}


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
