"""Forms that carry files, or more text than others: read within limits of their own, and only for who is signed in.

A route names `large_form` among its `dependencies`: those run first, and what was read is then what `Visitor` and
`Fields` find. Files are in `files_of(request)`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import IO

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from diamond.core.errors import DiamondError, InvalidInput, TooLarge, Unauthenticated
from diamond.server.web.forms import parse_form

MAX_TEXT_BYTES = 4 * 1024 * 1024  # a script and the task file that holds it, each of 1 MiB, and room for escapes
MAX_FILES = 200
MAX_FILES_BYTES = 32 * 1024 * 1024
_MAX_FIELDS = 300
_PART_BYTES = 2 * 1024 * 1024
_UNKNOWN_BYTES = 512 * 1024  # of somebody who is not signed in: enough to show them what they typed


class Sent:
    """A file as a browser sent it. What it is called there is only a proposal."""

    def __init__(self, field: str, name: str, file: IO[bytes], size: int) -> None:
        self.field = field
        self.name = name
        self.file = file
        self.size = size

    def read(self) -> bytes:
        self.file.seek(0)
        return self.file.read()


async def large_form(request: Request) -> None:
    """Read the form; what it holds besides text lies in temporary files until the answer is sent.

    Raises:
        Unauthenticated: nobody is signed in here: then no more is read than is shown to them.
        TooLarge: there are more files or fields than any page of ours sends.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        await request.app.state.runtime.authenticator.recheck(request)
    except Unauthenticated:
        await _note_text(request, kind)
        raise
    if kind != "multipart/form-data":
        if kind == "application/x-www-form-urlencoded":
            request.scope["diamond.form"] = plain(parse_form(await _all_of(request), max_fields=_MAX_FIELDS))
        return
    parser = MultiPartParser(
        request.headers, request.stream(), max_files=MAX_FILES + 1, max_fields=_MAX_FIELDS, max_part_size=_PART_BYTES
    )
    try:
        sent = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise TooLarge(
                f"more than {MAX_FILES} files were chosen at once",
                hint="choose fewer, pack them into an archive, or use `diamond launch` for whole folders",
                field="files",
            ) from None
        if "maximum size" in error.message:
            raise TooLarge(
                f"a field holds more than the {_PART_BYTES // 2**20} MiB that a page takes as text",
                hint="go back and shorten it; longer text belongs into a file, chosen under Files or sent by "
                "`diamond launch`",
            ) from None
        if "Too many fields" in error.message:
            raise TooLarge(f"the form has more than {_MAX_FIELDS} fields", hint="go back and shorten it") from None
        raise InvalidInput(
            f"the form cannot be read: {error.message}", hint="go back, reload the page, send it again"
        ) from None
    form: dict[str, str] = {}
    files: list[Sent] = []
    for name, value in sent.multi_items():
        if isinstance(value, UploadFile):
            if value.filename:  # a field of files that was left empty has a nameless one
                files.append(Sent(name, value.filename, value.file, value.size or 0))
        elif name in form:
            raise InvalidInput("the form gives a field twice", hint="reload the page and send it again")
        elif "\x00" in value:
            raise InvalidInput("the form holds a NUL character", hint="leave it out", field=name[:40])
        else:
            form[name] = value
    request.scope["diamond.form"] = plain(form)
    request.scope["diamond.files"] = files


async def _note_text(request: Request, kind: str) -> None:
    """What was typed, for the page that says that nobody is signed in; nothing where it cannot be read."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or int(length) > _UNKNOWN_BYTES:
        return
    raw = await request.body()

    async def once() -> AsyncGenerator[bytes, None]:
        yield raw
        yield b""

    try:
        if kind == "multipart/form-data":
            parser = MultiPartParser(request.headers, once(), max_files=MAX_FILES + 1, max_fields=_MAX_FIELDS)
            pairs = (await parser.parse()).multi_items()
            form = {name: value for name, value in pairs if isinstance(value, str)}
        else:
            form = parse_form(raw, max_fields=_MAX_FIELDS)
    except (MultiPartException, DiamondError):
        return
    request.scope["diamond.form"] = plain(form)


def files_of(request: Request) -> list[Sent]:
    found: list[Sent] = request.scope.get("diamond.files", [])
    return found


def plain(form: dict[str, str]) -> dict[str, str]:
    """Browsers end lines of text fields with CR LF, whatever was in them."""
    return {name: value.replace("\r\n", "\n") for name, value in form.items()}


async def _all_of(request: Request) -> bytes:
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > MAX_TEXT_BYTES:
            raise TooLarge(f"the form is larger than {MAX_TEXT_BYTES} bytes", hint="shorten what you wrote")
    return bytes(raw)
