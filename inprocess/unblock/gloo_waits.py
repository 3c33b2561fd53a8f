"""End waits of gloo that outlast their connection.

A connection that breaks ends the waits for it, with an error; but gloo forgets transfers of which some bytes are on the
way, or that were about to be written. Such a wait lasts until the timeout of its group, 30 minutes by default:

    what fails                                              who waits on
    a rank that receives a large tensor just now            its sender, in `waitSend`
    a rank that sends one                                   its receiver, in `waitRecv`
    any, a moment before another rank sends to it           the other, in `waitSend`

(`Pair::signalException` of gloo/transport/tcp tells the waits of operations that have not begun, and no others; so in
all versions up to the one in torch 2.13.) These two functions of a buffer are virtual, so `watch_gloo_waits` puts
others in their places, which note who waits and call the original ones; `end_gloo_waits` then ends all waits. In the
steady state this costs two uncontended locks per wait. Which entries of the table these are is not assumed, but looked
up by name; where anything is not as expected nothing is changed, and such waits last until their timeout. That is so,
too, for a wait in an atomic section, which the abort waits for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
from typing import Any

_log = logging.getLogger(__name__)
_LIBRARY = os.path.join(os.path.dirname(__file__), "_gloo_waits.abi3.so")
_UNWINDER = "libgcc_s.so.1"  # of the exceptions of gloo
_TORCH = "libtorch_cpu.so"
_BUFFER = "N4gloo9transport3tcp13UnboundBuffer"  # mangled names, by the Itanium C++ ABI
_MILLISECONDS = "NSt6chrono8durationIlSt5ratioILl1ELl1000EEEE"
_WAITS = (f"_Z{_BUFFER}8waitRecvEPi{_MILLISECONDS}", f"_Z{_BUFFER}8waitSendEPi{_MILLISECONDS}")
_ABORTS = (f"_Z{_BUFFER}13abortWaitRecvEv", f"_Z{_BUFFER}13abortWaitSendEv")
_TABLE = f"_ZTV{_BUFFER}E"
_MOST_ENTRIES = 12
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)

_lock = threading.Lock()
_library: Any = None


def watch_gloo_waits() -> bool:
    """Make `end_gloo_waits` work in this process from now on; return whether it does. Idempotent.

    While no thread waits in gloo. Does nothing if torch is not loaded, or this package was installed without a C
    compiler. Does not raise.
    """
    global _library
    with _lock:
        if _library is None and "torch.distributed" in sys.modules:
            try:
                _library = _installed()
            except (OSError, AttributeError, ValueError) as error:
                _log.debug("waits of gloo for bytes that are on the way cannot be ended: %s", error)
        return _library is not None


def end_gloo_waits() -> int:
    """End all waits of gloo in this process with a RuntimeError; return how many there were.

    Break the connections first: an operation that goes on with the next transfer would wait again. Any thread; may be
    repeated.
    """
    return 0 if _library is None else int(_library.inprocess_end_gloo_waits())


def _installed() -> Any:
    """Put the functions in their places, and return the library with them. OSError, AttributeError, ValueError."""
    ctypes.CDLL(_UNWINDER, mode=os.RTLD_GLOBAL | os.RTLD_LAZY)  # not named in a library that zig has linked
    library = ctypes.CDLL(_LIBRARY)
    torch = ctypes.CDLL(_TORCH, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    functions = [ctypes.cast(getattr(torch, name), ctypes.c_void_p).value for name in (*_WAITS, *_ABORTS)]
    table = ctypes.addressof(ctypes.c_void_p.in_dll(torch, _TABLE))
    entries = list((ctypes.c_void_p * _MOST_ENTRIES).from_address(table))
    places = [table + entries.index(function) * _POINTER_BYTES for function in functions[: len(_WAITS)]]
    replacements = (ctypes.c_void_p * len(_WAITS))()
    library.inprocess_gloo_functions((ctypes.c_void_p * len(functions))(*functions), replacements)
    # The linker has made the table read-only. Through this file the kernel writes all the same.
    with open("/proc/self/mem", "wb", buffering=0) as memory:
        for place, replacement in zip(places, replacements, strict=True):
            os.pwrite(memory.fileno(), int(replacement).to_bytes(_POINTER_BYTES, sys.byteorder), place)
    return library
