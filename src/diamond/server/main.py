"""Running a server: one per home, from an empty folder to answering, and down again without losing a request.

Owns the lock, server.json, the listening socket and the signals. Must not know routes.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import uvicorn

import diamond
from diamond.core.errors import Conflict, DiamondError, InstallationProblem
from diamond.core.home import DEFAULT_PORT, ClientConfig, Home
from diamond.core.rundir import write_atomic
from diamond.server import identity_file, workers
from diamond.server.app import create_app
from diamond.server.hub import Hub
from diamond.server.identity_providers import IdentityProviders
from diamond.server.logs import configure_logging
from diamond.server.services import bootstrap
from diamond.server.services.allowances import Allowances, Caps
from diamond.server.services.context import Context
from diamond.server.services.sealing import FILE_NAME, Keys
from diamond.server.settings import Settings, load_settings
from diamond.server.slow_clients import patient_protocol
from diamond.server.store.blobs import BlobStore
from diamond.server.store.db import Database
from diamond.server.store.series import SeriesStore
from diamond.server.store.streams import StreamStore
from diamond.server.trust import Certificates, certificates_for, trust_of
from diamond.server.workers import Place, Supervisor

log = logging.getLogger("diamond.server")
_GRACE_S = 10
_RENEW_EVERY_S = 12 * 3600.0
_FAREWELL_S = 0.3


def serve(
    *,
    home: Home,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    database_url: str | None = None,
    embedded: str | None = None,
    use_tls: bool | None = None,
    multi_user: bool | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_setup: Callable[[str, str], None] | None = None,
) -> int:
    """Run a server until SIGTERM or SIGINT; 0 when it stopped as asked.

    Args:
        port: 0 takes a free one.
        embedded: name of an endpoint to prepare for an agent on this machine.
        use_tls: speak HTTPS; None: as the environment says.
        multi_user: accounts for many people; None: as the environment says.
        on_ready: called with the server's address, on the main thread, once it answers.
        on_setup: called after that with the address of a page and the code that makes the first administrator there,
            if there is none yet. Nothing else ever shows that code.

    Raises:
        Conflict: another server runs on this home.
        InstallationProblem: the port is taken, the database cannot be used, or the address is not allowed.
    """
    settings = load_settings(
        home=home.path, host=host, port=port, database_url=database_url, embedded=embedded, tls=use_tls,
        multi_user=multi_user,
    )  # fmt: skip
    return run(settings, on_ready=on_ready, on_setup=on_setup)


def run(
    settings: Settings,
    *,
    on_ready: Callable[[str], None] | None = None,
    on_setup: Callable[[str, str], None] | None = None,
) -> int:
    """`serve`, with everything that can be set."""
    check_mode(settings)
    configure_logging(settings.log_level, settings.log_format)
    home = settings.home_dir
    with ExitStack() as stack:
        stack.enter_context(server_lock(home))
        listener = stack.enter_context(_bind(settings.host, settings.port))
        certificates = certificates_for(settings, now=time.time())
        url = _url(settings.host, listener.getsockname()[1], "https" if certificates else "http")
        db = open_database(settings)
        stack.callback(db.close)
        workers.check(settings.workers, is_sqlite=db.is_sqlite)
        db.migrate()
        hub = make_hub(db)
        ctx = make_context(settings, db, hub)
        setup_code = _prepare(ctx, settings, url, certificates)

        def ready() -> None:
            ca = str(certificates.ca.absolute()) if certificates and certificates.ca else ""
            said = {"pid": os.getpid(), "url": url, **({"ca": ca} if ca else {})}
            write_atomic(home.server_file, json.dumps(said).encode())
            log.info("Diamond %s answers at %s", diamond.__version__, url)
            if settings.multi_user and not (settings.is_loopback or settings.public_url or settings.allowed_hosts):
                log.warning(
                    "this server answers to any name, and its links repeat the one they were asked by: set "
                    "DIAMOND_PUBLIC_URL to the address that people use"
                )
            if pin := trust_of(settings, certificates).pin:
                log.info("its authority is %s", pin)
            if on_ready:
                on_ready(url)
            if on_setup and setup_code:
                on_setup(f"{settings.public_url.rstrip('/') or url}/setup", setup_code)

        stack.callback(home.server_file.unlink, missing_ok=True)
        if settings.workers > 1:
            return _supervise(settings, db, listener, ready)
        server = _Server(_uvicorn_config(ctx, hub, settings, certificates), hub, ready)
        server.renew = lambda: certificates_for(settings, now=time.time())
        server.run(sockets=[listener])
        if server.failure is not None:
            raise server.failure
        log.info("stopped")
    return 0


def _supervise(settings: Settings, db: Database, listener: socket.socket, ready: Callable[[], None]) -> int:
    """Several workers do the answering. The key of secrets is not among what they are told: they find it as we did."""
    db.close()
    told = settings.model_dump_json(exclude={"secret_key"})
    return Supervisor(settings.workers, told, listener).run(ready)


def _prepare(ctx: Context, settings: Settings, url: str, certificates: Certificates | None) -> str:
    """Make what the mode needs; the code for the first administrator, if one is wanted."""
    if settings.multi_user:
        bootstrap.note_accounts(ctx)
        return bootstrap.prepare_multi_user(ctx)
    if bootstrap.has_accounts(ctx) and not settings.single_user:
        raise InstallationProblem(
            "this installation has accounts: started for one user, it would let whoever starts it be its administrator",
            hint="start it with `diamond serve --multi-user`; to make it one user's again, set DIAMOND_SINGLE_USER=1",
            field="multi_user",
        )
    prepared = bootstrap.prepare(ctx, embedded=settings.embedded or None)
    ca = str(certificates.ca) if certificates and certificates.ca else ""
    ClientConfig(url=url, token=prepared.user_token, ca=ca).save(settings.home_dir)
    return ""


def open_database(settings: Settings) -> Database:
    connections = max(2, settings.database_connections // settings.workers)
    return Database(settings.database, sqlite_synchronous=settings.sqlite_synchronous, connections=connections)


def make_hub(db: Database) -> Hub:
    if db.is_sqlite:
        return Hub()
    from diamond.server.hub_postgres import PostgresHub

    return PostgresHub(db.url)


def make_context(settings: Settings, db: Database, hub: Hub) -> Context:
    """Stores and database as services want them. The schema must be there already."""
    root = settings.home_dir.server
    streams = StreamStore(root / "streams", segment_bytes=settings.log_segment_bytes, cap_bytes=settings.log_cap_bytes)
    return Context(
        home=settings.home_dir,
        db=db,
        streams=streams,
        series=SeriesStore(root / "series", streams, cap_bytes=settings.curves_cap_bytes),
        blobs=BlobStore(root / "blobs"),
        hub=hub,
        epoch=db.epoch(),
        agent_token_s=settings.agent_token_days * 86_400.0,
        secret_keys=Keys(Path(settings.secret_key_file or root / FILE_NAME).expanduser(), settings.secret_key),
        identity=IdentityProviders(identity_file.load(settings) if settings.multi_user else None),
        caps=Caps(
            output_bytes=settings.output_cap_bytes,
            job_bytes_per_s=settings.job_bytes_per_s,
            endpoint_bytes_per_s=settings.endpoint_bytes_per_s,
            calls_per_s=settings.agent_calls_per_s,
            reserve_bytes=settings.disk_reserve_bytes,
        ),
        allowances=Allowances(
            sessions=settings.sessions_per_user, tokens=settings.tokens_per_user, projects=settings.projects_per_user
        ),
    )


@contextmanager
def server_lock(home: Home) -> Iterator[None]:
    """Hold this home's server lock; the system lets go of it however the process ends.

    Raises:
        Conflict: somebody holds it; names the process.
    """
    home.make()
    home.server.mkdir(exist_ok=True, mode=0o700)
    path = home.server / "server.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode("ascii", errors="replace").strip() or "unknown"
            raise Conflict(
                f"a Diamond server already runs on {home.path} (process {holder})",
                hint=f"use it, or stop it first: kill {holder}" if holder.isdecimal() else "stop it first",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def check_mode(settings: Settings) -> None:
    """Raises InstallationProblem for settings that would give somebody more than they should have, with the cure."""
    if not settings.is_loopback and not settings.multi_user:
        raise InstallationProblem(
            f"refusing to listen on {settings.host}: Diamond has one user here and no sign-in, so whoever reaches that "
            "address and comes by the token could run anything as you",
            hint="for other machines and people: `diamond serve --multi-user --tls`; for yourself: listen on 127.0.0.1 "
            "and reach it through an SSH tunnel",
            field="host",
        )
    if not settings.is_loopback and not settings.allow_remote and not settings.has_tls:
        raise InstallationProblem(
            f"refusing to listen on {settings.host}: Diamond speaks plain HTTP, so whoever listens in on that network "
            "could take passwords and tokens",
            hint="add --tls, which needs no other preparation; if a TLS proxy in front needs another address than "
            "127.0.0.1, set DIAMOND_ALLOW_REMOTE=1",
            field="host",
        )
    if settings.multi_user and settings.embedded:
        raise InstallationProblem(
            "an endpoint in the server itself is for one user alone: with several, tasks of others would run under the "
            "server's own account, which can read everything the server keeps",
            hint="start it with `diamond serve --multi-user`; to run tasks on this machine too, add it as an endpoint "
            "under an account of its own: `diamond endpoint create NAME`",
            field="embedded",
        )
    if settings.log_cap_bytes < 2 * settings.log_segment_bytes:
        raise InstallationProblem(
            "setting log_cap_bytes: must be at least twice log_segment_bytes",
            hint="raise DIAMOND_LOG_CAP_BYTES or lower DIAMOND_LOG_SEGMENT_BYTES",
            field="log_cap_bytes",
        )


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: nobody connects before there is somebody to answer."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InstallationProblem(f"cannot listen on {host}: {error}", field="host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InstallationProblem(
                f"port {port} on {host} is already in use",
                hint=f"choose another with --port, e.g. --port {port + 1 if port < 65535 else 0}, or stop what uses it",
                field="port",
            ) from error
        raise InstallationProblem(f"cannot listen on {host}:{port}: {error.strerror}", field="port") from error
    return listener


def _url(host: str, port: int, scheme: str = "http") -> str:
    # Every address answers here; the loopback one is what this machine's clients should use.
    shown = "127.0.0.1" if host in ("0.0.0.0", "") else "::1" if host == "::" else host  # noqa: S104 - shown, not bound
    return f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"


def run_worker(
    settings: Settings, ctx: Context, hub: Hub, place: Place, sockets: list[socket.socket], ready: Callable[[], None]
) -> None:
    """Answer as one of several, until told to stop."""
    certificates = certificates_for(settings, now=time.time())
    server = _Server(_uvicorn_config(ctx, hub, settings, certificates, place), hub, ready)
    server.renew = lambda: certificates_for(settings, now=time.time())
    server.run(sockets=sockets)
    if server.failure is not None:
        raise server.failure


def _uvicorn_config(
    ctx: Context, hub: Hub, settings: Settings, certificates: Certificates | None, place: Place | None = None
) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(ctx, hub, settings, trust_of(settings, certificates), place),
        ssl_certfile=certificates.cert if certificates else None,
        ssl_keyfile=str(certificates.key) if certificates else None,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        http=patient_protocol(settings.header_timeout_s, settings.drain_timeout_s),
        ws="none",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_GRACE_S,
    )


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it is ready and ends waiting requests first when asked to stop."""

    def __init__(self, config: uvicorn.Config, hub: Hub, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.failure: BaseException | None = None
        self._hub = hub
        self._ready = ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self.renew: Callable[[], Certificates | None] = lambda: None
        self._renewing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        if self.config.ssl is not None:
            self._renewing = asyncio.create_task(self._keep_certificate())
        try:
            self._ready()
        except Exception as error:
            self.failure = error
            self.should_exit = True

    async def _keep_certificate(self) -> None:
        """New connections get the newest certificate, so that none expires in a server that runs for years."""
        while True:
            await asyncio.sleep(_RENEW_EVERY_S)
            try:
                found = await asyncio.to_thread(self.renew)
                if found is not None and self.config.ssl is not None:
                    self.config.ssl.load_cert_chain(found.cert, found.key)
            except (OSError, DiamondError) as error:
                log.error("the certificate cannot be renewed: %s", error)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hub.close()
        if self._renewing is not None:
            self._renewing.cancel()
        hurrying = asyncio.create_task(self._hurry())
        await super().shutdown(sockets=sockets)
        hurrying.cancel()

    async def _hurry(self) -> None:
        """Over TLS a connection ends when its client agrees, and one that idles does not listen: do not wait for it."""
        closing: set[int] = set()
        while True:
            await asyncio.sleep(_FAREWELL_S)
            known, closing = closing, set()
            for connection in list(self.server_state.connections):
                transport = connection.transport
                if transport.is_closing() and id(connection) in known:
                    transport.abort()
                elif transport.is_closing():
                    closing.add(id(connection))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not uvicorn's own: it raises the signal again at the end, which would skip our clean-up.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        if self._loop is not None:
            # Through the loop: this may interrupt the hub in the middle of something.
            self._loop.call_soon_threadsafe(self._hub.close)


def print_setup(page: str, code: str) -> None:
    """To the terminal alone: logs are kept, and others may read them."""
    print(setup_text(page, code), file=sys.stderr, flush=True)


def setup_text(page: str, code: str) -> str:
    return (
        f"Nobody administers this installation yet. To be the first, open {page} and give this code:\n"
        f"  setup code: {code}\n"
        "  It works once, until the next start."
    )


def main() -> int:
    """`python -m diamond.server`: everything from the environment."""
    try:
        return run(load_settings(), on_ready=lambda url: print(url, flush=True), on_setup=print_setup)
    except DiamondError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
