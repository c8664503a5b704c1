"""Run the process tests with their models on the GPU, several ranks to one device, and write what passed to `tests.json` next to this file.

Files run at the same time, each in a pytest of its own. Tests of what only a CPU has fail here; the file names each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FIRST = ("accelerator", "gradients", "staged", "mesh", "post_validation", "offload_runs", "recompute_runs", "checkpoint", "divided_head")
"""What a GPU may break most: played first, for there may not be time for all."""
LEFT_OUT = (
    *("readme", "pages_by_launcher", "demo", "command_line_page", "executor_benchmark", "gpu_benchmark"),
    *("hosts", "multihost", "torchrun"),
)
"""What starts programs of its own, which stay on the CPU."""


def files(only: list[str]) -> list[Path]:
    """The test files in the order in which they start."""
    names = only or [path.stem.removeprefix("test_") for path in sorted((ROOT / "tests/procs").glob("test_*.py"))]
    rest = [name for name in names if name not in FIRST and name not in LEFT_OUT]
    return [ROOT / f"tests/procs/test_{name}.py" for name in (*(name for name in FIRST if name in names), *rest)]


def played(path: Path, device: str, ends: float, longest_s: float) -> dict[str, Any]:
    """What one file's pytest found: numbers, and of each test that failed the last line of its error."""
    seconds = min(ends - time.monotonic(), longest_s)
    if seconds < 10:
        return {"file": path.stem, "not_started": True}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "0",
            "-W",
            "default",
            "-p",
            "no:cacheprovider",
            "--tb=short",
            f"--junitxml={report}",
        ]
        environment = os.environ | {"ZEROBUBBLE_TEST_DEVICE": device, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        began = time.monotonic()
        try:
            done = subprocess.run([*command, str(path)], cwd=ROOT, env=environment, timeout=seconds, capture_output=True, text=True)
        except subprocess.TimeoutExpired as error:
            text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            return {"file": path.stem, "timed_out": round(seconds), "output": text[-1500:]}
        row: dict[str, Any] = {"file": path.stem, "seconds": round(time.monotonic() - began, 1)}
        if not report.exists():
            return row | {"rc": done.returncode, "output": (done.stdout + done.stderr)[-1500:]}
        failed = {}
        suite = next(ET.parse(report).iter("testsuite"))
        for case in suite.iter("testcase"):
            for fault in (*case.findall("failure"), *case.findall("error")):
                failed[str(case.get("name"))] = (fault.text or "")[-2500:]
        return row | {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")} | {"failed": failed}


def main() -> None:
    """Play the files and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names of files, without test_ and .py; by default nearly all")
    parser.add_argument("--device", default="cuda", help="what ZEROBUBBLE_TEST_DEVICE says (%(default)s); cpu rehearses")
    parser.add_argument("--at-once", type=int, default=8, help="how many files run at the same time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3600, help="how long all may take (%(default)s)")
    parser.add_argument("--longest", type=float, default=600, help="how long one file may take (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("tests.json"), help="where the table goes")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for row in pool.map(lambda path: played(path, options.device, ends, options.longest), files(options.only)):
            rows.append(row)
            print({key: value for key, value in row.items() if key not in ("failed", "output")}, *row.get("failed", ()), flush=True)
            options.out.write_text(json.dumps({"device": options.device, "files": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
