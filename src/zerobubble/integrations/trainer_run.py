"""Reads what determines the costs of a run from the arguments of Trainer: the shape of the model and the batch.

The arguments are a file as `HfArgumentParser` and TRL's `--config` read it: JSON or YAML with the fields of `TrainingArguments`, the model
and the length of sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch import nn

from zerobubble.cost_model import Experts, Latent, Model
from zerobubble.errors import InputError
from zerobubble.integrations.described_run import DescribedRun, not_described
from zerobubble.integrations.transformers import default_microbatches
from zerobubble.whole_files import unusable

MODELS = ("model_name_or_path", "config_name")
LENGTHS = ("max_length", "max_seq_length", "block_size", "model_max_length")
"""The arguments of TRL and of the example scripts of Transformers for the model and the tokens of a sequence."""
TOLERANCE = 0.005
"""The largest relative difference between the parameters of a model and those of its shape, which has no norms and biases."""


def read_run(file: str, ranks: int | None, microbatches: int | None) -> DescribedRun:
    """Returns the run that a file of arguments describes, on `ranks` in `microbatches`, by default as many as `PipelineTrainer` takes.

    Raises:
        InputError: With everything in the file that cannot be planned for.
    """
    arguments = _arguments(file)
    faults = list(_faults(arguments))
    if ranks is None:
        faults.append("Trainer has no number of pipeline ranks: give --ranks")
    if faults or ranks is None:
        raise InputError("{file}: {reason}", file=file, reason="; ".join(faults))
    samples = arguments.get("per_device_train_batch_size", 8)
    parts = microbatches if microbatches is not None else default_microbatches(ranks, samples)
    if parts > samples:
        raise InputError(
            "{argument}={got} is more than the {expected} samples of per_device_train_batch_size in {file}",
            argument="--microbatches",
            got=parts,
            expected=samples,
            file=file,
        )
    model, names, positions = _described(
        arguments[_found(arguments, MODELS)], arguments[_found(arguments, LENGTHS)], arguments.get("attn_implementation") != "eager"
    )
    recompute = "full" if arguments.get("gradient_checkpointing") else "none"
    return DescribedRun(model, names, ranks, parts, samples // parts, recompute, positions=positions)


def _arguments(file: str) -> Mapping[str, Any]:
    try:
        read = yaml.safe_load(Path(file).read_text(encoding="utf-8"))  # JSON is YAML, too
    except OSError as error:
        raise unusable("read", file, error) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError("{file} cannot be read: {reason}", file=file, reason=str(error)) from error
    if not isinstance(read, dict):
        raise InputError("{file} must have the arguments of Trainer by name, got {got}", file=file, got=type(read).__name__)
    return read


def _found(arguments: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((name for name in names if arguments.get(name) is not None), "")


def _faults(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Lists missing arguments, and arguments that a pipeline or the cost model does not support."""
    if not isinstance(arguments.get(_found(arguments, MODELS)), str):
        yield f"it names no model: give {MODELS[0]}, a folder with a config.json or a name on the hub"
    counts = {"per_device_train_batch_size": arguments.get("per_device_train_batch_size", 8)}
    if length := _found(arguments, LENGTHS):
        counts[length] = arguments[length]
    else:
        yield f"it has no length of sequences: give {LENGTHS[0]}"
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            yield f"{name} must be a whole number of at least 1, got {count!r}"
    dtype = arguments.get("dtype", arguments.get("torch_dtype"))
    if not (arguments.get("bf16") or arguments.get("fp16") or dtype in ("bfloat16", "float16")):
        yield "it trains in float32, for which data sheets have no times of matrix products: give bf16"
    if arguments.get("auto_find_batch_size"):
        yield "auto_find_batch_size leaves the batch open: give per_device_train_batch_size"


def _described(path: str, sequence: int, fused_attention: bool) -> tuple[Model, tuple[str, ...], int]:
    """Returns the shape of a language model, the names of its embedding, layers and final norm, and the number of learned positions'
    parameters."""
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            module: Any = transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        raise InputError("{got} is no language model of Transformers: {reason}", got=path, reason=str(error).partition("\n")[0]) from error
    text = config.get_text_config()
    names = _names(module, text.num_hidden_layers)
    window = getattr(text, "sliding_window", None) or getattr(text, "window_size", None)  # GPT-Neo has the second
    slides = window and window < sequence and getattr(text, "use_sliding_window", True)
    positions = _positions(module)
    count: int = module.num_parameters() - positions
    shapes = [_shape(text, sequence, gated, fused_attention) for gated in (True, False)]
    nearest = min(shapes, key=lambda shape: abs(shape.parameters - count))
    if names is None or slides or abs(nearest.parameters - count) > TOLERANCE * count:
        reason = f"it attends to a window of {window} tokens" if slides else "its layers are not those of a plain decoder"
        raise not_described(f"{config.model_type} of {count / 1e9:.3g} billion parameters", reason)
    return nearest, names, positions


def _positions(module: Any) -> int:
    """Returns the number of parameters of tables of learned positions: embeddings that are not those of tokens."""
    of_tokens = {module.get_input_embeddings(), module.get_output_embeddings()}
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding) and part not in of_tokens]
    return sum(table.weight.numel() for table in tables)


def _names(module: Any, layers: int) -> tuple[str, ...] | None:
    """Returns the names of the embedding, the layers, and the first module after them with parameters, which is the head if the final norm
    has none or is defined before the layers. Returns None if the module has no such list.
    """
    modules = dict(module.named_modules())
    embedding = next((name for name, part in modules.items() if part is module.get_input_embeddings()), "")
    for name, layers_list in modules.items():
        if isinstance(layers_list, nn.ModuleList) and len(layers_list) == layers:
            parent = name.rpartition(".")[0]
            children = list(modules[parent].named_children())
            after = [child for _, child in children].index(layers_list) + 1
            head = [f"{parent}.{child}" for child, later in children[after:] if any(True for _ in later.parameters())]
            head += [other for other, part in modules.items() if part is module.get_output_embeddings()]
            return (embedding, *(f"{name}.{number}" for number in range(layers)), head[0]) if head and embedding else None
    return None


def _shape(config: Any, sequence: int, gated: bool, fused_attention: bool) -> Model:
    heads, latent = config.num_attention_heads, getattr(config, "kv_lora_rank", None) is not None
    experts = _experts(config)
    return Model(
        name=config.model_type,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=heads if latent else _kv_heads(config),
        inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocabulary=config.vocab_size,
        sequence=sequence,
        gated=gated,
        dropout=bool(getattr(config, "resid_pdrop", 0.0)),
        tied=config.tie_word_embeddings,
        fused_attention=fused_attention,
        latent=Latent(config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)
        if latent
        else None,
        experts=experts,
        head_width=None if latent else getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def _kv_heads(config: Any) -> int:
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):  # Falcon, GPTBigCode
        return 1
    names = ("num_key_value_heads", "num_kv_heads")
    return next((count for name in names if (count := getattr(config, name, None))), config.num_attention_heads)


def _experts(config: Any) -> Experts | None:
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    routed = next((count for name in names if (count := getattr(config, name, None))), None)
    if routed is None:
        return None
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "n_shared_experts", None) or 0
    dense = getattr(config, "first_k_dense_replace", 0)
    return Experts(routed, config.num_experts_per_tok, inner, shared, dense, getattr(config, "topk_group", None) or 0)
