"""A device named "separate" for the tests of accelerators, on machines without one.

It is registered as torch's backend `PrivateUse1`, like the accelerators of other vendors. Its memory is the host's and its kernels are the
CPU's, but torch refuses to mix its tensors with those of the CPU, as it does those of a GPU. It has streams, events with times, pinned host
memory, a random generator, autocast, and collectives over gloo with the backend "bridge". It has no compiler and no graphs, and its work is
over when a call returns: `zb.testing.checked_device` tests the order of streams.

The first import compiles kernels.cpp, which takes half a minute and needs a C++ compiler and ninja.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections import namedtuple
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # registers how tensors are pickled, before this package does
from torch import Tensor
from torch.utils import cpp_extension

NAME = "separate"
BACKEND = "cpu:gloo,separate:bridge"
"""The backend for `torch.distributed.init_process_group`."""
LACKING = {
    "no code generator for separate": "compiler",
    "Backend not supported for separate": "random states in traced checkpoints",
    "'Sparseseparate'": "sparse tensors",
    "aten::_sparse_coo_tensor": "sparse tensors",
    "'SparseCsrseparate'": "sparse tensors",
    "'NestedTensorseparate'": "nested tensors",
    "'Quantizedseparate'": "quantized tensors",
    "aten::empty_quantized": "quantized tensors",
}
"""What the device lacks, by what torch or zerobubble says of it."""
_LIBRARY = "zerobubble_separate"
_COMPILE = f"""
import sys
from torch.utils.cpp_extension import load
load({_LIBRARY!r}, [sys.argv[1]], build_directory=sys.argv[2], extra_cflags=["-O1"])
"""
Properties = namedtuple("Properties", ("name", "total_memory", "uuid"))


def _compiled() -> Any:
    """Returns the compiled kernels. Of processes that start together, the first compiles them."""
    source = Path(__file__).with_name("kernels.cpp")
    version = hashlib.blake2b(source.read_bytes() + torch.__version__.encode(), digest_size=8).hexdigest()
    folder = Path(cpp_extension.get_default_build_root()) / f"{_LIBRARY}_{version}"
    library = folder / f"{_LIBRARY}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "queue").open("w") as queue:
        fcntl.flock(queue, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where ninja is
                command = [sys.executable, "-c", _COMPILE, str(source), scratch]
                subprocess.run(command, check=True, env=os.environ | {"PATH": path})
                (Path(scratch) / library.name).rename(library)
    spec = spec_from_file_location(_LIBRARY, library)
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


_kernels = _compiled()


def _index(device: Any = None) -> int:
    if device is None:
        return int(_kernels.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(_kernels.current_device()) if index is None else index


class Stream(torch.Stream):
    """A stream of the device."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)


def _event(enable_timing: bool = False) -> torch.Event:
    return torch.Event(device=NAME, enable_timing=enable_timing)


class _OnStream:
    """A context in which `stream` is current."""

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.accelerator.set_stream(self.before)


class _OnDevice:
    """A context in which a device is current."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = _kernels.current_device()
        _kernels.set_device(self.index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _kernels.set_device(self.before)


def _module() -> ModuleType:
    """The module `torch.separate`, with the functions that torch and zerobubble call on an accelerator's."""
    generators = tuple(_kernels.default_generator(index) for index in range(_kernels.device_count()))

    def seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module: Any = ModuleType(f"torch.{NAME}")
    module.Stream, module.Event, module.stream, module.device = Stream, _event, _OnStream, _OnDevice
    module.current_stream = lambda device=None: torch.accelerator.current_stream(torch.device(NAME, _index(device)))
    module.device_count, module.current_device = _kernels.device_count, _kernels.current_device
    module.set_device = lambda device: _kernels.set_device(_index(device))
    module.is_available = module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.synchronize = lambda device=None: None
    module.mem_get_info = lambda device=None: (8 << 30, 16 << 30)
    module.get_device_properties = lambda device=None: Properties(NAME, 16 << 30, f"{NAME}-{_index(device)}")
    module.default_generators = generators
    module.get_rng_state = lambda device=NAME: generators[_index(device)].get_state()
    module.set_rng_state = lambda state, device=NAME: generators[_index(device)].set_state(state)
    module.manual_seed = lambda seed: generators[_index()].manual_seed(seed)
    module.manual_seed_all = seed_all
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _bridge(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _kernels.bridge(dist.ProcessGroupGloo(dist.PrefixStore("bridge", store), rank, size, timeout))


def _rebuild(on_cpu: Tensor, device: torch.device, requires_grad: bool) -> Tensor:
    return on_cpu.to(device).requires_grad_(requires_grad)


def _reduce(tensor: Tensor) -> tuple[Any, ...]:
    """Pickles the values of a tensor of the device for another process, which cannot map its memory."""
    if tensor.device.type != NAME:
        found: tuple[Any, ...] = torch.multiprocessing.reductions.reduce_tensor(tensor)
        return found
    return _rebuild, (tensor.detach().cpu(), tensor.device, tensor.requires_grad)


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _module())
sys.modules[f"torch.{NAME}"] = getattr(torch, NAME)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
dist.Backend.register_backend("bridge", _bridge, devices=[NAME])
ForkingPickler.register(Tensor, _reduce)
ForkingPickler.register(torch.nn.Parameter, _reduce)
