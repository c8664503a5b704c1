"""The examples of split models, meshes and resuming after a kill run as their first lines say, and their losses fall."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.procs.programs import ROOT, run_forked
from tests.refusals import states

pytestmark = pytest.mark.spread

MODELS = re.findall(r"^def (\w+)\(\) -> Case:", (ROOT / "examples/split_models.py").read_text(encoding="utf-8"), re.MULTILINE)
EXAMPLES = [*(f"split_models.py {name}" for name in MODELS), "fsdp.py", "tp.py"]


@pytest.mark.long
@pytest.mark.parametrize("command", EXAMPLES)
def test_an_example_runs_and_learns(command: str, tmp_path: Path) -> None:
    name, *arguments = command.split()
    (count,) = re.findall(r"torchrun --nproc-per-node (\d)", (ROOT / "examples" / name).read_text(encoding="utf-8"))
    words = ["", str(ROOT / "examples" / name), *arguments]
    run = f"import runpy, sys\nsys.argv = {words}\nrunpy.run_path({str(ROOT / 'tests/run_example.py')!r}, run_name='__main__')\n"
    found = run_forked(run, tmp_path, int(count))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", found)]
    assert losses[-1] < losses[0]
    if arguments == ["generate"]:
        assert "written: one for the money, two for the sho" in found
    page = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert all(word in page for word in [name, *(f"`{argument}`" for argument in arguments)])


@pytest.mark.long
def test_the_example_of_a_killed_run_goes_on_with_the_same_losses() -> None:
    run = [sys.executable, str(ROOT / "examples/resume.py")]
    results = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert results.returncode == 0, results.stderr[-4000:]
    killed, resumed, alone, uninterrupted, difference = results.stdout.splitlines()
    states(killed, 4, "zb-v", "rank 2", "SIGKILL", 0, 7)
    assert re.match(r"2 ranks, 1f1b: steps [36] to 12, ", resumed)
    states(alone, 12, 15, "device", "steps")
    states(uninterrupted, 0, 15, "stopped", "device")
    assert float(difference.rsplit(" ", 1)[1]) < 1e-12
    assert "resume.py" in (ROOT / "examples/README.md").read_text(encoding="utf-8")
