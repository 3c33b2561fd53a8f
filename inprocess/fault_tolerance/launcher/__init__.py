"""`ckpt_launcher`: torchrun, with a monitor process beside each worker and restarts that all nodes agree on.

    ckpt_launcher, one per node
      command, options   the command line: torchrun's, and ours
      agent              runs one cycle after the other
        cycle            how a cycle ends, and whether another follows
        monitors         monitor processes, one per local rank: started before the first workers; they outlive workers,
                         and are started again when they die
        workers          worker processes, each in a session of its own: started, stopped, replaced
          worker_causes  why they have ended
        preloading       workers that are started before they are needed; what they do is in `preloaded_worker`
        cycle_logs       a file per cycle with the output of the workers
        orphans          processes and GPU memory that workers leave behind
        survivors        policy "in-process": workers that go on when others have failed
        open_calls       which workers are in a call of the wrapper, and have failed if they end; which have joined
        inboxes          signals to the launcher, and requests of ranks (FT_LAUNCHER_IPC_SOCKET)
      rendezvous_rounds  which nodes are in the next cycle, if they have fixed ranks
      dynamic_rounds     the same for nodes that come and go
        round_state      which of them are in the round, and which are spares; `rank_assignment.node_choice` chooses
        count_watch      which of them do not answer
      meeting            what the nodes of one cycle tell each other, in the store of the rendezvous
        node_table       the workers of each node, there
      bounded_store      the store, in operations that end although its host does not answer

A cycle is a rendezvous and the workers after it, until all have ended with 0 or one has failed. Then everything of the
cycle is ended on all nodes. The main thread does everything but the logs of cycles; it sleeps until a worker or monitor
ends, or a signal arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Launch as the command line (default: `sys.argv`) says; returns the exit code. Main thread."""
    from inprocess.fault_tolerance.launcher.command import run  # importing this package stays cheap

    return run(argv)
