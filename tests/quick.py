"""Check what changed since the last commit, or in it if nothing did: style, types, layers, and the nearest tests without processes.

    python -m tests.quick

`make quick` calls it between two edits, and it takes up to a minute and a half; `make test` is the full run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.nearest import ROOT, nearest_to_all

BIN = Path(sys.executable).parent
SECONDS = 45
"""How long tests begin, the nearest first; those that are left are counted as skipped."""


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
    """Run the checks, types and layers alongside the tests; returns the exit status of one that fails."""
    files = changed()
    tests = nearest_to_all(files, "tests/pure")
    print(f"{len(files)} files changed; tests: {' '.join(map(str, tests)) or 'none'}", flush=True)
    if not files:
        return 0
    for check in (["check"], ["format", "--check"]):
        if status := subprocess.run([BIN / "ruff", *check, *files], cwd=ROOT, check=False).returncode:
            return status
    alongside = [
        subprocess.Popen([BIN / name], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in ("mypy", "lint-imports")
    ]
    pytest = [sys.executable, "-m", "pytest", "--no-loadscope-reorder", f"--seconds={SECONDS}", *tests]
    statuses = [subprocess.run(pytest, cwd=ROOT, check=False).returncode] if tests else []
    for check in alongside:
        said, _ = check.communicate()
        print(said, end="")
        statuses.append(check.returncode)
    return next(filter(None, statuses), 0)


if __name__ == "__main__":
    sys.exit(main())
