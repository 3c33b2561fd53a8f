"""Run any function in a persistent background process, and finalize it in order, on all ranks at once.

                     schedule_async_request                       one per writer
    trainer thread ─────────────────────────▶ AsyncCallsQueue ══════════════════▶ writer process 0, 1, ...
                   ◀───────────────────────── (in order)      ◀══════════════════   ▲ fork
                    maybe_finalize_async_calls                                     server process

This package knows nothing of checkpoints. `queue` is where to start reading; `process` and `writer` are the two ends of
a writer.
"""

from ckpt.async_calls.caller import DistributedAsyncCaller
from ckpt.async_calls.config import WriterConfig
from ckpt.async_calls.context import WriterContext, current
from ckpt.async_calls.queue import AsyncCallsQueue
from ckpt.async_calls.request import AsyncRequest, CallTimer, RecoverableCall

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CallTimer",
    "DistributedAsyncCaller",
    "RecoverableCall",
    "WriterConfig",
    "WriterContext",
    "current",
]
