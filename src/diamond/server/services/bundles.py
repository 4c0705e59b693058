"""Uploaded folders: a manifest is itself a blob, named by its digest, and is checked every time it is taken up."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from diamond.core.bundles import Manifest, check_manifest
from diamond.core.codec import decode
from diamond.core.errors import InvalidInput, NotFound
from diamond.server.services.context import Context


def register(ctx: Context, raw: object) -> dict[str, Any]:
    """Take up a manifest once all its files are here; otherwise say which are missing. Safe to repeat."""
    manifest = decode(Manifest, raw, strict=True)
    check_manifest(manifest)
    missing = missing_blobs(ctx, [item.digest for item in manifest.files if not item.link_to])
    if not missing:
        ctx.blobs.put_bytes(manifest.digest, manifest.canonical())
    return {"ref": manifest.ref, "digest": manifest.digest, "missing": missing, "complete": not missing}


def missing_blobs(ctx: Context, digests: list[str]) -> list[dict[str, Any]]:
    """Those not here whole, each with the number of bytes already received, to resume from."""
    return [
        {"digest": digest, "received": ctx.blobs.partial_size(digest)}
        for digest in ctx.blobs.missing(sorted(set(digests)))
    ]


def manifest(ctx: Context, digest: str) -> Manifest:
    """The checked manifest of a bundle.

    Raises:
        NotFound: no such blob is here.
        InvalidInput: the blob is no manifest, or one that could write outside its target.
    """
    if not ctx.blobs.has(digest):
        raise NotFound(f"bundle {digest} is not here", hint="upload it with POST /api/v1/bundles")
    return _load(ctx.blobs.path(digest), digest)


@lru_cache(maxsize=64)
def _load(path: Path, digest: str) -> Manifest:
    # Content-addressed, so a cached manifest cannot go stale.
    if path.stat().st_size > 64 * 1024 * 1024:
        raise InvalidInput(f"blob {digest} is too large to be a bundle manifest")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"blob {digest} is not a bundle manifest") from error
    found = decode(Manifest, raw, strict=True)
    check_manifest(found)
    return found


def check_mounts(ctx: Context, workdir: str, targets: Iterable[str]) -> None:
    """Refuse mounts that would have to replace a file of the work directory, or lie below one."""
    taken = {item.path for item in manifest(ctx, workdir).files}
    for target in targets:
        parts = target.split("/")
        in_the_way = next((path for n in range(1, len(parts) + 1) if (path := "/".join(parts[:n])) in taken), None)
        if in_the_way is not None:
            raise InvalidInput(
                f"the work directory already has a file {in_the_way!r}",
                hint="choose another target, or list the file in .diamondignore",
                field=f"file_mounts.{target}",
            )


def require(ctx: Context, digest: str, field: str) -> None:
    """Refuse a task that names a bundle which is not wholly here."""
    try:
        found = manifest(ctx, digest)
    except NotFound as error:
        raise InvalidInput(error.message, hint=error.hint, field=field) from error
    except InvalidInput as error:
        raise InvalidInput(error.message, hint=error.hint, field=field) from error
    if gone := ctx.blobs.missing([item.digest for item in found.files if not item.link_to]):
        raise InvalidInput(f"{len(gone)} files of bundle {digest} are not here", hint="upload them again", field=field)
