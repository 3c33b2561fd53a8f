"""`ckpt_launcher`: torchrun, with a monitor process beside each worker and restarts that all nodes agree on.

    ckpt_launcher, one per node                             monitor processes, one per local rank
      command, options   the command line of torchrun ─┐      started once, before the first workers; they outlive
      agent              one cycle after the other     │      workers, and are started again when they die
        monitors  ───────────────────────────────────────▶
        workers          stop sequence, by events     ─────▶ workers, each in a session of its own
        leftovers        what workers leave behind
        survivors        who goes on when others have failed (policy "in-process"); `replacement`: one more worker
        signals          what the launcher is told
        control          what ranks ask for          ◀────── FT_LAUNCHER_IPC_SOCKET
        progress         whether checkpoints advance
        gpu_memory       whether the GPUs are free again
        verdict          whether another cycle follows
      rendezvous         who is in the next cycle: torch's handlers, made fit for restarts
        meeting          what the nodes of one cycle tell each other, in the rendezvous's store

A cycle: rendezvous, workers, until all have ended with 0 or one has not; then everything of the cycle is ended on all
nodes. The main thread does everything; it sleeps until a worker or monitor ends or a signal comes.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) to its end; returns the exit code. On the main thread."""
    from inprocess.fault_tolerance.launcher.command import run  # importing this package stays cheap

    return run(argv)
