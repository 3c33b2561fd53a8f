"""The ranks of a job, and how they agree: before a save and in a restore, on a step to stop after, and on failures.

    group         the interface: an all-gather of bytes, and what follows from it; `Alone`, without communication; and
                  access to torch.distributed, without importing torch
    collectives   `Ranks`, by a process group of torch; `StoreRanks`, by a store of torch alone
    rounds        arrive, decide once, gather and wait, in a store of torch; the warning of waits that are long
    failure       the failure of one rank, in the form in which it reaches the others
    stop          one step to stop after, by rounds

This package knows nothing of checkpoints.
"""
