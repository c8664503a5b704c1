"""The one module that names kinds of devices: the host and any accelerator of torch, behind one interface.

`interface(device)` returns the interface of the host or of an accelerator, which uses `torch.accelerator` and `torch.get_device_module`.
Other code calls `is_host` if a host behaves differently, such as for blocking calls, and never compares names of devices.

A kind of accelerator may lack some features, such as graph capture. Using one raises an `InputError` that names it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerobubble.communicators import MOST_QUEUES, USUAL_QUEUES
from zerobubble.errors import InputError
from zerobubble.installing import CUDA_BUILD
from zerobubble.units import counted

Result = TypeVar("Result")
Stream = Any
"""A queue of work on a device, with the methods `wait_stream`, `wait_event` and `synchronize` of `torch.Stream`."""
Event = Any
"""A point in a stream, with the methods `record`, `synchronize`, `query` and `elapsed_time` of `torch.Event`."""


class Feature(StrEnum):
    """Features that some kinds of devices lack."""

    STREAMS = "streams"
    TIMES = "events with times"
    PINNED = "pinned host memory"
    GRAPHS = "graphs"


class DeviceInterface:
    """The interface of a device. A method for a feature that the device lacks raises an `InputError`."""

    has_graphs = False
    """Whether graphs can be captured."""
    has_generator = False
    """Whether it has a random generator other than the CPU's."""
    needs_host_compiler = True
    """Whether compiled code for it needs a C++ compiler."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_stream(self) -> Stream:
        """Returns the stream on which the calling thread enqueues work."""
        raise self.lacks("streams")

    def new_stream(self) -> Stream:
        """Creates a stream."""
        raise self.lacks("streams")

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """A context in which the calling thread enqueues work on `stream`."""
        raise self.lacks("streams")

    def set_stream(self, stream: Stream) -> None:
        """Makes `stream` current in the calling thread."""
        raise self.lacks("streams")

    def new_event(self, *, timed: bool = False) -> Event:
        """Creates an event; its times can be compared if it is `timed`."""
        raise self.lacks("events")

    def keep_for(self, tensor: Tensor, stream: Stream) -> None:
        """Reuses the memory of `tensor` only after the work that is on `stream` when the tensor is freed (`Tensor.record_stream`)."""
        raise self.lacks("streams")

    def synchronize(self) -> None:
        """Waits until the device has done all its work."""
        raise self.lacks("synchronization")

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocates host memory to and from which copies of this device can be asynchronous."""
        raise self.lacks("host memory")

    def copy_on_host(self, tensor: Tensor) -> Tensor:
        """Enqueues a copy of `tensor` to host memory, and returns it. The host may read it once the device has done that work."""
        return self.host_memory(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)

    def random_state(self) -> Tensor:
        """Returns the state of the device's generator."""
        raise self.lacks("random generator")

    def set_random_state(self, state: Tensor) -> None:
        """Sets the state of the device's generator."""
        raise self.lacks("random generator")

    def generator(self) -> torch.Generator:
        """Returns the device's default generator."""
        raise self.lacks("random generator")

    def is_capturing(self) -> bool:
        """Returns whether a graph is being captured, which forbids to read the state of the generator."""
        return False

    def free_bytes(self) -> int:
        """Returns the free memory in bytes."""
        raise self.lacks("count of free memory")

    def capture(self, run: Callable[[], Result], pool: Any) -> tuple[Any, Callable[[], object], Result]:
        """Captures what `run` enqueues as a graph with memory from `pool`, None for a new one.

        Returns the pool, a function that replays the graph, and the result of `run`, valid after a replay.
        """
        raise self.lacks("graphs")

    def uuid(self) -> str:
        """Returns an id that no other device has; empty if torch reports none."""
        return ""

    def lacking(self, features: Iterable[Feature]) -> list[Feature]:
        """Returns the `features` that the device lacks. It tries each of them, because torch's modules differ in more than their names."""
        return [feature for feature in features if not self._has(feature)]

    def _has(self, feature: Feature) -> bool:
        try:
            if feature is Feature.STREAMS:
                self.current_stream()
                with self.on_stream(self.new_stream()):
                    pass
            elif feature is Feature.TIMES:
                self.new_event(timed=True)
            elif feature is Feature.PINNED:
                self.host_memory((1,), torch.uint8)
        except Exception:  # noqa: BLE001 - backends of torch raise errors of many types
            return False
        return feature is not Feature.GRAPHS or self.has_graphs

    def lacks(self, feature: str) -> InputError:
        """Returns the error for a feature that this kind of device does not have in this version of torch."""
        return InputError(
            "device {device} has no {feature} in torch {version}",
            device=str(self.device),
            feature=feature,
            version=torch.__version__,
            remedy="leave out the option that needs it, or use another device",
        )


class Host(DeviceInterface):
    """The host, which does its work in order: it has no streams, and no random state other than torch's own of the CPU."""

    def synchronize(self) -> None:
        pass

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Accelerator(DeviceInterface):
    """An accelerator of any kind, which does its work on streams after the calls that enqueue it have returned."""

    has_generator = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._module = torch.get_device_module(device)
        self.has_graphs = hasattr(self._module, "CUDAGraph")  # ROCm's, too
        self.needs_host_compiler = not self.has_graphs

    def _feature(self, attribute: str, feature: str) -> Any:
        member = getattr(self._module, attribute, None)
        if member is None:
            raise self.lacks(feature)
        return member

    def current_stream(self) -> Stream:
        return getattr(self._module, "current_stream", torch.accelerator.current_stream)(self.device)

    def new_stream(self) -> Stream:
        return self._feature("Stream", "streams")(self.device)

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._feature("stream", "streams")(stream)
        return context

    def set_stream(self, stream: Stream) -> None:
        torch.accelerator.set_stream(stream)

    def new_event(self, *, timed: bool = False) -> Event:
        return self._feature("Event", "events")(enable_timing=timed)

    def keep_for(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def random_state(self) -> Tensor:
        return self.generator().get_state()

    def set_random_state(self, state: Tensor) -> None:
        self.generator().set_state(state)

    def generator(self) -> torch.Generator:
        self._feature("init", "random generator")()  # before it, there are none
        generators = self._feature("default_generators", "random generator")
        index = torch.accelerator.current_device_index() if self.device.index is None else self.device.index
        generator: torch.Generator = generators[index]
        return generator

    def is_capturing(self) -> bool:
        return bool(getattr(self._module, "is_current_stream_capturing", lambda: False)())

    def free_bytes(self) -> int:
        return int(self._feature("mem_get_info", "count of free memory")(self.device)[0])

    def capture(self, run: Callable[[], Result], pool: Any) -> tuple[Any, Callable[[], object], Result]:
        graph = self._feature("CUDAGraph", "graphs")()
        pool = pool if pool is not None else self._module.graph_pool_handle()
        with self._module.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = run()
        return pool, graph.replay, result

    def uuid(self) -> str:
        return str(getattr(self._module.get_device_properties(self.device), "uuid", ""))


_stand_in: DeviceInterface | None = None


def interface(device: torch.device) -> DeviceInterface:
    """Returns the interface of a device."""
    if _stand_in is not None:
        return _stand_in
    return _interface(device)


@cache
def _interface(device: torch.device) -> DeviceInterface:
    return Host(device) if device.type in ("cpu", "meta") else Accelerator(device)


@contextmanager
def stand_in(device_interface: DeviceInterface) -> Iterator[None]:
    """A context in which `device_interface` is the interface of every device of this process."""
    global _stand_in
    before, _stand_in = _stand_in, device_interface
    try:
        yield
    finally:
        _stand_in = before


def is_host(device: torch.device) -> bool:
    """Returns whether work on the device is over when the call that starts it returns."""
    return device.type == "cpu" and _stand_in is None


def holds_values(device: torch.device) -> bool:
    """Returns whether tensors on the device have memory."""
    return device.type != "meta"


def is_numbered(device: torch.device) -> bool:
    """Returns whether a machine may have several devices of this kind, of which each rank takes one."""
    return device.type != "cpu"


def runs_backward_in_caller(device: torch.device) -> bool:
    """Returns whether autograd's engine runs the backward of the device's tensors in the calling thread, not in one per device."""
    return device.type == "cpu"


def of_kind(kind: str) -> torch.device:
    """Returns this process's current device of a kind, such as "cpu"."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def move(modules: Iterable[nn.Module], device: torch.device | str, *, recurse: bool = True) -> None:
    """Moves the parameters and buffers of `modules` to `device`.

    Tensors without values stay on the meta device. As under `Module.to`, parameters stay the same objects, except on devices whose tensors
    torch cannot put into a tensor of the CPU. There, a parameter of several modules becomes one other object.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        before = [(part, dict(part._parameters)) for part in (module.modules() if recurse else (module,))]
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=recurse)  # type: ignore[no-untyped-call]
        for part, parameters in before:
            for name, parameter in parameters.items():
                after = part._parameters[name]
                if parameter is not None and after is not None and after is not parameter:
                    part._parameters[name] = replaced.setdefault(parameter, after)


def note_of_dtypes(message: str, module: nn.Module) -> str:
    """Returns what to add to the `message` of torch's error about tensors of several dtypes in `module`; else empty."""
    if "dtype" not in message and "scalar type" not in message:
        return ""
    dtypes = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()})
    return (
        f", and its parameters are {' and '.join(dtypes)}; convert the batch or the model, or run the step inside torch.autocast"
        if dtypes
        else ""
    )


def note_of_devices(message: str, values: Iterable[object]) -> str:
    """Returns what to add to the `message` of torch's error about tensors on several devices, some of them among `values`; else empty."""
    if "on the same device" not in message:
        return ""
    places = sorted({str(value.device) for value in values if isinstance(value, Tensor)})
    return f", on {' and '.join(places)}; batches and targets must be on the device of the stages, pipe.device"


class Autocast(NamedTuple):
    """An enabled autocast: its device type and dtype."""

    device_type: str
    dtype: torch.dtype


def autocast_of(device_type: str) -> Autocast | None:
    """Returns the autocast enabled for a device type, None if it is disabled."""
    return Autocast(device_type, torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else None


def backend_of(device: torch.device) -> str:
    """Returns the backend of `torch.distributed` for tensors on the device, such as "nccl"; "gloo" if torch names none."""
    return dist.Backend.default_device_backend_map.get(device.type, "gloo")


def hardware_queues() -> int | None:
    """Returns the number of hardware queues of a CUDA device; None for other devices, whose rules are not known.

    The variable CUDA_DEVICE_MAX_CONNECTIONS sets it.
    """
    if torch.version.hip is not None:
        return None
    setting = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return min(max(int(setting), 1), MOST_QUEUES) if setting.isdecimal() else USUAL_QUEUES


def has_nccl() -> bool:
    """Returns whether this build of torch has NCCL, or RCCL in its place."""
    return dist.is_nccl_available()


def accelerator() -> torch.device | None:
    """Returns the kind of accelerator that can be used, None without one."""
    # Without an accelerator, torch 2.6 raises instead of returning None.
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def accelerator_fault() -> str:
    """Returns why torch cannot use the accelerator that it is built for, such as an old driver; empty if it can, or is built for none."""
    if torch.accelerator.is_available():
        return ""
    kind = _built_for()
    if kind is None:
        return ""
    reason = "it finds none"
    try:
        torch.get_device_module(kind).init()
    except Exception as error:  # noqa: BLE001 - backends of torch raise errors of many types
        reason = str(error).partition(". ")[0].strip().rstrip(".")
    return f"torch {torch.__version__} cannot use {kind.type}: {reason}"


def _built_for() -> torch.device | None:
    """Returns the kind of accelerator that this torch is built for, whether or not there is one; None for a build for CPUs."""
    try:
        return torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, without one
        return None


def device_fault(device: torch.device | str) -> str:
    """Returns why this process cannot put tensors on `device`, with the remedy; empty if it can."""
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return ""
    try:
        module = torch.get_device_module(device)
        count = module.device_count() if module.is_available() else 0
    except (AttributeError, RuntimeError):  # torch knows the name only
        count = 0
    if count > (device.index or 0):
        return ""
    if count:
        last = f" to '{device.type}:{count - 1}'" if count > 1 else ""
        devices = f"the devices of this process are '{device.type}:0'{last}"
        remedy = f"pass device='{device.type}' after torch.{device.type}.set_device(int(os.environ['LOCAL_RANK']))"
        return f"there is no device '{device}': {devices}; {remedy}, with at most a process for each"
    return f"device '{device}' cannot be used: {_why_absent(device.type)}, or pass device='cpu'"


def _why_absent(kind: str) -> str:
    """Returns why there is no device of a kind, and how to get one."""
    built = _built_for()
    if built is not None and built.type == kind:
        return f"{accelerator_fault()}; `zerobubble doctor --gpu` says what is missing"
    install = f"{kind} needs another build or another machine"
    if kind == "cuda" and sys.platform == "linux":
        install = CUDA_BUILD
    return f"torch {torch.__version__} is built for {'CPUs' if built is None else built.type}; {install}"


def shortage(num_ranks: int) -> str:
    """Returns why `num_ranks` ranks of this machine cannot each have an accelerator, with the remedy; empty if they can."""
    if fault := accelerator_fault():
        return f"{fault}; `zerobubble doctor --gpu` says what is missing"
    if accelerator() is None:
        return f"torch {torch.__version__} is built for CPUs; for NVIDIA GPUs, {CUDA_BUILD}"
    count = torch.accelerator.device_count()
    if count < num_ranks:
        return f"torch sees {counted(count, 'GPU')} for {counted(num_ranks, 'rank')}: start one rank for each GPU"
    return ""


def has_driver() -> bool:
    """Returns whether this machine has an accelerator or its driver, whether or not this build of torch can use it."""
    return accelerator() is not None or any(map(shutil.which, ("nvidia-smi", "rocm-smi")))


def make_current(kind: str, index: int) -> torch.device:
    """Makes device number `index` of a kind current in this process, and returns it."""
    torch.get_device_module(kind).set_device(index)
    return torch.device(kind, index)


def accelerators() -> list[dict[str, Any]]:
    """Returns the type, index, name, bytes of memory and number of processors of each accelerator."""
    kind = accelerator()
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    properties_of = [(index, module.get_device_properties(index)) for index in range(torch.accelerator.device_count())]
    return [
        {
            "type": kind.type,
            "index": index,
            "name": about.name,
            "bytes": about.total_memory,
            "processors": getattr(about, "multi_processor_count", 1),
        }
        for index, about in properties_of
    ]


def accelerator_facts() -> dict[str, Any]:
    """Returns what decides how ranks on this machine's accelerators exchange messages; it creates a context on each of them.

    `nccl` is the version of NCCL, None without it, `free` the free bytes of each accelerator, and `apart` the pairs of accelerators that
    cannot access each other's memory.
    """
    accelerators_here = accelerators()
    count = range(len(accelerators_here))
    module = torch.get_device_module(accelerators_here[0]["type"]) if accelerators_here else None
    reaches = getattr(module, "can_device_access_peer", lambda _, __: True)
    return {
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if module is not None and has_nccl() else None,  # type: ignore[no-untyped-call]
        "free": [interface(torch.device(entry["type"], entry["index"])).free_bytes() for entry in accelerators_here],
        "apart": [[first, second] for first in count for second in count if first < second and not reaches(first, second)],
    }


def accelerator_in_use() -> torch.device | None:
    """Returns the current device of the accelerator, None if this process has not used one: asking further would create a context."""
    device = accelerator()
    # Some modules do not report whether they are in use: MPS always has a context.
    if device is None or not getattr(torch.get_device_module(device), "is_initialized", lambda: True)():
        return None
    return torch.device(device.type, torch.accelerator.current_device_index())


def current_stream() -> Stream | None:
    """Returns the calling thread's current stream of the accelerator, None if this process has not used one."""
    if _stand_in is not None:
        return _stand_in.current_stream()
    device = accelerator_in_use()
    return None if device is None else interface(device).current_stream()


def set_stream(stream: Stream | None) -> None:
    """Makes a stream current in the calling thread; does nothing for None."""
    if stream is not None:
        interface(stream.device).set_stream(stream)


def wait_for(stream: Stream | None) -> None:
    """Waits until the device has done all work enqueued on the stream so far; does nothing for None."""
    if stream is not None:
        stream.synchronize()


@contextmanager
def generators_restored(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restores the generators of the CPU and of `devices`, accelerators of one kind, on exit."""
    with torch.random.fork_rng(devices, **({"device_type": devices[0].type} if devices else {})):
        yield


def seed_alike(device: torch.device) -> None:
    """Seeds the generators of all devices of the kind of `device` with the initial seed of the CPU's."""
    torch.get_device_module(device).manual_seed_all(torch.initial_seed())
