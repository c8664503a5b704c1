"""A model whose code comes with its weights (`trust_remote_code` of Transformers) is split, proved and trained like any other.

Without `trust_remote_code` it is refused by name.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import zerobubble as zb
from tests.libraries import library
from tests.procs.ranks import Ranks
from tests.refusals import raises, states
from zerobubble.cli import main

CONFIGURATION = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own_code"

    def __init__(self, width=16, num_hidden_layers=3, vocab_size=32, **others):
        self.width, self.num_hidden_layers, self.vocab_size = width, num_hidden_layers, vocab_size
        super().__init__(**others)
"""
MODEL = """
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import OwnConfig


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, **others):
        hidden = self.tokens(input_ids)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return CausalLMOutput(logits=self.head(hidden))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What such a model's repository holds, without weights."""
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = {"model_type": "own_code", "architectures": ["OwnForCausalLM"], "auto_map": code}
    (tmp_path / "configuration_own.py").write_text(CONFIGURATION, encoding="utf-8")
    (tmp_path / "modeling_own.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


def configuration(folder: Path) -> Any:
    """The configuration, by its own code, of which Transformers makes a copy."""
    library("transformers.utils.hub")
    library("transformers.dynamic_module_utils").HF_MODULES_CACHE = str(folder / "modules")
    return library("transformers").AutoConfig.from_pretrained(folder, trust_remote_code=True)


def loss_fn(output: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten())


def trained(group: Any, folder: Path) -> tuple[str, float, str]:
    """The module of the model's class, how far loss and gradients are from one device's, and the description of the cut."""
    torch.manual_seed(0)
    model = library("transformers").AutoModelForCausalLM.from_config(configuration(folder), trust_remote_code=True).double()
    plain, ids = copy.deepcopy(model), torch.arange(32).view(8, 4)
    split = zb.split(model)
    with zb.Pipeline(split, "zb-h1", 4, loss_fn, group=group) as pipe:
        loss, expected = pipe.step({"input_ids": ids}, ids), loss_fn(plain(ids), ids)
        expected.backward()
        named = [each for module in pipe.modules.values() for each in module.named_parameters()]
        found = [(parameter.grad - plain.get_parameter(name).grad).abs().max().item() for name, parameter in named]
    return type(model).__module__, max(*found, (loss - expected).abs().item()), split.describe(2)


@pytest.mark.long
def test_a_model_of_remote_code_has_the_numbers_of_one_device(world: Ranks, folder: Path) -> None:
    for module, error, result in world.run(trained, folder, ranks=2):
        assert module.startswith("transformers_modules.")
        assert error < 1e-12
        states(result, "float64", "gradients")


def test_code_is_not_run_that_nobody_trusted(folder: Path) -> None:
    output = CliRunner().invoke(main, ["split", str(folder), "--stages", "2"])
    assert output.exit_code == 2
    states(output.output, "configuration_own.OwnConfig", "custom")
    assert "trust_remote_code=True" in output.output
    with raises(zb.InputError, "OwnForCausalLM", "Transformers", "OwnConfig", "trust_remote_code=True"):
        zb.split(configuration(folder))
