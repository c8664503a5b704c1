"""Estimates the costs of a transformer's stages from the times and bytes of its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from textwrap import wrap

from zerobubble.arguments import BYTES, NUMBER, SIZE, each, either, instance, optional, takes
from zerobubble.cost_model.assumptions import assumptions_of
from zerobubble.cost_model.configuration import known_model
from zerobubble.cost_model.gpus import GPU, known_gpu
from zerobubble.cost_model.held import (
    RUNTIME_BYTES,
    Parameters,
    gradient_bytes,
    halves_of_layer,
    optimizer_bytes,
    parameters_of,
    state_bytes,
    weight_bytes,
)
from zerobubble.cost_model.kernels import HALF, Efficiency, Kernels
from zerobubble.cost_model.models import Model
from zerobubble.cost_model.parts import ModelPart, ModelParts, piece_of_layers
from zerobubble.cost_model.setting import Setting, SettingError
from zerobubble.cost_model.step import StepEstimate, made_for, shared, step_estimate, update_seconds
from zerobubble.costs import KEPT, Costs, Limits
from zerobubble.display import COLUMNS, Displayed
from zerobubble.errors import InputError
from zerobubble.ir import Placement, Schedule
from zerobubble.partition import Layer
from zerobubble.simulation import metrics, peak_memory
from zerobubble.units import as_bytes, counted, show_bytes, show_range

NS = 1e9
CUT_INSIDE = "At a cut inside a layer, the input of the layer crosses together with the output of its attention, as zb.split sends them."


@dataclass(frozen=True, slots=True, repr=False)
class Estimate(Displayed):
    """Estimated times and bytes of a transformer's stages, for one GPU of each rank's tensor-parallel group.

    `setting` is the model on its GPUs and `efficiency` the share of their speed that operations reach. `costs` are valid for every schedule
    with this number of stages, on any placement. The other sequences have one entry per stage: `layers` are transformer layers, in steps of
    a half, `parameters` those of one GPU, `expert_parameters` those of routed experts among them, and `weights`, `gradients`, `optimizer`
    and `activations` are bytes, the latter for one microbatch. `assumptions` has a sentence for each assumption.
    """

    setting: Setting
    efficiency: Efficiency
    costs: Costs
    layers: tuple[float, ...]
    parameters: tuple[int, ...]
    expert_parameters: tuple[int, ...]
    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]

    @property
    def assumptions(self) -> tuple[str, ...]:
        inside = any(count % 1 for count in self.layers)
        return (*assumptions_of(self.setting, self.efficiency), *([CUT_INSIDE] if inside else []))

    def parts(self, inside_blocks: bool = False) -> tuple[Layer, ...]:
        """Returns the embedding, the layers and the head, as `zb.plan` takes them: it chooses the stages.

        With `inside_blocks`, attention and MLP, each with its norm and residual, are parts of their own.

        >>> import zerobubble as zb
        >>> found = zb.cost_model.transformer("llama3-70b", gpu="H100", tp=8, pp=8)
        >>> [zb.partition.cut_layers(found.parts(inside), zb.Placement.vee(8)).excess < 1.05 for inside in (False, True)]
        [False, True]
        """
        return layers_of(self.setting, self.efficiency, inside_blocks)

    @property
    def activations(self) -> tuple[int, ...]:
        return self.costs.held_after_f

    def step(self, schedule: str | Schedule, num_microbatches: int | None = None) -> StepEstimate:
        """Simulates a training step: `schedule`, by name or as an object, under the costs, followed by the optimizer's step.

        Raises `InputError` if the schedule has another number of ranks or stages, and for a name without `num_microbatches`.

        >>> import zerobubble as zb
        >>> found = zb.cost_model.transformer("megatron-22b", gpu="A100", tp=8, microbatch=4, recompute="selective")
        >>> found.step("1f1b", 1)
        <StepEstimate of 1f1b on 8 GPUs: 1.1 s, 7,446 tokens/s, 41.64 % of the peak FLOP/s, 62.3 GB>
        """
        setting = self.setting
        played = made_for(setting, schedule, num_microbatches)
        return self.as_step(played, metrics(played, self.costs).makespan, peak_memory(played, self.costs))

    def as_step(self, schedule: Schedule, makespan: int, activations: Sequence[int], num_microbatches: int | None = None) -> StepEstimate:
        """Returns a training step in which `schedule` takes `makespan` ns and ranks hold up to `activations` bytes of activations.

        `num_microbatches` is that of the step if `schedule` is only a part of it.
        """
        microbatches = schedule.num_microbatches if num_microbatches is None else num_microbatches
        placement, kernels = schedule.placement, Kernels(self.setting.gpu, self.efficiency)
        experts = placement.rank_sums(self.expert_parameters)
        of_ranks = [Parameters(every - some, some) for every, some in zip(placement.rank_sums(self.parameters), experts, strict=True)]
        update = max(update_seconds(self.setting, kernels, parameters) for parameters in of_ranks)
        held = self._fixed_bytes(placement)
        passes = makespan / NS * self.efficiency.slowest_of(self.setting.gpus)
        return step_estimate(self.setting, schedule.name, microbatches, passes, update, activations, held)

    @takes(placement=Placement, memory=optional(BYTES))
    def limits(self, placement: Placement, memory: int | str | None = None) -> Limits:
        """Returns the bytes left for activations on each rank of `placement`, after weights, gradients, optimizer state, CUDA and NCCL.

        The total is the GPU's memory, or `memory`: bytes, or text such as "70GB". Raises `InputError` if nothing is left.

        >>> import zerobubble as zb
        >>> found = zb.cost_model.transformer("megatron-175b", gpu="A100", tp=8, pp=8)
        >>> found.limits(zb.Placement.linear(8))
        <Limits of 8 ranks: 33.4 GB to 34.8 GB>
        """
        total = self.setting.gpu.memory_bytes if memory is None else as_bytes(memory)
        self.costs.require_fit(placement, f"placement {placement.name!r}")
        left = [total - taken for taken in self._fixed_bytes(placement)]
        if min(left) <= 0:
            raise InputError(
                "weights, gradients, the optimizer, CUDA and NCCL need {needed} of {memory} on rank {rank}",
                needed=show_bytes(total - min(left)),
                memory=show_bytes(total),
                rank=left.index(min(left)),
                remedy="divide them over more GPUs with tp, pp or dp",
            )
        return Limits(tuple(left))

    def _fixed_bytes(self, placement: Placement) -> list[int]:
        """Returns the bytes on a GPU of each rank that do not change during a step."""
        return [RUNTIME_BYTES + state for state in placement.rank_sums(self.state_bytes)]

    @property
    def state_bytes(self) -> tuple[int, ...]:
        """Returns the bytes of weights, gradients and optimizer state, by stage."""
        return tuple(map(sum, zip(self.weights, self.gradients, self.optimizer, strict=True)))

    def _summary(self) -> str:
        setting = self.setting
        shape = f"tp {setting.tp}, {counted(self.costs.num_stages, 'stage')}, {counted(setting.dp, 'replica')}"
        kept = show_range(self.activations, show_bytes)
        return f"of {setting.model.name} on {setting.gpu.name}: {shape}; activations {kept} a microbatch"

    def _details(self) -> Iterator[str]:
        yield repr(self.costs)
        for assumption in self.assumptions:
            yield from wrap(assumption, COLUMNS, initial_indent="- ", subsequent_indent="  ")


COUNTS = dict.fromkeys(("tp", "cp", "ep", "pp", "v", "dp", "microbatch"), SIZE)


@takes(
    model=either(str, Model),
    gpu=either(str, GPU),
    **COUNTS,
    recompute=str,
    sequence_parallel=bool,
    overlap_tp=bool,
    precision=str,
    gradients=str,
    shard_optimizer=bool,
    shard_weights=bool,
    shard_gradients=bool,
    gather_keys=bool,
    layers=optional(each(NUMBER)),
    efficiency=instance(Efficiency),
)
def transformer(
    model: str | Model,
    *,
    gpu: str | GPU,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    pp: int = 1,
    v: int = 1,
    dp: int = 1,
    microbatch: int = 1,
    recompute: str = "none",
    sequence_parallel: bool = True,
    overlap_tp: bool = False,
    precision: str = "bf16",
    gradients: str = "fp32",
    shard_optimizer: bool = True,
    shard_weights: bool = False,
    shard_gradients: bool = False,
    gather_keys: bool = False,
    layers: Sequence[float] | None = None,
    efficiency: Efficiency = Efficiency(),  # noqa: B008 - frozen
) -> Estimate:
    """Estimates the costs of a transformer's stages, without a cluster to measure on.

    Raises `InputError` for an unknown model or GPU, and for incompatible shapes, listing all faults.

    Arguments:
        model: a name of `MODELS`, a config.json of Transformers or a folder with one, or a `Model`.
        gpu: a name of `GPUS`, a file of `zerobubble doctor --measure`, or a `GPU`.
        tp: degree of tensor parallelism, within an NVLink domain.
        cp: degree of context parallelism: tensor-parallel groups over which sequences are divided.
        ep: degree of expert parallelism, among the tp*cp*dp GPUs with the same stages.
        pp: number of ranks of the pipeline.
        v: stages per rank.
        dp: number of replicas.
        microbatch: sequences per microbatch.
        recompute: what B recomputes: "none"; "selective", attention between its projections if not fused, and the activation of
                    routed experts; "latent", these and the up-projections of latent attention; or "full", whole layers.
        sequence_parallel: whether norms, residuals and dropout are sharded along the sequence over the tensor-parallel group.
        overlap_tp: whether tensor-parallel communication overlaps with matrix products wherever possible.
        precision: "bf16", or "fp8" for the products of linear layers.
        gradients: precision of weight gradients and their sums over microbatches and replicas, "fp32" or "bf16".
        shard_optimizer: whether replicas shard the optimizer state; plain replicas of a `Pipeline` keep all of it.
        shard_weights: whether replicas shard weights, too, as FSDP2 does in a `Pipeline`: gathered weights and whole gradients are held
                    during a step, in addition to the shares of weights and summed gradients.
        shard_gradients: whether replicas shard gradients, too, as FSDP does, instead of only the optimizer state. Kernels of their own
                    then sum gradients over microbatches.
        gather_keys: whether context parallelism gathers all keys and values before attention, instead of exchanging them during it.
        layers: transformer layers of each stage; by default equal, or one fewer on the first and the last stage. Half a layer is its
                    attention, at the end of a stage, or its MLP, at the beginning.
        efficiency: fractions of the data sheet figures that operations reach.

    >>> import zerobubble as zb
    >>> zb.cost_model.transformer("megatron-175b", gpu="A100", tp=8, pp=8, v=3, recompute="selective")
    <Estimate of megatron-175b on A100: tp 8, 24 stages, 1 replica; activations 428 MB to 493 MB a microbatch>
    """
    setting = Setting(
        model=known_model(model),
        gpu=known_gpu(gpu),
        tp=tp,
        cp=cp,
        ep=ep,
        pp=pp,
        v=v,
        dp=dp,
        microbatch=microbatch,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
        overlap_tp=overlap_tp,
        precision=precision,
        gradients=gradients,
        shard_optimizer=shard_optimizer,
        shard_weights=shard_weights,
        shard_gradients=shard_gradients,
        gather_keys=gather_keys,
    )
    counts = _layers_of_stages(setting, layers)
    return estimate_of(setting, efficiency, ModelParts.from_setting(setting, Kernels(setting.gpu, efficiency)), counts)


def estimate_of(setting: Setting, efficiency: Efficiency, parts: ModelParts, counts: tuple[float, ...]) -> Estimate:
    """Estimates a model made of `parts`, in stages with these numbers of layers."""
    kernels = Kernels(setting.gpu, efficiency)
    parameters = tuple(parameters_of_stages(setting, counts))
    totals, experts = tuple(stage.total for stage in parameters), tuple(stage.experts for stage in parameters)
    weights = tuple(weight_bytes(setting, stage) for stage in parameters)
    gradients = tuple(gradient_bytes(setting, stage) for stage in parameters)
    optimizer = tuple(optimizer_bytes(setting, stage) for stage in parameters)
    kept = [sum(sizes) for sizes in zip(weights, gradients, optimizer, strict=True)]
    costs = _costs(setting, kernels, parts.of_stages(counts), parameters, counts).with_columns(**{KEPT: kept})
    return Estimate(setting, efficiency, costs, counts, totals, experts, weights, gradients, optimizer)


def layers_of(
    setting: Setting,
    efficiency: Efficiency = Efficiency(),  # noqa: B008 - frozen
    inside_blocks: bool = False,
) -> tuple[Layer, ...]:
    """Returns the embedding, the transformer layers and the head of a model, as `zb.plan` takes them: it chooses the stages.

    With `inside_blocks`, the two halves of a layer are parts of its block.
    """
    kernels = Kernels(setting.gpu, efficiency)
    parts, vocabulary = ModelParts.from_setting(setting, kernels), parameters_of(setting, 0, 0, 1)
    whole, inside = (round(NS * message_seconds(setting, kernels, is_inside)) for is_inside in (False, True))

    def transformer_layers() -> Iterator[Layer]:
        for place, layer in enumerate(parts.layers):
            attention, mlp = halves_of_layer(setting, place >= setting.model.dense_layers)
            if not inside_blocks:
                yield _as_layer(setting, layer.whole, attention.plus(mlp), whole)
                continue
            block = f"layers.{place}"
            yield replace(_as_layer(setting, layer.attention, attention, inside), name="attention", block=block)
            yield replace(_as_layer(setting, layer.mlp, mlp, whole), name="mlp", block=block)

    ends = (_as_layer(setting, part, vocabulary, whole) for part in (parts.embedding, parts.head))
    return (next(ends), *transformer_layers(), next(ends))


def _as_layer(setting: Setting, part: ModelPart, parameters: Parameters, comm: int) -> Layer:
    forward, within_bw, weight, exposed = (round(NS * seconds) for seconds in part.times)
    kept = state_bytes(setting, parameters)
    fused = within_bw + weight if exposed else 0
    return Layer(forward, within_bw + exposed, weight, round(part.saved), round(part.pending), kept, comm, fused=fused)


def _layers_of_stages(setting: Setting, layers: Sequence[float] | None) -> tuple[float, ...]:
    stages, total = setting.pp * setting.v, setting.model.layers
    if layers is not None:
        if len(layers) != stages or sum(layers) != total or min(layers) < 0 or any(2 * count % 1 for count in layers):
            got = f"got {len(layers)} with the sum {sum(layers):g}"
            raise SettingError(("layers", f"layers must be {stages} counts >= 0 in steps of 0.5 that sum to {total}, {got}"))
        return tuple(int(count) if count == int(count) else count for count in layers)
    if total % stages == 0 or (total + 2) % stages == 0:
        return shared_layers(total, stages)
    unequal = f"the {total} layers of {setting.model.name} cannot be divided equally over pp*v={stages} stages"
    remedy = "nor with one less on the first and the last: give the layers of each stage, layers=[...]"
    raise SettingError(("layers", f"{unequal}, {remedy}"))


def shared_layers(total: int, stages: int) -> tuple[int, ...]:
    """Returns the layers of each stage: equal, or as equal as possible, with embedding and head counted as one layer each.

    Requires at most `total` + 2 stages.
    """
    if total % stages == 0:
        return (total // stages,) * stages
    equal, more = divmod(total + 2, stages)
    counts = [equal + (1 <= stage <= more) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def parameters_of_stages(setting: Setting, counts: Sequence[float]) -> Iterator[Parameters]:
    """Returns the parameters of each stage on one GPU. A last stage that is not the first has a copy of a tied embedding."""
    last, dense = len(counts) - 1, setting.model.dense_layers
    for stage, (first, end) in enumerate(pairwise(accumulate(counts, initial=0.0))):
        vocabularies = (stage == 0) + (stage == last and not (setting.model.tied and last == 0))
        piece = piece_of_layers(first, end)
        plain = max(0, min(piece.end, dense) - piece.first)
        total = parameters_of(setting, plain, piece.end - piece.first - plain, vocabularies)
        for layer, half in ((piece.attention, 0), (piece.mlp, 1)):
            total = total if layer is None else total.plus(halves_of_layer(setting, layer >= dense)[half])
        yield total


def _costs(
    setting: Setting, kernels: Kernels, stages: Sequence[ModelPart], parameters: Sequence[Parameters], counts: Sequence[float]
) -> Costs:
    forward, within_bw, weight, exposed = (_whole(column, NS) for column in zip(*(stage.times for stage in stages), strict=True))
    saved, pending = (_whole(column) for column in zip(*((stage.saved, stage.pending) for stage in stages), strict=True))
    messages = _whole([message_seconds(setting, kernels, bool(edge % 1)) for edge in accumulate(counts[:-1])], NS)
    sums = _whole([_sum_over_replicas(setting, kernels, stage_parameters) for stage_parameters in parameters], NS)
    backward = tuple(map(sum, zip(within_bw, exposed, strict=True)))
    costs = Costs(forward, backward, weight, messages, saved, pending, reduce=sums)
    return costs.with_columns(fused=list(map(sum, zip(within_bw, weight, strict=True)))) if any(exposed) else costs


def message_seconds(setting: Setting, kernels: Kernels, inside: bool = False) -> float:
    """Returns the seconds of a message between stages: each GPU sends its share of a hidden state, which the receivers gather.

    `inside` a layer, the input of the layer crosses the cut, too, as `zb.split` with `inside_blocks` sends it.
    """
    size = HALF * setting.tokens * setting.model.hidden * (2 if inside else 1)
    gathered = 0.0 if setting.sequence_parallel else kernels.gather(size, setting.tp)
    return kernels.send(size / setting.tp, setting.within_domain) + gathered


def _sum_over_replicas(setting: Setting, kernels: Kernels, parameters: Parameters) -> float:
    """Returns the seconds of a reduce-scatter of gradients, and of a gather of the sums if each replica updates all parameters."""
    collectives = 1 if setting.shard_optimizer else 2
    return collectives * sum(
        kernels.gather(setting.gradient_bytes * count, sharers, near) for count, sharers, near in shared(setting, parameters)
    )


def _whole(values: Sequence[float], scale: float = 1.0) -> tuple[int, ...]:
    return tuple(round(scale * value) for value in values)
