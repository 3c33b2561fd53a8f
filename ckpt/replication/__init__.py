"""Copies of staged bytes in the memory of other nodes.

    node A                                         node B
    replica process of rank 0                      replica process of rank 2
      arena ─▶ Sender ═══ TcpTransport: blocks ══▶ server ─▶ ReplicaMemory
      server ◀═════════════ ranges ═════════════▶ RemoteHolder (a restore)

    replica     what is replicated, from where, to where
    buddies     which rank holds the replica of which
    memory      what a holder has: anonymous shared memory, used again and again, also by the next process
    tcp, tcp_server, connection, messages   the transport over TCP
    limiter     the limit of bandwidth
    sender      one transfer after the other
    worker      the replica process of a rank, forked by its keeper
    process, control    the trainer's end of it, and what they tell each other

Free of torch.
"""
