"""Megatron-Core with a schedule of ours: `use_schedule("zb-h1")` before `pretrain`, or a `Player` in your own loop.

Megatron's training step calls what `get_forward_backward_func` returns. Here that is a `Player`. The model chunks of this rank become the
stages of a `zb.Pipeline`, whose forward passes call Megatron's own `forward_step`. Models, data, losses, gradient buffers, sums over
replicas and optimizers stay Megatron's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

import zerobubble as zb
from zerobubble.errors import InputError, raise_faults
from zerobubble.integrations.versions import needed, refuse_wrong_versions
from zerobubble.ir import Kind, Placement, Schedule
from zerobubble.planning import Plan
from zerobubble.runtime.frameworks import linear, schedule_for

with needed("megatron"):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.utils import get_model_config

OWN = frozenset({"build_or_modules", "num_microbatches", "loss_fn", "loss_weight", "scale", "group", "mesh", "main_grad", "tied"})
"""The options of a pipeline that are set here."""
PASSES = {Kind.F, Kind.B, Kind.W, Kind.BW}
REFUSED = (
    "no_sync_func",  # overlap_grad_reduce
    "grad_sync_func",  # overlap_grad_reduce with align_grad_reduce
    "param_sync_func",  # overlap_param_gather with align_param_gather
    "defer_embedding_wgrad_compute",
    "fine_grained_activation_offloading",
    "hybrid_context_parallel",
    "num_microbatches_with_partial_activation_checkpoints",
    "overlap_moe_expert_parallel_comm",
)
"""The settings of a Megatron configuration for which its own schedules make calls that the player does not make."""
EXCHANGED_OR_FUSED = ("allreduce_dgrad", "sequence_parallel", "gradient_accumulation_fusion")
"""The options of a parallel linear layer with which Megatron computes its weight gradient in B."""


class _Batches:
    """The data of one chunk in a step. A forward that runs twice for a microbatch reads the same data again.

    Args:
        source: The user's iterator, None on ranks without data.
    """

    def __init__(self, source: Iterator[Any] | None) -> None:
        self._source = source
        self._drawn: dict[int, list[Any]] = {}

    def iterator(self, microbatch: int) -> Iterator[Any] | None:
        """Returns the iterator that the user's forward step gets for a microbatch."""
        if self._source is None:
            return None
        if microbatch in self._drawn:
            return iter(self._drawn[microbatch])
        self._drawn[microbatch] = []
        return _noting(self._source, self._drawn[microbatch])


def _noting(source: Iterator[Any], drawn: list[Any]) -> Iterator[Any]:
    """Yields the values of `source`, and appends each to `drawn`."""
    for value in source:
        drawn.append(value)
        yield value


@dataclass
class _Call:
    """The arguments of one call, and what the last stage leaves: what the loss function returned by microbatch, and numbers of tokens."""

    forward_step_func: Callable[..., Any]
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    context_ranks: int
    stored: dict[int, list[Any]] = field(default_factory=dict)
    num_tokens: list[Any] = field(default_factory=list)


class _Stage(nn.Module):
    """A model chunk as a stage. Its output is what the next stage receives; that of the last stage is the loss.

    Args:
        chunk: The model chunk.
        vp_stage: Its number on this rank, None if ranks have one chunk.
        is_first: Whether it is the first stage.
        is_last: Whether it is the last stage.
    """

    def __init__(self, chunk: nn.Module, vp_stage: int | None, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.chunk = chunk
        self._vp_stage = vp_stage
        self._is_first, self._is_last = is_first, is_last
        self._call: _Call | None = None
        self._batches = _Batches(None)

    def begin(self, call: _Call | None, source: Iterator[Any] | None = None) -> None:
        """Begins a call with this chunk's data, or ends it."""
        self._call, self._batches = call, _Batches(source)

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        call = self._call
        assert call is not None
        stored: list[Any] = []
        output, num_tokens = schedules.forward_step(
            call.forward_step_func,
            self._batches.iterator(microbatch),
            self.chunk,
            call.num_microbatches,
            None if self._is_first else x,
            stored,
            get_model_config(self.chunk),
            call.context_ranks,
            collect_non_loss_data=call.collect_non_loss_data,
            is_first_microbatch=schedules.check_first_val_step(call.first_val_step, call.forward_only, microbatch == 0),
            current_microbatch=microbatch,
            vp_stage=self._vp_stage,
            is_last_stage=self._is_last,
        )
        if self._is_last:
            call.stored[microbatch] = stored
            call.num_tokens.append(num_tokens)
            if call.forward_only:  # the caller gets what is stored
                return x.new_zeros(())
        loss: Tensor = output
        return loss


class Player:
    """Runs the passes of Megatron's steps in a `zb.Pipeline`, `pipeline`, which is made at the first call.

    A call takes the keyword arguments of Megatron's own functions. It returns what the user's loss function returned for each microbatch
    on the rank of the last stage, and an empty list elsewhere. Messages carry their shapes, so arguments about shapes are ignored.

    Args:
        schedule: The name of a schedule, or a schedule or plan for the microbatches of each step.
        options: Further options of `zb.Pipeline`.

    Raises `InputError` for an option that is set here. The first call raises one with all reasons why Megatron's model cannot run the
    schedule.
    """

    def __init__(self, schedule: str | Schedule | Plan, **options: Any) -> None:
        refuse_wrong_versions("megatron")
        refused = sorted(OWN & options.keys())
        if refused:
            raise InputError("the player sets {got} itself: leave it out", got=", ".join(refused), argument="options")
        self._schedule = schedule
        self._options = options
        self._stages: list[_Stage] = []
        self.pipeline: zb.Pipeline | None = None

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        pg_collection: Any = None,
        force_all_reduce: bool = False,
        **_: Any,
    ) -> list[Any]:
        chunks = list(model) if isinstance(model, list) else [model]
        sources = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        groups = pg_collection or _groups()
        if self.pipeline is None or [stage.chunk for stage in self._stages] != chunks:
            self.close()
            self.pipeline = self._connected(chunks, num_microbatches, groups.pp)
        call = _Call(forward_step_func, num_microbatches, forward_only, collect_non_loss_data, first_val_step, groups.cp.size())
        self._run(self.pipeline, call, sources)
        config = get_model_config(chunks[0])
        if config.finalize_model_grads_func is not None and not forward_only:
            tokens = sum(call.num_tokens, torch.zeros([], dtype=torch.int, device=self.pipeline.device))
            counted = tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(chunks, counted, pg_collection=groups, force_all_reduce=force_all_reduce)
        return [value for _, stored in sorted(call.stored.items()) for value in stored]

    def close(self) -> None:
        """Closes the pipeline. The next call makes another."""
        if self.pipeline is not None:
            self.pipeline.close()
        self.pipeline, self._stages = None, []

    def _run(self, pipe: zb.Pipeline, call: _Call, sources: list[Iterator[Any] | None]) -> None:
        """Runs the passes of a call."""
        for stage, source in zip(self._stages, sources, strict=True):
            stage.begin(call, source)
        unused = [torch.zeros(1, device=pipe.device) for _ in range(call.num_microbatches)]  # the user's forward step reads data
        numbers = [{"microbatch": number} for number in range(call.num_microbatches)]
        try:
            if call.forward_only:
                pipe.eval_step(unused, kwargs=numbers, num_microbatches=call.num_microbatches)
            else:
                pipe.step(unused, unused, kwargs=numbers, num_microbatches=call.num_microbatches)
        finally:
            for stage in self._stages:
                stage.begin(None)

    def _connected(self, chunks: list[nn.Module], num_microbatches: int, group: Any) -> zb.Pipeline:
        """Returns a pipeline of the chunks of all ranks in `group`."""
        config, ranks = get_model_config(chunks[0]), group.size()
        _refuse(schedule_for(self._schedule, ranks, num_microbatches), len(chunks), config)
        last = ranks * len(chunks) - 1
        for vp_stage, chunk in enumerate(chunks):
            number = vp_stage * ranks + group.rank()
            ends = {"is_first": number == 0, "is_last": number == last}
            self._stages.append(_Stage(chunk, vp_stage if len(chunks) > 1 else None, **ends))
            _defer_weight_gradients(chunk)
        buffered = next((p.main_grad.dtype for p in chunks[0].parameters() if hasattr(p, "main_grad")), None)

        def loss_fn(output: Tensor, _: Tensor) -> Tensor:
            return output if config.grad_scale_func is None else config.grad_scale_func(output)

        options = {"scale": "none", "group": group, "main_grad": buffered, **self._options}
        return zb.Pipeline(self._stages, self._schedule, num_microbatches, loss_fn, **options)


def use_schedule(schedule: str | Schedule | Plan, **options: Any) -> Player:
    """Lets Megatron's `get_forward_backward_func` return a `Player`, and returns it. The arguments are those of `Player`.

    With one pipeline rank, it returns Megatron's own function. Call it after the imports of Megatron's modules.
    """
    original = schedules.get_forward_backward_func
    player = Player(schedule, **options)

    def get_forward_backward_func(*sizes: int | None, **named: int | None) -> Callable[..., Any]:
        function: Callable[..., Any] = original(*sizes, **named)
        return function if function is schedules.forward_backward_no_pipelining else player

    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("get_forward_backward_func") is original:
            names["get_forward_backward_func"] = get_forward_backward_func
    return player


def _groups() -> Any:
    """Returns the process groups that Megatron's own functions use."""
    groups: Any = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return groups


def _refuse(schedule: Schedule, num_chunks: int, config: Any) -> None:
    """Raises one `InputError` with all reasons why Megatron's model cannot run the schedule."""
    faults = [f"the player does not support {name}: leave it out" for name in REFUSED if getattr(config, name, None)]
    if getattr(config, "cuda_graph_impl", "none") != "none":
        faults.append(f"the player does not support cuda_graph_impl={config.cuda_graph_impl!r}: set 'none'")
    ranks, per_rank = schedule.num_ranks, schedule.num_stages // schedule.num_ranks
    if schedule.placement.routes != Placement.looped(ranks, max(per_rank, 1)).routes:
        faults.append(f"{schedule.name} has the placement {schedule.placement}, and Megatron places chunks in loops: use interleaved-zb")
    elif per_rank != num_chunks:
        faults.append(f"{schedule.name} has {per_rank} stages per rank, and the model {num_chunks} chunks: make both equal")
    kinds = {op.kind for row in schedule.rows for op in row} - PASSES
    if kinds:
        faults.append(f"{schedule.name} has the passes {', '.join(sorted(map(str, kinds)))}: use a schedule of F, B, W and BW")
    begun: dict[int, list[int]] = {}
    for op in (op for row in schedule.rows for op in row if op.kind is Kind.F):
        begun.setdefault(op.stage, []).append(op.microbatch)
    if any(order != sorted(order) for order in begun.values()):
        faults.append(f"{schedule.name} begins microbatches out of order, and Megatron reads their data in order")
    raise_faults(faults)


def _defer_weight_gradients(chunk: nn.Module) -> None:
    """Lets the linear layers of a chunk defer weight gradients to W.

    The hooks of Megatron's `DistributedDataParallel` would add gradients to its buffers in B. The pipeline adds them, so the hooks go.
    """
    for part in chunk.modules():
        if isinstance(part, DistributedDataParallel):
            part.grad_accs.clear()  # the only references to the autograd nodes with the hooks
        if isinstance(part, (ColumnParallelLinear, RowParallelLinear)):
            part._forward_impl = MethodType(_linear, part)


def _linear(layer: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> Tensor:  # Megatron's name
    """The product of a parallel linear layer, whose weight gradient W computes unless Megatron's own function must."""
    if weight.requires_grad and not any(options.get(name) for name in EXCHANGED_OR_FUSED):
        return linear(input, weight, bias)
    product: Tensor = type(layer)._forward_impl(layer, input, weight, bias=bias, **options)
    return product
