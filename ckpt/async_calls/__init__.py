"""Run any function in a persistent background process, and finalize it in order, on all ranks at once.

                     schedule_async_request                       one per writer
    trainer thread ─────────────────────────▶ AsyncCallsQueue ══════════════════▶ writer process 0, 1, ...
                   ◀───────────────────────── (in order)      ◀══════════════════   ▲ fork
                    maybe_finalize_async_calls                                     keeper

This package knows nothing of checkpoints. Start with `queue`, which finalizes calls, and `runner` below it, which runs
them; `call` is one call from its `request` to its end, `writer` and `writer_main` are the two ends of a writer process.

Names are imported when they are used: a writer, whose modules are of this package, needs none of the queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inprocess.ipc.lazy_names import lazy_names

if TYPE_CHECKING:
    from ckpt.async_calls.call import CallTimer, RecoverableCall
    from ckpt.async_calls.compatible import abort_nvrx_checkpoint
    from ckpt.async_calls.queue import AsyncCallsQueue, DistributedAsyncCaller
    from ckpt.async_calls.request import AsyncRequest
    from ckpt.async_calls.writer import WriterConfig
    from ckpt.async_calls.writer_main import WriterContext, current

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CallTimer",
    "DistributedAsyncCaller",
    "RecoverableCall",
    "WriterConfig",
    "WriterContext",
    "abort_nvrx_checkpoint",
    "current",
]

_LAZY = {
    "CallTimer": ".call",
    "RecoverableCall": ".call",
    "DistributedAsyncCaller": ".queue",
    "abort_nvrx_checkpoint": ".compatible",
    "WriterContext": ".writer_main",
    "current": ".writer_main",
    "AsyncCallsQueue": ".queue",
    "AsyncRequest": ".request",
    "WriterConfig": ".writer",
}

__getattr__, __dir__ = lazy_names(__name__, _LAZY)
