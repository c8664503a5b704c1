"""The module kinds of the split matrix: anything a stage may contain, as small as possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

D = 6


class Way(nn.Module):
    """Parts by name and a function of them and the inputs: the shortest way to write many small models."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.way = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self.way(self, *inputs)


def lin(features: int = D, **options: Any) -> nn.Linear:
    return nn.Linear(D, features, **options)


def parameter(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(size))


class Block(nn.Module):
    """A residual block with a norm, two Linears and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(D), lin(2 * D), nn.ReLU(inplace=True), nn.Linear(2 * D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


class Attention(nn.Module):
    """A causal self-attention and MLP block, as GPTs have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.mlp = nn.LayerNorm(D), lin(3 * D), lin(), Block()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.mlp(x + self.out(attended.transpose(1, 2).flatten(2)))
        return y


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = lin().requires_grad_(False), lin(2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


class Experts(nn.Module):
    """A top-2 mixture of four experts, of which the last is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = lin(4), nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        scores = self.gate(rows).softmax(-1) * torch.tensor([1.0, 1.0, 1.0, 0.0], device=x.device)
        weights, chosen = scores.topk(2)
        y = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            row, slot = (chosen == index).nonzero(as_tuple=True)
            y = y.index_add(0, row, expert(rows[row]) * weights[row, slot].unsqueeze(-1))
        return y.view_as(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(D, D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cell(x)[0]
        return y


class HandMade(torch.autograd.Function):
    """A Linear as a Python Function, as fp8 and Triton layers are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, -2).t() @ x.flatten(0, -2)


def selective(block: nn.Module) -> nn.Module:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return Way(lambda m, x: checkpoint(m.block, x, use_reentrant=False, context_fn=contexts), block=block)


def checkpointed(block: nn.Module, *, reentrant: bool = False) -> nn.Module:
    return Way(lambda m, x: checkpoint(m.block, x, use_reentrant=reentrant), block=block)


def compiled(block: nn.Module) -> nn.Module:
    return torch.compile(block, backend="aot_eager")  # type: ignore[return-value]


def compiled_in_place(block: nn.Module) -> nn.Module:
    block.compile(backend="aot_eager")
    return nn.Sequential(block)


def with_tensor_hook() -> nn.Module:
    module = Way(lambda m, x: m.up(m.down(x)), down=lin(), up=lin(), seen=[])
    module.up.weight.register_hook(lambda gradient: module.seen.append(gradient.clone()))
    module.down.weight.register_hook(lambda gradient: 2 * gradient)
    return module


def hooked_view() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        view = m.w.t()
        view.register_hook(lambda gradient: 2 * gradient)
        y: Tensor = x @ view
        return y

    return Way(forward, w=parameter(D, D))


def halves(m: Any, x: Tensor) -> Tensor:
    first, second = m.w.chunk(2)
    y: Tensor = functional.linear(x, first) * functional.linear(x, second)
    return y


def with_accumulated_hook() -> nn.Module:
    module = Way(lambda m, x: m.linear(x), linear=lin(), seen=[])
    module.linear.weight.register_post_accumulate_grad_hook(lambda weight: module.seen.append(weight.grad.clone()))
    return module


def with_node_hook() -> nn.Module:
    """As data-parallel wrappers do: a hook on the node that adds to `.grad`, kept alive by the code that sets it."""
    module = Way(lambda m, x: m.linear(x), linear=lin(), seen=[])
    weight = module.linear.weight
    module.node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    module.node.register_hook(lambda *_: module.seen.append(weight.grad.clone()))
    return module


def with_module_hook() -> nn.Module:
    module = Way(lambda m, x: m.linear(x), linear=lin(), seen=[])
    module.linear.register_full_backward_hook(lambda _, gradients, outputs: module.seen.extend((*gradients, *outputs)))
    return module


def forces(m: Any, x: Tensor) -> Tensor:
    """The gradient of an energy for the input, as force fields give it."""
    with torch.enable_grad():
        place = x if x.requires_grad else x.detach().requires_grad_()
        energy = m.second(torch.tanh(m.first(place))).sum()
        (force,) = torch.autograd.grad(energy, place, create_graph=True)
    y: Tensor = m.third(force)
    return y


def weighs(m: Any, x: Tensor) -> Tensor:
    """A step along a weight's own gradient within the forward, as inner loops take."""
    with torch.enable_grad():
        energy = torch.tanh(m.first(x)).square().sum()
        (slope,) = torch.autograd.grad(energy, m.first.weight, create_graph=True)
    y: Tensor = m.second(functional.linear(x, m.first.weight - 0.1 * slope))
    return y


def steers(m: Any, x: Tensor) -> Tensor:
    """A gradient that is only looked at: nothing goes back through it."""
    with torch.enable_grad():
        place = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.tanh(m.first(place)).sum(), place)
    y: Tensor = m.second(m.first(x + force))
    return y


def forcing() -> nn.Module:
    return Way(forces, first=lin(), second=lin(), third=lin())


def twice() -> nn.Module:
    return Way(lambda m, x: m.linear(torch.tanh(m.linear(x))), linear=lin())


def three_of_one() -> nn.Module:
    return Way(lambda m, x: m.a(x) * m.b(x) + m.c(x), a=lin(), b=lin(), c=lin())


def in_half_precision_twice(m: Any, x: Tensor) -> Tensor:
    """The same block in two regions of autocast, each of which casts its weights again."""
    return in_half_precision(m, in_half_precision(m, x))


class Scaled(torch.autograd.Function):
    """A view whose gradient is not that of the tensor it shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return 3 * dy


class StackedExperts(nn.Module):
    """Experts whose matrices are slices of two parameters, as Transformers has them; the last is never chosen."""

    def __init__(self, *, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        self.router, self.up = lin(4), parameter(4, D, 8) if turned else parameter(4, 8, D)
        self.down, self.bias = parameter(4, D, 4), parameter(4, D)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        scores = self.router(rows).softmax(-1).double() * torch.tensor([1.0, 1.0, 1.0, 0.0], device=x.device)
        weights, chosen = scores.topk(2)
        y = torch.zeros_like(rows)
        for index in torch.arange(4, device=x.device):
            row, slot = (chosen == index).nonzero(as_tuple=True)
            if not len(row):
                continue
            up = rows[row] @ self.up[index] if self.turned else functional.linear(rows[row], self.up[index])
            gate, value = up.chunk(2, -1)
            found = functional.linear(torch.tanh(gate) * value, self.down[index], self.bias[index])
            y.index_add_(0, row, (found * weights[row, slot].unsqueeze(-1)).to(y.dtype))
        return y.view_as(x)


def gathered(m: Any, x: Tensor) -> Tensor:
    """A matrix of its own for each row, some of them the same."""
    numbers = torch.tensor([0, 2, 2, 0, 1], device=x.device)
    y: Tensor = torch.bmm(x[0].unsqueeze(1), m.w[numbers])
    z: Tensor = torch.bmm(m.v[numbers], y.mT)
    return z


def grouped_and_turned(m: Any, x: Tensor) -> Tensor:
    ends = torch.tensor([4, 4, 10], dtype=torch.int32, device=x.device)
    y: Tensor = functional.grouped_mm(m.first(x).flatten(0, 1).bfloat16(), m.w.transpose(-2, -1), offs=ends)
    return y.double()


def grouped(m: Any, x: Tensor) -> Tensor:
    ends = torch.tensor([4, 4, 10], dtype=torch.int32, device=x.device)
    y: Tensor = functional.grouped_mm(m.first(x).flatten(0, 1).bfloat16(), m.w, offs=ends)
    return y.double()


def with_raw_node_hook() -> nn.Module:
    module = Way(lambda m, x: x @ m.w, w=parameter(D, D), seen=[])
    module.node = module.w.expand_as(module.w).grad_fn.next_functions[0][0]
    module.node.register_hook(lambda *_: module.seen.append(module.w.grad.clone()))
    return module


def frozen_for_a_while(m: Any, x: Tensor) -> Tensor:
    """Only the second call of the Linear trains it."""
    m.linear.requires_grad_(False)
    y = m.linear(x)
    m.linear.requires_grad_(True)
    z: Tensor = m.linear(torch.tanh(y))
    return z


def offloaded(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        y: Tensor = m.block(x)
    return y


def in_half_precision(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y: Tensor = m.block(x.float())
    return y.double()


def fast_weights(m: Any, x: Tensor) -> Tensor:
    weights = {"weight": m.linear.weight * m.scale, "bias": m.linear.bias}
    y: Tensor = m.linear(torch.func.functional_call(m.linear, weights, (x,)))
    return y


def complex_linear(m: Any, x: Tensor) -> Tensor:
    y: Tensor = m.linear(torch.complex(x, x.flip(-1)))
    return torch.view_as_real(y).flatten(-2)


def shared_over_depth(m: Any, x: Tensor) -> Tensor:
    for _ in range(4):
        x = m.block(x)
    return x


def half_frozen() -> nn.Module:
    linear = lin()
    linear.weight.requires_grad_(False)
    return linear


def tied(count: int, first: int, second: int) -> nn.Module:
    module = nn.Sequential(*[lin() for _ in range(count)])
    module[second].weight = module[first].weight
    return module


def tied_head() -> nn.Module:
    module = Way(lambda m, tokens: m.head(m.block(m.table(tokens))), table=nn.Embedding(11, D), block=Block(), head=lin(11, bias=False))
    module.head.weight = module.table.weight
    return module


def zero_first(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


class Kind(NamedTuple):
    """How to build a module, what it takes (`x`: vectors, `fixed`: vectors without gradient, `tokens`: integers, or several of them),
    and whether some weight has no gradient between its first B and its first W."""

    build: Callable[[], nn.Module]
    takes: str = "x"
    waits: bool = True


KINDS: dict[str, Kind] = {
    "gpt block": Kind(Attention),
    "mlp without bias": Kind(lambda: nn.Sequential(lin(bias=False), nn.GELU(), lin(bias=False))),
    "layer norm": Kind(lambda: nn.LayerNorm(D), waits=False),
    "raw parameters": Kind(lambda: Way(lambda m, x: torch.tanh(x * m.scale) @ m.matrix, scale=parameter(D), matrix=parameter(D, D))),
    "conv1d": Kind(lambda: nn.Sequential(nn.Conv1d(5, 5, 3), nn.ReLU(inplace=True))),
    "conv2d and batch norm": Kind(
        lambda: Way(lambda m, x: m.norm(m.conv(x.unsqueeze(1))), conv=nn.Conv2d(1, 2, 3), norm=nn.BatchNorm2d(2))
    ),
    "batch norm": Kind(lambda: Way(lambda m, x: m.norm(m.linear(x).flatten(0, 1)), linear=lin(), norm=nn.BatchNorm1d(D))),
    "gru": Kind(lambda: Recurrent(nn.GRU), waits=False),
    "lstm": Kind(lambda: Recurrent(nn.LSTM), waits=False),
    "multi-head attention": Kind(lambda: Way(lambda m, x: m.attention(x, x, x)[0], attention=nn.MultiheadAttention(D, 2)), waits=False),
    "transformer layer with dropout": Kind(lambda: nn.TransformerEncoderLayer(D, 2, 12, dropout=0.3)),
    "dropout": Kind(lambda: nn.Sequential(lin(), nn.Dropout(0.4), lin())),
    "weight norm": Kind(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(lin()), lin())),
    "spectral norm": Kind(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(lin()), lin())),
    "orthogonal": Kind(lambda: nn.utils.parametrizations.orthogonal(lin()), waits=False),
    "experts, one of them empty": Kind(Experts),
    "lora": Kind(Lora),
    "partly frozen": Kind(lambda: nn.Sequential(lin().requires_grad_(False), nn.ReLU(inplace=True), lin())),
    "all frozen": Kind(lambda: nn.Sequential(lin(), lin()).requires_grad_(False), waits=False),
    "weight frozen, bias not": Kind(lambda: Way(lambda m, x: m.last(m.first(x)), first=half_frozen(), last=lin())),
    "frozen for a while": Kind(lambda: Way(frozen_for_a_while, linear=lin())),
    "unused parts": Kind(lambda: Way(lambda m, x: m.used(x), used=lin(), unused=lin(), alone=parameter(3))),
    "two inputs, two outputs": Kind(lambda: Way(lambda m, x, y: (m.first(x) * y, m.second(y)), first=lin(), second=lin()), "x x"),
    "an output used by nobody": Kind(lambda: Way(lambda m, x: (m.first(x), m.second(x).detach()), first=lin(), second=lin())),
    "a linear in series": Kind(lambda: Way(lambda m, x: m.linear(m.linear(m.linear(x))), linear=lin())),
    "a linear in parallel": Kind(lambda: Way(lambda m, x: m.linear(x) * m.linear(torch.tanh(x)), linear=lin())),
    "neighbors tied": Kind(lambda: tied(2, 0, 1)),
    "first and third tied": Kind(lambda: tied(3, 0, 2)),
    "norm shared over depth": Kind(lambda: Way(lambda m, x: m.norm(m.b(m.norm(m.a(m.norm(x))))), a=lin(), b=lin(), norm=nn.LayerNorm(D))),
    "scale shared over depth": Kind(
        lambda: Way(lambda m, x: m.b(m.a(x * m.scale) * m.scale) * m.scale, a=lin(), b=lin(), scale=parameter(D))
    ),
    "block shared over depth": Kind(lambda: Way(shared_over_depth, block=Block())),
    "weight used outside its linear": Kind(
        lambda: Way(lambda m, x: functional.linear(m.linear(x), m.linear.weight), linear=lin()), waits=False
    ),
    "embedding": Kind(lambda: nn.Sequential(nn.Embedding(11, D), Block()), "tokens"),
    "embedding tied to its head": Kind(lambda: tied_head(), "tokens"),
    "embedding on an inner stage": Kind(
        lambda: Way(lambda m, x, tokens: m.block(x + m.table(tokens)), table=nn.Embedding(11, D), block=Block()), "x tokens"
    ),
    "sparse embedding": Kind(lambda: nn.Sequential(nn.Embedding(11, D, sparse=True), lin()), "tokens"),
    "input without gradient": Kind(lambda: Block(), "fixed"),
    "a path apart from the input's": Kind(
        lambda: Way(lambda m, x: (m.linear(x), m.other(m.start)), linear=lin(), other=lin(), start=parameter(2, D))
    ),
    "parameter of the output's shape": Kind(
        lambda: Way(lambda m, x: torch.tanh(m.linear(x) + m.place), linear=lin(), place=parameter(2, 5, D))
    ),
    "parameter reshaped to the output": Kind(
        lambda: Way(lambda m, x: torch.tanh(m.linear(x) + m.place.view(2, 5, D)), linear=lin(), place=parameter(60))
    ),
    "parameter reshaped to the input": Kind(
        lambda: Way(lambda m, x: m.linear(torch.tanh(x + m.place.view(2, 5, D))), linear=lin(), place=parameter(60))
    ),
    "parameter reshaped at the end": Kind(lambda: Way(lambda m, x: m.linear(x) + m.place.view(2, 5, D), linear=lin(), place=parameter(60))),
    "parameter and input reshaped alike": Kind(
        lambda: Way(lambda m, x: m.linear(torch.tanh(x.flatten() + m.place.flatten()).view(x.shape)), linear=lin(), place=parameter(60, 1))
    ),
    "output viewed": Kind(lambda: Way(lambda m, x: m.linear(x).view(-1, D), linear=lin())),
    "output transposed": Kind(lambda: Way(lambda m, x: m.linear(x).transpose(0, 1), linear=lin())),
    "output sliced": Kind(lambda: Way(lambda m, x: m.linear(x)[:, 1:, ::2], linear=lin())),
    "output in chunks": Kind(lambda: Way(lambda m, x: m.linear(x).chunk(2, -1), linear=lin())),
    "output expanded": Kind(lambda: Way(lambda m, x: m.linear(x).expand(3, 2, 5, D), linear=lin())),
    "output is the input": Kind(nn.Identity, waits=False),
    "output and input": Kind(lambda: Way(lambda m, x: (m.linear(x), x), linear=lin())),
    "output twice": Kind(lambda: Way(lambda m, x: (m.linear(x),) * 2, linear=lin())),
    "one row": Kind(lambda: Way(lambda m, x: m.linear(x[0, 0]), linear=lin())),
    "no rows": Kind(lambda: Way(lambda m, x: m.linear(x[:0]).sum() + x, linear=lin())),
    "strided input": Kind(lambda: Way(lambda m, x: m.linear(x.transpose(0, 1)[::2]), linear=lin())),
    "parameter as input of a linear": Kind(
        lambda: Way(lambda m, x: m.keys(m.queries) @ m.values(x).mT, queries=parameter(3, D), keys=lin(), values=lin())
    ),
    "relu in place on a linear": Kind(lambda: nn.Sequential(lin(), nn.ReLU(inplace=True), lin())),
    "sum in place on a linear": Kind(lambda: Way(lambda m, x: m.b(m.a(x).add_(x).mul_(2)), a=lin(), b=lin())),
    "in place on a part of a linear": Kind(lambda: Way(lambda m, x: m.b(zero_first(m.a(x))), a=lin(), b=lin())),
    "checkpoint": Kind(lambda: checkpointed(Attention())),
    "checkpoint, reentrant": Kind(lambda: checkpointed(Attention(), reentrant=True)),
    "checkpoint, selective": Kind(lambda: selective(nn.Sequential(lin(), nn.GELU(), lin()))),
    "checkpoint in a checkpoint": Kind(lambda: checkpointed(nn.Sequential(lin(), checkpointed(Attention()), lin()))),
    "checkpoint with dropout": Kind(lambda: checkpointed(nn.Sequential(lin(), nn.Dropout(0.4), lin()))),
    "checkpoint, reentrant, with dropout": Kind(lambda: checkpointed(nn.Sequential(lin(), nn.Dropout(0.4), lin()), reentrant=True)),
    "checkpoint of a linear used outside too": Kind(
        lambda: Way(lambda m, x: m.b(checkpoint(m.b, m.a(x), use_reentrant=False)), a=lin(), b=lin())
    ),
    "offloaded": Kind(lambda: Way(offloaded, block=Block())),
    "compiled": Kind(lambda: compiled(Attention()), waits=False),
    "compiled in place": Kind(lambda: compiled_in_place(Attention()), waits=False),
    "compiled between linears": Kind(lambda: nn.Sequential(lin(), compiled(Block()), lin())),
    "hand-made function": Kind(lambda: Way(lambda m, x: m.linear(HandMade.apply(x, m.weight)), weight=parameter(D, D), linear=lin())),
    "autocast": Kind(lambda: Way(in_half_precision, block=Block().float())),
    "autocast, a linear used twice": Kind(lambda: Way(in_half_precision, block=twice().float())),
    "autocast, region by region": Kind(lambda: Way(in_half_precision_twice, block=Block().float())),
    "autocast, three linears of one input": Kind(lambda: Way(in_half_precision, block=three_of_one().float())),
    "autocast, checkpoint": Kind(lambda: Way(in_half_precision, block=checkpointed(Block()).float())),
    "autocast, gradient within the forward": Kind(lambda: Way(in_half_precision, block=forcing().float())),
    "autocast, convolution": Kind(lambda: Way(in_half_precision, block=nn.Conv1d(5, 5, 3).float()), waits=False),
    "conv1d, grouped, strided and dilated": Kind(lambda: nn.Conv1d(5, 10, 2, groups=5, stride=2, dilation=2, padding=1)),
    "conv1d, same": Kind(lambda: nn.Sequential(nn.Conv1d(5, 5, 4, padding="same", dilation=2), nn.Conv1d(5, 5, 3, padding="valid"))),
    "conv1d, reflected": Kind(lambda: nn.Conv1d(5, 5, 3, padding=1, padding_mode="reflect", bias=False)),
    "conv1d, circular and same": Kind(lambda: nn.Conv1d(5, 5, 4, padding="same", padding_mode="circular")),
    "conv1d without a batch": Kind(lambda: Way(lambda m, x: m.conv(x[0]), conv=nn.Conv1d(5, 5, 3))),
    "conv1d of no rows": Kind(lambda: Way(lambda m, x: m.conv(x[:0]).sum() + x, conv=nn.Conv1d(5, 5, 3))),
    "conv2d, transposed input": Kind(
        lambda: Way(lambda m, x: m.conv(x.unsqueeze(1).mT), conv=nn.Conv2d(1, 4, (2, 3), padding=(1, 2), stride=(2, 1)))
    ),
    "conv2d used twice": Kind(lambda: Way(lambda m, x: m.conv(torch.tanh(m.conv(x.unsqueeze(1)))), conv=nn.Conv2d(1, 1, 3, padding=1))),
    "conv3d, replicated": Kind(
        lambda: Way(lambda m, x: m.conv(x[:, None, None]), conv=nn.Conv3d(1, 3, (1, 2, 3), padding=(0, 1, 1), padding_mode="replicate"))
    ),
    "conv transposed": Kind(lambda: nn.Sequential(nn.ConvTranspose1d(5, 5, 3)), waits=False),
    "checkpoint of convolutions": Kind(lambda: checkpointed(nn.Sequential(nn.Conv1d(5, 5, 3), nn.GELU(), nn.Conv1d(5, 5, 3)))),
    "embedding with padding": Kind(lambda: nn.Embedding(11, D, padding_idx=-1), "tokens"),
    "embedding by frequency": Kind(lambda: nn.Embedding(11, D, scale_grad_by_freq=True), "tokens", waits=False),
    "embedding of bounded norm": Kind(lambda: nn.Embedding(11, D, max_norm=1.0), "tokens", waits=False),
    "embedding bag": Kind(lambda: nn.EmbeddingBag(11, D), "tokens", waits=False),
    "matrix of the module, linear": Kind(lambda: Way(lambda m, x: functional.linear(x, m.w, m.b), w=parameter(4, D), b=parameter(4))),
    "matrix of the module, first": Kind(lambda: Way(lambda m, x: torch.tanh(torch.matmul(m.w, x)), w=parameter(3, 5))),
    "matrix of the module, in a list": Kind(
        lambda: Way(lambda m, x: x @ m.list[0] @ m.list[1], list=nn.ParameterList([torch.randn(D, D), torch.randn(D, 2)]))
    ),
    "matrix of the module, in a checkpoint": Kind(
        lambda: Way(lambda m, x: m.last(checkpoint(lambda x: torch.tanh(x @ m.w), x, use_reentrant=False)), w=parameter(D, D), last=lin())
    ),
    "matrix of the module, in a reentrant checkpoint": Kind(
        lambda: Way(lambda m, x: m.last(checkpoint(lambda x: torch.tanh(x @ m.w), x, use_reentrant=True)), w=parameter(D, D), last=lin())
    ),
    "checkpoint of a module with a matrix": Kind(lambda: checkpointed(Way(lambda m, x: torch.tanh(x @ m.w) @ m.w, w=parameter(D, D)))),
    "matrix of the module before a compiled block": Kind(
        lambda: Way(lambda m, x: m.block(x @ m.w), w=parameter(D, D), block=compiled(Block()))
    ),
    "matrix of the module, hooked": Kind(with_raw_node_hook, waits=False),
    "matrix of the module, mapped over rows": Kind(
        lambda: Way(lambda m, x: torch.vmap(lambda row: row @ m.w)(x), w=parameter(D, D)), waits=False
    ),
    "matrix of the module, frozen": Kind(
        lambda: Way(lambda m, x: x @ m.w @ m.fixed, w=parameter(D, D), fixed=parameter(D, D).requires_grad_(False))
    ),
    "experts, batched": Kind(
        lambda: Way(lambda m, x: torch.bmm(torch.relu(torch.bmm(x, m.up)), m.down), up=parameter(2, D, 8), down=parameter(2, 8, D))
    ),
    "experts, batched with bias": Kind(lambda: Way(lambda m, x: torch.baddbmm(m.b, x, m.w), w=parameter(2, D, 8), b=parameter(2, 1, 8))),
    "experts, broadcast": Kind(lambda: Way(lambda m, x: torch.tanh(x.unsqueeze(1) @ m.w).sum(1), w=parameter(3, D, D))),
    "experts by einsum": Kind(
        lambda: Way(lambda m, x: torch.einsum("bend,edf->benf", x.unsqueeze(1).expand(2, 3, 5, D), m.w), w=parameter(3, D, 4))
    ),
    "addmm": Kind(lambda: Way(lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w), w=parameter(D, 4), b=parameter(4))),
    "addmm that scales": Kind(
        lambda: Way(lambda m, x: torch.addmm(m.b, x.flatten(0, 1), m.w, alpha=2), w=parameter(D, 4), b=parameter(4)), waits=False
    ),
    "addmm under autocast": Kind(
        lambda: Way(
            in_half_precision,
            block=Way(
                lambda m, x: m.act(torch.addmm(m.b, x[0], m.w)) @ m.w, act=nn.ReLU(inplace=True), w=parameter(D, D), b=parameter(D)
            ).float(),
        )
    ),
    "matrix turned": Kind(lambda: Way(lambda m, x: torch.tanh(x @ m.w.T) @ m.w, w=parameter(8, D))),
    "matrix turned and linear": Kind(lambda: Way(lambda m, x: functional.linear(x, m.w.t(), m.b), w=parameter(D, 8), b=parameter(8))),
    "matrix of a view that scales its gradient": Kind(lambda: Way(lambda m, x: x @ Scaled.apply(m.w), w=parameter(D, D)), waits=False),
    "matrix of a view that is hooked": Kind(hooked_view, waits=False),
    "matrix of a view, broadcast": Kind(lambda: Way(lambda m, x: x @ m.w.expand(2, D, 4), w=parameter(D, 4)), waits=False),
    "halves of a matrix": Kind(lambda: Way(halves, w=parameter(8, D))),
    "matrix whole and in part": Kind(lambda: Way(lambda m, x: torch.tanh(x @ m.w) @ m.w[:, :2], w=parameter(D, D))),
    "experts in stacks": Kind(StackedExperts),
    "experts in stacks, turned": Kind(lambda: StackedExperts(turned=True)),
    "experts in stacks, twice": Kind(lambda: Way(lambda m, x: m.block(torch.tanh(m.block(x))), block=StackedExperts())),
    "experts in stacks, checkpointed": Kind(lambda: checkpointed(StackedExperts())),
    "experts in stacks, autocast": Kind(lambda: Way(in_half_precision, block=StackedExperts().float())),
    "experts gathered": Kind(lambda: Way(gathered, w=parameter(3, D, 4), v=parameter(3, 5, 4))),
    "experts by einsum in parts": Kind(lambda: Way(lambda m, x: torch.einsum("bd,fd->bf", x[0], m.w[1]), w=parameter(2, 4, D))),
    "experts grouped and turned": Kind(
        lambda: Way(grouped_and_turned, w=nn.Parameter(torch.randn(3, 8, 16, dtype=torch.bfloat16)), first=lin(16))
    ),
    "experts grouped": Kind(lambda: Way(grouped, w=nn.Parameter(torch.randn(3, 16, 8, dtype=torch.bfloat16)), first=lin(16))),
    "gradient within a checkpoint": Kind(lambda: checkpointed(Way(forces, first=lin(), second=lin(), third=lin()))),
    "gradient within a reentrant checkpoint": Kind(
        lambda: checkpointed(Way(forces, first=lin(), second=lin(), third=lin()), reentrant=True)
    ),
    "gradient of weights within a checkpoint": Kind(lambda: checkpointed(Way(weighs, first=lin(), second=lin()))),
    "first gradient within a checkpoint, kept from going back": Kind(lambda: checkpointed(Way(steers, first=lin(), second=lin()))),
    "gradient within the forward": Kind(lambda: Way(forces, first=lin(), second=lin(), third=lin())),
    "gradient within the forward, input without": Kind(lambda: Way(forces, first=lin(), second=lin(), third=lin()), "fixed"),
    "linear mapped over rows": Kind(lambda: Way(lambda m, x: m.last(torch.vmap(m.linear)(x)), linear=lin(), last=lin())),
    "weights given by a call": Kind(lambda: Way(fast_weights, linear=lin(), scale=parameter(D)), waits=False),
    "complex linear": Kind(lambda: Way(complex_linear, linear=nn.Linear(D, D, dtype=torch.complex128)), waits=False),
    "tensor hooks": Kind(with_tensor_hook, waits=False),
    "hook after accumulation": Kind(with_accumulated_hook, waits=False),
    "hook on the accumulating node": Kind(with_node_hook, waits=False),
    "module hook": Kind(with_module_hook),
}
if not hasattr(functional, "grouped_mm"):  # torch 2.6 has none
    del KINDS["experts grouped"], KINDS["experts grouped and turned"]
