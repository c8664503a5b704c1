"""Compiles LLVM text to machine code and stores it on disk, under a digest of its inputs, so that nothing stale is loaded."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from zerobubble.errors import InputError
from zerobubble.whole_files import opened_regular

FOLDER = "ZEROBUBBLE_CACHE_DIR"
"""The environment variable with the cache folder of compiled kernels. By default they are stored next to their sources or in the user's
cache folder."""


def loaded(name: str, key: str, made: Callable[[], tuple[str, str]]) -> tuple[int, str]:
    """Returns the address of function `name`, and a line that is cached with it.

    `made` returns the LLVM text of its module and this line; it is called if the cache has no entry `key`.
    """
    kept = _kept(key)
    if kept is None:
        text, shown = made()
        kept = f"{shown}\n".encode() + _compiled(text)
        _keep(key, kept)
    line, _, code = kept.partition(b"\n")
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(name)), line.decode()


@cache
def processor() -> str:
    """The machine that code is compiled for, and the compiler."""
    return f"{llvmlite.__version__} {llvm.get_process_triple()} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


@cache
def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    options = {"reloc": "static"} if target.name.startswith("x86") else {}
    features = llvm.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2, codemodel="jitdefault", jit=True, **options)


@cache
def _engine() -> Any:
    machine = _machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _compiled(text: str) -> bytes:
    machine = _machine()
    module = llvm.parse_assembly(f'target triple = "{machine.triple}"\ntarget datalayout = "{machine.target_data}"\n{text}')
    module.verify()
    tuning = llvm.create_pipeline_tuning_options(speed_level=2)
    tuning.loop_unrolling = False  # a quarter of the time, for kernels that are no faster
    passes = llvm.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    code: bytes = machine.emit_object(module)
    return code


def _folders() -> Iterator[Path]:
    """Yields the possible cache folders, best first."""
    if given := os.environ.get(FOLDER):
        yield Path(given)
        return
    yield Path(__file__).parent / "__pycache__"
    with suppress(RuntimeError):  # a user without a home, as in containers that run under any number
        yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerobubble"


def _kept(key: str) -> bytes | None:
    """Returns the cached entry of `key` if it is complete, and from someone who can run code in this process anyway."""
    for folder in _folders():
        with suppress(OSError, InputError), opened_regular(folder / f"{key}.o") as file:
            if not _is_trusted(os.fstat(file.fileno())):
                continue
            digest, _, kept = file.read().partition(b"\n")
            if digest == _digest(key, kept):
                return kept
    return None


def _is_trusted(state: os.stat_result) -> bool:
    """Whether only this user, root or the owner of the package can have written a file."""
    return state.st_uid in (os.geteuid(), 0, os.stat(__file__).st_uid) and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _digest(key: str, kept: bytes) -> bytes:
    return sha256(key.encode() + kept).hexdigest().encode()


def _keep(key: str, made: bytes) -> None:
    """Writes the code atomically to the first writable folder, for all users. Without such a folder, each process compiles."""
    for folder in _folders():
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            handle, draft = tempfile.mkstemp(dir=folder, prefix=f".{key}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    os.fchmod(handle, 0o644)
                    file.write(_digest(key, made) + b"\n" + made)
                os.replace(draft, folder / f"{key}.o")
            except BaseException:
                os.unlink(draft)
                raise
            return
