"""Proofs that a process knows a secret, without sending it: HMAC-SHA256 (RFC 2104) over nonces of both ends.

The caller puts into a proof what it is for: the protocol, the role of the sender and both nonces, so that a proof is
worth nothing in another connection, in the other direction or in another protocol.
"""

from __future__ import annotations

import hashlib
import hmac
import os

__all__ = ["NONCE_BYTES", "PROOF_BYTES", "fresh_nonce", "proof"]

NONCE_BYTES = 16
PROOF_BYTES = 32


def fresh_nonce() -> bytes:
    """Return 16 random bytes."""
    return os.urandom(NONCE_BYTES)


def proof(secret: str, *parts: bytes) -> bytes:
    """Return the proof of knowing the secret; compare with `hmac.compare_digest`. No part may contain a zero byte."""
    return hmac.new(secret.encode(), b"\0".join(parts), hashlib.sha256).digest()
