"""The store of a rank, opened in its monitor process.

Our coordination server and etcd need no torch. A store of another kind is created again in the monitor process, from
the name of its class and its keyword arguments. That imports torch: it starts more slowly and takes more memory.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from importlib import import_module
from typing import Any

from inprocess.coordination import Access, CoordinationStore, Namespace
from inprocess.coordination.namespace import PrefixView

_SECONDS = "timedelta_s"


def describe_store(base_store: Any, factory: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what `open_store` needs, as JSON values.

    ValueError if the store cannot be created again in another process.
    """
    if hasattr(base_store, "client"):
        document: dict[str, Any] = base_store.client.to_document()
        return document
    name = f"{factory.__module__}:{factory.__qualname__}"
    if "<locals>" in name or factory.__module__ == "__main__":
        raise ValueError(
            f"the monitor process cannot create a store of class {name}: define it in a module that can be imported"
        )
    values = {key: {_SECONDS: v.total_seconds()} if isinstance(v, timedelta) else v for key, v in kwargs.items()}
    try:
        json.dumps(values)
    except TypeError as error:
        raise ValueError(
            f"store_kwargs must be numbers, strings and timedeltas, to be sent to the monitor process: {error}"
        ) from None
    environment = {
        name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ
    }
    return {"factory": name, "kwargs": values, "environment": environment}


def open_store(description: dict[str, Any], patience_s: float) -> Any:
    """Open the store that `describe_store` has described. Monitor process."""
    patience = timedelta(seconds=patience_s)
    if "access" in description:
        return CoordinationStore(Access.from_document(description["access"]), patience=patience)
    if "etcd" in description:
        from inprocess.coordination.etcd import EtcdClient
        from inprocess.coordination.etcd_gateway import EtcdCluster

        return EtcdClient(EtcdCluster.from_document(description["etcd"]), description["job"], patience=patience)
    os.environ.update(description["environment"])
    module, _, qualname = description["factory"].partition(":")
    factory: Any = import_module(module)
    for part in qualname.split("."):
        factory = getattr(factory, part)
    kwargs = {
        key: timedelta(seconds=value[_SECONDS]) if isinstance(value, dict) and _SECONDS in value else value
        for key, value in description["kwargs"].items()
    }
    return factory(**kwargs)


def iteration_store(base_store: Any, iteration: int) -> PrefixView:
    """Return the namespace of an iteration: the same keys for a rank and its monitor process."""
    client = getattr(base_store, "client", base_store)
    if getattr(client, "takes_guards", False):
        return Namespace(iteration, client)
    from inprocess.store import PrefixStore

    return PrefixStore(iteration, base_store)
