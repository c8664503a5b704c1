"""Programs of the first pages run on the two devices that stand for a GPU, unchanged but for `--device`.

test_pages_by_launcher runs it on CPUs.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.device import cpu_only
from tests.procs.programs import ROOT, programs_of, torchrun
from tests.procs.versions import VERSION

pytestmark = [pytest.mark.long, pytest.mark.spread, cpu_only("it starts ranks on other devices")]
FILES = {
    "docs/train-on-gpus.md": ["run.svg", "gpus-checkpoint"],
    "docs/hugging-face.md": ["checkpoint", "adapter"],
    "docs/long-sequences.md": [],
}
"""The pages, and what their first programs write."""
ON_CHECKED_DEVICE = """
import runpy
import zerobubble as zb

with zb.testing.checked_device():
    runpy.run_path("page.py", run_name="__main__")
"""
ON_SEPARATE_DEVICE = f"""
import os, runpy, sys

os.environ["ZEROBUBBLE_SEPARATE_DEVICES"] = "2"
sys.path.insert(0, {str(ROOT)!r})
import tests.separate
runpy.run_path("page.py", run_name="__main__")
"""


@pytest.mark.parametrize("page", FILES)
@pytest.mark.parametrize(
    ("program", "device"),
    [
        (ON_CHECKED_DEVICE, "cpu"),
        pytest.param(
            ON_SEPARATE_DEVICE,
            "separate",
            marks=[
                pytest.mark.skipif(VERSION < (2, 13), reason="the device implements the interfaces of torch 2.13"),
                pytest.mark.skipif(shutil.which("c++") is None, reason="the device needs a C++ compiler"),
            ],
        ),
    ],
)
def test_the_program_runs_on_a_device_that_stands_for_a_gpu(program: str, device: str, page: str, tmp_path: Path) -> None:
    (tmp_path / "page.py").write_text(programs_of(page)[0])
    done = torchrun(program, tmp_path, 2, "--device", device)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all((tmp_path / name).exists() for name in FILES[page])
