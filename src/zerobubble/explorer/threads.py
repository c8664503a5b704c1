"""Runs calls of the server in threads for which the end of the process does not wait: an answer may take minutes, Ctrl-C should not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from anyio import CapacityLimiter

P = ParamSpec("P")
Result = TypeVar("Result")


async def run_in_daemon(limiter: CapacityLimiter, call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """Return what `call` returns, or raise its error, once `limiter` admits it. Cancelling leaves the thread behind."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the waiting task raises it
            future.set_exception(error)

    async with limiter:
        threading.Thread(target=run, name="zerobubble-answer", daemon=True).start()
        return await asyncio.shield(asyncio.wrap_future(future))
