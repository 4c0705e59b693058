"""`diamond check`: what is right and wrong with this installation, and how to mend it. Also `diamond version`."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from diamond import __version__
from diamond.cli import render
from diamond.cli.endpoints import no_endpoints
from diamond.cli.session import emit, leave
from diamond.cli.startup import skip_httpx_cli
from diamond.core.endpoints import Endpoint
from diamond.core.errors import DiamondError
from diamond.core.home import DEFAULT_PORT, ClientConfig, Home

if TYPE_CHECKING:
    from diamond.sdk.client import Client

MIN_PYTHON = (3, 11)
WARN_FREE_BYTES = 5 * 1024**3
FAIL_FREE_BYTES = 200 * 1024**2
MAX_SKEW_S = 30.0
RECENT_S = 86400.0
_MENDED = "mended"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`status` is ok, warn, fail or info; `mend` says what to do about it."""

    name: str
    status: str
    detail: str
    mend: str = ""


def check(*, as_json: bool) -> None:
    findings: list[Finding] = []
    for finding in _all():
        findings.append(finding)
        if not as_json:
            _show(finding)
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    if as_json:
        emit({"ok": not failed, "checks": findings})
    else:
        print("All is well." if not failed and not warned else f"{failed} failed, {warned} to look at.")
    if failed:
        leave(1)


def _show(finding: Finding) -> None:
    mark = render.paint(f"{finding.status:<4}", render.STATE_COLOURS[finding.status])
    print(f"{mark}  {finding.name:<14}  {render.clean(finding.detail)}")
    if finding.mend and finding.status != "ok":
        print(f"      {'':<14}  {render.paint('→', '2')} {render.clean(finding.mend)}")


def _all() -> Iterator[Finding]:
    yield _python()
    home = Home.find()
    yield from _home(home)
    yield from _service(home)
    yield from _agent_log(home)
    yield from _programs()


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info[:2] >= MIN_PYTHON
    return Finding(
        name="python",
        status="ok" if good else "fail",
        detail=f"{found} at {sys.executable}",
        mend="install Python 3.11 or newer",
    )


def _home(home: Home) -> Iterator[Finding]:
    if not home.path.exists():
        yield Finding(name="home", status="info", detail=f"{home.path} does not exist yet", mend="diamond up makes it")
        folder = next(parent for parent in home.path.parents if parent.exists())
    else:
        folder = home.path
        mode = stat.S_IMODE(home.path.stat().st_mode)
        if mode & 0o077:
            yield Finding(
                name="home",
                status="warn",
                detail=f"{home.path} is open to other users (mode {mode:03o}); it holds tokens",
                mend=f"chmod 700 {home.path}",
            )
        else:
            yield Finding(name="home", status="ok", detail=f"{home.path} is private")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding(
            name="home writable", status="fail", detail=f"{folder}: {error.strerror}", mend="set DIAMOND_HOME elsewhere"
        )
        return
    free = shutil.disk_usage(folder).free
    status = "fail" if free < FAIL_FREE_BYTES else "warn" if free < WARN_FREE_BYTES else "ok"
    yield Finding(
        name="disk space",
        status=status,
        detail=f"{render.size(free)} free at {folder}",
        mend="free space, or set DIAMOND_HOME to a larger disk",
    )


def _service(home: Home) -> Iterator[Finding]:
    config = ClientConfig.load(home)
    if config is None:
        yield Finding(name="server", status="fail", detail="none is known here", mend="start one: diamond up -d")
        yield _port(DEFAULT_PORT)
        return
    skip_httpx_cli()
    from diamond.sdk.client import Client

    try:
        client = Client(timeout_s=5.0)
    except DiamondError as error:
        yield Finding(name="server", status="fail", detail=error.message, mend=error.hint)
        return
    with client:
        try:
            health = client.health(retries=0)
        except DiamondError as error:
            # Whoever signed in has an account at a server that somebody operates; `up` would start another.
            mend = "its operator knows" if config.user else "start it: diamond up -d"
            yield Finding(name="server", status="fail", detail=error.message, mend=mend)
            parts = urlsplit(config.url)
            if parts.hostname in ("127.0.0.1", "localhost") and not config.user:
                yield _port(parts.port or DEFAULT_PORT)
            return
        yield Finding(name="server", status="ok", detail=f"{client.url} answers")
        theirs = str(health.get("version", "?"))
        yield Finding(
            name="version",
            status="ok" if theirs == __version__ else "warn",
            detail=f"{__version__}" if theirs == __version__ else f"here {__version__}, server {theirs}",
            mend="install the same version on both sides",
        )
        yield from _skew(client)
        try:
            client.info()
        except DiamondError as error:
            yield Finding(
                name="token", status="fail", detail=error.message, mend=error.hint or "set DIAMOND_TOKEN, or remove it"
            )
            return
        yield Finding(name="token", status="ok", detail="accepted")
        yield from _endpoints(client)


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Finding(
                name="port",
                status="fail",
                detail=f"port {port} cannot be used: {error.strerror}",
                mend=f"choose another: diamond up --port {port + 1 if port < 65535 else 0}",
            )
    return Finding(name="port", status="ok", detail=f"port {port} is free")


def _skew(client: Client) -> Iterator[Finding]:
    before = time.time()
    told = client.server_date()
    if not told:
        return
    skew = parsedate_to_datetime(told).timestamp() - (before + time.time()) / 2
    # The header has whole seconds.
    late = abs(skew) > MAX_SKEW_S
    yield Finding(
        name="clock",
        status="warn" if late else "ok",
        detail=f"{abs(skew):.0f} s {'behind' if skew > 0 else 'ahead of'} the server"
        if late
        else "agrees with the server's",
        mend="set the clocks by NTP: times shown are off by as much",
    )


def _endpoints(client: Client) -> Iterator[Finding]:
    found = client.endpoints.list()
    if not found:
        yield Finding(
            name="endpoints",
            status="warn",
            detail="none; tasks have nowhere to run",
            mend=no_endpoints(client),
        )
    for each in found:
        local = each.name == "local"
        mend, since = "diamond up -d", "its agent never connected"
        if each.last_seen_at:
            since = f"offline since {render.since(each.last_seen_at)}"
        if not local or each.access in ("expired", "revoked", "none"):
            since, mend = _absence(each, since)
        warnings = each.usage.warnings if each.usage else ()
        if not each.online:
            yield Finding(name=f"endpoint {each.name}", status="fail" if local else "warn", detail=since, mend=mend)
        elif not warnings:
            yield Finding(name=f"endpoint {each.name}", status="ok", detail="online")
        for warning in warnings:
            head = "online, but" if each.online else "when last heard of"
            yield Finding(name=f"endpoint {each.name}", status="warn", detail=f"{head}: {warning}", mend=_mend(warning))


def _absence(endpoint: Endpoint, since: str) -> tuple[str, str]:
    """Why an endpoint's agent is not there, and what to do, by how it stands with the server."""
    line = f"diamond endpoint enroll {endpoint.name}"
    if endpoint.access == "revoked":
        return f"{since}; its token was revoked", f"to let it speak again: {line}"
    if endpoint.access == "expired":
        return f"{since}; its token has expired", f"to let it speak again: {line}"
    if endpoint.access == "code":
        return f"{since}; a code waits to be used", "paste the line that was printed on its login node, or: " + line
    if endpoint.access == "none":
        return f"{since}; its code has expired", f"get a new line: {line}"
    return since, "look there: diamond agent status; start it: diamond agent start"


def _mend(warning: str) -> str:
    """What to do about a warning of an agent, by what it is about."""
    if "policy.toml" in warning:
        return "mend policy.toml in the agent's folder; it is read again by itself"
    if "disk" in warning:
        return "free space on that machine"
    return ""


def _agent_log(home: Home) -> Iterator[Finding]:
    for log in sorted((home.path / "agents").glob("*/agent.log")):
        try:
            with open(log, "rb") as file:
                file.seek(max(0, log.stat().st_size - 32768))
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except OSError:
            continue
        error = next(filter(None, map(_error_text, reversed(lines))), "")
        if error and error != _MENDED:
            yield Finding(
                name=f"agent {log.parent.name}", status="warn", detail=f"last error: {error[:200]}", mend=f"see {log}"
            )


def _error_text(line: str) -> str:
    """The message of a line that tells of an error not older than a day, or of its end; the agent writes JSON lines."""
    try:
        entry = json.loads(line)
        if "works again" in entry["message"] or str(entry["message"]).startswith("connected to"):
            return _MENDED
        recent = time.time() - float(entry["at"]) < RECENT_S
        return str(entry["message"]) if entry["level"] in ("error", "critical") and recent else ""
    except (ValueError, KeyError, TypeError):
        return ""


def _programs() -> Iterator[Finding]:
    bash = shutil.which("bash")
    yield Finding(
        name="bash",
        status="ok" if bash else "fail",
        detail=bash or "not found",
        mend="jobs are bash scripts: install bash",
    )
    for name, use in (("git", ""), ("apptainer", "containers"), ("sbatch", "Slurm")):
        path = shutil.which(name)
        yield Finding(
            name=name, status="info", detail=path or "not found" + (f" ({use} not available here)" if use else "")
        )
    torch = importlib.util.find_spec("torch")
    yield Finding(name="torch", status="info", detail="installed" if torch else "not installed in this environment")


def version(*, as_json: bool) -> None:
    """Own version, and the server's if one answers at once."""
    theirs: str | None = None
    url = ""
    if ClientConfig.load(Home.find()):
        skip_httpx_cli()
        from diamond.sdk.client import Client

        try:
            with Client(timeout_s=2.0) as client:
                url = client.url
                theirs = str(client.health(retries=0).get("version"))
        except DiamondError:
            theirs = None
    if as_json:
        emit({"version": __version__, "python": sys.version.split()[0], "server": theirs, "url": url or None})
        return
    print(f"diamond {__version__} (Python {sys.version.split()[0]})")
    if theirs:
        print(f"server  {render.clean(theirs)} at {url}")
    elif url:
        print(f"server  no answer from {url}")
