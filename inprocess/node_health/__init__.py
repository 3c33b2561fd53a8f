"""Checks of a node: its GPUs, links, storage and clock, and what a service, a command or the scheduler says of it.

    launcher                                   python -m inprocess.node_health FD
      NodeProbe ── NodeCheckSettings ────────▶   checks_of: the checks that the settings ask for
                ── RunChecks ────────────────▶   CheckChain: all of them at once, a thread each
                ◀──────────── CheckReport ────
                ◀──────────── CheckReport ────   the cheap ones at each interval, when a failure is new

A check is a `NodeCheck`, with one interface (`interface`): a name, a limit, and a result that says whether the node is
in order, is not and why, or has nothing to check. `device_checks`, `storage_checks` and `outside_checks` have them.

They run in a process of their own because drivers and file systems may hang in the kernel, where a thread cannot be
ended: such a process is killed, and left behind if even that does not help. The launcher goes on.
"""
