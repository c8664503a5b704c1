"""The commands that messages name for missing packages suit how this package was installed."""

from __future__ import annotations

from importlib import metadata
from unittest import mock

import pytest

from zerobubble.installing import install


@pytest.mark.parametrize("extra", ["plan", "explore"])
def test_the_command_suits_an_installed_package_and_its_sources(extra: str) -> None:
    """tests/pure/test_distribution.py runs the first one."""
    with mock.patch.object(metadata, "distribution"):
        assert install(extra) == f"pip install 'zerobubble[{extra}]'"
    with mock.patch.object(metadata, "distribution", side_effect=metadata.PackageNotFoundError):
        assert f"pip install '.[{extra}]'" in install(extra)
