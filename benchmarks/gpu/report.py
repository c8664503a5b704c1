"""One command for a machine with GPUs: examines it, measures, runs the process tests on it, and writes `gpu-report/`.

`gpu-report/report.md` begins with PASS, or with FAIL and a list of what failed. `report.json` has everything, without paths of the machine.
The exit code is 1 after a failure. `--rehearse` runs a small part of each step on the CPU, to test this program.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MOST_OVER_FUSED = 1.03
"""The most that B and W may take together, relative to the fused backward, for the model as it is."""
ROUNDING = {"float32": 1e-4, "bfloat16": 6e-2, "float8": 6e-2}
"""The largest error of a gradient on several ranks: microbatches are summed in another order than on one device."""
LEAST_PREDICTED = 0.95
"""The least that the forecast of activations may be, relative to what the allocator has given out."""
_PATH = re.compile(r"(?<![\w:./-])/(?:[\w.+@-]+/)+(?=[\w.+@-])")


def sanitized(text: str) -> str:
    """Returns `text` in which paths of this machine are cut to what they are in the repository, in a package, or to their last part."""
    text = text.replace(f"{ROOT}/", "")
    text = re.sub(r"(?<![\w.-])/\S*?/(?:site|dist)-packages/", "", text)
    return _PATH.sub("", text)


def clean(value: Any) -> Any:
    """Returns a JSON value with every text in it sanitized, keys included."""
    if isinstance(value, str):
        return sanitized(value)
    if isinstance(value, Mapping):
        return {sanitized(key): clean(each) for key, each in value.items()}
    return [clean(each) for each in value] if isinstance(value, list) else value


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a step in the repository, with its output shown and kept."""
    print("$", *map(sanitized, command), flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(sanitized(done.stdout + done.stderr), end="", flush=True)
    return done


def written(path: Path) -> Any:
    """Returns the JSON that a step has written; None if it has written none."""
    return json.loads(path.read_text()) if path.exists() else None


def faults_of(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields what failed: checks of the machine, measurements out of bounds, tests, and steps without a result."""
    for step in ("doctor", "results", "steps", "tests"):
        if report[step] is None:
            yield f"{step}: no result; it ended with {report['ends'][step]}"
        elif step in ("results", "steps") and report["ends"][step] != "exit code 0":
            yield f"{step}: ended with {report['ends'][step]}"
    for check in (report["doctor"] or {"checks": ()})["checks"]:
        if check["status"] == "failed":
            yield f"doctor, {check['check']}: {check['found']}"
    results = report["results"] or {}
    for row in results.get("memory", ()):
        if not LEAST_PREDICTED <= row["predicted_over_allocated"] <= 1:
            yield f"memory of {row['schedule']}: predicted over allocated is {row['predicted_over_allocated']}, not {LEAST_PREDICTED} to 1"
    for row in results.get("split", ()):
        if results["machine"]["device"] != "cpu" and row["way"] in ("deferred", "graph") and row["over_eager_fused"] > MOST_OVER_FUSED:
            yield f"split, {row['way']} in {row['precision']}: {row['over_eager_fused']} of the fused backward, more than {MOST_OVER_FUSED}"
    for row in results.get("determinism", ()):
        if row["deterministic_kernels"] and not (row["repeated_equal"] and row["offloaded_equal"]):
            yield "determinism: a repeated or an offloaded step has other bits"
    for row in (report["steps"] or {"steps": ()})["steps"]:
        if row["gradient_error"] > ROUNDING[row["precision"]]:
            yield f"steps, {row['schedule']} in {row['precision']}: gradients differ from one device's by {row['gradient_error']}"
    for row in (report["tests"] or {"files": ()})["files"]:
        if "failed" in row:
            yield from (f"{row['file']}::{name}" for name in row["failed"])
        else:
            yield f"{row['file']}: did not end"


def page(report: Mapping[str, Any]) -> str:
    """Returns the page of a report."""
    lines = [f"# {'FAIL' if report['faults'] else 'PASS'}", ""]
    lines += [f"- {fault}" for fault in report["faults"]]
    lines += ["", "## Machine", ""]
    lines += [f"- {each['status']}: {each['check']}, {each['found']}" for each in (report["doctor"] or {"checks": ()})["checks"]]
    for name, rows in {**(report["results"] or {}), "steps": (report["steps"] or {"steps": []})["steps"]}.items():
        lines += ["", f"## {name}", "", *table(rows if isinstance(rows, list) else [rows])]
    columns = ("file", "tests", "failures", "errors", "skipped")
    counts = [{key: row.get(key, "") for key in columns} for row in (report["tests"] or {"files": ()})["files"]]
    return "\n".join([*lines, "", "## tests", "", *table(counts), ""])


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table whose columns are all keys of the rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, ["---"] * len(columns), *([str(row.get(column, "")) for column in columns] for row in rows)]
    return [f"| {' | '.join(each)} |" for each in cells]


def main() -> int:
    """Runs the steps, writes the report, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-report", help="the folder of the report (%(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="a small part of each step, on the CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = {name: options.out / f"{name}.json" for name in ("results", "steps", "tests")}
    for stale in parts.values():
        stale.unlink(missing_ok=True)
    small = ["--device", "cpu"] if options.rehearse else []
    programs = {"results": ("run.py", ["--only", "memory"]), "steps": ("steps.py", ["--only", "1f1b"]), "tests": ("check.py", ["packing"])}
    ends = {}
    done = run([sys.executable, "-m", "zerobubble", "doctor", "--json", *([] if options.rehearse else ["--gpu"])])
    doctor = json.loads(done.stdout) if done.stdout.startswith("{") else None
    ends["doctor"] = f"exit code {done.returncode}"
    for name, (program, part) in programs.items():
        done = run([sys.executable, str(HERE / program), "--out", str(parts[name]), *small, *(part if small else [])])
        ends[name] = f"exit code {done.returncode}"
    found = {name: written(path) for name, path in parts.items()}
    report = clean({"rehearsed": options.rehearse, "doctor": doctor, **found, "ends": ends})
    report["faults"] = list(faults_of(report))
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (options.out / "report.md").write_text(page(report))
    for path in parts.values():
        path.unlink(missing_ok=True)
    print("FAIL" if report["faults"] else "PASS", *report["faults"], sep="\n  ")
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
