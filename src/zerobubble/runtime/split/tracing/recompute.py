"""Activation checkpoints in traced stages: recorded during tracing, then written into the joint graph.

While AOTAutograd traces, checkpoints discard nothing: every value has a node. So a dispatch mode records the nodes made inside a
checkpoint. Nodes that the backward needs, and that are used nowhere outside of their checkpoint, are then copied to the point where the
backward first needs them. The forward keeps the same values as in eager mode: the inputs of a checkpoint, the outputs used later, and what
the policy of a selective checkpoint saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import getitem
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from zerobubble.errors import InputError
from zerobubble.runtime.device import interface
from zerobubble.runtime.split.graphs.fx_nodes import is_getitem, is_random
from zerobubble.runtime.split.layers.weight_work import CAN_SEE_HOOKS

_SAVED_POLICIES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
Checkpoint: TypeAlias = tuple[Any, Any]
"""A checkpoint in a forward, identified by its pack and unpack hooks for saved tensors."""
CheckpointOf: TypeAlias = Mapping[str, Checkpoint]
"""The outermost checkpoint in which nodes were made, by node name."""


@contextmanager
def recording_checkpoints(tensors: Sequence[Tensor]) -> Iterator[CheckpointOf]:
    """Records the outermost checkpoint of each node while a graph is traced.

    `tensors` are the inputs of the forward. Raises `InputError` for other hooks on saved tensors, which have no effect in a graph, and for
    a checkpoint that changes one of `tensors`. Before torch 2.8, hooks cannot be distinguished, and a checkpoint raises `RuntimeError`.
    """
    if not CAN_SEE_HOOKS:
        with disable_saved_tensors_hooks("checkpoints and offloading have no effect in a graph; checkpoints need torch 2.8 or later"):
            yield {}
        return
    with _CheckpointRecorder(tensors) as recorder:
        yield recorder.checkpoint_of


class _CheckpointRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts every operation while a forward is traced, and fills `checkpoint_of`."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.checkpoint_of: dict[str, Checkpoint] = {}
        self._tensors = tensors
        self._versions = self._current_versions()
        self._num_hooks_outside = len(_saved_tensors_hooks())
        self._was_in_checkpoint = False

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if raised[0] is None:
            self._refuse_changes()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, as for the modes of selective checkpoints: torch may call compiled code under this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._refuse_changes()
        checkpoints = _saved_tensors_hooks()[self._num_hooks_outside :]
        self._was_in_checkpoint = bool(checkpoints)
        if not checkpoints:
            return func(*args, **(kwargs or {}))
        if any(pack.__module__ != "torch.utils.checkpoint" for pack, _ in checkpoints):
            raise InputError("its hooks on saved tensors, as offloading sets them, have no effect in a graph")
        mode = get_proxy_mode()
        if mode is None:
            return func(*args, **(kwargs or {}))
        nodes = mode.tracer.graph.nodes
        num_before = len(nodes)
        result = func(*args, **(kwargs or {}))
        self._record(nodes, num_before, checkpoints[0])
        return result

    def _record(self, nodes: Any, num_before: int, outermost: Checkpoint) -> None:
        """Records the nodes after the first `num_before`, made by one operation in a checkpoint."""
        new = islice(reversed(nodes), len(nodes) - num_before)
        self.checkpoint_of.update((node.name, outermost) for node in new)

    def _refuse_changes(self) -> None:
        """Raises if the last operation changed a tensor within a checkpoint. The version increases only after the operation, so the next
        one checks.
        """
        before, self._versions = self._versions, self._current_versions()
        if self._was_in_checkpoint and self._versions != before:
            raise InputError("a checkpoint in it changes a buffer or an input, and recomputing would change it twice")

    def _current_versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


def _saved_tensors_hooks() -> list[Checkpoint]:
    """Returns the active hooks on saved tensors, outermost first. torch exposes only the innermost, so all are popped and pushed back."""
    hooks_in_order: list[Checkpoint] = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks_in_order.insert(0, hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in hooks_in_order:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return hooks_in_order


def recompute_in_backward(joint: fx.GraphModule, forward: set[fx.Node], checkpoint_of: CheckpointOf, *, redraw: bool) -> set[fx.Node]:
    """Changes `joint` so that its backward part recomputes the nodes of checkpoints; returns the new nodes of the `forward` part.

    With `redraw`, random numbers are redrawn from the saved state of the generator; otherwise the forward saves them.
    """
    checkpoints = _nodes_in_checkpoints([node for node in joint.graph.nodes if node in forward], checkpoint_of)
    discarded = _discarded(checkpoints, forward, redraw)
    users = [node for node in joint.graph.nodes if node not in forward and node.op != "output"]
    for node, copy in _copy_to_users(joint.graph, discarded, users, checkpoints).items():
        if is_random(node):
            forward = (forward - {node}) | _redraw(joint.graph, node, copy)
    for node in joint.graph.nodes:
        for mark in ("recompute", "ac_graph_id"):  # these would make inductor recompute a second time
            node.meta.pop(mark, None)
    return forward


def _nodes_in_checkpoints(forward: Iterable[fx.Node], checkpoint_of: CheckpointOf) -> dict[fx.Node, Checkpoint]:
    """Returns the nodes of a forward made in a checkpoint, in order, each with its checkpoint. Selected results stay with their node."""
    checkpoints: dict[fx.Node, Checkpoint] = {}
    for node in forward:
        source: Any = node.args[0] if is_getitem(node) else None
        checkpoint = checkpoint_of.get(node.name) if source is None else checkpoints.get(source)
        if checkpoint is not None:
            checkpoints[node] = checkpoint
    return checkpoints


def _discarded(checkpoints: Mapping[fx.Node, Checkpoint], forward: set[fx.Node], redraw: bool) -> set[fx.Node]:
    """Returns the nodes that the forward discards: not saved by a policy, and used in the forward only within their checkpoint."""
    discarded = set()
    for node, checkpoint in checkpoints.items():
        users = [user for user in node.users if user in forward]
        if not _is_saved(node, redraw) and all(checkpoints.get(user) == checkpoint for user in users):
            discarded.add(node)
    return discarded


def _is_saved(node: fx.Node, redraw: bool) -> bool:
    """Returns whether a node's value is saved: by the policy of a selective checkpoint, or because it cannot be redrawn."""
    source: Any = node.args[0] if is_getitem(node) else node
    return source.meta.get("recompute") in _SAVED_POLICIES or (is_random(source) and not redraw)


def _copy_to_users(
    graph: fx.Graph, discarded: set[fx.Node], users: Sequence[fx.Node], checkpoints: Mapping[fx.Node, Checkpoint]
) -> dict[fx.Node, fx.Node]:
    """Copies the discarded nodes that `users` need to the first use of their checkpoint, and redirects the users to the copies."""
    first_user: dict[Checkpoint, fx.Node] = {}
    for user in users:
        for source in discarded.intersection(user.all_input_nodes):
            first_user.setdefault(checkpoints[source], user)
    needed = _needed_by(users, discarded)
    copies: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if node in needed]:
        with graph.inserting_before(first_user[checkpoints[node]]):
            copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
    for user in users:
        for source in discarded.intersection(user.all_input_nodes):
            user.replace_input_with(source, copies[source])
    return copies


def _needed_by(users: Iterable[fx.Node], discarded: set[fx.Node]) -> set[fx.Node]:
    """Returns the discarded nodes that lead to `users` only through discarded nodes."""
    needed: set[fx.Node] = set()
    stack = list(users)
    while stack:
        new = discarded.intersection(stack.pop().all_input_nodes) - needed
        needed |= new
        stack += new
    return needed


def _redraw(graph: fx.Graph, node: fx.Node, copy: fx.Node) -> set[fx.Node]:
    """Makes `copy` redraw the random numbers of `node` from the saved generator state; returns the nodes that replace `node`."""
    replacement = _draw_and_keep_state(graph, node)
    target: Any = copy.target
    with graph.inserting_before(copy):
        same = graph.call_function(run_with_rng_state, (replacement.kept_state, target, *copy.args), dict(copy.kwargs))
    same.meta = dict(copy.meta)
    copy.replace_all_uses_with(same)
    graph.erase_node(copy)
    node.replace_all_uses_with(replacement.drawn)
    graph.erase_node(node)
    return set(replacement)


class _Drawing(NamedTuple):
    """A node with two results: the state of the generator before a draw, and the random numbers `drawn`."""

    both: fx.Node
    kept_state: fx.Node
    drawn: fx.Node


def _draw_and_keep_state(graph: fx.Graph, node: fx.Node) -> _Drawing:
    target: Any = node.target
    with graph.inserting_before(node):
        both = graph.call_function(run_and_save_rng_state, (target, *node.args), dict(node.kwargs))
        kept_state = graph.call_function(getitem, (both, 0))
        drawn = graph.call_function(getitem, (both, 1))
    drawn.meta = dict(node.meta)
    kept_state.meta["val"] = _generator_state_like(node.meta["val"])
    both.meta["val"] = (kept_state.meta["val"], node.meta["val"])
    return _Drawing(both, kept_state, drawn)


def _generator_state_like(value: Any) -> Any:
    """Returns the generator state of a value's device, as a fake tensor of the same fake mode."""
    parts = value if isinstance(value, (tuple, list)) else (value,)
    tensor: Any = next(part for part in parts if isinstance(part, Tensor))
    on_device = interface(tensor.device)
    state = on_device.random_state() if on_device.has_generator else torch.get_rng_state()
    return tensor.fake_mode.from_tensor(state)
