import traceback
from collections.abc import Generator, Iterator

import pytest

from tests.device import DEVICE, use_device
from tests.procs.ranks import Ranks

use_device()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Skips a test for which the device "separate" has no kernels."""
    try:
        yield
    except Exception as error:
        if DEVICE.type == "separate":
            from tests.separate import LACKING

            said = "".join(traceback.format_exception(error))
            if lacking := [name for sign, name in LACKING.items() if sign in said]:
                pytest.skip(f"the device has no {lacking[0]}")
        raise


@pytest.fixture(scope="session")
def worlds() -> Iterator[list[Ranks]]:
    made: list[Ranks] = []
    yield made
    for ranks in made:
        ranks.kill()


@pytest.fixture
def world(worlds: list[Ranks]) -> Ranks:
    """Four ranks, shared by every test that leaves them healthy; new ones after a test in which some hung or died."""
    if not worlds or not all(process.is_alive() for process in worlds[-1].processes):
        for broken in worlds:
            broken.kill()  # its remaining processes would take memory and time from all further tests
        worlds[:] = [Ranks(4)]
    return worlds[-1]
