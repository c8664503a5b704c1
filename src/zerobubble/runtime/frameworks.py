"""All that `zerobubble.integrations` may import from the runtime, besides the public names of `zb`; import-linter checks it.

A training framework runs its own loop, and calls a pipeline where it would call a model. An adapter needs:

- Arguments of `zb.Pipeline` before there is a pipeline: `PipelineOptions`, `ALIKE`, `dependency_faults`, `faults_in`, `schedule_for`.
- Microbatches and outputs, cut and joined as a step does: `sample_slices`, `join_outputs`, `OUTPUTS`.
- User code that runs for each microbatch, with one device's draws: `RandomStates`, `states_restored`, `seed_all`, `drawn_seed`, `mixed`.
- What that code changes in Python objects: `PythonState`, `Snapshot`, `changed`, `put_back`, `Place`, `Items`, `GENERATORS`,
  `is_constant_code`.
- The trained weights of all stages in the framework's model: `gathering`, `make_whole`.
- Calls of torch that need all ranks, and what saves an optimizer: `COMBINING`, `takes_rank_for_replica`, `SAVED_BY`.
- Layers of the framework that split their backward pass: `linear`, `STAND_INS`.
- Messages between processes that name a lost rank: `exchanging`, `PeerSockets`, `NewConnections`.
"""

from zerobubble.runtime.executor.program_cache import schedule_for
from zerobubble.runtime.gathered import gathering, make_whole
from zerobubble.runtime.hooks.torch_calls import COMBINING, takes_rank_for_replica
from zerobubble.runtime.options import ALIKE, PipelineOptions, dependency_faults, faults_in
from zerobubble.runtime.split.layers.linear import linear
from zerobubble.runtime.split.layers.stand_ins import STAND_INS
from zerobubble.runtime.step.batch import OUTPUTS, join_outputs, sample_slices
from zerobubble.runtime.step.optimizers import SAVED_BY
from zerobubble.runtime.transport.contact import exchanging
from zerobubble.runtime.transport.sockets import NewConnections, PeerSockets
from zerobubble.runtime.values.python_objects import is_constant_code
from zerobubble.runtime.values.python_places import Items, Place
from zerobubble.runtime.values.python_state import GENERATORS, PythonState, Snapshot, changed, put_back
from zerobubble.runtime.values.random_state import RandomStates, drawn_seed, mixed, seed_all, states_restored

__all__ = [
    "ALIKE",
    "COMBINING",
    "GENERATORS",
    "OUTPUTS",
    "SAVED_BY",
    "STAND_INS",
    "Items",
    "NewConnections",
    "PeerSockets",
    "PipelineOptions",
    "Place",
    "PythonState",
    "RandomStates",
    "Snapshot",
    "changed",
    "dependency_faults",
    "drawn_seed",
    "exchanging",
    "faults_in",
    "gathering",
    "is_constant_code",
    "join_outputs",
    "linear",
    "make_whole",
    "mixed",
    "put_back",
    "sample_slices",
    "schedule_for",
    "seed_all",
    "states_restored",
    "takes_rank_for_replica",
]
