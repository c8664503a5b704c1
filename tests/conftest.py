"""Settings shared by all tests: hypothesis tries the same problems on every run, without a clock; two workers share the tests.

At first one worker has ranks that compute and the other ranks that mostly wait, so that both cores are used and no measured time is
disturbed by ranks that compute beside it. Then they share what needs no ranks, or ranks but no measured time.
"""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.procs.exhaustive import EXHAUSTIVE

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


WAITING = (
    *(
        "abort",
        "construction",
        "diagnosis",
        "ends",
        "fail_cannot_fail",
        "failures",
        "fault_injection",
        "forked_children",
        "hosts",
        "multihost",
    ),
    *("lifetimes", "process_ends", "random_signals", "survival", "surviving_agents", "told_to_end", "torchrun"),
)
"""Tests in which a rank fails, and the others wait until they are told."""
ALONE = (
    *(
        "graph_attributes",
        "graph_checkpoint",
        "graph_guard",
        "graph_lengths",
        "graph_none",
        "graph_share",
        "graph_split",
        "graph_tensors",
        "graph_transformers",
        "graph_values",
    ),
    *(
        "alike",
        "compiled_sizes",
        "cuda_graphs",
        "handed_mappings",
        "model_cuts",
        "model_habits",
        "own_layers",
        "saved_tensors",
        "special_tensors",
        "split_matrix",
        "torchvision_fits",
    ),
)
"""Tests of stages, nearly all in the test's own process."""
UNTIMED = (
    *("families", "fifty_steps", "graph_cut_models", "models_in_use", "other_models", "post_validation", "split_examples"),
    *("command_line_page", "gpu_benchmark", "pages_by_launcher", "split_transformers"),
)
"""Tests of ranks that compute, none of which looks at a clock: they take longest, and each goes to the worker that is free."""

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


class RanksTogether(LoadScopeScheduling):
    """Tests with rank processes go together to the world of one worker, those that wait to that of the other.

    These two groups are the largest and begin. Each other file is a group: what its tests share, such as a browser, a plan or kernels that
    are compiled for the first of them, is then made once. Of files whose tests take longest every test is a group, and they end the run.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(nodeid.partition("::")[0])
        name = file.stem.removeprefix("test_")
        if file.parent.name == "procs" and name in UNTIMED:
            return nodeid
        if file.parent.name != "procs" or name in ALONE:
            return str(file)
        return "ranks that wait" if name in WAITING else "ranks that compute"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> RanksTogether:
    return RanksTogether(config, log)
