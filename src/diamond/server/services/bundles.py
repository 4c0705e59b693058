"""Uploaded folders: a manifest is itself a blob, named by its digest, and is checked every time it is taken up."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from sqlalchemy.orm import Session

from diamond.core.bundles import Manifest, check_manifest
from diamond.core.codec import decode
from diamond.core.errors import InvalidInput, NotFound
from diamond.server.services import holdings, manifests, quotas
from diamond.server.services.context import Context

_FEW = 8


def register(ctx: Context, raw: object, user_id: str) -> dict[str, Any]:
    """Take up a manifest once the user has sent all its files; otherwise say which are missing. Safe to repeat.

    Raises:
        QuotaExceeded: what is missing is more than this user may still store.
    """
    manifest = decode(Manifest, raw, strict=True)
    check_manifest(manifest)
    digests = [item.digest for item in manifest.files if not item.link_to]
    if holdings.held(ctx, user_id, [manifest.ref]) and not ctx.blobs.claim([manifest.digest, *digests]):
        return _answer(manifest, [])
    missing = _not_readable(ctx, user_id, missing_blobs(ctx, user_id, digests))
    sizes = {item.digest: item.size_bytes for item in manifest.files}
    wanted = [one["digest"] for one in missing]
    quotas.check_upload(ctx, user_id, sum(sizes[digest] for digest in wanted), wanted)
    if not missing:
        ctx.blobs.put_bytes(manifest.digest, manifest.canonical())
        holdings.give(ctx, user_id, [manifest.ref])
    return _answer(manifest, missing)


def _not_readable(ctx: Context, user_id: str, missing: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that the user could fetch and send again, such as the payload of an image that was exported. Of
    many, all are asked for: to look each of them up would take longer."""
    if len(missing) > _FEW:
        return missing
    return [
        one
        for one in missing
        if ctx.blobs.claim([one["digest"]]) or not holdings.user_may_read(ctx, user_id, one["digest"])
    ]


def _answer(manifest: Manifest, missing: list[dict[str, Any]]) -> dict[str, Any]:
    return {"ref": manifest.ref, "digest": manifest.digest, "missing": missing, "complete": not missing}


def missing_blobs(ctx: Context, holder: str, digests: list[str]) -> list[dict[str, Any]]:
    """Those that are not here whole, or that this holder has not sent (whoever else did), each with the number of bytes
    already received of it, to resume from."""
    wanted = sorted(set(digests))
    here = holdings.held(ctx, holder, wanted) - set(ctx.blobs.claim(wanted))
    return [
        {"digest": digest, "received": ctx.blobs.partial_size(digest, holder)}
        for digest in wanted
        if digest not in here
    ]


def manifest(ctx: Context, digest: str) -> Manifest:
    """The checked manifest of a bundle.

    Raises:
        NotFound: no such blob is here.
        InvalidInput: the blob is no manifest, or one that could write outside its target.
    """
    if not ctx.blobs.has(digest):
        raise not_here(digest)
    return manifests.load(ctx.blobs.path(digest), digest)


def not_here(digest: str) -> NotFound:
    """Also of one that is here, to whoever may not have it."""
    return NotFound(f"bundle {digest} is not here", hint="upload it with POST /api/v1/bundles")


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


def require(ctx: Context, user_id: str, digest: str, field: str, session: Session | None = None) -> None:
    """Refuse what names a bundle that is not wholly here, or that this user may not have."""
    try:
        with nullcontext(session) if session else ctx.db.read() as looking:
            if not holdings.may_use(looking, user_id, digest):
                raise not_here(digest)
        found = manifest(ctx, digest)
    except (NotFound, InvalidInput) as error:
        raise InvalidInput(error.message, hint=error.hint, field=field) from error
    # Claimed: what is going to name it does so a moment later.
    if gone := ctx.blobs.claim([digest, *(item.digest for item in found.files if not item.link_to)]):
        raise InvalidInput(f"{len(gone)} files of bundle {digest} are not here", hint="upload them again", field=field)
