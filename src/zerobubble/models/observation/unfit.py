"""Refuses models that other tools have wrapped or changed so that they cannot be cut, before any code runs."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from zerobubble.errors import InputError
from zerobubble.runtime.split.layers.eligibility import fsdp2_parts
from zerobubble.runtime.split.weight_flops import is_wrapped
from zerobubble.runtime.values.stateful import refuse_lazy

_INSIDE = "give zb.split the module that it wraps"
_REPLICAS = f"{_INSIDE}, and let zb.Pipeline(mesh=...) sum the gradients of replicas"
_DIVIDE_STAGES = (
    "divide its stages: zb.Pipeline(lambda stage, num_stages: torch.distributed.fsdp.fully_shard(split(stage, num_stages), "
    "mesh=mesh['dp_shard']), ..., mesh=mesh) with split = zb.split(model)"
)
_WRAPPERS: dict[type[nn.Module], str] = {
    DistributedDataParallel: f"all-reduces gradients in its own group during a backward pass of the whole model: {_REPLICAS}",
    DataParallel: f"copies the whole model in each forward: {_REPLICAS}",
    FullyShardedDataParallel: f"shards the parameters of the whole model: {_INSIDE}, and {_DIVIDE_STAGES}",
}


def refuse_unfit(model: nn.Module) -> None:
    """Raises `InputError` for a lazy, wrapped, sharded, compiled, quantized, sparse or inference model, naming the module or parameter."""
    refuse_lazy(model)
    _refuse_composed(model)
    for name, module in model.named_modules():
        for kind, reason in _WRAPPERS.items():
            if isinstance(module, kind):
                raise InputError("{module} is a {kind}, which {reason}", module=_described(name), kind=kind.__name__, reason=reason)
        if isinstance(module, nn.SyncBatchNorm) and module.process_group is None:
            raise InputError(
                "{module} is a SyncBatchNorm over all ranks, but ranks with other stages do not run it",
                module=_described(name),
                remedy="give it the group of the ranks that hold this stage, such as process_group=mesh.get_group('dp'), or use "
                "BatchNorm, which sees a microbatch",
            )
        if name and is_wrapped(module):
            raise InputError(
                "{module} was returned by torch.compile, which wraps the module",
                module=_described(name),
                remedy="compile it in place, with block.compile() instead of torch.compile(block)",
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                "{module} is TorchScript, which stages cannot copy",
                module=_described(name),
                remedy="give zb.split the module before torch.jit, or cut the model by hand, as build(stage, num_stages), where "
                "split='whole' runs TorchScript",
            )
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            raise InputError(
                "{module} is a quantized {kind}, which does not train", module=_described(name), kind=type(module).__name__, remedy=_PLAIN
            )
    if is_wrapped(model):
        raise InputError(
            "the model given to zb.split was compiled as a whole by torch.compile, but no stage runs the whole model",
            remedy=f"{_INSIDE}, its _orig_mod, and let zb.Pipeline(split='compiled') compile the stages, or compile its blocks by "
            "block.compile()",
        )
    _refuse_parameters(model)


def _refuse_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            remedy = "make or load the model outside of it"
            raise InputError("parameter {name!r} was made inside torch.inference_mode(), and does not train", name=name, remedy=remedy)
        if parameter.is_quantized or parameter.layout is not torch.strided:
            kind_of = "quantized" if parameter.is_quantized else f"sparse ({parameter.layout})"
            raise InputError(
                "parameter {name!r} is {kind_of}, and stages cannot sum and send its gradients", name=name, kind_of=kind_of, remedy=_PLAIN
            )


def _refuse_composed(model: nn.Module) -> None:
    """Refuses modules changed in place by `fully_shard` or `replicate`, which keep their names."""
    divided = set(fsdp2_parts(model))
    for name, module in model.named_modules():
        if module in divided:
            raise InputError(
                "{module} is sharded by fully_shard, but its stages would not be",
                module=_described(name),
                remedy=f"give zb.split the model before that, and {_DIVIDE_STAGES}",
            )
        if any(kind.__module__ == _REPLICATE for kind in type(module).__mro__):
            raise InputError(
                "{module} is under replicate(), which all-reduces gradients during a backward pass of the whole model",
                module=_described(name),
                remedy="give zb.split the model before that, and let zb.Pipeline(mesh=...) sum the gradients of replicas",
            )


_REPLICATE = "torch.distributed._composable.replicate"
_PLAIN = "cut the model with dense weights of floating-point numbers"


def _described(name: str) -> str:
    return f"module {name!r}" if name else "the model given to zb.split"
