"""The commands that messages name for missing packages suit how this package was installed."""

from __future__ import annotations

from importlib import metadata
from unittest import mock

import click
import pytest

from zerobubble.cli import main
from zerobubble.installing import install


@pytest.mark.parametrize("extra", ["plan", "explore"])
def test_the_command_suits_an_installed_package_and_its_sources(extra: str) -> None:
    """tests/pure/test_distribution.py runs the first one."""
    with mock.patch.object(metadata, "distribution"):
        assert install(extra) == f"pip install 'zerobubble[{extra}]'"
    with mock.patch.object(metadata, "distribution", side_effect=metadata.PackageNotFoundError):
        assert f"pip install '.[{extra}]'" in install(extra)


@pytest.mark.parametrize("verb", ["explore", "watch"])
def test_the_help_of_a_page_says_how_to_install_what_it_needs(verb: str) -> None:
    command = main.commands[verb]
    for missing in (None, metadata.PackageNotFoundError):
        with mock.patch.object(metadata, "distribution", side_effect=missing):
            assert install("explore") in " ".join(command.get_help(click.Context(command)).split())
