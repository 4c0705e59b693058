"""Starting and stopping the service on this machine: up, down, serve, backup, restore.

Besides `diamond.cli.agent` the only module of the command line that may import the server.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diamond.cli import browser, locks, render
from diamond.cli.agent import Supervisor, about_this_machine, end_left_over_agent
from diamond.cli.launch import progress_bar
from diamond.cli.session import confirm, emit, leave, program, say
from diamond.core.errors import Conflict, DiamondError, InstallationProblem, InvalidInput, Unavailable
from diamond.core.home import DEFAULT_PORT, LOCAL_ENDPOINT, Home
from diamond.core.tls import pin_of

START_WAIT_S = 60.0
STOP_WAIT_S = 30.0
_LOG_TAIL_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where a server shall listen and keep its rows, as far as the command line says."""

    host: str | None = None
    port: int | None = None
    database_url: str | None = None
    tls: bool | None = None
    multi_user: bool | None = None

    def options(self) -> dict[str, Any]:
        """What the options say, else the environment, else the defaults."""
        chosen, port = os.environ.get("DIAMOND_PORT", ""), self.port
        if port is None:
            if chosen and not (chosen.isdecimal() and int(chosen) < 65536):
                raise InvalidInput(f"DIAMOND_PORT is {chosen[:20]!r}", hint="set it to a port number", field="port")
            port = int(chosen) if chosen else DEFAULT_PORT
        host = self.host or os.environ.get("DIAMOND_HOST") or "127.0.0.1"
        return {
            "host": host, "port": port, "database_url": self.database_url, "use_tls": self.tls,
            "multi_user": self.multi_user,
        }  # fmt: skip

    def differs_from(self, url: str) -> list[str]:
        """Options that ask for something else than the server at `url` has, as far as that can be seen."""
        here = urlsplit(url)
        found = [f"--port {self.port}"] if self.port not in (None, 0, here.port) else []
        found += [f"--host {self.host}"] if self.host not in (None, here.hostname, "localhost", "0.0.0.0", "::") else []  # noqa: S104 - compared, not bound
        found += ["--tls" if self.tls else "--no-tls"] if self.tls not in (None, here.scheme == "https") else []
        return found + (["--database-url …"] if self.database_url else [])


def up(*, detach: bool, where: Where, as_json: bool) -> None:
    home = Home.find()
    if running := running_server(home):
        _already_running(home, running, where, as_json)
        return
    _check_mode(where)
    _make(home)
    if note := about_this_machine():
        say(note)
    if detach:
        _up_detached(home, where, as_json)
    else:
        leave(_up(home, where, lambda url: _ready_text(url, as_json)))


def _check_mode(where: Where) -> None:
    """Say what is wrong here, and not only in the log of a server in the background."""
    from diamond.server.main import check_mode
    from diamond.server.settings import load_settings

    chosen = where.options()
    check_mode(load_settings(host=chosen["host"], tls=where.tls, embedded=LOCAL_ENDPOINT))


def _make(home: Home) -> None:
    """The folders of a server; says what to do where they cannot be."""
    try:
        home.make()
        home.server.mkdir(exist_ok=True, mode=0o700)
        # Making what is there already succeeds even where nothing else may be written.
        probe = home.server / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InstallationProblem(
            f"Diamond cannot keep its files in {home.path}: {error.strerror or error}",
            hint="set DIAMOND_HOME to a folder of yours, e.g.  export DIAMOND_HOME=/scratch/$USER/diamond",
        ) from error


@contextmanager
def _postgres_driver() -> Iterator[None]:
    """psycopg is installed only where somebody asked for it."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "psycopg" and "pq wrapper" not in str(error):
            raise
        raise InstallationProblem("PostgreSQL needs psycopg", hint="pip install 'diamond-hpc[postgres]'") from error


def _up(home: Home, where: Where, tell: Callable[[str], None]) -> int:
    """Server in this process, agent as its child, until a signal ends both."""
    from diamond.server.main import serve as run_server

    agent = Supervisor(home, LOCAL_ENDPOINT)

    def ready(url: str) -> None:
        agent.start(url)
        tell(url)

    try:
        with _postgres_driver():
            return run_server(home=home, **where.options(), embedded=LOCAL_ENDPOINT, on_ready=ready)
    finally:
        if agent.stop():
            say("The agent has stopped; jobs that run go on, and `diamond up` takes them up again.")


def _ready_text(url: str, as_json: bool) -> None:
    if as_json:
        emit({"url": url, "pid": os.getpid()}, line=True)
        return
    say(f"Diamond is up: {url}")
    say(f"  in a browser:         {browser.dashboard(url)}")
    say(f"  in another terminal:  {program()} launch task.yaml")
    say(f"  Ctrl-C stops it; `{program()} up -d` runs it in the background")
    # Beside the server, which must not wait for a browser to start.
    threading.Thread(target=browser.open_page, args=(browser.dashboard(url),), daemon=True).start()


def _already_running(home: Home, running: dict[str, Any], where: Where, as_json: bool) -> None:
    ignored = where.differs_from(running["url"]) if running["url"] else []
    if as_json:
        emit({**running, "already_running": True, "ignored": ignored})
        return
    print(f"Diamond is already running: {running['url']} (process {running['pid']}, home {home.path})")
    if ignored:
        port = urlsplit(running["url"]).port
        kept = f"its port was not changed; it is {port}" if where.port not in (None, port) else "nothing was changed"
        options = " ".join(ignored)
        say(f"  {kept}. To use {options}:  {program()} down && {program()} up -d {options}")


def _up_detached(home: Home, where: Where, as_json: bool) -> None:
    log = server_log(home)
    before = log.stat().st_size if log.exists() else 0
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        _daemonise(log, writer)
        _daemon(home, where)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        pid = int(pipe.read().strip() or 0)
    os.wait()
    problem = _await_start(home, pid)
    if problem and as_json:
        raise InstallationProblem(f"Diamond did not start: {problem}", hint=" ".join(_log_tail(log, before)[-3:]))
    if problem:
        say(f"Diamond did not start: {problem}. The end of {log}:")
        for line in _log_tail(log, before):
            say(f"  {line}")
        leave(1)
    found = running_server(home) or {"url": "", "pid": pid}
    if as_json:
        emit({**found, "already_running": False})
        return
    print(f"Diamond is up: {found['url']}")
    say(f"  in a browser: {browser.dashboard(found['url'])}")
    say(f"  process {found['pid']}, log {log}")
    say(f"  next: {program()} launch task.yaml    stop it: {program()} down")
    browser.open_page(browser.dashboard(found["url"]))


def server_log(home: Home) -> Path:
    return home.server / "server.log"


def _daemonise(log: Path, pid_pipe: int) -> None:
    """Own session, no terminal, not a session leader (so that it can never get one), output into the log."""
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    os.write(pid_pipe, f"{os.getpid()}\n".encode())
    os.close(pid_pipe)
    os.umask(0o077)
    sys.stdout.flush()
    sys.stderr.flush()
    empty = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, onto in ((empty, 0), (out, 1), (out, 2)):
        os.dup2(fd, onto)
    os.close(empty)
    os.close(out)


def _daemon(home: Home, where: Where) -> None:
    code = 1
    try:
        os.chdir(home.path)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        code = _up(home, where, lambda url: None)
    except DiamondError as error:
        say(f"error: {error}")
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _await_start(home: Home, pid: int) -> str:
    """Wait until the server answers and its endpoint is online; gives what went wrong, or nothing."""
    from diamond.sdk.client import Client

    ends_at = time.monotonic() + START_WAIT_S
    answered = False
    while time.monotonic() < ends_at:
        if not locks.runs(pid):
            return "it ended at once"
        found = running_server(home)
        if found and found.get("url"):
            try:
                with Client(timeout_s=5) as client:
                    client.health(retries=0)
                    answered = True
                    if client.endpoints.get(LOCAL_ENDPOINT).online:
                        return ""
            except Unavailable:
                pass
        time.sleep(0.1)
    if answered:
        return f"the server answers, but this machine's agent has not come online in {START_WAIT_S:.0f} s"
    return f"it has not answered in {START_WAIT_S:.0f} s"


def _log_tail(log: Path, start: int) -> list[str]:
    try:
        with open(log, "rb") as file:
            file.seek(max(start, log.stat().st_size - 16384))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as error:
        return [f"({error.strerror})"]
    return [render.clean(line) for line in text.splitlines()[-_LOG_TAIL_LINES:]]


def running_server(home: Home) -> dict[str, Any] | None:
    """`{"pid", "url"}` of the server on this home, or None. The lock decides; server.json only adds the address."""
    pid = locks.holder(home.server / "server.lock")
    if pid is None:
        return None
    try:
        said = json.loads(home.server_file.read_bytes())
        url = str(said["url"]) if said["pid"] == pid else ""
    except (OSError, ValueError, KeyError, TypeError):
        url = ""
    return {"pid": pid, "url": url}


def down(*, as_json: bool) -> None:
    home = Home.find()
    found = running_server(home)
    if not found:
        emit({"stopped": False, "was_running": False}) if as_json else say("Diamond is not running.")
        return
    pid = int(found["pid"])
    if not pid:
        raise Conflict("a server holds the lock but does not say its process number", hint=f"see {home.server}")
    try:
        ended = locks.end(pid, home.server / "server.lock", STOP_WAIT_S)
    except PermissionError as error:
        raise Conflict(
            f"process {pid} is not yours to stop", hint="ask the user who started it, or run this as that user"
        ) from error
    if not ended:
        raise Unavailable(f"process {pid} has not ended in {STOP_WAIT_S:.0f} s", hint=f"see {server_log(home)}")
    end_left_over_agent(home.agent(LOCAL_ENDPOINT))
    if as_json:
        emit({"stopped": True, "was_running": True, "pid": pid})
    else:
        print("Diamond is down. Jobs that run go on; `diamond up` takes them up again.")


def serve(where: Where) -> None:
    from diamond.server.main import serve as run_server
    from diamond.server.main import setup_text

    home = Home.find()
    _make(home)
    with _postgres_driver():
        leave(
            run_server(
                home=home,
                **where.options(),
                on_ready=lambda url: _serving_text(home, url),
                on_setup=lambda page, code: say(setup_text(page, code)),
            )
        )


def _serving_text(home: Home, url: str) -> None:
    say(f"Diamond: {url}")
    if ca := home.own_authority():
        # What people are asked to compare, where they sign in or enrol.
        say(f"  its authority: {pin_of(Path(ca).read_text())}")
        say(f"  the same:      openssl x509 -noout -fingerprint -sha256 -in {shlex.quote(ca)}")


def backup(file: Path, *, database_url: str | None, as_json: bool) -> None:
    from diamond.server.backup import backup as save
    from diamond.server.settings import load_settings

    target = file.expanduser()
    if target.exists():
        raise Conflict(f"{file} exists", hint="choose another name: a backup replaces nothing")
    if not target.absolute().parent.is_dir():
        raise InvalidInput(f"there is no folder {target.absolute().parent}", field="FILE")
    with _postgres_driver(), _bar("Saving") as tell:
        found = save(load_settings(home=Home.find().path, database_url=database_url), target, tell)
    size_bytes = target.stat().st_size
    if as_json:
        emit({"file": str(target), "size_bytes": size_bytes, **vars(found)})
        return
    tasks = render.count(found.tables.get("tasks", 0), "task")
    print(f"Saved {tasks} with logs, curves and files: {target} ({render.size(size_bytes)})")
    say("  It holds everything the server keeps: store it as privately as your data.")
    if found.tables.get("secrets"):
        say("  Secrets are in it encrypted. Their key is not: keep a copy of server/secret.keys apart from it.")


def rotate_key(*, prune: bool, database_url: str | None, as_json: bool) -> None:
    from diamond.server.keys import rotate
    from diamond.server.settings import load_settings

    with _postgres_driver():
        settings = load_settings(home=Home.find().path, database_url=database_url)
        done = rotate(settings, prune=prune, pause=_wait_for_requests)
    if as_json:
        emit(done)
    else:
        sealed = render.count(done.resealed, "value")
        print(f"key {done.key} seals now; {sealed} sealed anew, {render.count(len(done.dropped), 'old key')} dropped")
        for one in done.unopened:
            say(f"  {one} cannot be opened with any key here; set it anew")
        if done.kept and not prune:
            say("  The key before still opens. Drop it with: diamond secret rotate-key --prune")
    leave(1 if done.unopened else 0)


def _wait_for_requests(seconds: float) -> None:
    """Requests under way when the key changed may still seal with the one before."""
    if seconds <= 0:
        return
    say(f"The keys were changed just now: waiting {seconds:.0f} s for requests that may use the one before …")
    if not sys.stderr.isatty():
        time.sleep(seconds)
        return
    from rich.console import Console

    end = time.monotonic() + seconds
    with Console(stderr=True, no_color=not render.use_colour(sys.stderr) or None).status("") as status:
        while (left := end - time.monotonic()) > 0:
            status.update(f"{left:.0f} s to go; Ctrl-C leaves the keys as they are")
            time.sleep(min(left, 0.5))


def restore(file: Path, *, database_url: str | None, yes: bool, as_json: bool) -> None:
    from diamond.server.backup import restore as put_back
    from diamond.server.settings import load_settings

    home = Home.find()
    if running := running_server(home):
        raise Conflict(f"the server runs (process {running['pid']})", hint="stop it first: diamond down")
    _make(home)
    settings = load_settings(home=home.path, database_url=database_url)
    source = file.expanduser()
    try:
        with _postgres_driver(), _bar("Restoring") as tell:
            found = put_back(source, settings, force=yes, progress=tell)
    except Conflict as error:
        if not confirm(f"Replace everything the server keeps in {home.path} by what {file} holds?", yes=False):
            hint = "nothing was changed; -y replaces what is there without asking"
            raise Conflict(error.message, hint=hint) from error
        with _bar("Restoring") as tell:
            found = put_back(source, settings, force=True, progress=tell)
    if as_json:
        emit({"file": str(source), **vars(found)})
    else:
        same = " with the same --database-url" if database_url else ""
        if found.tables.get("secrets"):
            say("  Its secrets open only with the key they were sealed with (server/secret.keys), which is apart.")
        print(f"Restored what was saved at {render.clock(found.created_at)}. Start it with: diamond up -d{same}")
        print(f"If it has accounts: diamond serve --multi-user{same}")


@contextmanager
def _bar(title: str) -> Iterator[Callable[[str, int, int], None] | None]:
    with progress_bar(title) as tell:
        yield None if tell is None else lambda _what, done, total: tell(done, total, 0)
