"""Proofs that a process knows a secret, without sending it: HMAC-SHA256 (RFC 2104) over nonces of both ends.

The caller puts into a proof what it is for: the protocol, the role of the sender and both nonces, so that a proof is
worth nothing in another connection, in the other direction or in another protocol.
"""

from __future__ import annotations

import hashlib
import hmac
import os

NONCE_BYTES = 16
PROOF_BYTES = 32
_SECRET = "INPROCESS_SECRET"


def fresh_nonce() -> bytes:
    """Return 16 random bytes."""
    return os.urandom(NONCE_BYTES)


def proof(secret: str, *parts: bytes) -> bytes:
    """Return the proof of knowing the secret; compare with `hmac.compare_digest`. No part may contain a zero byte."""
    return hmac.new(secret.encode(), b"\0".join(parts), hashlib.sha256).digest()


def job_secret(job: str) -> str | None:
    """Return the secret of a job, derived from INPROCESS_SECRET in the environment; None without that."""
    given = os.environ.get(_SECRET)
    return None if not given else hashlib.sha256(f"{given}\0{job}".encode()).hexdigest()
