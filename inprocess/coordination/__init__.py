"""The store through which the ranks agree: servers, clients, and what is written there. Free of torch.

rank process           monitor process of rank 0        monitor process of rank 1 (2, 3)
StoreClient  ------>   StoreServer, position 0  ---->   StoreServer, position 1: standby, mirrors what 0 applies
    \\                                                      ^
     `------------ when 0 is gone: journal, then on --------'
"""

from __future__ import annotations

from inprocess.coordination.client import StoreClient
from inprocess.coordination.mixin import StoreMixin
from inprocess.coordination.namespace import CoordinationStore, Namespace
from inprocess.coordination.server import StoreServer
from inprocess.coordination.wire import Host

__all__ = ["CoordinationStore", "Host", "Namespace", "StoreClient", "StoreMixin", "StoreServer"]
