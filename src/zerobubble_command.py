"""The `zerobubble` command as it is installed.

It begins outside of the package, so that Ctrl-C while the package is imported ends in one sentence, too.
"""

from __future__ import annotations

import sys
from types import TracebackType

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells give it."""


def main() -> None:
    """Run the command line."""
    report_interruptions()
    from zerobubble.cli import main as command

    command(prog_name="zerobubble")


def report_interruptions() -> None:
    """From now on, Ctrl-C that nobody catches ends this process with one sentence, as it does while modules are imported."""
    sys.excepthook = _report


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("zerobubble: interrupted", file=sys.stderr)  # noqa: T201 - click may be what was being imported
    sys.exit(INTERRUPTED)
