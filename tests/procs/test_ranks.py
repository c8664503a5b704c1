"""The report of a test on a rank's process that ended.

The message has the signal and the last jobs.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.procs.ranks import Ranks


def job(group: Any, name: str) -> None:
    return


def test_a_rank_that_ends_between_jobs_is_reported_with_its_signal_and_last_jobs() -> None:
    world = Ranks(1)
    try:
        for name in ("first", "second", "third"):
            world.run(job, name, ranks=1)
        os.kill(world.processes[0].pid or 0, signal.SIGABRT)
        world.processes[0].join()
        with pytest.raises(AssertionError) as caught:
            world.run(job, "fourth", ranks=1)
    finally:
        world.kill()
    found = "rank 0 ended by SIGABRT before it got job('fourth',); its last jobs were job('second',) and job('third',)"
    assert str(caught.value).startswith(found)
