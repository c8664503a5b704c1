"""The division of a model over GPUs, and the share of a layer on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from zerobubble.cost_model.gpus import GPU
from zerobubble.cost_model.models import Model
from zerobubble.errors import InputError

RECOMPUTE = ("none", "selective", "latent", "full")
"""What is recomputed before a backward pass: nothing; large, cheap tensors; these and the heads of latent attention; or whole layers.

The second is attention between its projections if not fused, and the activation between the products of routed experts. The third also
has queries, keys and values of latent attention, which up-projections make from latent vectors.
"""
GRADIENT_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a weight gradient, by the precision of sums over microbatches and replicas."""
LONG_CONTEXT = 32_768
"""Sequences with more tokens than this are a kind of run of their own: attention takes a large part of their time."""
ERROR_BARS = {"dense bf16": 0.14, "dense fp8": 0.14, "long context": 0.15, "experts": 0.15}
"""Relative error that step times of each kind of run should not exceed: none of the published runs does (benchmarks/cost_model)."""
VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this per GPU of a tensor-parallel group, as in Megatron-LM."""


class SettingError(InputError):
    """Incompatible arguments of an estimate; `faults` has the argument and a sentence for each reason."""

    def __init__(self, *faults: tuple[str, str]) -> None:
        super().__init__("; ".join(sentence for _, sentence in faults))
        self.faults = faults


class Linear(NamedTuple):
    """A linear layer on one GPU, from `inputs` to `outputs` features, for this many `rows`.

    A column-parallel layer begins with a gather of its inputs; a row-parallel layer ends with a sum.
    """

    rows: int
    inputs: int
    outputs: int
    gathers: bool = False
    sums: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model on GPUs: tensor, context and expert parallelism, stages, replicas, microbatches and recomputation."""

    model: Model
    gpu: GPU
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    v: int = 1
    dp: int = 1
    microbatch: int = 1
    recompute: str = RECOMPUTE[0]
    sequence_parallel: bool = True
    overlap_tp: bool = False
    precision: str = "bf16"
    gradients: str = "fp32"
    shard_optimizer: bool = True
    shard_weights: bool = False
    shard_gradients: bool = False
    gather_keys: bool = False

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise SettingError(*faults)

    def _faults(self) -> Iterator[tuple[str, str]]:
        """Yields the argument and a sentence for each fault."""
        counts = {name: getattr(self, name) for name in ("tp", "cp", "ep", "pp", "v", "dp", "microbatch")}
        small = {name: count for name, count in counts.items() if count < 1}
        yield from ((name, f"{name} must be at least 1, got {count}") for name, count in small.items())
        if not small:
            yield from self._indivisible()
        yield from self._recompute_faults()
        if self.precision not in dict(self.gpu.flops):
            yield "precision", self.gpu.unsupported(self.precision)
        if self.gradients not in GRADIENT_BYTES:
            yield "gradients", f"gradients must be {' or '.join(map(repr, GRADIENT_BYTES))}, got {self.gradients!r}"
        if self.shard_gradients and not self.shard_optimizer:
            yield "shard_gradients", "shard_gradients=True needs shard_optimizer=True: a GPU updates the parameters whose gradients it has"
        if self.shard_weights and (self.shard_gradients or not self.shard_optimizer):
            yield "shard_weights", "shard_weights=True needs shard_optimizer=True and shard_gradients=False: FSDP2 sums whole gradients"
        if self.gather_keys and self.cp == 1:
            yield "gather_keys", "gather_keys is for context parallelism, which cp=1 does not have: leave it out"

    def _recompute_faults(self) -> Iterator[tuple[str, str]]:
        if self.recompute not in RECOMPUTE:
            yield "recompute", f"recompute must be {', '.join(map(repr, RECOMPUTE))}, got {self.recompute!r}"
        elif self.recompute == RECOMPUTE[1] and self.model.fused_attention and self.model.experts is None:
            nothing = f"{self.model.name} has fused attention, so {self.recompute!r} has nothing to recompute"
            yield "recompute", f"{nothing}: take 'none' or 'full'"
        elif self.recompute == "latent" and self.model.latent is None:
            yield "recompute", f"{self.model.name} has no latent attention, so 'latent' has nothing to recompute: take another"

    def _indivisible(self) -> Iterator[tuple[str, str]]:
        model = self.model
        if self.tp > self.gpu.domain_size:
            yield "tp", f"tp must be at most {self.gpu.domain_size}, the size of the NVLink domain of an {self.gpu.name}, got {self.tp}"
        for what, count in (("heads", model.heads), ("kv_heads", model.kv_heads), ("inner", model.inner)):
            if count % self.tp:
                yield "tp", f"tp={self.tp} does not divide the {count} {what} of {model.name}: take a divisor"
        if model.sequence % (self.tp * self.cp):
            divided = f"does not divide the {model.sequence} tokens of a sequence of {model.name}"
            yield "cp", f"tp*cp={self.tp * self.cp} {divided}: take a divisor"
        yield from self._indivisible_experts()

    def _indivisible_experts(self) -> Iterator[tuple[str, str]]:
        experts, name = self.model.experts, self.model.name
        sharing = self.tp * self.cp * self.dp
        if experts is None:
            if self.ep > 1:
                yield "ep", f"{name} has no experts to divide over ep={self.ep} GPUs: take 1"
            return
        if experts.routed % self.ep:
            yield "ep", f"ep={self.ep} does not divide the {experts.routed} experts of {name}: take a divisor"
        if sharing % self.ep:
            yield "ep", f"ep={self.ep} does not divide the tp*cp*dp={sharing} GPUs that have the same stages: take a divisor"
        if self.tp > 1 and not self.sequence_parallel:
            yield "sequence_parallel", f"with tp={self.tp}, the experts of {name} need divided tokens: take sequence_parallel=True"

    @property
    def kind(self) -> str:
        """The kind of run, a key of `ERROR_BARS`."""
        if self.model.experts is not None:
            return "experts"
        return "long context" if self.model.sequence > LONG_CONTEXT else f"dense {self.precision}"

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a weight gradient."""
        return GRADIENT_BYTES[self.gradients]

    @property
    def operand_bytes(self) -> int:
        """Bytes of an input of a linear layer."""
        return 1 if self.precision == "fp8" else 2

    @property
    def recomputes_activation(self) -> bool:
        """Whether B recomputes the activation of routed experts."""
        return self.recompute in ("selective", "latent")

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch in one tensor-parallel group."""
        return self.microbatch * self.queries

    @property
    def queries(self) -> int:
        """Tokens of each sequence in one tensor-parallel group."""
        return self.model.sequence // self.cp

    @property
    def own_tokens(self) -> float:
        """Tokens of a microbatch on one GPU, outside of the parts of a layer that are sharded by features."""
        return self.tokens / (self.tp if self.sequence_parallel else 1)

    @property
    def hidden_elements(self) -> float:
        """Elements of a hidden state on one GPU, outside of the parts of a layer that are sharded by features."""
        return self.own_tokens * self.model.hidden

    @property
    def keys_and_values(self) -> float:
        """Elements of keys and values on one GPU."""
        return self.tokens * self.model.key_heads * (self.model.key_width + self.model.value_width) / self.tp

    @property
    def outputs(self) -> float:
        """Elements of attention outputs on one GPU."""
        return self.tokens * self.model.heads * self.model.value_width / self.tp

    @property
    def attended(self) -> float:
        """Elements of queries, keys, values and attention outputs on one GPU."""
        queries = self.tokens * self.model.heads * (self.model.key_width + self.model.value_width) / self.tp
        return queries + self.keys_and_values

    @property
    def latent(self) -> float:
        """Elements of latent vectors on one GPU."""
        widths = self.model.latent
        return 0.0 if widths is None else self.own_tokens * (widths.queries + widths.keys + widths.rotary)

    def inner(self, routed: bool) -> float:
        """Elements between the two products of the MLP, or of the shared experts, on one GPU."""
        return self.tokens * self._inner_width(routed) / self.tp

    def _inner_width(self, routed: bool) -> int:
        experts = self.model.experts
        return self.model.inner if not routed or experts is None else experts.shared * experts.inner

    @property
    def chosen(self) -> float:
        """Tokens of one GPU's experts, counted once per expert, with balanced load."""
        return 0.0 if self.model.experts is None else self.own_tokens * self.model.experts.chosen

    @property
    def scores(self) -> int:
        """Attention scores on one GPU."""
        return self.attention_batch * self.queries * self.model.sequence

    @property
    def attention_batch(self) -> int:
        """Heads times sequences on one GPU."""
        return self.microbatch * self.model.heads // self.tp

    def mlp_linears(self, routed: bool) -> tuple[Linear, ...]:
        """Returns the linear layers of the MLP, or of the shared experts, on one GPU."""
        hidden, inner = self.model.hidden, self._inner_width(routed) // self.tp
        products = 2 if self.model.gated else 1
        mlp = (
            Linear(self.tokens, hidden, products * inner, gathers=True),
            Linear(self.tokens, inner, hidden, sums=True),
        )
        return mlp if inner else ()

    def attention_linears(self) -> Iterator[Linear]:
        """Yields the linear layers around attention, on one GPU."""
        model, tokens = self.model, self.tokens
        heads = model.heads // self.tp
        if model.latent is None:
            keys = model.kv_heads // self.tp
            outputs = heads * model.key_width + keys * (model.key_width + model.value_width)
            yield Linear(tokens, model.hidden, outputs, gathers=True)
        else:
            latent, own_tokens = model.latent, ceil(self.own_tokens)
            yield Linear(own_tokens, model.hidden, latent.queries)
            yield Linear(own_tokens, model.hidden, latent.keys + latent.rotary)
            yield Linear(tokens, latent.queries, heads * model.key_width, gathers=True)
            yield Linear(tokens, latent.keys, heads * (latent.plain + latent.values), gathers=True)
        yield Linear(tokens, heads * model.value_width, model.hidden, sums=True)

    @property
    def padded_vocabulary(self) -> int:
        """Padded vocabulary size on one GPU."""
        share = VOCABULARY_MULTIPLE * self.tp
        return -(-self.model.vocabulary // share) * VOCABULARY_MULTIPLE

    @property
    def sharers(self) -> int:
        """Number of GPUs with the same parameters, which sum gradients and may shard the optimizer state."""
        return self.cp * self.dp

    @property
    def expert_sharers(self) -> int:
        """Number of GPUs with the same routed experts."""
        return self.tp * self.sharers // self.ep

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.tp * self.pp * self.sharers

    @property
    def neighbors(self) -> int:
        """Number of GPUs of a domain with the same stages: pipeline ranks are placed furthest apart."""
        return min(self.gpu.domain_size, self.tp * self.sharers)

    @property
    def within_domain(self) -> bool:
        """Whether NVLink connects all GPUs."""
        return self.gpus <= self.gpu.domain_size
