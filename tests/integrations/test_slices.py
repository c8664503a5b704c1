"""Decoders of Transformers over slices of a sequence: one device's losses and gradients, or a refusal that names the module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.ranks import cases_played, run_program
from tests.integrations.train_over_slices import FAMILIES, IN_FLOAT32, REFUSED, RUNS
from tests.refusals import states
from tests.thinned import long_if

PROGRAM = Path(__file__).with_name("train_over_slices.py")
SHORT = ("llama", "mistral", "gpt2", "gemma3", "mixtral")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    run_program(PROGRAM, folder, *sorted(cases_played(request, "test_a_step_equals_one_device")), *REFUSED, ranks=2)
    return folder


def results(folder: Path, family: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{family}.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", long_if({*FAMILIES} - {*SHORT}, FAMILIES))
def test_a_step_equals_one_device(folder: Path, case: str) -> None:
    for found in results(folder, case):
        assert len(found) == len(RUNS) + (case == "llama"), found
        assert max(map(max, found.values())) <= (1e-6 if case in IN_FLOAT32 else 1e-12), found


@pytest.mark.parametrize(
    ("family", "stated"),
    [("bert", "bert.embeddings.position_embeddings"), ("mamba", "backbone.layers.0.mixer"), ("checkpointed", "checkpointing")],
)
def test_what_slices_cannot_run_is_refused(folder: Path, family: str, stated: str) -> None:
    for found in results(folder, family):
        states(found["refused"], stated)
