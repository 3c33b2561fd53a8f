"""Memory that outlives its trainer: a process of each rank keeps it for the next processes of the same job on the node.

Knows nothing of checkpoints: it passes memory on, and with it what the trainer has said about it. The process is
`__main__`, the trainer's end of it `keeping`; `takeover` is how other processes get the memory.
"""
