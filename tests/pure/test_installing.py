"""The commands that messages name for missing packages suit how this package was installed."""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from unittest import mock

import click
import pytest

from zerobubble import errors
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


@pytest.mark.parametrize(
    ("extra", "package"),
    [(name, name) for name in ("deepspeed", "lightning", "megatron", "torchtitan", "transformers", "trl")]
    + [("transformers", "accelerate")],
)
def test_an_integration_without_its_framework_says_how_to_install_it(extra: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for module in [name for name in sys.modules if name.startswith(("zerobubble.integrations.", package))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError) as raised:
        import_module(f"zerobubble.integrations.{extra}")
    assert isinstance(raised.value, errors.MissingPackageError)
    assert raised.value.fields["name"].split(".")[0] == package
    assert raised.value.fields["remedy"] == install(extra)
