"""What checkpoints compute again: seen while a stage is traced, and written into its joint graph.

While AOTAutograd traces, checkpoints keep everything they are to forget. So the nodes made inside one are noted, and those that the
backward pass needs and nobody outside the checkpoint has used are copied to where it first needs them. The forward then keeps what it
keeps in eager mode: what goes into a checkpoint, what comes out of it and is used later, and what a selective one is told to save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from zerobubble.errors import InputError
from zerobubble.runtime.split.gate import CAN_SEE_HOOKS

_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_Hooks = tuple[Any, Any]


@contextmanager
def noting_checkpoints(tensors: Sequence[Tensor]) -> Iterator[Mapping[str, _Hooks]]:
    """FailureReport in which outermost checkpoint each node of the graph in the making is made, by the node's name.

    `tensors` are what the forward is given. Raises `InputError` for other hooks on saved tensors, which have no effect in a graph, and
    for a checkpoint that changes one of `tensors`. Before torch 2.8, which cannot tell hooks apart, a checkpoint is a `RuntimeError`.
    """
    if not CAN_SEE_HOOKS:
        with disable_saved_tensors_hooks("checkpoints and offloading have no effect in a graph; checkpoints have from torch 2.8 on"):
            yield {}
        return
    with _Noting(tensors) as noting:
        yield noting.made


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation, and notes in `made` what `noting_checkpoints` says."""

    supports_higher_order_operators = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[str, _Hooks] = {}
        self._tensors = tensors
        self._versions = self._look()
        self._around = len(_hooks())
        self._is_inside = False

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if raised[0] is None:
            self._check()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As the modes of selective checkpoints: torch may call what it compiles under this one."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._check()
        hooks = _hooks()[self._around :]
        self._is_inside = bool(hooks)
        if not hooks:
            return func(*args, **(kwargs or {}))
        if any(pack.__module__ != "torch.utils.checkpoint" for pack, _ in hooks):
            raise InputError("its hooks on saved tensors, as offloading sets them, have no effect in a graph")
        mode = get_proxy_mode()
        before = 0 if mode is None else len(mode.tracer.graph.nodes)
        result = func(*args, **(kwargs or {}))
        if mode is not None:
            nodes = mode.tracer.graph.nodes
            self.made.update((node.name, hooks[0]) for node in islice(reversed(nodes), len(nodes) - before))
        return result

    def _check(self) -> None:
        """Whether the last operation changed a tensor within a checkpoint: versions count up behind it."""
        before, self._versions = self._versions, self._look()
        if self._is_inside and self._versions != before:
            raise InputError("a checkpoint in it changes a buffer or an input, which computing again would change once more")

    def _look(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]


def _hooks() -> list[_Hooks]:
    """The hooks on saved tensors in force, outermost first. They can be read by taking them off alone."""
    found: list[_Hooks] = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.insert(0, hooks)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in found:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
    return found


def compute_again(joint: fx.GraphModule, forward: set[fx.Node], made: Mapping[str, _Hooks], *, draw: bool) -> set[fx.Node]:
    """Let the backward part of `joint` compute again what was `made` in checkpoints; gives the `forward` part's nodes as they are now.

    With `draw`, it draws random numbers again, from the same state of the generator; else the forward keeps what came of them.
    """
    for node, copy in _copies(joint.graph, forward, made, draw).items():
        if is_random(node):
            forward = (forward - {node}) | _draw_alike(joint.graph, node, copy)
    for node in joint.graph.nodes:
        for mark in ("recompute", "ac_graph_id"):  # on these inductor would act once more
            node.meta.pop(mark, None)
    return forward


def _copies(graph: fx.Graph, forward: set[fx.Node], made: Mapping[str, _Hooks], draw: bool) -> dict[fx.Node, fx.Node]:
    """Copy what the backward part needs and the forward is to forget to where its checkpoint is first needed, and use the copies there."""
    inside = _inside([node for node in graph.nodes if node in forward], made)
    lost = {node for node in inside if not _is_saved(node, draw) and all(inside.get(u) == inside[node] for u in node.users if u in forward)}
    users = [node for node in graph.nodes if node not in forward and node.op != "output"]
    firsts: dict[_Hooks, fx.Node] = {}
    for user in users:
        for source in lost.intersection(user.all_input_nodes):
            firsts.setdefault(inside[source], user)
    needed = _leading(lost, users)
    copies: dict[fx.Node, fx.Node] = {}
    for node in [node for node in graph.nodes if node in needed]:
        with graph.inserting_before(firsts[inside[node]]):
            copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
    for user in users:
        for source in lost.intersection(user.all_input_nodes):
            user.replace_input_with(source, copies[source])
    return copies


def _inside(forward: Iterable[fx.Node], made: Mapping[str, _Hooks]) -> dict[fx.Node, _Hooks]:
    """The nodes of a forward that were made in a checkpoint, in order, each with it."""
    found: dict[fx.Node, _Hooks] = {}
    for node in forward:
        hooks = found.get(node.args[0]) if node.target is getitem else made.get(node.name)  # type: ignore[arg-type]
        if hooks is not None:
            found[node] = hooks
    return found


def _is_saved(node: fx.Node, draw: bool) -> bool:
    """Whether what the node gives is kept: by the policy of a selective checkpoint, or as it cannot be drawn again."""
    source: Any = node.args[0] if node.target is getitem else node
    return source.meta.get("recompute") in _SAVED or (not draw and is_random(source))


def _leading(lost: set[fx.Node], users: Iterable[fx.Node]) -> set[fx.Node]:
    """Those of the `lost` that lead to one of `users`."""
    found: set[fx.Node] = set()
    stack = list(users)
    while stack:
        new = lost.intersection(stack.pop().all_input_nodes) - found
        found |= new
        stack += new
    return found


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers, which attention does with dropout alone."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(target, "tags", ()):
        return False
    names = [argument.name for argument in target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return "dropout_p" not in names or given.get("dropout_p", 0.0) != 0.0


def _draw_alike(graph: fx.Graph, node: fx.Node, copy: fx.Node) -> set[fx.Node]:
    """Let `copy` draw the random numbers of `node`, whose generator's state is kept; gives what stands for `node` now."""
    target: Any = node.target
    value = node.meta["val"]
    tensor = next(part for part in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(part, Tensor))
    state = torch.get_rng_state() if tensor.device.type == "cpu" else torch.cuda.get_rng_state(tensor.device)
    with graph.inserting_before(node):
        both = graph.call_function(run_and_save_rng_state, (target, *node.args), dict(node.kwargs))
        kept, drawn = graph.call_function(getitem, (both, 0)), graph.call_function(getitem, (both, 1))
    drawn.meta = dict(node.meta)
    kept.meta["val"] = tensor.fake_mode.from_tensor(state)  # type: ignore[attr-defined]
    both.meta["val"] = (kept.meta["val"], value)
    with graph.inserting_before(copy):
        again = graph.call_function(run_with_rng_state, (kept, target, *copy.args), dict(copy.kwargs))
    again.meta = dict(copy.meta)
    copy.replace_all_uses_with(again)
    graph.erase_node(copy)
    node.replace_all_uses_with(drawn)
    graph.erase_node(node)
    return {both, kept, drawn}
