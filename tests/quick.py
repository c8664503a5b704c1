"""Check what changed since the last commit, or in it if nothing did: style, types, import floors, and the nearest tests without processes.

    python -m tests.quick

`make quick` calls it between two edits; `make test` is the full run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.nearest import ROOT, nearest_to_all

BIN = Path(sys.executable).parent


def changed() -> list[Path]:
    """The Python files that differ from the last commit, with new ones; those of the last commit itself if there are none."""
    for command in (
        (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"]),
        (["diff", "--name-only", "HEAD~1", "HEAD"],),
    ):
        lines = [line for words in command for line in subprocess.check_output(["git", *words], cwd=ROOT, text=True).splitlines()]
        if files := [Path(line) for line in lines if line.endswith(".py") and (ROOT / line).exists()]:
            return files
    return []


def main() -> int:
    """Run the checks one after another; returns the exit status of the first that fails."""
    files = changed()
    tests = nearest_to_all(files, "tests/pure")
    print(f"{len(files)} files changed; tests: {' '.join(map(str, tests)) or 'none'}", flush=True)
    names = list(map(str, files))
    checks = [[BIN / "ruff", "check", *names], [BIN / "ruff", "format", "--check", *names], [BIN / "mypy"], [BIN / "lint-imports"]]
    if tests:
        checks.append([sys.executable, "-m", "pytest", *map(str, tests)])
    for check in checks if files else []:
        if status := subprocess.run(list(map(str, check)), cwd=ROOT, check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
