"""Trains adapters on quantized models, alone or in a pipeline of all ranks under each schedule, and writes losses and gradients.

`python train_quantized.py FOLDER` is the reference; under torchrun, all ranks form one pipeline.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

import zerobubble as zb

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama nf4": ("llama", NF4 | {"bnb_4bit_use_double_quant": True}),
    "llama fp4": ("llama", NF4 | {"bnb_4bit_quant_type": "fp4"}),
    "llama int8": ("llama", {"load_in_8bit": True}),
    "qwen3 nf4": ("qwen3", NF4),
    "qwen3_moe nf4": ("qwen3_moe", NF4),
}
"""By name: the family, and the settings of `BitsAndBytesConfig`."""
SCHEDULES = ("1f1b", "zb-v")
OTHERS = ("gpipe", "interleaved-1f1b", "zb-h1", "zb-h2", "v-half", "interleaved-zb", "dualpipe-v")
MICROBATCHES, STEPS = 6, 2


def save_base(case: str, folder: Path) -> None:
    """Writes the weights before quantization."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(CASES[case][0], **SIZES, **EXPERTS)).save_pretrained(folder / case)


def quantized_model(case: str, folder: Path) -> nn.Module:
    """A small model with quantized weights, and adapters of peft on top."""
    quantization = BitsAndBytesConfig(**CASES[case][1])
    model = AutoModelForCausalLM.from_pretrained(folder / case, quantization_config=quantization, device_map="cpu")
    torch.manual_seed(0)
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, lora)


def batch(step: int) -> Tensor:
    return torch.randint(64, (2 * MICROBATCHES, 12), generator=torch.Generator().manual_seed(step))


def own_loss(output: Any, _: Tensor) -> Tensor:
    return output.loss


def train_alone(case: str, folder: Path) -> dict[str, Any]:
    """The losses and the gradients of the adapters of each step, with one device."""
    model = quantized_model(case, folder)
    optimizer = torch.optim.SGD([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(input_ids=part, labels=part).loss for part in batch(step).chunk(MICROBATCHES)]
        for loss in losses:
            (loss / MICROBATCHES).backward()
        found |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        found[f"{step} loss"] = torch.stack(losses).mean().detach()
        optimizer.step()
    return found


def train_in_pipeline(case: str, folder: Path, schedule: str) -> dict[str, Any]:
    """What `train_alone` returns, of this rank's stages."""
    model = quantized_model(case, folder)
    found: dict[str, Any] = {}
    with zb.Pipeline(zb.split(model), schedule, MICROBATCHES, own_loss) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-2)
        for step in range(STEPS):
            optimizer.zero_grad()
            ids = batch(step)
            loss = pipe.step({"input_ids": ids, "labels": ids}, ids)
            named = [named for stage in pipe.modules.values() for named in stage.named_parameters()]
            found |= {f"{step} {name}": p.grad.clone() for name, p in named if p.requires_grad}
            found[f"{step} loss"] = loss
            optimizer.step()
    return found


def main() -> None:
    """Train each case and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--base", type=Path, help="the folder of the reference")
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        for case in options.cases:
            for schedule in options.schedules:
                found = train_in_pipeline(case, options.base, schedule)
                torch.save(found, options.folder / f"{case}.{schedule}.{dist.get_rank()}.pt")
        dist.destroy_process_group()
    else:
        for case in options.cases:
            save_base(case, options.folder)
            torch.save(train_alone(case, options.folder), options.folder / f"{case}.pt")


if __name__ == "__main__":
    main()
