"""The process that watches a rank from outside, and outlives it. Started by the rank's wrapper or by a launcher.

    start                           starts and ends the process
    supervised                      the wrapper's process, replaced when it dies
    messages                        all messages
    __main__                        the process: reads the first message, and runs one of two loops
      rank_monitor                  for a wrapper: the one rank that has started it
        limits, sibling, stores     progress limits; heartbeats; the store of the job
      node_monitor                  for a launcher: ranks that connect to its sockets
        rank_socket, session        connections, and the rank that is watched
        neighbors, state_machine    other monitors of the node; the phases of a restart, for the log
      watched                       for both: a process and how it is ended, its sections
      device_health                 for a launcher's ranks: GPUs and network ports

The process imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inprocess.ipc.lazy_names import lazy_names

if TYPE_CHECKING:
    from inprocess.monitor_process.supervised import MonitorProcess

__all__ = ["MonitorProcess"]


__getattr__, __dir__ = lazy_names(__name__, {"MonitorProcess": ".supervised"})
