"""A session: the connected ranks of a pipeline, which have agreed on all arguments and hold equal values of what they share.

Order. `connect` has the phases of `zerobubble.runtime.failure`. Each needs the one before: the rendezvous gives a transport, on which
faults can be exchanged; stages are built before arguments are compared, because the comparison covers the schedule and the devices;
channels open only after the comparison, because ranks with different arguments would wait for each other; and values are broadcast over
open channels. A rank that finds a fault early does not raise at once, which would leave the others waiting: it brings the fault to the next
comparison, where every rank raises all faults of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerobubble.errors import InputError
from zerobubble.runtime.agreement import compare_levels, compare_models, place_stages_without_tensors, terms_of
from zerobubble.runtime.executor.program_cache import every_channel
from zerobubble.runtime.failure.guard import FailureGuard
from zerobubble.runtime.failure.setup_ranks import SetupRanks
from zerobubble.runtime.failure.setup_timeout import SetupTimeout
from zerobubble.runtime.options import (
    PipelineOptions,
    faults_in,
    layout_for,
    usable_timeout,
)
from zerobubble.runtime.setup import Setup, build_stages
from zerobubble.runtime.shared_values import SharedValues, share_values
from zerobubble.runtime.stage.uncut_model import RankStages
from zerobubble.runtime.transport.choice import transport_for
from zerobubble.runtime.transport.mesh import Layout
from zerobubble.runtime.transport.peers import Peers, in_transport_ranks
from zerobubble.runtime.transport.rank_process import this_process
from zerobubble.runtime.transport.rendezvous import RendezvousRecord
from zerobubble.runtime.transport.terms import versions
from zerobubble.runtime.transport.transport import Transport
from zerobubble.runtime.values.buffers import making_tensors
from zerobubble.runtime.values.random_state import next_seed


@dataclass(frozen=True)
class Session:
    """This rank's part in a pipeline whose ranks are connected.

    Attributes:
        transport: Connects all ranks of the mesh, which `layout` describes.
        peers: The ranks of this pipeline.
        guard: Reports a failure of any rank to all.
        setup_ranks: The ranks, while they set up the pipeline.
        values: What this rank shares with others.
        seed: Seeds the random numbers of stages, on all ranks.
    """

    transport: Transport
    layout: Layout
    peers: Peers
    guard: FailureGuard
    setup_ranks: SetupRanks
    setup: Setup
    values: SharedValues
    seed: int
    options: PipelineOptions


@making_tensors()
def connect(options: PipelineOptions, survivors: Layout | None = None) -> Session:
    """Meets the other ranks, builds this rank's stages, agrees on all arguments, connects, and makes shared values equal.

    With `survivors`, the remaining ranks of an earlier pipeline continue. Their values are equal, or will be once all have ended the same
    call.

    Raises `InputError` on every rank, with all faults and differences of all ranks, and `PipelineError` on every rank if one of them fails
    or does not arrive.
    """
    layout = survivors or layout_for(options)
    ranks, peers = _rendezvous(options, layout)
    own_seed = 0 if survivors is not None else next_seed()  # survivors have their modules and keep their seed
    with ranks.guard.opening("while agreeing on a seed"):
        seed: int = ranks.gather(own_seed, "agreeing on a seed")[0]
    with ranks.guard.during("while building its stages"):
        setup, fault, cause = build_stages(options, layout, peers, own_seed)
    # A rank with a fault goes on until here: the others wait for it in this comparison, and all raise its fault together.
    all_terms = ranks.agree(fault, terms_of(options, setup), cause)
    assert setup is not None
    place_stages_without_tensors(ranks, setup, all_terms)
    is_given = survivors is None and setup.whole is None
    compare_models(ranks, layout, setup, RankStages.of(setup.stages, options.build_or_modules) if is_given else None)
    compare_levels(ranks, setup)
    _open_channels(ranks, layout, setup, captures_steps=options.captures_steps)
    values = share_values(ranks, layout, peers, setup, options.bucket_bytes, are_equal=survivors is not None)
    return Session(ranks.transport, layout, peers, ranks.guard, ranks, setup, values, seed, options)


def _rendezvous(options: PipelineOptions, layout: Layout) -> tuple[SetupRanks, Peers]:
    """Reaches the other ranks, and watches their processes from now on, or from before if they are already known."""
    record = RendezvousRecord(faults_in(options), versions(), this_process())
    transport = transport_for(options.transport, layout, usable_timeout(options), record)
    peers = Peers(transport, layout.pipeline, Peers(transport, layout.along[layout.lockstep]) if layout.lockstep else None)
    guard = FailureGuard(transport)
    ranks = SetupRanks(transport, guard, SetupTimeout(transport, guard, usable_timeout(options)))
    doing, processes = "meeting the other ranks", transport.group.processes
    with guard.during(f"while {doing}"):
        if processes:
            guard.watch_processes(processes)
        ranks.timeout.run(transport.connect, doing)
        if not processes:
            guard.watch_processes(ranks.gather(this_process(), doing))
    return ranks, peers


def _open_channels(ranks: SetupRanks, layout: Layout, setup: Setup, *, captures_steps: bool) -> None:
    """Opens the channels of the first schedule in every pipeline."""
    transport, channels = ranks.transport, every_channel(setup.compiled)
    of_all = [in_transport_ranks(channel, pipeline) for pipeline in layout.pipelines for channel in channels]
    with ranks.guard.opening("while connecting the ranks"):
        ranks.timeout.run(lambda: transport.open(setup.stages.device, of_all), "connecting the ranks")
        if captures_steps and not transport.capabilities.can_be_captured:
            raise InputError(
                "cuda_graphs='step' cannot capture messages of transport {transport!r}, for which the host waits",
                transport=transport.carrier.name,
                remedy="leave it out, or give each rank a GPU of its own and leave transport out",
            )
