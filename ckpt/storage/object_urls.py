"""Which object store a URL names, and how it is opened: options, environment, repetition of requests."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
import urllib.parse
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from ckpt.errors import StorageError
from ckpt.storage.object_store import BRIEF_S, SHOWN, ObjectStore
from ckpt.storage.options import StorageOptions

__all__ = ["object_store"]

_REQUEST_S, _LEAST_REQUEST_S = 60.0, 10.0  # for one attempt, with the data of a pack file
_CONNECT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
_RETRIES = 1000  # the time ends before
_ENVIRONMENT = MappingProxyType({"s3": "aws_", "s3a": "aws_", "gs": "google_", "az": "azure_", "azure": "azure_"})
_SECRET = re.compile("key|secret|token|password|credential")
_CLIENT_OPTIONS = frozenset({"allow_http", "allow_invalid_certificates", "proxy_url", "user_agent"})
_BRIEF_REQUEST_S = 5.0


def object_store(url: str, options: StorageOptions) -> ObjectStore:
    """Return the store of a URL, the same for each call of one process. StorageError if it cannot be opened."""
    if url.startswith("memory:"):  # one for the process, whatever the options
        options = StorageOptions()
    return _opened(url.rstrip("/"), options, os.getpid())


@functools.lru_cache(maxsize=64)
def _opened(url: str, options: StorageOptions, pid: int) -> ObjectStore:
    try:
        import obstore.store
    except ImportError:
        raise StorageError(f"{url} needs obstore: pip install 'ckpt-inprocess[objects]'") from None
    if url.startswith("memory:"):
        return ObjectStore(url, obstore.store.MemoryStore())
    config, client = _config(url, options)
    endpoint = next((value for name, value in config.items() if name.endswith(("endpoint", "endpoint_url"))), "")
    if endpoint.startswith("http://") and client.get("allow_http") != "true":
        if not _is_loopback(endpoint):
            raise StorageError(
                f"{url}: the endpoint {endpoint.partition('?')[0]} is not encrypted; use https, or allow it with "
                "storage_options={'allow_http': True}"
            )
        client["allow_http"] = "true"
    secret = [value for name, value in (*options.given, *options.environment) if _SECRET.search(name)]

    def opened(timeout_s: float, request_s: float) -> Any:
        pause = {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
            "max_backoff": timedelta(seconds=min(_LONGEST_PAUSE_S, timeout_s / 4)),
            "base": 2,
        }
        retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=timeout_s), "backoff": pause}
        times = {"timeout": timedelta(seconds=request_s), "connect_timeout": timedelta(seconds=_CONNECT_S)}
        return obstore.store.from_url(url, config=config, client_options=times | client, retry_config=retry)

    request_s = min(_REQUEST_S, max(_LEAST_REQUEST_S, 2 * options.timeout_s))
    try:
        store, brief = opened(options.timeout_s, request_s), opened(BRIEF_S, min(request_s, _BRIEF_REQUEST_S))
    except Exception as error:
        text = str(error).split("\n\nDebug source")[0]
        for value in secret:
            text = text.replace(value, "***")
        raise StorageError(f"{url} cannot be opened: {text[:SHOWN]} (check the URL and storage_options)") from None
    return ObjectStore(url, store, secret, brief=brief, timeout_s=options.timeout_s)


def _config(url: str, options: StorageOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the store and those of the connections: of the environment only those that are known."""
    import obstore.store

    prefix = _ENVIRONMENT[url.partition(":")[0]]
    config: dict[str, Any] = {}
    for name, value in options.environment:
        name = {"aws_endpoint_url_s3": "aws_endpoint_url"}.get(name, name)
        if name.startswith(prefix) and name.removeprefix(prefix) not in _CLIENT_OPTIONS:
            with contextlib.suppress(Exception):
                obstore.store.from_url(url, config={name: value}, client_options={"allow_http": "true"})
                config[name] = value
    client = {name: value for name, value in options.given if name in _CLIENT_OPTIONS}
    for name, value in options.given:
        if name not in _CLIENT_OPTIONS:
            config.pop(f"{prefix}{name}", None)
            config[name] = value
    return config, client


def _is_loopback(endpoint: str) -> bool:
    host = urllib.parse.urlsplit(endpoint).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
