"""Shapes of published transformers."""

from __future__ import annotations

from dataclasses import dataclass

from zerobubble.cost_model.checks import require_amounts
from zerobubble.display import Displayed
from zerobubble.errors import InputError, near


@dataclass(frozen=True, slots=True, repr=False)
class Model(Displayed):
    """The shape of a decoder-only transformer.

    `kv_heads` are the heads of keys and values, `inner` is the width between the two products of the MLP. `gated` says that the MLP has a
    third product that gates the first, as SwiGLU has; `dropout` that residuals and attention have dropout, and products a bias; `tied` that
    the head is the embedding. With `fused_attention` scores stay on the processors (FlashAttention), and the half of them that a causal
    mask hides is not computed; without it they are written to memory.
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

    def __post_init__(self) -> None:
        counts = ("layers", "hidden", "heads", "kv_heads", "inner", "vocabulary", "sequence")
        require_amounts(f"model {self.name!r}", {name: getattr(self, name) for name in counts})
        if self.hidden % self.heads:
            raise InputError(f"hidden={self.hidden} of model {self.name!r} must be a multiple of its {self.heads} heads")
        if self.heads % self.kv_heads:
            raise InputError(f"the {self.heads} heads of model {self.name!r} must be a multiple of its {self.kv_heads} kv_heads")

    def _summary(self) -> str:
        return f"{self.name}: {self.layers} layers of {self.hidden} with {self.heads} heads, sequences of {self.sequence} tokens"

    @property
    def kv_hidden(self) -> int:
        """The width of keys, and of values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrix products of one layer; norms and biases, less than a thousandth of them, are left out."""
        attention = 2 * self.hidden * (self.hidden + self.kv_hidden)
        return attention + (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def flops_per_token(self) -> float:
        """FLOPs that training on one token needs: nothing computed twice, and all scores of the attention.

        Source: arXiv 2205.05198, appendix A.
        """
        attention = 12 * self.layers * self.sequence * self.hidden
        return 6.0 * (self.layers * self.layer_parameters + self.vocabulary * self.hidden) + attention


def _megatron(name: str, layers: int, hidden: int, heads: int) -> Model:
    return Model(name, layers, hidden, heads, heads, 4 * hidden, 51200, 2048)


def _llama(name: str, layers: int, hidden: int, heads: int, inner: int) -> Model:
    return Model(name, layers, hidden, heads, 8, inner, 128256, 8192, gated=True, dropout=False, tied=False, fused_attention=True)


MODELS = {
    model.name: model
    for model in (
        _megatron("megatron-22b", 48, 6144, 64),
        _megatron("megatron-175b", 96, 12288, 96),
        _megatron("megatron-530b", 105, 20480, 128),
        _megatron("megatron-1t", 128, 25600, 160),
        _megatron("gpt3-175b", 96, 12288, 96),
        _llama("llama3-70b", 80, 8192, 64, 28672),
        _llama("llama3-405b", 126, 16384, 128, 53248),
    )
}
"""The models that are known by name; `Model` describes others.

Sources: for Megatron table 3 of Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198; for
GPT-3 table 2.1 of Brown et al., arXiv 2005.14165, here in the form of Megatron; for Llama 3 table 3 of Llama Team, The Llama 3 Herd of
Models, arXiv 2407.21783.
"""


def known_model(model: str | Model) -> Model:
    """`model` itself, or the one of that name; raises `InputError` with those that are known."""
    if isinstance(model, Model):
        return model
    if model not in MODELS:
        known = f"{near(model, MODELS)}known are {', '.join(MODELS)}"
        raise InputError(f"there is no model {model!r}: {known}; cost_model.Model describes others")
    return MODELS[model]
