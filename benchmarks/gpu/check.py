"""Runs the process tests with their models on the GPU, several ranks per device, and writes the results to `tests.json` next to this file.

Files run concurrently, each in its own pytest. Tests of what only a CPU has are skipped, with a reason. Ends with "PASS" and exit code 0 if
no test failed and every file finished; otherwise lists what did not, with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
FIRST = (
    *("accelerator", "survival", "experts", "scaled_gradients", "fsdp", "wrapped", "mesh", "post_validation", "failures", "divided_head"),
    *("checkpoint", "one_device_checkpoint", "split_matrix", "gradients", "staged", "fault_injection", "offload_runs", "recompute_runs"),
)
"""Files to start first: what a GPU is most likely to break, and what takes longest."""
LEFT_OUT = (
    *("readme", "pages_by_launcher", "demo", "command_line_page", "executor_benchmark", "gpu_benchmark", "separate"),
    *("hosts", "multihost", "torchrun"),
)
"""Files whose tests start programs of their own, which stay on the CPU."""
SANITIZED = ("accelerator", "four_ranks")
"""The file whose tests of this name also run under PyTorch's CUDA Stream Sanitizer, which reports races between streams."""


def files(only: list[str]) -> list[Path]:
    """Returns the test files in the order in which they start."""
    names = only or [path.stem.removeprefix("test_") for path in sorted((ROOT / "tests/procs").glob("test_*.py"))]
    rest = [name for name in names if name not in FIRST and name not in LEFT_OUT]
    return [ROOT / f"tests/procs/test_{name}.py" for name in (*(name for name in FIRST if name in names), *rest)]


def played(path: Path, device: str, ends: float, longest_s: float, sanitized: str = "") -> dict[str, Any]:
    """Runs one file and returns its counts, the end of the error of each failed test, and the reason of each skipped one.

    With `sanitized`, it runs only the tests of this name, under the sanitizer.
    """
    name = f"{path.stem}, sanitized" if sanitized else path.stem
    seconds = min(ends - time.monotonic(), longest_s)
    if seconds < 10:
        return {"file": name, "not_started": True}
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
            "-v",
            "-p",
            "no:cacheprovider",
            "-m",
            "sweep or not long",
            "--tb=short",
            f"--junitxml={report}",
            *(["-k", sanitized] if sanitized else []),
        ]
        environment = os.environ | {"ZEROBUBBLE_TEST_DEVICE": device, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        if sanitized:
            environment["TORCH_CUDA_SANITIZER"] = "1"
        began = time.monotonic()
        output = Path(folder) / "output"
        with output.open("w") as file:
            running = subprocess.Popen([*command, str(path)], cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
            try:
                running.wait(seconds)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)  # its ranks, too, which would keep the device busy
                running.wait()
                return {"file": name, "timed_out": round(seconds), "output": output.read_text(errors="replace")[-4000:]}
        row: dict[str, Any] = {"file": name, "seconds": round(time.monotonic() - began, 1)}
        if not report.exists():
            return row | {"rc": running.returncode, "output": output.read_text(errors="replace")[-4000:]}
        failed, skipped = {}, {}
        suite = next(ET.parse(report).iter("testsuite"))
        for case in suite.iter("testcase"):
            for fault in (*case.findall("failure"), *case.findall("error")):
                failed[str(case.get("name"))] = (fault.text or "")[-6000:]
            for skip in case.findall("skipped"):
                skipped[str(case.get("name"))] = str(skip.get("message"))
        counts = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        return row | counts | {"failed": failed, "reasons_of_skips": skipped}


def faults(row: dict[str, Any]) -> list[str]:
    """Returns what did not pass in a file: its failed tests, or why it has no result."""
    if "failed" in row:
        return [f"{row['file']}::{name}" for name in row["failed"]]
    why = next((f"{key}: {row[key]}" for key in ("not_started", "timed_out", "rc") if key in row), "no result")
    return [f"{row['file']} ({why})"]


def main() -> int:
    """Runs the files, writes the table, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="names of files, without test_ and .py; by default nearly all")
    parser.add_argument("--device", default="cuda", help="what ZEROBUBBLE_TEST_DEVICE says (%(default)s); cpu rehearses")
    parser.add_argument("--at-once", type=int, default=8, help="how many files run at the same time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3600, help="how long all may take (%(default)s)")
    parser.add_argument("--longest", type=float, default=900, help="how long one file may take (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("tests.json"), help="where the table goes")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    machine = {"torch": torch.__version__, "device": name, "date": str(date.today())}
    rows = []
    with ThreadPoolExecutor(options.at_once) as pool:
        runs = [(path, "") for path in files(options.only)]
        if options.device == "cuda":
            file, names = SANITIZED
            runs += [(path, names) for path, _ in runs if path.stem == f"test_{file}"]
        for row in pool.map(lambda each: played(each[0], options.device, ends, options.longest, each[1]), runs):
            rows.append(row)
            hidden = ("failed", "output", "reasons_of_skips")
            print({key: value for key, value in row.items() if key not in hidden}, *row.get("failed", ()), flush=True)
            table = {"device": options.device, "machine": machine, "files": rows}
            options.out.write_text(json.dumps(table, indent=1) + "\n")
    found = [fault for row in rows for fault in faults(row)]
    tests, skipped = (sum(row.get(key, 0) for row in rows) for key in ("tests", "skipped"))
    print(f"{tests} tests in {len(rows)} files, {skipped} skipped, {len(found)} not passed", *found, sep="\n  ")
    print("FAIL" if found else "PASS")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
