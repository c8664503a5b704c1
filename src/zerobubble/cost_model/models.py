"""Shapes of published transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zerobubble.arguments import NUMBERED, SIZE, optional, takes
from zerobubble.display import Displayed
from zerobubble.errors import InputError, near, raise_faults


@takes(**dict.fromkeys(("queries", "keys", "plain", "rotary", "values"), SIZE))
class Latent(NamedTuple):
    """Multi-head latent attention: queries, keys and values of all heads are up-projected from latent vectors.

    `queries` is the width of the latent vector for queries, `keys` that for keys and values. A head has `plain` features of queries and
    keys, and `rotary` features with positions, whose keys all heads share. Its values have `values` features.
    """

    queries: int
    keys: int
    plain: int
    rotary: int
    values: int


@takes(**dict.fromkeys(("routed", "chosen", "inner"), SIZE), **dict.fromkeys(("shared", "dense_layers", "nodes"), NUMBERED))
class Experts(NamedTuple):
    """Experts instead of an MLP: each token goes to `chosen` of the `routed` experts, of width `inner`, and to all `shared` ones.

    The first `dense_layers` have an MLP. The experts of a token are on at most `nodes` GPU domains; 0 means no limit.
    """

    routed: int
    chosen: int
    inner: int
    shared: int = 0
    dense_layers: int = 0
    nodes: int = 0


_COUNTS = ("layers", "hidden", "heads", "kv_heads", "inner", "vocabulary", "sequence")
_FLAGS = ("gated", "dropout", "tied", "fused_attention", "position_table")
_OPTIONAL = ("batch", "head_width", "positions")


@takes(
    name=str,
    latent=optional(Latent),
    experts=optional(Experts),
    **dict.fromkeys(_COUNTS, SIZE),
    **dict.fromkeys(_OPTIONAL, optional(SIZE)),
    **dict.fromkeys(_FLAGS, bool),
)
@dataclass(frozen=True, slots=True, repr=False)
class Model(Displayed):
    """The shape of a decoder-only transformer.

    Attributes:
        name: The name in messages.
        layers: The number of transformer layers.
        hidden: The width of the residual stream.
        heads: The heads of queries.
        kv_heads: The heads of keys and values.
        inner: The width between the two products of the MLP.
        vocabulary: The number of tokens in the vocabulary.
        sequence: The tokens of a sequence.
        gated: Whether the MLP has a third product that gates the first, as SwiGLU has.
        dropout: Whether residuals and attention have dropout, and products a bias.
        tied: Whether the head is the embedding.
        fused_attention: Whether scores stay on the processors (FlashAttention), and the half of them that a causal mask hides is not
            computed; otherwise they are written to memory.
        latent: The widths of latent attention, which must be fused; None for plain attention.
        experts: The experts that layers have instead of an MLP; None if all have an MLP.
        batch: The sequences of a step with which it was trained, where that was published.
        head_width: The features of a head, if not `hidden / heads`.
        positions: The positions for which the model was made.
        position_table: Whether they are a table, which limits sequences; longer ones are else reported.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    sequence: int
    gated: bool = False
    dropout: bool = True
    tied: bool = True
    fused_attention: bool = False
    latent: Latent | None = None
    experts: Experts | None = None
    batch: int | None = None
    head_width: int | None = None
    positions: int | None = None
    position_table: bool = True

    def __post_init__(self) -> None:
        raise_faults(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.position_table and self.positions is not None and self.sequence > self.positions:
            table = f"the table of {self.positions:,} positions of model {self.name!r}"
            yield f"sequences of {self.sequence:,} tokens exceed {table}: take fewer tokens, such as --sequence {self.positions}"
        if self.latent is None and self.head_width is None and self.hidden % self.heads:
            yield f"hidden={self.hidden} of model {self.name!r} must be a multiple of its {self.heads} heads"
        if self.heads % self.kv_heads:
            yield f"the {self.heads} heads of model {self.name!r} must be a multiple of its {self.kv_heads} kv_heads"
        if self.latent is not None and not self.fused_attention:
            yield f"model {self.name!r} has latent attention, which is supported only with fused attention: give fused_attention=True"
        if self.experts is not None and self.experts.chosen > self.experts.routed:
            yield f"a token of model {self.name!r} cannot go to {self.experts.chosen} of {self.experts.routed} experts"
        if self.experts is not None and not 0 <= self.experts.dense_layers <= self.layers:
            yield f"dense_layers={self.experts.dense_layers} of model {self.name!r} must be 0 to its {self.layers} layers"

    def _summary(self) -> str:
        experts = "" if self.experts is None else f" and {self.experts.routed} experts"
        return f"{self.name}: {self.layers} layers of {self.hidden} with {self.heads} heads{experts}, sequences of {self.sequence} tokens"

    @property
    def dense_layers(self) -> int:
        """Number of first layers without experts."""
        return self.layers if self.experts is None else self.experts.dense_layers

    @property
    def key_width(self) -> int:
        """Features of a head's queries and keys."""
        return self._head_width if self.latent is None else self.latent.plain + self.latent.rotary

    @property
    def value_width(self) -> int:
        """Features of a head's values."""
        return self._head_width if self.latent is None else self.latent.values

    @property
    def _head_width(self) -> int:
        return self.head_width or self.hidden // self.heads

    @property
    def key_heads(self) -> int:
        """Heads with separate keys and values, after the up-projection."""
        return self.kv_heads if self.latent is None else self.heads

    @property
    def inner_products(self) -> int:
        """Number of products of an MLP or expert."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of the products around the attention of one layer."""
        output = self.heads * self.value_width * self.hidden
        if self.latent is None:
            return output + self.hidden * (self.heads + self.kv_heads) * self.key_width + self.hidden * self.kv_heads * self.value_width
        return (
            output
            + self.latent_parameters
            + self.heads * (self.latent.queries * self.key_width + self.latent.keys * (self.latent.plain + self.latent.values))
        )

    @property
    def latent_parameters(self) -> int:
        """Parameters of the down-projections to latent vectors, replicated in a tensor-parallel group."""
        return 0 if self.latent is None else self.hidden * (self.latent.queries + self.latent.keys + self.latent.rotary)

    def common_parameters(self, routed: bool) -> int:
        """Parameters of the matrix products of a layer, one with routed experts if `routed`, without these experts.

        Norms and biases, a thousandth of them, are left out.
        """
        if not routed or self.experts is None:
            return self.attention_parameters + self.inner_products * self.hidden * self.inner
        shared = self.experts.shared * self.inner_products * self.hidden * self.experts.inner
        return self.attention_parameters + shared + self.hidden * self.experts.routed

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return 0 if self.experts is None else self.inner_products * self.hidden * self.experts.inner

    @property
    def parameters(self) -> int:
        """All parameters, the embedding and the head included."""
        routed = self.layers - self.dense_layers
        experts = 0 if self.experts is None else routed * self.experts.routed * self.expert_parameters
        common = self.dense_layers * self.common_parameters(False) + routed * self.common_parameters(True)
        return common + experts + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def flops_per_token(self) -> float:
        """Returns the FLOPs to train on one token, without recomputation: all scores, or the computed half for fused attention.

        Source: arXiv 2205.05198, appendix A.
        """
        routed = self.layers - self.dense_layers
        chosen = 0 if self.experts is None else routed * self.experts.chosen * self.expert_parameters
        products = self.dense_layers * self.common_parameters(False) + routed * self.common_parameters(True) + chosen
        scores = 6 * self.layers * self.sequence * self.heads * (self.key_width + self.value_width)
        return 6.0 * (products + self.vocabulary * self.hidden) + (scores / 2 if self.fused_attention else scores)


def _megatron(name: str, layers: int, hidden: int, heads: int, batch: int | None) -> Model:
    return Model(name, layers, hidden, heads, heads, 4 * hidden, 51200, 2048, batch=batch)


def _llama(name: str, layers: int, hidden: int, heads: int, inner: int, batch: int | None) -> Model:
    return Model(
        name, layers, hidden, heads, 8, inner, 128256, 8192, gated=True, dropout=False, tied=False, fused_attention=True, batch=batch
    )


MODELS = {
    model.name: model
    for model in (
        _megatron("megatron-22b", 48, 6144, 64, 4),
        _megatron("megatron-175b", 96, 12288, 96, 64),
        _megatron("megatron-530b", 105, 20480, 128, 280),
        _megatron("megatron-1t", 128, 25600, 160, 512),
        _megatron("gpt3-175b", 96, 12288, 96, 1536),
        _llama("llama3-70b", 80, 8192, 64, 28672, None),
        _llama("llama3-405b", 126, 16384, 128, 53248, 2048),
        Model(
            "deepseek-v3",
            61,
            7168,
            128,
            128,
            18432,
            129280,
            4096,
            gated=True,
            dropout=False,
            tied=False,
            fused_attention=True,
            latent=Latent(1536, 512, 128, 64, 128),
            experts=Experts(256, 8, 2048, shared=1, dense_layers=3, nodes=4),
            batch=15360,
        ),
    )
}
"""The models known by name; use `Model` to describe others.

Sources: for Megatron table 3 of Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198; for
GPT-3 table 2.1 of Brown et al., arXiv 2005.14165, here in the form of Megatron, with 3.2 M tokens of a batch; for Llama 3 table 3 of Llama
Team, The Llama 3 Herd of Models, arXiv 2407.21783, with the 16 M tokens of its table 4; for DeepSeek-V3 section 4.2 of DeepSeek-AI, arXiv
2412.19437, without its module that predicts a second token.
"""


def model_named(name: str) -> Model:
    """Returns the model with that name; raises `InputError`, listing the known names."""
    if name not in MODELS:
        available = f"{near(name, MODELS, same_numbers=True)}available are {', '.join(MODELS)}"
        remedy = "for others, give a model's config.json, a cost_model.Model in Python, or measured costs (zerobubble plan --costs)"
        raise InputError("there is no model {model!r}: {known}; {remedy}", model=name, known=available, remedy=remedy)
    return MODELS[name]
