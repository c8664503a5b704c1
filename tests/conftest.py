"""Settings shared by all tests: hypothesis tries the same problems on every run, without a clock; two workers share the tests.

Process tests say by a marker how they use the machine: `ranks_wait`, `in_process` or `spread` (pyproject.toml describes them). Both workers
begin with process tests: one with ranks that compute, the other with ranks that mostly wait. So both cores are busy, and no measured time
is disturbed by other ranks. Then the workers share all other tests.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.procs.exhaustive import EXHAUSTIVE

ROOT = Path(__file__).parents[1]

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


ONE_IN = 8
"""The share of the long cases of each test that is played."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out seven in eight long cases of each test, the first stays, but for tests marked `long(all=True)`.

    All are played with ZEROBUBBLE_EXHAUSTIVE=1, and so is what is asked for by its name.
    """
    if EXHAUSTIVE or any("::" in argument for argument in config.args):
        return
    seen: Counter[str] = Counter()
    played: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        long = item.get_closest_marker("long")
        test = item.nodeid.partition("[")[0]
        is_sampled = long is not None and not long.kwargs.get("all")
        (left_out if is_sampled and seen[test] % ONE_IN else played).append(item)
        seen[test] += is_sampled
    config.hook.pytest_deselected(items=left_out)
    items[:] = played


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
