"""The small version of the 70B example trains with the plans of its command and matches one device."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.procs.programs import ROOT, run_forked


@pytest.mark.long
def test_the_twin_has_the_numbers_of_one_device(tmp_path: Path) -> None:
    program = str(ROOT / "examples/big_model/train_twin.py")
    found = run_forked(f"import runpy\nrunpy.run_path({program!r}, run_name='__main__')\n", tmp_path, 4)
    errors = [float(error) for error in re.findall(r"  equal to one device: largest relative error (\S+)$", found, re.MULTILINE)]
    assert len(errors) == 2
    assert max(errors) < 1e-12
    divided, shards = re.findall(r"^(\w.*): (?:linear|vee), .* layers, (\d+) forwards recomputed", found, re.MULTILINE)
    assert divided[0] == "head divided by its vocabulary"
    assert shards[0] == "stages in shards over two replicas"
    assert int(divided[1]) > 0
    assert int(shards[1]) > 0
    assert "big_model" in (ROOT / "examples/README.md").read_text(encoding="utf-8")
