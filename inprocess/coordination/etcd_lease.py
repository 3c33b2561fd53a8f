"""Leases of etcd: it deletes the keys of a lease that is no longer renewed.

Source: etcd's documentation, "API reference": LeaseGrantRequest, LeaseKeepAliveRequest.
"""

from __future__ import annotations

import hashlib

from inprocess.coordination.etcd_gateway import EtcdGateway, EtcdRequest
from inprocess.exception import StoreError


class EtcdLease:
    """A lease of `seconds`, which all clients that give the same `name` share. Any thread."""

    def __init__(self, gateway: EtcdGateway, name: str, seconds: int) -> None:
        self.id = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1 or 1
        self.seconds = seconds
        self._gateway = gateway

    def grant(self) -> None:
        """Let it begin, unless it has. StoreError."""

        def grant(request: EtcdRequest) -> None:
            try:
                self._gateway.post(request, "/v3/lease/grant", {"ID": str(self.id), "TTL": str(self.seconds)})
            except StoreError as error:
                if "lease already exists" not in str(error):  # granted by another client, or by an earlier attempt
                    raise

        self._gateway.run(grant)

    def renew(self) -> bool:
        """Renew it; return False if it has expired, or was never granted. StoreError."""
        message = {"ID": str(self.id)}
        answer = self._gateway.run(lambda request: self._gateway.post(request, "/v3/lease/keepalive", message))
        return int(answer.get("TTL", 0)) > 0
