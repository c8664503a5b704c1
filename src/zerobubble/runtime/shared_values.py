"""The last part of the phase *connect*: ranks make equal what they share, and prepare to sum its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from zerobubble.errors import InputError
from zerobubble.reductions import stage_sums
from zerobubble.runtime.failure.setup_ranks import SetupRanks
from zerobubble.runtime.hooks.changed_copies import ChangedCopies, watched_copies
from zerobubble.runtime.hooks.equal_optimizers import EqualOptimizers
from zerobubble.runtime.hooks.equal_values import EqualValues
from zerobubble.runtime.hooks.replicas import Replicas
from zerobubble.runtime.hooks.shared_gradients import SharedGradients
from zerobubble.runtime.setup import Setup
from zerobubble.runtime.stage.rank_stages import Stages
from zerobubble.runtime.stage.replaced_parameters import ReplacedParameters
from zerobubble.runtime.stage.sharded import ShardedTensors
from zerobubble.runtime.step.hook import StepHook
from zerobubble.runtime.transport.mesh import EXPERTS, Layout
from zerobubble.runtime.transport.peers import Peers
from zerobubble.runtime.transport.transport import Transport


@dataclass(frozen=True)
class SharedValues:
    """What this rank shares with others.

    Attributes:
        shared: Parameters that several stages or ranks of the pipeline hold.
        sharded: The parameters and buffers that are sharded over ranks.
        replicas: The ranks with other shares of the batch; None if there are none.
        copies: Watches what has copies on other ranks or stages.
    """

    shared: SharedGradients
    sharded: ShardedTensors
    replicas: Replicas | None
    copies: ChangedCopies

    def hooks(self) -> list[StepHook]:
        """Returns the hooks that sum gradients and compare copies, in the order of their calls."""
        sums: list[StepHook] = [self.shared] if self.shared.is_needed else []
        if self.replicas is not None:
            sums = [self.replicas.earlier, *sums, self.replicas]
        optimizers = EqualOptimizers([*self.shared.shared_with_others(), *(self.replicas.shared_with_others() if self.replicas else ())])
        values = EqualValues(self.shared.shared_with_others())
        return [*([self.copies] if self.copies.is_needed else []), *sums, *(hook for hook in (optimizers, values) if hook.is_needed)]


def share_values(ranks: SetupRanks, layout: Layout, peers: Peers, setup: Setup, bucket_bytes: int, *, are_equal: bool) -> SharedValues:
    """Broadcasts the values that ranks share, unless they `are_equal`, and returns what sums their gradients."""
    modules = setup.stages.modules
    shared = SharedGradients(setup.schedule.placement, modules, peers, setup.tied, setup.gradients)
    sharded = _sharded(ranks, layout, setup)
    replicas = _replicas(ranks.transport, layout, setup, sharded, peers.rank, bucket_bytes) if layout.data else None
    # Copies within a pipeline first, so that all copies of the first replica agree on the values that other replicas receive.
    _make_equal(ranks, partial(shared.broadcast_initial_values, are_equal=are_equal), "making the copies of stages equal")
    if replicas is not None:
        _make_equal(ranks, replicas.broadcast_initial_values, "making replicas equal")
    setup.stages.refusals += [sums.refuse_other_parameters for sums in (shared, replicas) if sums is not None]
    setup.stages.replaced = ReplacedParameters(modules.values(), shared.names, _holders(peers, setup.stages), replicas=replicas is not None)
    return SharedValues(shared, sharded, replicas, watched_copies(modules, shared, replicas))


def _sharded(ranks: SetupRanks, layout: Layout, setup: Setup) -> ShardedTensors:
    """Returns the parts of the stages that ranks divide. If it cannot be trained, closes and raises the same `InputError` on all ranks."""
    fault, sharded, spread = "", None, False
    try:
        sharded = ShardedTensors(ranks.transport, layout, setup.stages.modules)
        spread = sharded.is_any_along(EXPERTS)
    except InputError as error:
        fault = str(error)
    if EXPERTS in layout.lockstep:
        with ranks.guard.opening("while comparing experts"):
            is_spread = any(ranks.gather(spread, "comparing experts"))
        if not is_spread and not fault:
            fault = (
                f"mesh has a dimension {EXPERTS!r}, but no stage holds parameters that are distributed over it: make experts DTensors over "
                f"mesh[{EXPERTS!r}], mark them with zb.nn.mark_experts, or count its ranks into 'dp'"
            )
    if layout.along:
        ranks.agree(fault, {})
    elif fault:
        raise InputError(fault)
    assert sharded is not None
    return sharded


def _replicas(transport: Transport, layout: Layout, setup: Setup, sharded: ShardedTensors, rank: int, bucket_bytes: int) -> Replicas:
    """Returns the sums over replicas, in the order in which stages end in the schedule of `rank`.

    A planner may change the schedule of one replica before another's: without an order, sums go from the last stage to the first.
    """
    order = [] if setup.planner is not None else [gradients.stage for gradients in stage_sums(setup.compiled.graph)[rank]]
    return Replicas(transport, layout, setup.stages.modules, sharded, setup.gradients, order, bucket_bytes)


def _make_equal(ranks: SetupRanks, broadcast: Callable[[], None], doing: str) -> None:
    """Broadcasts initial values, which may take long."""
    with ranks.guard.opening(f"while {doing}"):
        ranks.timeout.run(broadcast, doing, is_brief=False)


def _holders(peers: Peers, stages: Stages) -> dict[str, set[int]]:
    """Returns the ranks that hold each parameter, by its name in stages."""
    names = {name for module in stages.modules.values() for name, _ in module.named_parameters(remove_duplicate=False)}
    with peers.collective("comparing the names of parameters"):
        of_ranks = peers.gather_objects(sorted(names))
    holders: dict[str, set[int]] = {}
    for rank, theirs in enumerate(of_ranks):
        for name in theirs:
            holders.setdefault(name, set()).add(rank)
    return holders
