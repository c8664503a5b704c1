"""How to install what a message says is missing."""

from __future__ import annotations

CUDA_BUILD = "`PIP_EXTRA_INDEX_URL= pip install --force-reinstall torch` installs a build for CUDA on Linux"


def install(extra: str) -> str:
    """Returns the command that installs an extra of this package: from its own metadata if it is installed, else from its sources.

    An installed package satisfies the requirement `zerobubble`, wherever it came from, so pip needs no index that has it.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # takes as long as the rest of a command's start

    try:
        distribution("zerobubble")
    except PackageNotFoundError:
        return f"pip install '.[{extra}]' in the repository of zerobubble"
    return f"pip install 'zerobubble[{extra}]'"
