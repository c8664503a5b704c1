"""Reads the layers of `plan`: for `--layers` from a file, for `--from` from the configuration of a training framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from importlib import import_module
from typing import Any, NamedTuple

from zerobubble.arguments import require, require_amount, require_ms
from zerobubble.cli.inputs.files import Parsed, read_json
from zerobubble.cli.inputs.problem import WorkOptions
from zerobubble.cost_model.gpus import GPU, known_gpu
from zerobubble.cost_model.machine import MACHINE, Machine, timed_on
from zerobubble.errors import InputError, ParseError
from zerobubble.installing import install
from zerobubble.partition import Layer
from zerobubble.partition.layers import LINE, NUMBERS, WORDS
from zerobubble.planning.problem.workload import RANK_BYTES
from zerobubble.units import NS_PER_MS

REMEDY = "write the layers of a model with `zerobubble split config.json -o layers.json`"
_TIMES = ("forward", "backward", "weight")
_KEYS = tuple(column.name for column in fields(Layer))
_REQUIRED = tuple(column.name for column in fields(Layer) if column.default is MISSING)


DTYPE = "dtype"
"""The key of a file of layers for the dtype of their activations."""


class CountedDtype(NamedTuple):
    """The dtype in which `split` counts activations; the default of torch if it is not `in_config`."""

    name: str
    in_config: bool

    def __str__(self) -> str:
        if self.in_config:
            return f"Activations count in {self.name}, the torch_dtype of the configuration."
        remedy = 'Under autocast, add "torch_dtype": "bfloat16" to it, and split again'
        return f"Activations count in {self.name}, as the configuration has no torch_dtype. {remedy}."

    @classmethod
    def from_dict(cls, data: Any) -> CountedDtype:
        """Reads the JSON form. Raises `ParseError` for anything else."""
        if not isinstance(data, dict) or data.keys() != set(cls._fields):
            raise ParseError("{key} needs {expected}, got {data!r:.60}", key=DTYPE, expected=" and ".join(cls._fields), data=data)
        return cls(str(data["name"]), bool(data["in_config"]))


class GivenLayers(NamedTuple):
    """Layers to cut, the numbers of ranks and microbatches as far as they are known, and the device that runs them.

    Times are estimates for `gpu`, or for the assumed `machine`. If `is_measured`, or with neither, the file has the times. `dtype` is that
    of activations, if `split` counted them.
    """

    parts: tuple[Layer, ...]
    ranks: int | None
    microbatches: int | None
    gpu: GPU | None = None
    machine: Machine | None = None
    is_measured: bool = False
    dtype: CountedDtype | None = None

    def device_text(self) -> str:
        """Names the device of the layers' times; empty if only the user knows it."""
        if self.is_measured and self.gpu is not None:
            return f"The file has the times; {self.gpu.name} only sets the memory."
        if self.gpu is not None:
            return f"Times are estimates for {self.gpu.name}, from its data sheet."
        if self.machine is not None:
            return f"Times are estimates for an assumed GPU of {self.machine}. For your GPU, give --gpu, such as --gpu RTX4090."
        return ""


def layers_in_file(file: str, work: WorkOptions, gpu: str | None, *, need_bytes: bool) -> GivenLayers:
    """Returns the layers in `file`, for the ranks and microbatches of the options, with estimated times of `gpu` if the file has FLOPs."""
    need_bytes |= gpu is not None

    def parse(data: Any) -> tuple[tuple[Layer, ...], Machine | None, CountedDtype | None]:
        layers = _layers(data, work.comm, work.held, need_bytes)
        return layers, _part(data, MACHINE, Machine.from_dict), _part(data, DTYPE, CountedDtype.from_dict)

    parts, machine, dtype = read_json(file, "layers", parse, REMEDY)
    if gpu is None:
        return GivenLayers(parts, work.ranks, work.microbatches, machine=machine, dtype=dtype)
    device = known_gpu(gpu)
    if machine is not None:
        parts = timed_on(parts, machine, device, work.ranks or 1)
    return GivenLayers(parts, work.ranks, work.microbatches, device, is_measured=machine is None, dtype=dtype)


def read_layers(file: str, comm: float, held: float, *, need_bytes: bool = False) -> tuple[Layer, ...]:
    """Reads the layers in `file`: their JSON form in ns and bytes, or a list of [F, B, W] in ms, for layers that save equal memory.

    `comm` in ms and `held` apply to a list. Raises `InputError` with the file and the layer that is wrong, and for a list if
    `need_bytes`.
    """
    return read_json(file, "layers", lambda data: _layers(data, comm, held, need_bytes), REMEDY)


def _part(data: Any, key: str, parse: Callable[[Any], Parsed]) -> Parsed | None:
    """Parses what a file of layers says of their origin under `key`; None if it says nothing."""
    return parse(data[key]) if isinstance(data, dict) and key in data else None


def _layers(data: Any, comm: float, held: float, need_bytes: bool) -> tuple[Layer, ...]:
    if isinstance(data, list) and need_bytes:
        raise ParseError("a list of times has no bytes", remedy="give --memory in microbatches and no --gpu, or the JSON form of layers")
    is_form = isinstance(data, dict) and isinstance(data.get("layers"), list)
    if not is_form and not isinstance(data, list):
        raise ParseError("give a list with [F, B, W] in ms per layer, or the JSON form of layers")
    if not (rows := data["layers"] if is_form else data):
        raise ParseError("it has no layers", remedy="give at least one for each stage")
    if is_form:
        return tuple(_from_form(number, layer) for number, layer in enumerate(rows))
    return tuple(_from_times(number, row, comm, held) for number, row in enumerate(rows))


def _from_times(number: int, row: Any, comm: float, held: float) -> Layer:
    if not isinstance(row, list) or len(row) != len(_TIMES):
        raise ParseError("layer {number} needs three times in ms, [F, B, W], got {row!r:.60}", number=number, row=row)
    for name, value in zip(_TIMES, row, strict=True):
        require_ms(f"{name} of layer {number}", value, "a finite number of ms >= 0")
    forward, backward, weight, link = (round(value * NS_PER_MS) for value in (*row, comm))
    return Layer(forward, backward, weight, RANK_BYTES, round(held * RANK_BYTES), output_comm=link)


def _from_form(number: int, data: Any) -> Layer:
    if not isinstance(data, dict):
        raise ParseError("layer {number} must be an object, got {data!r:.60}", number=number, data=data)
    lacking, unknown = [key for key in _REQUIRED if key not in data], [key for key in data if key not in _KEYS]
    if lacking or unknown:
        sentence = "layer {number} lacks {key!r}" if lacking else "layer {number} has {key!r}, which no layer has"
        raise ParseError(sentence, number=number, key=(*lacking, *unknown)[0])
    for name, value in data.items():
        if name in WORDS:
            require(f"{name} of layer {number}", value, LINE)
        if name in NUMBERS:
            require_amount(f"{name} of layer {number}", value)
    return Layer(**data)


class LayerSource(NamedTuple):
    """A framework of `plan --from`: the usage of the option, its package, and our module whose `read_run` imports it."""

    usage: str
    package: str
    module: str


SOURCES = {
    "titan": LayerSource("titan:CONFIG or titan:MODULE:CONFIG", "torchtitan", "zerobubble.integrations.torchtitan.runs"),
    "trainer": LayerSource("trainer:FILE", "transformers", "zerobubble.integrations.trainer_run"),
}


def read_source(source: str, gpu: str | None, ranks: int | None, microbatches: int | None) -> GivenLayers:
    """Returns the layers that `source` describes, with times of `gpu`. `ranks` and `microbatches` replace those of the configuration."""
    framework, _, config = source.partition(":")
    if framework not in SOURCES or not config:
        raise InputError(
            "--from takes {expected}, got {got!r}",
            argument="--from",
            expected=" or ".join(entry.usage for entry in SOURCES.values()),
            got=source,
        )
    if gpu is None:
        raise InputError(
            "{argument} needs {needed}, whose data sheet gives the times", argument="--from", needed="--gpu NAME, such as H100"
        )
    try:
        run = import_module(SOURCES[framework].module).read_run(config, ranks, microbatches)
    except ModuleNotFoundError as error:
        raise InputError(
            "--from {got}: needs {expected}, and {missing} is missing",
            got=framework,
            expected=SOURCES[framework].package,
            missing=str(error.name),
            remedy=install(SOURCES[framework].package),
        ) from error
    return GivenLayers(run.layers(gpu), run.pp, run.num_microbatches, known_gpu(gpu))
