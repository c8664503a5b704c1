"""Reads the layers of `plan --from` from the configuration of a training framework."""

from __future__ import annotations

from zerobubble.cli.inputs.layers import Laid
from zerobubble.cost_model.gpus import known_gpu
from zerobubble.errors import InputError

TITAN = "titan"


def read_source(source: str, gpu: str | None, ranks: int | None, microbatches: int | None) -> Laid:
    """Returns the layers that `source` describes, with times of `gpu`. `ranks` and `microbatches` replace those of the configuration."""
    framework, _, config = source.partition(":")
    if framework != TITAN or not config:
        raise InputError(
            "--from takes {expected}, got {got!r}", argument="--from", expected="titan:CONFIG or titan:MODULE:CONFIG", got=source
        )
    if gpu is None:
        raise InputError(
            "{argument} needs {needed}, whose data sheet gives the times", argument="--from", needed="--gpu NAME, such as H100"
        )
    try:
        from zerobubble.integrations.torchtitan.runs import read_run  # imports torchtitan
    except ModuleNotFoundError as error:
        raise InputError(
            "--from titan: needs torchtitan, and {got} is missing: pip install 'zerobubble[torchtitan]'", got=str(error.name)
        ) from error
    run = read_run(config)
    num_ranks = ranks if ranks is not None else run.pp
    if num_ranks == 1 and ranks is None:
        raise InputError("the configuration {got} has parallelism.pipeline_parallel_degree=1: give --ranks", got=config, argument="--ranks")
    return Laid(run.layers(gpu), num_ranks, microbatches if microbatches is not None else run.num_microbatches, known_gpu(gpu).memory_bytes)
