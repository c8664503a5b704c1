"""A torchvision that was built for another torch is named in the error, whatever error Transformers raises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import zerobubble as zb
from tests.libraries import library
from tests.refusals import raises
from zerobubble.models.from_config import split_config

pytestmark = pytest.mark.in_process

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


@pytest.fixture
def mixed_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchvision that fails as one for another build of torch does."""
    library("transformers").LlamaConfig  # noqa: B018  # imported while all is well
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")\n')
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("mixed_installation")
def test_a_configuration_file_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with raises(zb.InputError, "torchvision", "torch", "pip"):
        split_config(str(tmp_path / "config.json"))


@pytest.mark.usefixtures("mixed_installation")
def test_a_configuration_object_is_not_blamed() -> None:
    with raises(zb.InputError, "torchvision", "torch", "version"):
        zb.split(library("transformers").LlamaConfig(**LLAMA))


def test_the_environment_of_make_venv_has_no_torchvision() -> None:
    """PyPI's does not load with the torch that is pinned, and Transformers loads what there is; image models have theirs apart."""
    pinned = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("transformers==") for line in pinned)
    assert not [line for line in pinned if line.startswith(("torchvision", "timm"))]
