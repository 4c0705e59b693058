"""Files that come with a form: kept as clients' are, and put together into a bundle for a work directory."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping

from diamond.core.bundles import BundleFile, Manifest, check_relative_path, digest_of_ref, is_bundle_ref
from diamond.core.codec import encode
from diamond.core.errors import InvalidInput
from diamond.server.services import bundles, gallery, holdings, quotas, usage
from diamond.server.services.context import Context


def contents(ctx: Context, user_id: str, ref: str) -> tuple[BundleFile, ...]:
    """What lies in a bundle that this user may use; nothing, for what is no reference or not theirs."""
    if not is_bundle_ref(ref):
        return ()
    try:
        bundles.require(ctx, user_id, digest_of_ref(ref), "workdir")
    except InvalidInput:
        return ()
    return bundles.manifest(ctx, digest_of_ref(ref)).files


def change(
    ctx: Context, user_id: str, ref: str, add: Mapping[str, bytes], drop: Collection[str] = (), *, field: str = "files"
) -> str:
    """A bundle with these files besides, or instead, and without others; its reference, or "" for one without files.

    Args:
        ref: the bundle there was; empty for none.
        add: contents by path. A path that was there gets the new contents.

    Raises:
        InvalidInput: a path cannot be used, or `ref` is not theirs to use.
        QuotaExceeded: there is no room for so much.
    """
    kept: dict[str, BundleFile] = {}
    if ref:
        if not is_bundle_ref(ref):
            raise InvalidInput(
                f"the work directory is {ref[:80]!r}, which does not lie at the server",
                hint="take `workdir` out of the YAML to send files from here",
                field=field,
            )
        bundles.require(ctx, user_id, digest_of_ref(ref), field)
        kept = {item.path: item for item in bundles.manifest(ctx, digest_of_ref(ref)).files if item.path not in drop}
        # Whoever may have the bundle may have what is in it; from now on it counts for them as well.
        sizes = {item.digest: item.size_bytes for item in kept.values() if item.digest and not gallery.has(item.digest)}
        given = holdings.give(ctx, user_id, sizes)
        usage.note_stored(ctx, user_id, sum(sizes[digest] for digest in given))
    blobs: dict[str, bytes] = {}
    for path, data in add.items():
        try:
            clean = check_relative_path(path, "the path")
        except InvalidInput as error:
            raise type(error)(error.message, hint=error.hint, field=field) from error
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        kept[clean] = BundleFile(path=clean, size_bytes=len(data), digest=digest, executable=data.startswith(b"#!"))
    if not kept:
        return ""
    keep(ctx, user_id, blobs)
    manifest = Manifest(files=tuple(kept[path] for path in sorted(kept)))
    try:
        answer = bundles.register(ctx, encode(manifest), user_id)
    except InvalidInput as error:
        raise type(error)(error.message, hint=error.hint, field=field) from error
    assert answer["complete"], "every file was kept a moment ago"
    return manifest.ref


def keep(ctx: Context, user_id: str, blobs: Mapping[str, bytes]) -> None:
    """Store contents by digest for a user, as far as they have room."""
    ctx.ingestion.check_reserve(sum(map(len, blobs.values())))
    quotas.check_upload(ctx, user_id, sum(map(len, blobs.values())), list(blobs))
    new = {digest for digest in blobs if not ctx.blobs.has(digest)}
    for digest, data in blobs.items():
        ctx.blobs.put_bytes(digest, data)
    given = holdings.give(ctx, user_id, {digest: len(data) for digest, data in blobs.items()})
    usage.note_stored(ctx, user_id, sum(len(blobs[digest]) for digest in given | new))
