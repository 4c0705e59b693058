"""Bytes at the server, as if somebody had sent them."""

from __future__ import annotations

import hashlib

from diamond.server.services import holdings
from diamond.server.services.context import Context


def upload(ctx: Context, holder: str, data: bytes) -> str:
    """The blob's digest. `holder`: id of the user, or of the endpoint, that sent it."""
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    ctx.blobs.put_bytes(digest, data)
    holdings.give(ctx, holder, {digest: len(data)})
    return digest
