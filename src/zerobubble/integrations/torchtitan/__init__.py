"""torchtitan with a zero-bubble schedule: `pipelining_fn` for a `ModelSpec`, and `pipelined` for a whole configuration.

torchtitan's trainer calls two methods of a schedule object, `step` and `eval`. Here they run a `zb.Pipeline`. Everything else stays
torchtitan's: models and their `parallelize_fn`, data, losses, optimizers, clipping, checkpoints, validation and metrics.

    from zerobubble.integrations.torchtitan import pipelined

    def llama3_8b_zero_bubble():
        return pipelined(llama3_8b(), "zb-v")
"""

from zerobubble.integrations.versions import needed
from zerobubble.runtime.frameworks import COMBINING

with needed("torchtitan"):
    from zerobubble.integrations.torchtitan.front import pipelined, pipelining_fn
    from zerobubble.integrations.torchtitan.schedule import TitanSchedule

__all__ = ["TitanSchedule", "pipelined", "pipelining_fn"]

COMBINING.add("torchtitan.distributed.utils")
