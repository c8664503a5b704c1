from collections.abc import Iterator

import pytest

from tests.procs.ranks import Ranks


@pytest.fixture(scope="session")
def world() -> Iterator[Ranks]:
    """Four ranks, shared by every test that leaves them healthy."""
    ranks = Ranks(4)
    yield ranks
    ranks.kill()
