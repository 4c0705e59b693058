"""Routes of file contents, for users and agents: resumable uploads, packs of small files, downloads.

Bodies are written to disk as they arrive; memory stays bounded whatever is sent.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from diamond.core.bundles import MAX_FILES, is_digest
from diamond.core.codec import decode
from diamond.core.errors import (
    DigestMismatch,
    Forbidden,
    InvalidInput,
    NotFound,
    QuotaExceeded,
    StorageFull,
    TooLarge,
)
from diamond.server.api.answers import FileAnswer, Json
from diamond.server.api.documents import AGENT_FAILS, fails, returns, takes
from diamond.server.api.runtime import Body, Ctx, Digest, Party, Server
from diamond.server.api.schemas import BlobQuery, MissingBlobs, PackStored, UploadState
from diamond.server.limits import drain
from diamond.server.services import agents, bundles, holdings, quotas, usage
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.store.blobs import BlobStore, PutResult

router = APIRouter(prefix="/api/v1", tags=["blobs"])
MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_BLOB_BYTES = 2**50
_PIECE_BYTES = 4 * 1024 * 1024
_DRAIN_BYTES = 64 * 1024 * 1024
_WRITERS = 8
_HEX_CHARS, _LENGTH_BYTES = 64, 8
_HEAD_BYTES = _HEX_CHARS + _LENGTH_BYTES


@router.post(
    "/blobs/missing",
    summary="Ask which blobs are missing",
    description="Of these digests, those that you have not sent completely yet, with how much of each you have. What "
    "others sent counts as missing: it is kept once, but has to be sent to be yours.",
    responses=returns(MissingBlobs, "The missing ones.") | AGENT_FAILS | fails(TooLarge),
    openapi_extra=takes(BlobQuery),
)
def missing_blobs(party: Party, ctx: Ctx, body: Body) -> Response:
    digests = decode(BlobQuery, body, strict=True).digests
    if len(digests) > MAX_FILES:
        raise TooLarge(f"has {len(digests)} entries; at most {MAX_FILES} are allowed", field="digests")
    for number, digest in enumerate(digests):
        if not is_digest(digest):
            raise InvalidInput(f"{digest[:90]!r} is not sha256:<64 hex digits>", field=f"digests[{number}]")
    return Json({"missing": bundles.missing_blobs(ctx, holdings.holder_of(party), digests)})


@router.put(
    "/blobs/{digest}",
    summary="Upload a blob",
    description="Bytes from `offset` on, of `total` altogether. Resumable: what arrived before a broken connection is "
    "kept, and `received` says where to go on. A gap stores nothing and answers how much is held.",
    responses=returns(UploadState, "How far the upload is.")
    | AGENT_FAILS
    | fails(Forbidden, QuotaExceeded)
    | fails(DigestMismatch, StorageFull),
    openapi_extra=takes("application/octet-stream"),
)
async def put_blob(
    request: Request,
    party: Party,
    server: Server,
    digest: Digest,
    total: Annotated[int, Query(ge=0, le=MAX_BLOB_BYTES, description="Size of the whole blob in bytes.")],
    offset: Annotated[int, Query(ge=0, le=MAX_BLOB_BYTES, description="Where these bytes begin.")] = 0,
) -> Response:
    request.scope["diamond.waits"] = True  # as slow as the sender's line, not as we are
    holder = holdings.holder_of(party)
    is_held = bool(await run_in_threadpool(holdings.held, server.ctx, holder, [digest]))
    is_here = server.ctx.blobs.has(digest)
    is_new = not (is_held and is_here)
    if is_new:
        await run_in_threadpool(_check, server.ctx, party, total, [digest])
    position = offset
    buffer = bytearray()

    async def store() -> PutResult:
        nonlocal position
        piece = bytes(buffer)
        buffer.clear()
        if is_new and piece:  # again: others of the same sender may have come meanwhile
            await run_in_threadpool(_check, server.ctx, party, total, [digest])
        pieces = [piece] if piece else []
        put = functools.partial(server.ctx.blobs.put_chunk, sender=holder, to_prove=not is_held)
        result = await run_in_threadpool(put, digest, total, position, pieces)
        position += len(piece)
        server.metrics.blob_bytes.inc(len(piece))
        if result.complete and is_new:
            await run_in_threadpool(_note, server.ctx, party, {digest: total}, set() if is_here else {digest})
        return result

    try:
        async for chunk in request.stream():
            buffer += chunk
            if len(buffer) >= _PIECE_BYTES:
                result = await store()
                if result.complete or result.received < position:
                    # Complete by another's hand, or a gap: the rest of this body is of no use.
                    await drain(request.receive, _DRAIN_BYTES)
                    return Json(UploadState(received=result.received, complete=result.complete))
    except ClientDisconnect:
        if buffer:
            await store()  # the sender will resume after it
        raise
    result = await store()
    return Json(UploadState(received=result.received, complete=result.complete))


@router.post(
    "/blobs/pack",
    summary="Upload many small blobs",
    description="The body is a sequence of frames: 64 hex characters of the SHA-256, 8 bytes of length (big-endian), "
    "the bytes. A frame holds at most 8 MiB. Frames before a faulty one are kept.",
    responses=returns(PackStored, "How many were stored.")
    | AGENT_FAILS
    | fails(Forbidden, QuotaExceeded)
    | fails(TooLarge, DigestMismatch, StorageFull),
    openapi_extra=takes("application/octet-stream"),
)
async def put_pack(request: Request, party: Party, server: Server) -> Response:
    request.scope["diamond.waits"] = True
    stored = 0
    batch: list[tuple[str, bytes]] = []
    size = 0

    async def flush() -> None:
        nonlocal stored, batch, size
        frames, batch = batch, []
        if not frames:
            return
        await run_in_threadpool(_check, server.ctx, party, size, [digest for digest, _ in frames])
        done: dict[str, int] = {}
        new: set[str] = set()
        # Each blob is synced to disk; several at once share the waiting.
        stores = (
            run_in_threadpool(_store_all, server.ctx.blobs, frames[first::_WRITERS], done, new)
            for first in range(min(_WRITERS, len(frames)))
        )
        outcomes = await asyncio.gather(*stores, return_exceptions=True)
        await run_in_threadpool(_note, server.ctx, party, done, new)
        for failure in outcomes:
            if isinstance(failure, BaseException):
                raise failure
        server.metrics.blob_bytes.inc(size)
        stored, size = stored + len(frames), 0

    try:
        async for digest, data in read_frames(request.stream()):
            batch.append((digest, data))
            size += len(data)
            if size >= _PIECE_BYTES or len(batch) >= 256:
                await flush()
        await flush()
    except QuotaExceeded:
        raise
    except (InvalidInput, ClientDisconnect):
        await flush()
        raise
    return Json(PackStored(stored=stored))


def _check(ctx: Context, party: Identity, num_bytes: int, digests: list[str]) -> None:
    """Refuse bytes that a user, or the disk, has no room for, and those of an agent that has nothing to do."""
    if party.endpoint_id is not None:
        agents.check_upload(ctx, party.endpoint_id, num_bytes, digests)
    quotas.check_upload(ctx, party.user_id, num_bytes, digests)
    ctx.ingestion.check_reserve(min(num_bytes, _PIECE_BYTES))  # again before each piece


def _store_all(blobs: BlobStore, frames: list[tuple[str, bytes]], done: dict[str, int], new: set[str]) -> None:
    """Stores them; adds to `done` what was, with its size, and to `new` those of them that were not here before."""
    for digest, data in frames:
        is_here = blobs.has(digest)
        blobs.put_bytes(digest, data)
        done[digest] = len(data)
        if not is_here:
            new.add(digest)


def _note(ctx: Context, party: Identity, sizes: dict[str, int], new: set[str]) -> None:
    """These blobs are the party's now. They count for whoever brings them, also where others have before: nobody learns
    from what they store who has the same."""
    given = holdings.give(ctx, holdings.holder_of(party), sizes)
    if party.user_id is not None:
        usage.note_stored(ctx, party.user_id, sum(sizes[digest] for digest in given | new))


async def read_frames(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, bytes]]:
    """Digest and bytes of each frame, holding no more than one frame and one chunk.

    Raises:
        InvalidInput: a frame makes no sense; those before it were yielded.
    """
    buffer = bytearray()
    number = 0
    async for chunk in chunks:
        buffer += chunk
        taken = 0
        while len(buffer) - taken >= _HEAD_BYTES:
            digest, length = _head(bytes(buffer[taken : taken + _HEAD_BYTES]), number)
            end = taken + _HEAD_BYTES + length
            if len(buffer) < end:
                break
            yield digest, bytes(buffer[taken + _HEAD_BYTES : end])
            taken, number = end, number + 1
        del buffer[:taken]
    if buffer:
        raise InvalidInput(
            f"the pack ends in the middle of frame {number}", hint=f"the {number} frames before it were stored"
        )


def _head(head: bytes, number: int) -> tuple[str, int]:
    digest = "sha256:" + head[:_HEX_CHARS].decode("latin-1")
    length = int.from_bytes(head[_HEX_CHARS:], "big")
    if not is_digest(digest):
        raise InvalidInput(
            f"frame {number} does not begin with 64 hex digits",
            hint="a frame is 64 lower-case hex characters, an 8-byte big-endian length, and that many bytes",
        )
    if length > MAX_FRAME_BYTES:
        raise TooLarge(
            f"frame {number} announces {length} bytes; at most {MAX_FRAME_BYTES} are allowed",
            hint="send larger blobs with PUT /api/v1/blobs/{digest}",
        )
    return digest, length


@router.get(
    "/blobs/{digest}",
    summary="Download a blob",
    description="For users who have sent it, or may see a task or an image that holds it, and for agents whose jobs "
    "need it. A `Range` of bytes is honoured.",
    responses=returns("application/octet-stream", "The bytes.")
    | returns("application/octet-stream", "The range asked for.", status=206)
    | AGENT_FAILS
    | fails(NotFound),
)
def get_blob(party: Party, ctx: Ctx, digest: Digest) -> Response:
    try:
        if not holdings.may_read(ctx, party, digest):
            raise FileNotFoundError(digest)
        return FileAnswer(ctx.blobs.path(digest), name=digest.removeprefix("sha256:"), headers={"ETag": f'"{digest}"'})
    except FileNotFoundError:
        raise NotFound(f"blob {digest} is not here", hint="it may not be uploaded completely") from None
