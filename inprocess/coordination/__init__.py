"""The store through which the ranks agree: one server, its clients, and its contents. Imports no torch.

rank process  ------ StoreClient ------+
                                       +---->  StoreServer, in a process that rank 0 has started
monitor process ---- StoreClient ------+

Alternatively both use `etcd.EtcdClient` and an etcd cluster; that module is imported only then.
"""

from __future__ import annotations

from inprocess.coordination.client import CoordinationStore, StoreClient
from inprocess.coordination.mixin import StoreMixin
from inprocess.coordination.namespace import Namespace, RestartIndex
from inprocess.coordination.rank_verbs import RankVerbs
from inprocess.coordination.server import StoreServer
from inprocess.coordination.verbs import Guard, StoreVerbs, VerbCall
from inprocess.coordination.wire import Access

__all__ = [
    "Access",
    "CoordinationStore",
    "Guard",
    "Namespace",
    "VerbCall",
    "RankVerbs",
    "RestartIndex",
    "StoreClient",
    "StoreMixin",
    "StoreServer",
    "StoreVerbs",
]
