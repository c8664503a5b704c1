"""What a batch holds besides tensors and plain values is cut as one device sees it, or is an error that leaves the pipeline usable."""

from __future__ import annotations

import warnings
from collections import UserDict, defaultdict, deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.nn.utils.rnn import pack_sequence

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.ranks import Ranks, alone
from tests.refusals import states

B, M, LENGTH, WIDTH, BLOCK = 6, 4, 128, 4, 32


class Attention(nn.Module):
    """Attends where the blocks and the function of the mask say: flex attention itself has no backward on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH).double()

    def forward(self, x: Tensor, mask: BlockMask, scale: float = 1.0) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, dim=-1))
        blocks = mask.to_dense().bool().repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
        single = create_mask(mask.mask_mod, len(x), 1, LENGTH, LENGTH, device="cpu")
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=blocks & single)[:, 0] * scale


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def masked(by_sample: bool) -> BlockMask:
    """Sample b sees the keys up to 16 (b + 1), or all samples the same keys."""

    def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv < (16 * (b + 1) if by_sample else 40)

    return create_block_mask(sees, B if by_sample else None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)


def attended(group: Any, by_sample: bool, as_kwargs: bool) -> float:
    """The largest difference of loss and gradients from one device."""
    x, mask = numbers(B, LENGTH, WIDTH), masked(by_sample)
    model = Attention()
    expected = nn.functional.mse_loss(model(x, mask, 2.0), x)
    expected.backward()
    inputs: Any = x if as_kwargs else {"x": x, "mask": mask, "scale": 2.0}
    kwargs = {"mask": mask, "scale": 2.0} if as_kwargs else None
    with zb.Pipeline([Attention()], "gpipe", M, nn.functional.mse_loss, group=alone()) as pipe:
        loss = pipe.step(inputs, x, kwargs=kwargs)
        pairs = zip(pipe.parameters(), model.parameters(), strict=True)
        return max((loss - expected).abs().item(), *((a.grad - b.grad).abs().max().item() for a, b in pairs))  # type: ignore[operator]


@cpu_only("the mask is one of the CPU")
@pytest.mark.sweep
@pytest.mark.parametrize(("by_sample", "as_kwargs"), [(True, False), (True, True), (False, False)])
def test_a_block_mask_is_cut_with_the_batch(world: Ranks, by_sample: bool, as_kwargs: bool) -> None:
    (error,) = world.run(attended, by_sample, as_kwargs, ranks=1)
    assert error <= 1e-9


@dataclass
class Sample:
    x: Tensor
    factor: float = 1.0


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x


class Takes(nn.Module):
    """A stage that takes its input in any form."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Any, other: Any = None, third: Any = None) -> Tensor:
        return self.inner(x.x * x.factor) if isinstance(x, Sample) else self.inner(x)  # type: ignore[no-any-return]


def boxes_loss(output: Tensor, target: Any) -> Tensor:
    if isinstance(target, Tensor):
        return nn.functional.mse_loss(output, target)
    return torch.stack([(row - sample["boxes"]).square().mean() for row, sample in zip(output, target, strict=True)]).mean()


X = numbers(B, WIDTH)
BOXES = [{"boxes": numbers(j + 1, WIDTH)} for j in range(B)]
GROUPED = [BOXES[0:2], BOXES[2:4], BOXES[4:5], BOXES[5:6]]
WORKS: dict[str, tuple[Any, Any]] = {
    "dataclass": (Sample(X, 2.0), X),
    "list of dataclasses": ([Sample(part, 2.0) for part in X.tensor_split(M)], list(X.tensor_split(M))),
    "user dict": (UserDict(x=X), X),
    "samples": (X, GROUPED),
    "mapping": ({"x": X, "other": {"v": X[:, 0]}}, X),
    "named tuple": ({"x": X, "other": Pair(X, X)}, X),
    "number": ({"x": X, "other": np.float64(2.0)}, X),
    "no batch": ({"x": X, "other": (torch.tensor(2.0), "mean", None, [1, 2])}, X),
}
REFUSED: dict[str, tuple[Any, Any, dict[str, int | None] | None, tuple[Any, ...]]] = {
    "array": ({"x": X, "other": np.ones(B)}, X, None, ("ndarray", B)),
    "object": ({"x": X, "other": Holder(X)}, X, None, ("Holder", B)),
    "arrays": ({"x": X.numpy(), "other": X.numpy()}, X, None, ("inputs['x']", "inputs['other']", "torch.from_numpy")),
    "nested user dict": ({"x": X, "other": UserDict(v=X)}, X, None, ("UserDict", B)),
    "nested default dict": ({"x": X, "other": defaultdict(int, v=X)}, X, None, ("defaultdict", B)),
    "view of a dict": ({"x": X, "other": MappingProxyType({"v": X})}, X, None, ("mappingproxy", B)),
    "deque": ({"x": X, "other": deque([X])}, X, None, ("deque", B)),
    "layers of a cache": ({"x": X, "other": Holder([Holder(X)])}, X, None, ("Holder", B)),
    "list of scalars": ({"x": X, "other": list(X[:, 0])}, X, None, ("inputs['other']", B)),
    "list of boxes": ({"x": X, "other": [{"box": torch.ones(1, 4)}] * B}, X, None, ("inputs['other']", B)),
    "sizes": ({"x": X, "other": torch.ones(B + 1)}, X, None, (B, B + 1, "inputs['other']")),
    "sparse": ({"x": X, "other": torch.eye(B).to_sparse()}, X, None, ("inputs['other']",)),
    "unknown name": ({"x": X}, X, {"othr": 1}, ("batch_dims", "'othr'", "'other'")),
    "dimension of a tuple": ((X, X[:, 0]), X, {"other": 1}, ("'other'", 1)),
    "packed": ({"x": X, "other": pack_sequence([X[:1]] * B)}, X, None, ("PackedSequence",)),
    "not cut": ({"x": X, "other": 2.0}, X, {"other": 0}, ("batch_dims", "'other'", 0)),
    "samples": (X, BOXES, None, (B, M)),
}


def time_major_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target.transpose(0, 1))


def stepped(group: Any) -> tuple[dict[str, float], dict[str, Exception], float]:
    """The differences from one device of what works, the errors of what is refused, and the largest difference of the steps after these."""
    works, refused, last = {}, {}, 0.0

    def pipeline(batch_dims: Any = None) -> zb.Pipeline:
        return zb.Pipeline([Takes()], "gpipe", M, boxes_loss, group=alone(), batch_dims=batch_dims)

    plain = boxes_loss(Takes()(X), X)
    with pipeline() as pipe:
        for name, (inputs, targets) in WORKS.items():
            factor = 2.0 if "dataclass" in name else 1.0
            expected = boxes_loss(Takes()(X * factor), BOXES if name == "samples" else X)
            works[name] = (pipe.step(inputs, targets) - expected).abs().item()
    for name, (inputs, targets, dims, _) in REFUSED.items():
        with pipeline(dims) as pipe:
            try:
                pipe.step(inputs, targets)
            except zb.InputError as error:
                refused[name] = error
            last = max(last, (pipe.step(X, X) - plain).abs().item())
    sequence = numbers(3, B, WIDTH)
    expected = nn.functional.mse_loss(Takes()(sequence, ...), sequence)
    for inputs in (sequence, (sequence, 2.0)):
        with zb.Pipeline([Takes()], "gpipe", M, time_major_loss, group=alone(), batch_dims={"x": 1}) as pipe:
            works[f"dimension of a {type(inputs).__name__}"] = (pipe.step(inputs, sequence.transpose(0, 1)) - expected).abs().item()
    with warnings.catch_warnings(record=True) as warned, pipeline() as pipe:
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step({"x": X, "other": ["a"] * B}, X)
            pipe.step({"x": X, "other": ["a"] * (B - 1)}, X)
    (warning,) = [str(warning.message) for warning in warned if "other" in str(warning.message)]
    states(warning, "inputs['other']", B, "batch_dims")
    with pipeline({"other": None}) as pipe:
        works["shared array"] = (pipe.step({"x": X, "other": np.ones(B)}, X) - plain).abs().item()
        for kwargs in (3, {"third": [{"box": torch.ones(1, 4)}] * B}):
            try:
                pipe.step(X, X, kwargs=kwargs)
            except zb.InputError as error:
                refused[f"kwargs of type {type(kwargs).__name__}"] = error
        last = max(last, (pipe.step(X, X) - plain).abs().item())
    return works, refused, last


def test_other_forms_of_a_batch_work_or_are_refused(world: Ranks) -> None:
    ((works, refused, last),) = world.run(stepped, ranks=1)
    assert max(works.values()) <= 1e-9, works
    assert refused.keys() == {*REFUSED, "kwargs of type int", "kwargs of type dict"}
    for name, (*_, values) in REFUSED.items():
        states(refused[name], *values)
    assert last <= 1e-9
