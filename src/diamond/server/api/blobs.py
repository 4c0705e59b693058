"""Routes of file contents, for users and agents: resumable uploads, packs of small files, downloads.

Bodies are written to disk as they arrive; memory stays bounded whatever is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from diamond.core.bundles import MAX_FILES, is_digest
from diamond.core.codec import decode
from diamond.core.errors import DigestMismatch, InvalidInput, NotFound, StorageFull, TooLarge
from diamond.server.api.answers import FileAnswer, Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Anyone, Body, Ctx, Digest, Server
from diamond.server.api.schemas import BlobQuery, MissingBlobs, PackStored, UploadState
from diamond.server.limits import drain
from diamond.server.services import bundles
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
    description="Of these digests, those the server does not hold completely, with how much of each it has.",
    responses=returns(MissingBlobs, "The missing ones.") | USER_FAILS | fails(TooLarge),
    openapi_extra=takes(BlobQuery),
)
def missing_blobs(_anyone: Anyone, ctx: Ctx, body: Body) -> Response:
    digests = decode(BlobQuery, body, strict=True).digests
    if len(digests) > MAX_FILES:
        raise TooLarge(f"has {len(digests)} entries; at most {MAX_FILES} are allowed", field="digests")
    for number, digest in enumerate(digests):
        if not is_digest(digest):
            raise InvalidInput(f"{digest[:90]!r} is not sha256:<64 hex digits>", field=f"digests[{number}]")
    return Json({"missing": bundles.missing_blobs(ctx, digests)})


@router.put(
    "/blobs/{digest}",
    summary="Upload a blob",
    description="Bytes from `offset` on, of `total` altogether. Resumable: what arrived before a broken connection is "
    "kept, and `received` says where to go on. A gap stores nothing and answers how much is held.",
    responses=returns(UploadState, "How far the upload is.") | USER_FAILS | fails(DigestMismatch, StorageFull),
    openapi_extra=takes("application/octet-stream"),
)
async def put_blob(
    request: Request,
    _anyone: Anyone,
    server: Server,
    digest: Digest,
    total: Annotated[int, Query(ge=0, le=MAX_BLOB_BYTES, description="Size of the whole blob in bytes.")],
    offset: Annotated[int, Query(ge=0, le=MAX_BLOB_BYTES, description="Where these bytes begin.")] = 0,
) -> Response:
    request.scope["diamond.waits"] = True  # as slow as the sender's line, not as we are
    position = offset
    buffer = bytearray()

    async def store() -> PutResult:
        nonlocal position
        piece = bytes(buffer)
        buffer.clear()
        result = await run_in_threadpool(server.ctx.blobs.put_chunk, digest, total, position, [piece] if piece else [])
        position += len(piece)
        server.metrics.blob_bytes.inc(len(piece))
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
    responses=returns(PackStored, "How many were stored.") | USER_FAILS | fails(TooLarge, DigestMismatch, StorageFull),
    openapi_extra=takes("application/octet-stream"),
)
async def put_pack(request: Request, _anyone: Anyone, server: Server) -> Response:
    request.scope["diamond.waits"] = True
    stored = 0
    batch: list[tuple[str, bytes]] = []
    size = 0

    async def flush() -> None:
        nonlocal stored, batch, size
        frames, batch = batch, []
        # Each blob is synced to disk; several at once share the waiting.
        stores = (
            run_in_threadpool(_store_all, server.ctx.blobs, frames[first::_WRITERS])
            for first in range(min(_WRITERS, len(frames)))
        )
        outcomes = await asyncio.gather(*stores, return_exceptions=True)
        for failure in outcomes:
            if failure is not None:
                raise failure
        server.metrics.blob_bytes.inc(size)
        stored, size = stored + len(frames), 0

    try:
        async for digest, data in read_frames(request.stream()):
            batch.append((digest, data))
            size += len(data)
            if size >= _PIECE_BYTES or len(batch) >= 256:
                await flush()
    except (InvalidInput, ClientDisconnect):
        await flush()
        raise
    await flush()
    return Json(PackStored(stored=stored))


def _store_all(blobs: BlobStore, frames: list[tuple[str, bytes]]) -> None:
    for digest, data in frames:
        blobs.put_bytes(digest, data)


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
    description="For users and agents. A `Range` of bytes is honoured.",
    responses=returns("application/octet-stream", "The bytes.")
    | returns("application/octet-stream", "The range asked for.", status=206)
    | USER_FAILS
    | fails(NotFound),
)
def get_blob(_anyone: Anyone, ctx: Ctx, digest: Digest) -> Response:
    try:
        return FileAnswer(ctx.blobs.path(digest), name=digest.removeprefix("sha256:"), headers={"ETag": f'"{digest}"'})
    except FileNotFoundError:
        raise NotFound(f"blob {digest} is not here", hint="it may not be uploaded completely") from None
