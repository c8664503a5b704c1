"""One browser for the tests of a file."""

from collections.abc import Iterator

import pytest

from tests.browser.chromium import CHROMIUM, Browser, chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium or chrome on the PATH to open pages in")
    with chromium() as started:
        yield started
