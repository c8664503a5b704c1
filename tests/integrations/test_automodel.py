"""NeMo AutoModel plays the schedules we export: its `pp_schedule_csv` reads the file, and the gradients are those of one device."""

from __future__ import annotations

from pathlib import Path

import pytest

import zerobubble as zb
from tests.integrations.ranks import run_program
from zerobubble.export.torch_csv import to_torch_csv

PROGRAM = Path(__file__).with_name("play_in_automodel.py")


@pytest.mark.feature("losses of one device", "any schedule of one route")
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "interleaved-zb"])
def test_gradients_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    (tmp_path / "schedule.csv").write_text(to_torch_csv(zb.make(name, 2, 4)))
    run_program(PROGRAM, tmp_path / "schedule.csv", tmp_path / "error", ranks=2)
    assert all(float((tmp_path / f"error{rank}").read_text()) <= 1e-12 for rank in (0, 1))
