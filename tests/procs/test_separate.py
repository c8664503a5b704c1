"""Files of process tests also pass on a device that is not the CPU: `tests/separate`, which stands for an accelerator of any vendor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import cpu_only
from tests.procs.versions import VERSION

pytestmark = [
    pytest.mark.long,
    pytest.mark.spread,
    cpu_only("it starts tests on another device"),
    pytest.mark.skipif(VERSION < (2, 13), reason="the device implements the interfaces of torch 2.13"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="the device needs a C++ compiler"),
]
ROOT = Path(__file__).parents[2]
FILES = ("accelerator", "divided_models", "fsdp", "graph_guard", "mesh", "placed_stages", "post_validation", "shared_draws", "staged")


@pytest.mark.parametrize("name", FILES)
def test_a_file_passes_on_another_device(tmp_path: Path, name: str) -> None:
    table = tmp_path / "tests.json"
    command = [sys.executable, str(ROOT / "benchmarks/gpu/check.py"), "--device", "separate", "--out", str(table), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert table.exists(), done.stdout + done.stderr
    (row,) = json.loads(table.read_text())["files"]
    assert done.returncode == 0, (row.get("failed"), row.get("output"))
    assert row["tests"] > row["skipped"]
