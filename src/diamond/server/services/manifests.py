"""Manifests of bundles, as they lie among the blobs. Each is checked when it is read: anybody may have sent it."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from diamond.core.bundles import Manifest, check_manifest
from diamond.core.codec import decode
from diamond.core.errors import InvalidInput

_MAX_BYTES = 64 * 1024 * 1024


@lru_cache(maxsize=64)
def load(path: Path, digest: str) -> Manifest:
    """Content-addressed, so what is remembered cannot go stale.

    Raises:
        FileNotFoundError: no such blob is here.
        InvalidInput: the blob is no manifest, or one that could write outside its target.
    """
    if path.stat().st_size > _MAX_BYTES:
        raise InvalidInput(f"blob {digest} is too large to be a bundle manifest")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"blob {digest} is not a bundle manifest") from error
    found = decode(Manifest, raw, strict=True)
    check_manifest(found)
    return found
