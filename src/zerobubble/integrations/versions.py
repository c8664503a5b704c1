"""Checks that the installed versions of a framework are those that its integration was written for."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from zerobubble.errors import InputError
from zerobubble.installing import install


def refuse_wrong_versions(extra: str) -> None:
    """Raises `InputError` with every package that the `extra` of zerobubble wants in another version than the installed one."""
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
