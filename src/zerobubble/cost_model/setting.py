"""How a model is divided over GPUs, and what one of them computes of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zerobubble.cost_model.checks import SettingError
from zerobubble.cost_model.gpus import GPU
from zerobubble.cost_model.models import Model

RECOMPUTE = ("none", "selective", "full")
"""What is computed again before a backward pass: nothing, the attention between its projections, whole layers from their inputs."""
VOCABULARY_MULTIPLE = 128
"""The vocabulary is padded to a multiple of so many words per GPU of a tensor-parallel group, as Megatron-LM does."""


class Linear(NamedTuple):
    """A linear layer as one GPU has it, from `inputs` features to `outputs`. It begins with a gather or, if not, ends with a sum."""

    inputs: int
    outputs: int
    gathers: bool


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on GPUs: by tensor and context parallelism, stages, replicas, microbatches and what is computed again."""

    model: Model
    gpu: GPU
    tp: int
    cp: int
    pp: int
    v: int
    dp: int
    microbatch: int
    recompute: str
    sequence_parallel: bool
    overlap_tp: bool
    precision: str

    def __post_init__(self) -> None:
        faults = list(self._faults())
        if faults:
            raise SettingError(*faults)

    def _faults(self) -> Iterator[tuple[str, str]]:
        """The argument and a sentence for everything that does not go."""
        counts = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "v": self.v, "dp": self.dp, "microbatch": self.microbatch}
        small = {name: count for name, count in counts.items() if count < 1}
        yield from ((name, f"{name} must be at least 1, got {count}") for name, count in small.items())
        if not small:
            yield from self._indivisible()
        if self.recompute not in RECOMPUTE:
            yield "recompute", f"recompute must be {', '.join(map(repr, RECOMPUTE))}, got {self.recompute!r}"
        elif self.recompute == RECOMPUTE[1] and self.model.fused_attention:
            nothing = f"{self.model.name} has fused attention, of which {self.recompute!r} has nothing to compute again"
            yield "recompute", f"{nothing}: take 'none' or 'full'"
        if self.precision not in dict(self.gpu.flops):
            yield "precision", self.gpu.lacks(self.precision)

    def _indivisible(self) -> Iterator[tuple[str, str]]:
        model = self.model
        if self.tp > self.gpu.domain:
            yield "tp", f"tp must be at most {self.gpu.domain}, the GPUs that NVLink joins around an {self.gpu.name}, got {self.tp}"
        for what, count in (("heads", model.heads), ("kv_heads", model.kv_heads), ("inner", model.inner)):
            if count % self.tp:
                yield "tp", f"tp={self.tp} does not divide the {count} {what} of {model.name}: take a divisor"
        if model.sequence % (self.tp * self.cp):
            divided = f"does not divide the {model.sequence} tokens of a sequence of {model.name}"
            yield "cp", f"tp*cp={self.tp * self.cp} {divided}: take a divisor"

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that one GPU's tensor-parallel group has."""
        return self.microbatch * self.queries

    @property
    def queries(self) -> int:
        """Tokens of each sequence that one GPU's tensor-parallel group has."""
        return self.model.sequence // self.cp

    @property
    def wide(self) -> float:
        """Numbers of a hidden state that one GPU keeps, between the parts of a layer that are divided by features."""
        return self.tokens * self.model.hidden / (self.tp if self.sequence_parallel else 1)

    @property
    def narrow(self) -> float:
        """Numbers of a hidden state divided over the tensor-parallel group."""
        return self.tokens * self.model.hidden / self.tp

    @property
    def kv_narrow(self) -> float:
        """Numbers of the keys, and of the values, that one GPU has."""
        return self.tokens * self.model.kv_hidden / self.tp

    @property
    def inner_narrow(self) -> float:
        """Numbers between the two products of the MLP that one GPU has."""
        return self.tokens * self.model.inner / self.tp

    @property
    def scores(self) -> int:
        """Scores of the attention that one GPU computes."""
        return self.attention_batch * self.queries * self.model.sequence

    @property
    def attention_batch(self) -> int:
        """Heads of sequences that one GPU computes."""
        return self.microbatch * self.model.heads // self.tp

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of a transformer layer, as one GPU has them."""
        model = self.model
        hidden, inner = model.hidden, model.inner // self.tp
        return (
            Linear(hidden, (hidden + 2 * model.kv_hidden) // self.tp, True),
            Linear(hidden // self.tp, hidden, False),
            Linear(hidden, (2 if model.gated else 1) * inner, True),
            Linear(inner, hidden, False),
        )

    @property
    def words(self) -> int:
        """Words of the vocabulary, padded, that one GPU has."""
        share = VOCABULARY_MULTIPLE * self.tp
        return -(-self.model.vocabulary // share) * VOCABULARY_MULTIPLE

    @property
    def sharers(self) -> int:
        """GPUs with the same parameters, which sum gradients and divide the optimizer's state."""
        return self.cp * self.dp

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return self.tp * self.pp * self.sharers

    @property
    def within_domain(self) -> bool:
        """Whether all GPUs are joined by NVLink."""
        return self.gpus <= self.gpu.domain
