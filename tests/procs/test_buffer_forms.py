"""`zb.gathered` brings buffers that are sparse, or expanded, so that elements share memory. Checkpoints refuse sparse ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerobubble as zb
from tests.device import cpu_only
from tests.procs.ranks import Ranks

pytestmark = cpu_only("compares with one device")
WIDTH, NODES = 4, 6
TOLERANCE = 1e-9
FORMS = {
    "coo": lambda dense: dense.to_sparse(),
    "uncoalesced": lambda dense: torch.sparse_coo_tensor(
        dense.to_sparse().indices().repeat(1, 2), dense.to_sparse().values().repeat(2) / 2, dense.shape
    ),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "expanded": lambda dense: dense[:1].expand(NODES, -1),
}


class Mixing(nn.Module):
    """A linear layer, and a matrix over nodes that is a buffer of the layer."""

    def __init__(self, matrix: Tensor | None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y.tanh() if self.matrix is None else (self.matrix @ y).tanh()


class Net(nn.Module):
    """Four layers; the matrix is a buffer of the model, or one of each layer, which a training step may scale."""

    def __init__(self, form: str, place: str) -> None:
        super().__init__()
        matrix = FORMS[form](torch.eye(NODES) + torch.diag(torch.ones(NODES - 1), 1))
        self.layers = nn.ModuleList(Mixing(matrix.clone() if place == "parts" else None) for _ in range(4))
        self.register_buffer("matrix", None if place == "parts" else matrix)
        self.scales = place == "scaled"

    def forward(self, x: Tensor) -> Tensor:
        if self.scales and self.training:
            self.matrix = self.matrix * 2
        for layer in self.layers:
            x = layer(x) if self.matrix is None else self.matrix @ layer(x)
        return x


def net(form: str, place: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(form, place).double()


def dense(model: nn.Module) -> list[Tensor]:
    return [(tensor if tensor.layout is torch.strided else tensor.to_dense()).clone() for tensor in model.state_dict().values()]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((mine - other).abs().max()) for mine, other in zip(ours, theirs, strict=True))


def gathers(group: Any, place: str, folder: str) -> dict[str, float]:
    """By form, the largest difference from one device of losses, gathered tensors, and tensors that were changed while gathered."""
    x, differences = torch.randn(NODES, WIDTH, dtype=torch.float64), {}
    for form in FORMS:
        model, one = net(form, place), net(form, place)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        with zb.Pipeline(zb.split(model, example=x), "1f1b", 1, nn.MSELoss(), group=group) as pipe:
            piped, errors = torch.optim.SGD(pipe.parameters(), lr=0.1), []
            for _ in range(2):
                loss = nn.functional.mse_loss(one(x), x)
                loss.backward()
                errors.append(float((pipe.step(x, x) - loss.detach()).abs()))
                for each in (optimizer, piped):
                    each.step()
                    each.zero_grad()
                with zb.gathered(model):
                    errors.append(difference(dense(model), dense(one)))
                    layouts = [tensor.layout for tensor in model.state_dict().values()]
                    if form != "expanded":
                        for buffer in (*model.buffers(), *one.buffers()):
                            buffer.mul_(0.5)
                with zb.gathered(model):
                    errors.append(difference(dense(model), dense(one)))
                    assert layouts == [tensor.layout for tensor in one.state_dict().values()]
            if form == "expanded":
                zb.save(f"{folder}/{form}", pipe, piped)
                zb.load(f"{folder}/{form}", pipe, piped)
            else:
                with pytest.raises(zb.InputError) as caught:
                    zb.save(f"{folder}/{form}", pipe, piped)
                assert "matrix" in str(caught.value)
                assert "persistent=False" in str(caught.value)
            pipe.step(x, x)
            differences[form] = max(errors)
    return differences


@pytest.mark.parametrize("place", ["model", "parts", "scaled"])
def test_gathered_buffers_of_every_layout_are_those_of_one_device(world: Ranks, tmp_path: Path, place: str) -> None:
    for differences in world.run(gathers, place, str(tmp_path), ranks=2):
        assert max(differences.values()) < TOLERANCE, differences
