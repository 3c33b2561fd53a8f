"""Processes, threads and sockets of one host, and lazy imports: what `inprocess` and `ckpt` share.

    packets         messages between processes: frozen dataclasses as JSON in SOCK_SEQPACKET packets, with descriptors
    unix_sockets    named sockets that only processes of the same user can reach
    process         the identity of a process, whether it runs, and how a child process is started
    proofs          how two processes prove to each other that they know a secret
    threads         threads whose end can be awaited by a thread into which exceptions are thrown
    wakeup          a flag that interrupts `poll`
    shared_memory   anonymous shared memory, passed by file descriptor
    lazy_names      names of a package that are imported when they are used

Private to the two libraries. It imports neither torch nor numpy nor anything else of `inprocess`.
"""
