"""Images as files that a browser downloads and sends: the same exports that `diamond image export` and `import` know.

An export is put together while it is sent, from bytes that lie at the server: nothing is written for it. What is taken
in is verified first, as a whole; then its parts are stored as if a client had uploaded them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import sqlalchemy as sa
from sqlalchemy.orm import undefer

from diamond.core.bundles import BundleFile, Manifest, check_relative_path, digest_of_ref, is_bundle_ref
from diamond.core.codec import decode, encode
from diamond.core.errors import DiamondError, InvalidInput, NotFound
from diamond.core.image_views import Build
from diamond.core.imagefile import (
    END,
    FILES,
    MAX_TEXT_BYTES,
    TEXT_MEMBERS,
    Contents,
    ImageFile,
    Member,
    check_contents,
    contents_block,
    header,
    look_through,
    members_of,
    padding,
    payload_name,
)
from diamond.core.images import PAYLOAD_FILE, ImageFacts, ReplicaState
from diamond.core.recipes import Recipe
from diamond.core.states import TaskState
from diamond.server.services import (
    bundles,
    holdings,
    image_copies,
    image_progress,
    image_work,
    images,
    quotas,
    uploads,
    usage,
)
from diamond.server.services.context import Context
from diamond.server.store.models import ImageRow, TaskRow

_CHUNK = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """How far an export is: "none", "running", "ready" or "failed"."""

    state: str = "none"
    task_id: str = ""
    size_bytes: int = 0
    why: str = ""


def exporting(ctx: Context, user_id: str, ref: str) -> Exporting:
    """Of its newest ready result. The task that brings it may be another's, and is only named to who may see it."""
    try:
        _, found = image_copies.payload(ctx, user_id, ref)
        return Exporting(state="ready", size_bytes=found.size_bytes)
    except NotFound:
        pass
    with ctx.db.read() as session:
        image = images.find(session, user_id, ref)
        try:
            replica, where = image_progress.newest(session, user_id, image, None, ref=ref, state=ReplicaState.READY)
        except NotFound:
            return Exporting()
        rows = session.scalars(
            sa.select(TaskRow)
            .where(TaskRow.image_id == image.id, TaskRow.kind == "transfer", TaskRow.endpoint_id == where.id)
            .order_by(TaskRow.id.desc())
            .options(undefer(TaskRow.work), undefer(TaskRow.outputs))
        ).all()
        for task in rows:
            order = image_work.order_of(task)
            if order is None or order.action != "export" or order.digest != replica.digest:
                continue
            state = TaskState(task.state)
            mine = task.id if task.owner_id == user_id else ""
            if not state.is_final:
                return Exporting(state="running", task_id=mine)
            if state is TaskState.SUCCEEDED:  # its bytes were let go of, or stayed where they were
                kept = any(item.path == PAYLOAD_FILE and item.stored for item in images.outputs_of(session, task.id))
                why = "" if kept else "it is larger than its endpoint hands over (max_image_bytes in its policy.toml)"
                return Exporting(state="none" if kept else "failed", task_id=mine, why=why)
            return Exporting(state="failed", task_id=mine, why=task.detail)
    return Exporting()


@dataclass(frozen=True, kw_only=True)
class Download:
    name: str
    size_bytes: int
    pieces: Iterator[bytes]


def download(ctx: Context, user_id: str, ref: str) -> Download:
    """The export of an image whose payload is at the server.

    Raises:
        NotFound: it is not; says what to do.
    """
    name, found = image_copies.payload(ctx, user_id, ref)
    with ctx.db.read() as session:
        row = images.find(session, user_id, ref, undefer(ImageRow.recipe))
        replica, _ = image_progress.newest(session, user_id, row, None, ref=ref, state=ReplicaState.READY)
        recipe, facts = decode(Recipe, row.recipe), decode(ImageFacts, replica.facts or {})
        outputs = {item.path: item for item in images.outputs_of(session, replica.task_id) if item.stored}
    texts = {}
    for text in TEXT_MEMBERS:
        if (item := outputs.get(text)) is not None and item.size_bytes <= MAX_TEXT_BYTES:
            try:
                with ctx.blobs.open(f"sha256:{item.sha256}") as file:
                    texts[text] = file.read()
            except FileNotFoundError:
                continue
    manifests = _manifests(ctx, user_id, recipe)
    blobs = {item.digest: item.size_bytes for one in manifests.values() for item in one.files if not item.link_to}
    payload = Member(name=payload_name(facts.builder), size_bytes=found.size_bytes, sha256=found.sha256)
    contents = Contents(
        name=name, recipe=recipe, facts=facts, members=members_of(texts, blobs, payload), bundles=manifests
    )
    begin = contents_block(contents)
    size = len(begin) + sum(512 + m.size_bytes + len(padding(m.size_bytes)) for m in contents.members) + len(END)
    return Download(name=f"{name}.diamond.tar", size_bytes=size, pieces=_pieces(ctx, contents, begin, texts))


def _manifests(ctx: Context, user_id: str, recipe: Recipe) -> dict[str, Manifest]:
    """What the recipe brings in goes along, so that it can be built elsewhere too."""
    found = {}
    for ref in sorted({ref for ref in recipe.files.values() if is_bundle_ref(ref)}):
        if not holdings.user_may_read(ctx, user_id, digest_of_ref(ref)):
            raise NotFound("a file that the recipe brings in is not here any more", hint="build the image again")
        found[ref] = bundles.manifest(ctx, digest_of_ref(ref))
    return found


def _pieces(ctx: Context, contents: Contents, begin: bytes, texts: dict[str, bytes]) -> Iterator[bytes]:
    yield begin
    for member in contents.members:
        yield header(member, contents.facts.built_at)
        if member.name in texts:
            yield texts[member.name]
        else:
            with ctx.blobs.open(f"sha256:{member.sha256}") as file:
                while piece := file.read(_CHUNK):
                    yield piece
        yield padding(member.size_bytes)
    yield END


def take_in(
    ctx: Context, user_id: str, file: BinaryIO, called: str, *, endpoint: str | None = None, name: str | None = None
) -> tuple[Build, bool]:
    """Import an export that somebody sent.

    Raises:
        InvalidInput: it is not one, or not whole; or it fits no endpoint.
        DigestMismatch: its contents are not what it says.
        QuotaExceeded: there is no room for it.
    """
    shown = "".join(char for char in called.replace("\\", "/").rpartition("/")[2] if char.isprintable())[:100]
    try:
        found = look_through(file, Path(f"the file {shown}"))
        check_contents(file, found)
    except DiamondError as error:
        raise type(error)(error.message, hint=error.hint, field="file") from error
    contents = found.contents
    _store(ctx, user_id, file, found)
    for manifest in contents.bundles.values():
        bundles.register(ctx, encode(manifest), user_id)
    try:
        return image_copies.import_image(
            ctx,
            user_id,
            recipe=encode(contents.recipe),
            facts=encode(contents.facts),
            lock=encode(found.lock),
            payload=f"sha256:{contents.payload.sha256}",
            name=name or contents.name,
            endpoint=endpoint,
        )
    except InvalidInput as error:
        field = error.field if error.field in ("name", "endpoint") else "file"
        raise type(error)(error.message, hint=error.hint, field=field) from error


def one_file(ctx: Context, user_id: str, name: str, data: bytes) -> str:
    """A file that a recipe brings in, kept for its user: the reference to write into `files`.

    Raises:
        QuotaExceeded: there is no room for it.
    """
    digest = "sha256:" + hashlib.sha256(data).hexdigest()
    uploads.keep(ctx, user_id, {digest: data})
    path = check_relative_path(name.replace("\\", "/").rpartition("/")[2] or "file", "the file's name")
    item = BundleFile(path=path, size_bytes=len(data), digest=digest, executable=data.startswith(b"#!"))
    manifest = Manifest(files=(item,), is_file=True)
    bundles.register(ctx, encode(manifest), user_id)
    return manifest.ref


def _store(ctx: Context, user_id: str, file: BinaryIO, found: ImageFile) -> None:
    """The large members, each as a blob of this user's."""
    members = [m for m in found.contents.members if m.name.startswith(FILES) or m is found.contents.payload]
    sizes = {f"sha256:{m.sha256}": m.size_bytes for m in members}
    quotas.check_upload(ctx, user_id, sum(sizes.values()), list(sizes))
    held = holdings.held(ctx, user_id, sizes)
    new = {digest for digest in sizes if not ctx.blobs.has(digest)}
    for member in members:
        digest = f"sha256:{member.sha256}"
        file.seek(found.offsets[member.name])
        pieces = _part(file, member.size_bytes)
        ctx.ingestion.check_reserve(member.size_bytes)
        ctx.blobs.put_chunk(digest, member.size_bytes, 0, pieces, sender=user_id, to_prove=digest not in held)
    given = holdings.give(ctx, user_id, sizes)
    usage.note_stored(ctx, user_id, sum(sizes[digest] for digest in given | new))


def _part(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := file.read(min(_CHUNK, size))):
        size -= len(piece)
        yield piece
