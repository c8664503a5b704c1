"""Refuses inputs of the network that a pipeline cannot train with: those that need gradients, and those that are not cut with the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils import _pytree as pytree

from zerobubble.errors import InputError


class CapturedInputs:
    """The inputs with which `training_step` of `module` calls the network for microbatches.

    Cost per step: a look at the shapes of the inputs, and at their graphs if they have any.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._name = f"{type(module).__name__}.training_step"
        self._cut: set[str] = set()

    def refuse_unfit(self, inputs: Sequence[Any], sizes: Sequence[int], network: str, outside: Mapping[str, Tensor]) -> None:
        """Raises `InputError` if inputs depend on parameters `outside` the network, or have more rows than the microbatch.

        Args:
            inputs: The inputs of each microbatch.
            sizes: The numbers of samples of microbatches.
            network: The name of the network.
            outside: The parameters outside the network, by name.
        """
        tensors = {
            pytree.keystr(path): leaf
            for path, leaf in pytree.tree_flatten_with_path(inputs[0])[0]
            if isinstance(leaf, Tensor) and leaf.ndim
        }
        self._refuse_trained(tensors.values(), network, outside)
        whole = sum(sizes)
        for path, tensor in tensors.items():
            if path in self._cut and len(tensor) == whole > sizes[0]:
                raise InputError(
                    "{name} calls {network} for a microbatch of {expected} samples with a tensor of {got}: its argument {path} is the "
                    "state of an earlier step, which is not cut",
                    name=self._name,
                    network=network,
                    path=path,
                    got=whole,
                    expected=sizes[0],
                    remedy="make it in each step for len(batch) samples, or let on_after_batch_transfer add it to the batch",
                )
        self._cut |= {path for path, tensor in tensors.items() if len(tensor) == sizes[0] < whole}

    def _refuse_trained(self, tensors: Iterable[Tensor], network: str, outside: Mapping[str, Tensor]) -> None:
        names = {id(parameter): name for name, parameter in outside.items()}
        if used := sorted({names[id(leaf)] for tensor in tensors for leaf in _leaves_of(tensor) if id(leaf) in names}):
            raise InputError(
                "{name} calls {network} with inputs that it computes from {used}, and parameters outside the network are trained with the "
                "loss only, on the rank of the last stage",
                name=self._name,
                network=network,
                used=", ".join(f"self.{name}" for name in used),
                remedy='let training_step call self(x), whose forward uses them, with PipelineStrategy(network="")',
            )


def _leaves_of(tensor: Tensor) -> Iterator[Tensor]:
    """Returns the tensors to whose gradients the graph of `tensor` leads."""
    if tensor.requires_grad and tensor.grad_fn is None:
        yield tensor
    nodes, seen = [tensor.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes += [before for before, _ in node.next_functions]
