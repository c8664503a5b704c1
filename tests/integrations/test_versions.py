"""Another version of a framework than its integration was written for is refused at construction."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

import pytest
from torch import nn

from tests.refusals import raises
from zerobubble.errors import InputError
from zerobubble.integrations import lightning, torchtitan, transformers, trl
from zerobubble.integrations.lightning import fabric

DOORS: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "Trainer": ("transformers", "4.57.1", transformers.PipelineTrainer),
    "SFTTrainer": ("trl", "0.24.0", trl.PipelineSFTTrainer),
    "Lightning": ("lightning", "2.5.6", lightning.PipelineStrategy),
    "Fabric": ("lightning", "2.5.6", lambda: fabric.PipelineStrategy("1f1b", 2, nn.functional.mse_loss)),
    "torchtitan": ("torchtitan", "0.4.0", torchtitan.pipelining_fn),
}


@pytest.mark.parametrize("door", DOORS)
def test_another_version_is_refused(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, version, build = DOORS[door]
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == package else installed(name))
    with raises(InputError, version, extra=package, remedy=f"pip install 'zerobubble[{package}]'"):
        build()
