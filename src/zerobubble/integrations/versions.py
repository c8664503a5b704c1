"""Checks that the installed versions of a framework are those that its integration was written for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from zerobubble.errors import InputError, MissingPackageError
from zerobubble.installing import install


@contextmanager
def needed(extra: str) -> Iterator[None]:
    """A context for imports of a framework: a module that is not installed is a `MissingPackageError` with the command for the `extra`."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = error.name or ""
        if name.partition(".")[0] == "zerobubble":
            raise
        message = "zerobubble.integrations.{extra} needs the module {name}, which is not installed"
        raise MissingPackageError(message, extra=extra, name=name, remedy=install(extra)) from error


def refuse_wrong_versions(extra: str) -> None:
    """Raises `InputError` with every package that the `extra` of zerobubble wants in another version than the installed one."""
    from packaging.requirements import Requirement  # a requirement of each framework, which may be missing

    wrong = []
    for text in metadata.requires("zerobubble") or ():
        wanted = Requirement(text)
        if wanted.marker is None or not wanted.marker.evaluate({"extra": extra}) or not wanted.specifier:
            continue
        try:
            version = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:  # imported from a checkout
            continue
        if not wanted.specifier.contains(version, prereleases=True):
            wrong.append(f"{wanted.name}{wanted.specifier} (installed: {version})")
    if wrong:
        raise InputError("zerobubble[{extra}] needs {expected}", extra=extra, expected=", ".join(wrong), remedy=install(extra))
