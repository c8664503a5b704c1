"""Settings shared by all tests: hypothesis tries the same problems on every run, without a clock; two workers share the tests.

At first one worker has ranks that compute and the other ranks that mostly wait, so that both cores are used and no measured time is
disturbed by ranks that compute beside it. Then they share what needs no ranks.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("steady")


WAITING = (
    *("construction", "diagnosis", "ends", "fail_cannot_fail", "failures", "fault_injection", "forked_children", "lifetimes"),
    *("process_ends", "random_signals", "told_to_end"),
)
"""Tests in which a rank fails, and the others wait until they are told."""
ALONE = (
    *("graph_checkpoint", "graph_guard", "graph_none", "graph_share", "graph_split", "graph_tensors", "graph_transformers", "graph_values"),
    *("cuda_graphs", "model_cuts", "own_layers", "special_tensors", "split_matrix"),
)
"""Tests of stages, nearly all in the test's own process."""


class RanksTogether(LoadScopeScheduling):
    """Tests with rank processes go together to the world of one worker, those that wait to that of the other.

    These two groups are the largest and begin.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(nodeid.partition("::")[0])
        name = file.stem.removeprefix("test_")
        if file.parent.name != "procs" or name in ALONE:
            return nodeid
        return "ranks that wait" if name in WAITING else "ranks that compute"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> RanksTogether:
    return RanksTogether(config, log)
