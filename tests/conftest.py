"""Settings shared by all tests: hypothesis tries the same problems on every run, without a clock; two workers share the tests."""

from __future__ import annotations

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("steady", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("steady")


class RanksTogether(LoadScopeScheduling):
    """Tests with rank processes go to one worker, which shares its world; that group is the largest and begins first."""

    def _split_scope(self, nodeid: str) -> str:
        return "procs" if nodeid.startswith("tests/procs/") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> RanksTogether:
    return RanksTogether(config, log)
