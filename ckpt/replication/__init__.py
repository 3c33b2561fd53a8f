"""Copies of staged bytes in the memory of other nodes.

    node A                                         node B
    replica process of rank 0                      replica process of rank 2
      arena ─▶ Sender ═══ TcpTransport: blocks ══▶ server ─▶ ReplicaMemory
      server ◀═════════════ ranges ═════════════▶ RemoteHolder (a restore)

    replica     what is replicated, from where, to where; which rank holds the replica of which; all messages
    held_replicas   what a holder has: anonymous shared memory, used again and again, also by the next process
    tcp, tcp_server, connection    the transport over TCP: one transfer after the other; the limit of bandwidth
    worker      the replica process of a rank, forked by its keeper
    replica_process the trainer's end of it

Free of torch.
"""
