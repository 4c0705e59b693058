"""Routes of shells, for the client that types and the agent that runs: each sends its stream and reads the other's.

Only long polls and small bodies, so that any proxy passes them. Everything here runs on the event loop, without a
thread or the database, but for opening and closing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from diamond.core.codec import decode
from diamond.core.errors import Conflict, DiamondError, NotFound, PolicyRefused, ProtocolError, TooLarge
from diamond.core.shells import MAX_CHUNK_BYTES, NewShell, Shell, ShellEnd, ShellReceived
from diamond.server.api.answers import Json
from diamond.server.api.documents import AGENT_FAILS, USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import MAX_CURSOR, Agent, Body, Server, User
from diamond.server.auth import require_agent
from diamond.server.runtime import MAX_WAIT_S, Runtime
from diamond.server.services import shells
from diamond.server.services.shells import LiveShell, Pipe

log = logging.getLogger("diamond.server")
router = APIRouter(prefix="/api/v1", tags=["shells"])
agent_router = APIRouter(prefix="/api/v1/agent", tags=["agent"])
SWEEP_EVERY_S = 1.0
_CHECK_JOBS_EVERY_S = 5.0

Offset = Annotated[int, Query(ge=0, le=MAX_CURSOR, description="Where in the stream these bytes begin.")]
From = Annotated[int, Query(ge=0, le=MAX_CURSOR, description="First byte wanted; you have all before it.")]
Wait = Annotated[float, Query(ge=0, description=f"Seconds to wait, at most {MAX_WAIT_S:.0f}.")]
Runner = Annotated[str, Query(min_length=8, max_length=100, description="Names the agent process.")]


@router.post(
    "/tasks/{task_id}/shells",
    status_code=201,
    summary="Open a shell",
    description="Starts a program in the task's running job, on a terminal of its own or with plain streams. Its bytes "
    "go through `input` and `output`, as frames: a byte for the kind (`i` input, `e` end of input, `w` window size, "
    "`s` signal; `o` output, `r` error output), four bytes of length (big-endian), and that many bytes.",
    responses=returns(Shell, "The shell; its agent starts it at once.", status=201)
    | USER_FAILS
    | fails(NotFound, Conflict, PolicyRefused, TooLarge),
    openapi_extra=takes(NewShell),
)
async def open_shell(user: User, server: Server, task_id: str, body: Body) -> Response:
    asked = decode(NewShell, body, strict=True)
    asked.check()
    place = await run_in_threadpool(shells.find_place, server.ctx, user, task_id, asked)
    shell = server.shells.add(place, asked)
    try:
        await run_in_threadpool(shells.record_opened, server.ctx, shell)
    except BaseException:
        server.shells.drop(shell)  # a shell that nobody wrote down must not be
        raise
    return Json(shell.show(), 201, {"Location": f"/api/v1/shells/{shell.id}"})


@router.get(
    "/shells/{shell_id}",
    summary="Look at a shell",
    description="How it stands, and once it is over, how it ended.",
    responses=returns(Shell, "The shell.") | USER_FAILS | fails(NotFound),
)
async def get_shell(user: User, server: Server, shell_id: str) -> Response:
    return Json(server.shells.of_user(user, shell_id).show())


@router.delete(
    "/shells/{shell_id}",
    status_code=204,
    summary="Close a shell",
    description="Ends what runs in it. Repeating it is harmless.",
    responses=USER_FAILS,
)
async def close_shell(user: User, server: Server, shell_id: str) -> Response:
    try:
        shell = server.shells.of_user(user, shell_id)
    except NotFound:
        return Response(status_code=204)
    server.shells.drop(shell)
    await _finish(server, shell, ShellEnd(message="closed by its user"))
    return Response(status_code=204)


@router.post(
    "/shells/{shell_id}/input",
    summary="Type into a shell",
    description=f"Up to {MAX_CHUNK_BYTES} bytes of the input stream. While the program reads nothing the server takes "
    "nothing more and answers, after `wait_s`, how much it took. Safe to repeat.",
    responses=returns(ShellReceived, "How much of the stream is here.") | USER_FAILS | fails(NotFound, TooLarge),
    openapi_extra=takes("application/octet-stream"),
)
async def write_input(
    request: Request, user: User, server: Server, shell_id: str, offset: Offset, wait_s: Wait = 10
) -> Response:
    shell = server.shells.of_user(user, shell_id)
    return await _write(request, server, shell, shell.input, offset, wait_s)


@router.get(
    "/shells/{shell_id}/output",
    summary="Read a shell's output",
    description="Bytes of the output stream from `offset` on, as soon as there are any. `Diamond-Eof: 1` says that the "
    "shell is over and nothing follows these.",
    responses=returns("application/octet-stream", "Frames.") | AGENT_FAILS | fails(NotFound, ProtocolError),
)
async def read_output(
    request: Request, user: User, server: Server, shell_id: str, offset: From = 0, wait_s: Wait = 10
) -> Response:
    shell = server.shells.of_user(user, shell_id)
    data = await _read(request, server, shell, shell.output, offset, wait_s)
    server.shells.of_user(user, shell_id)
    eof = shell.end is not None and offset + len(data) >= shell.output.end
    return _bytes(data, {"Diamond-Eof": "1" if eof else "0"})


@agent_router.post(
    "/shells/{shell_id}/output",
    summary="Send a shell's output",
    description="As a client sends input. 404: the shell is over, and what runs in it is to be ended.",
    responses=returns(ShellReceived, "How much of the stream is here.")
    | AGENT_FAILS
    | fails(NotFound, Conflict, TooLarge),
    openapi_extra=takes("application/octet-stream"),
)
async def write_output(
    request: Request, agent: Agent, server: Server, shell_id: str, runner: Runner, offset: Offset, wait_s: Wait = 10
) -> Response:
    shell = server.shells.of_agent(agent, shell_id, runner)
    return await _write(request, server, shell, shell.output, offset, wait_s)


@agent_router.get(
    "/shells/{shell_id}/input",
    summary="Read a shell's input",
    description="As a client reads output. The first agent process to ask has taken the shell up.",
    responses=returns("application/octet-stream", "Frames.") | AGENT_FAILS | fails(NotFound, Conflict, ProtocolError),
)
async def read_input(
    request: Request, agent: Agent, server: Server, shell_id: str, runner: Runner, offset: From = 0, wait_s: Wait = 10
) -> Response:
    shell = server.shells.of_agent(agent, shell_id, runner)
    data = await _read(request, server, shell, shell.input, offset, wait_s)
    # While it waited the shell may have ended, and its token may have been revoked.
    server.shells.of_agent(require_agent(await server.authenticator.identify(request)), shell_id, runner)
    return _bytes(data)


@agent_router.post(
    "/shells/{shell_id}/end",
    status_code=204,
    summary="Report a shell's end",
    description="After its last output. Safe to repeat.",
    responses=AGENT_FAILS | fails(Conflict),
    openapi_extra=takes(ShellEnd),
)
async def end_shell(agent: Agent, server: Server, shell_id: str, runner: Runner, body: Body) -> Response:
    end = shells.clean_end(decode(ShellEnd, body))
    try:
        shell = server.shells.of_agent(agent, shell_id, runner)
    except NotFound:
        return Response(status_code=204)
    await _finish(server, shell, end)
    return Response(status_code=204)


def _bytes(data: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(data, media_type="application/octet-stream", headers=headers)


async def _write(
    request: Request, server: Runtime, shell: LiveShell, pipe: Pipe, offset: int, wait_s: float
) -> Response:
    data = await request.body()  # of MAX_CHUNK_BYTES at most, see `limits`
    wanted = offset + len(data)

    def look() -> bool:
        return pipe.write(offset, data) >= wanted or pipe.end < offset or shell.end is not None

    before = pipe.end
    await _until(request, server, pipe, wait_s, look)
    if pipe.end > before:
        server.shells.used(shell)
    return Json(ShellReceived(received=pipe.end))


async def _read(request: Request, server: Runtime, shell: LiveShell, pipe: Pipe, offset: int, wait_s: float) -> bytes:
    await _until(request, server, pipe, wait_s, lambda: bool(pipe.read(offset, 1)) or shell.end is not None)
    return pipe.read(offset, MAX_CHUNK_BYTES) if offset >= pipe.start else b""


async def _until(request: Request, server: Runtime, pipe: Pipe, wait_s: float, is_done: Callable[[], bool]) -> None:
    """Wait for `is_done`, which is asked again whenever the pipe changes; not longer than `wait_s`."""
    if is_done():
        return
    # Well within the patience for silence: whoever only waits must be heard of in time.
    deadline = time.monotonic() + min(wait_s, MAX_WAIT_S, server.shells.limits.patience_s / 3)
    with server.waiting(request):
        while not server.hub.closing and (left_s := deadline - time.monotonic()) > 0:
            await pipe.change(left_s)
            if is_done():
                return


async def _finish(server: Runtime, shell: LiveShell, end: ShellEnd) -> None:
    if server.shells.finish(shell, end):
        try:
            await run_in_threadpool(shells.record_closed, server.ctx, shell)
        except DiamondError as error:
            log.warning("the end of shell %s could not be written down: %s", shell.id, error.message)


async def take_over(server: Runtime, endpoint_id: str, runner: str) -> None:
    """An agent process asks for orders: what an earlier one ran in shells went down with it."""
    for shell in server.shells.orphans(endpoint_id, runner):
        await _finish(server, shell, ShellEnd(message=f"the agent of endpoint {shell.place.endpoint} was restarted"))


async def keep_shells(server: Runtime) -> None:
    """End shells whose client or agent is gone, whose job is over, and all of them when the server stops."""
    table, hub = server.shells, server.hub
    check_jobs_at = 0.0
    ended_before: set[str] = set()
    with hub.subscribe() as subscription:
        while not hub.closing:
            await subscription.wait(SWEEP_EVERY_S)
            try:
                for shell, end in table.sweep():
                    await _finish(server, shell, end)
                live = table.live()
                if live and time.monotonic() >= check_jobs_at:
                    check_jobs_at = time.monotonic() + _CHECK_JOBS_EVERY_S
                    job_ids = {shell.place.job_id for shell in live}
                    ended = await run_in_threadpool(shells.ended_jobs, server.ctx, job_ids)
                    # Only from the second look on: the agent knows better how the program ended, and says so.
                    for shell in live:
                        if shell.place.job_id in ended & ended_before:
                            await _finish(server, shell, ShellEnd(message="the job has ended"))
                    ended_before = ended
            except Exception:
                log.exception("looking after shells failed; going on")
        for shell in table.live():
            await _finish(server, shell, ShellEnd(message="the server was stopped"))
