"""What a person at an agent's machine can ask for: enroll, start, stop, status, logs, upgrade, run.

The front end of the one-file agent, with the standard library alone; `diamond agent …` calls the same functions.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diamond import __version__
from diamond.agent import background
from diamond.agent.config import AgentConfig, choose_home, log_file, own_file, token_file
from diamond.agent.credentials import Credentials
from diamond.agent.enrol import enrol, running_file
from diamond.agent.link import Link
from diamond.agent.schedulers.choice import KINDS
from diamond.core.codec import decode
from diamond.core.enrolment import AGENT_PATH, AgentSelf
from diamond.core.errors import DiamondError, InstallationProblem, InvalidInput
from diamond.core.rundir import write_atomic

_RECENT_S = 86400.0


def say(text: str) -> None:
    print(text, flush=True)


def enroll(
    server: str,
    *,
    code: str | None,
    pin: str = "",
    ca_file: Path | None = None,
    home: Path | None = None,
    name: str | None = None,
    scheduler: str | None = None,
    take_over: bool = False,
    start: bool = False,
    via: str = "auto",
) -> None:
    """Enrol this machine, and with `start` put its agent into the background."""
    made = enrol(
        server,
        _code(code),
        pin=pin,
        ca_file=ca_file,
        home=home,
        name=name,
        scheduler=scheduler,
        take_over=take_over,
    )
    say(f"Enrolled as endpoint {made.config.name} of {made.config.server}.")
    say(f"  home: {made.home}")
    if not start:
        say(f"  next: {_called(made.home)} start --home {shlex.quote(str(made.home))}")
        return
    found = background.running(made.home)
    if found is not None and found.is_here and background.chosen_way(made.home):
        background.restart(made.home)
        say("  the agent that ran here was started anew; its jobs went on")
        return
    if found is not None and made.is_changed:
        say(f"  the agent that runs here ({found}) must be stopped and started to follow the server's new address")
    _show_started(background.start(made.home, via=via), made.home)


def _code(code: str | None) -> str:
    if code == "-":
        return sys.stdin.readline().strip()
    if code is None:
        if not sys.stdin.isatty():
            raise InvalidInput("give the enrolment code", hint="--code XXXX-XXXX-XXXX", field="--code")
        return getpass.getpass("Enrolment code: ").strip()
    return code


def start(home: Path, *, via: str = "auto", foreground: bool = False) -> int:
    if foreground:
        from diamond.agent.__main__ import main as run

        return run(["--home", str(home)])
    _show_started(background.start(home, via=via), home)
    return 0


def _show_started(done: background.Started, home: Path) -> None:
    if done.was_running:
        say(f"The agent runs already ({done.holder}), kept by {done.via}.")
        return
    say(f"The agent runs in the background ({done.holder}), kept by {done.via}: {done.why}.")
    for note in done.notes:
        say(f"  note: {note}")
    problem = _problem(home)
    say(f"  the server accepts it; log: {log_file(home)}" if problem is None else f"  but {problem}")


def _problem(home: Path) -> DiamondError | None:
    try:
        ask_server(home)
    except DiamondError as error:
        return error
    return None


def stop(home: Path) -> None:
    if background.stop(home):
        say("The agent has stopped and will not be started again. Jobs that run go on.")
    else:
        say("No agent ran here.")


def ask_server(home: Path) -> AgentSelf:
    """What the server says to this home's token. Raises DiamondError: why it cannot, or will not, say."""
    link = _link(home)
    try:
        return decode(AgentSelf, link.call("GET", "/agent/me", timeout_s=10.0))
    finally:
        link.release()


def _link(home: Path) -> Link:
    config = AgentConfig.load(home)
    if config is None:
        raise InstallationProblem(
            f"no agent is enrolled in {home}", hint="enrol it with the line that `diamond endpoint enroll NAME` prints"
        )
    return Link(config.server, Credentials.load(token_file(home)), ca_file=config.ca_file(home))


def status(home: Path) -> dict[str, Any]:
    """All that can be said about an agent from where it lives. `ok`: it runs and the server wants it."""
    config = AgentConfig.load(home)
    found = background.running(home)
    said: dict[str, Any] = {
        "name": config.name if config else "",
        "home": str(home),
        "server": config.server if config else "",
        "enrolled": config is not None,
        "running": {"pid": found.pid, "host": found.host} if found else None,
        "via": background.chosen_way(home),
        "version": __version__,
        "server_version": None,
        "up_to_date": None,
        "problem": None,
        "last_error": last_error(home),
        "policy": _policy_problem(home),
    }
    try:
        answer = ask_server(home)
        said["server_version"] = answer.server_version
        said["up_to_date"] = _is_current(home, answer)
    except DiamondError as error:
        said["problem"] = {"message": error.message, "hint": error.hint}
    if not found and said["problem"] is None:
        said["problem"] = {"message": "no agent runs here", "hint": f"start it: {_called(home)} start"}
    said["ok"] = said["problem"] is None
    return said


def _policy_problem(home: Path) -> str | None:
    """What is wrong with the rules here, or is not in force; None when nothing is."""
    from diamond.agent import policy_page

    found = policy_page.read(home / "policy.toml")
    problem: str | None = found["problem"] or found["not_in_force"]
    return problem


def _is_current(home: Path, answer: AgentSelf) -> bool:
    file = own_file(home)
    if not file.exists():
        return answer.server_version == __version__
    return hashlib.sha256(file.read_bytes()).hexdigest() == answer.agent_sha256


def show_status(home: Path, *, as_json: bool) -> int:
    said = status(home)
    if as_json:
        say(json.dumps(said, indent=2))
        return 0 if said["ok"] else 1
    found = said["running"]
    say(f"endpoint  {said['name'] or '(not enrolled)'}")
    say(f"home      {said['home']}")
    say(f"server    {said['server']}" + (f" (version {said['server_version']})" if said["server_version"] else ""))
    say("agent     " + (f"process {found['pid']} on {found['host']}" if found else "does not run"))
    say(f"kept by   {said['via'] or 'nothing: it will not be started again by itself'}")
    behind = f"; `{_called(home)} upgrade` brings the server's" if said["up_to_date"] is False else ""
    say(f"version   {said['version']}{behind}")
    if said["policy"]:
        say(f"policy    {said['policy']}")
    if said["last_error"] and not (said["problem"] and said["problem"]["message"] in said["last_error"]):
        say(f"error     {said['last_error']}")
    if said["problem"]:
        say(f"problem   {said['problem']['message']}")
        if said["problem"]["hint"]:
            say(f"          {said['problem']['hint']}")
    else:
        say("All is well.")
    return 0 if said["ok"] else 1


def last_error(home: Path) -> str:
    """The newest error in the log that is not older than a day and not followed by better news."""
    try:
        with open(log_file(home), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        try:
            entry = json.loads(line)
            if "works again" in entry["message"] or str(entry["message"]).startswith("connected to"):
                return ""
            if entry["level"] in ("error", "critical") and time.time() - float(entry["at"]) < _RECENT_S:
                return str(entry["message"])[:300]
        except (ValueError, KeyError, TypeError):
            continue
    return ""


def logs(home: Path, *, lines: int = 40, follow: bool = False) -> None:
    text = background.log_tail(home, lines)
    if text:
        say(text)
    elif not follow:
        say(f"There is no log yet at {log_file(home)}.")
    position = log_file(home).stat().st_size if log_file(home).exists() else 0
    while follow:
        time.sleep(0.5)
        try:
            with open(log_file(home), "rb") as file:
                if os.fstat(file.fileno()).st_size < position:
                    position = 0  # a new file took its place
                file.seek(position)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            continue
        if newline:
            position += len(whole) + 1
            say("\n".join(map(background.readable, whole.decode(errors="replace").splitlines())))


def upgrade(home: Path, *, sha256: str = "", source: Path | None = None) -> bool:
    """Exchange this home's one-file agent for a newer one and start it anew; whether there was a newer one.

    The server names the digest of its own file, so whoever took the server over could send any program.

    Args:
        sha256: the digest that the new file must have, from a source other than the server.
        source: the new file itself, carried here by hand; the server is not asked.

    Raises:
        InvalidInput: the file does not have that digest, or cannot be read.
        InstallationProblem: this agent was installed with a package manager, or the server's file is damaged.
    """
    file = own_file(home)
    if not file.exists():
        raise InstallationProblem(
            "this agent is an installed package, not the one-file agent", hint="upgrade it as it was installed (pip)"
        )
    data = _read_source(source) if source is not None else _fetch(home, sha256)
    digest = hashlib.sha256(data).hexdigest()
    if sha256 and digest != sha256.strip().lower():
        raise InvalidInput(
            f"the new agent has SHA-256 {digest}, not the one you gave; the present agent was kept",
            hint="`diamond agent bundle FILE` on a machine you trust makes the file and shows its digest",
            field="--sha256",
        )
    if data == file.read_bytes():
        return False
    _try_out(file, data)
    # Python reads from the file as it goes: it is not exchanged under a running agent.
    background.restart(home, lambda: write_atomic(file, data, mode=0o700))
    return True


def _fetch(home: Path, sha256: str) -> bytes:
    """The server's one-file agent; the present one where that is the same, and no digest is to be compared."""
    answer = ask_server(home)
    if not sha256 and _is_current(home, answer):
        return own_file(home).read_bytes()
    link = _link(home)
    try:
        data = link.fetch_file(AGENT_PATH)
    finally:
        link.release()
    if hashlib.sha256(data).hexdigest() != answer.agent_sha256:
        raise InstallationProblem("the file that came is not the one the server promised", hint="try again")
    return data


def _read_source(source: Path) -> bytes:
    try:
        return source.expanduser().read_bytes()
    except OSError as error:
        raise InvalidInput(f"{source}: {error.strerror}", field="--file") from error


def _try_out(file: Path, data: bytes) -> None:
    beside = file.with_name(f".try.{os.getpid()}.pyz")
    write_atomic(beside, data, mode=0o700)
    try:
        done = subprocess.run(
            [sys.executable, str(beside), "version"], capture_output=True, text=True, timeout=60, check=False
        )
    finally:
        beside.unlink(missing_ok=True)
    if done.returncode != 0:
        raise InstallationProblem(
            f"the server's agent does not run here: {done.stderr.strip()[-300:]}", hint="the present one was kept"
        )


def _called(home: Path) -> str:
    """How the user can type this command."""
    if own_file(home).exists():
        return f"python3 {shlex.quote(str(own_file(home)))}"
    return "diamond agent"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diamond-agent", description="Speak for this machine, or this cluster, to a Diamond server."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, action: Callable[[argparse.Namespace], int | None]) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(action=action)
        made.add_argument("--home", type=Path, metavar="DIR", help="the agent's own directory")
        made.add_argument("--name", help="the endpoint, where several are enrolled here")
        return made

    one = add("enroll", "Exchange a code for the right to speak for an endpoint.", _enroll)
    one.add_argument("server", metavar="URL", help="address of the Diamond server")
    one.add_argument("--code", help="the one-time code; '-' reads it from standard input")
    one.add_argument("--pin", default="", help="SHA-256 of the server's private authority")
    one.add_argument("--ca", type=Path, metavar="FILE", help="certificate of the server's authority, instead of --pin")
    one.add_argument("--scheduler", choices=KINDS, help="what runs the jobs; left out: Slurm where there is one")
    one.add_argument("--take-over", action="store_true", help="replace another home of this endpoint that is lost")
    one.add_argument("--start", action="store_true", help="also start the agent")
    one.add_argument("--via", default="auto", choices=("auto", *background.METHODS), help="how to keep it running")
    one = add("start", "Run the agent in the background, and keep it running after logout.", _start)
    one.add_argument("--foreground", action="store_true", help="run it here instead, until Ctrl-C")
    one.add_argument("--via", default="auto", choices=("auto", *background.METHODS), help="how to keep it running")
    one.add_argument("--from-cron", action="store_true", help=argparse.SUPPRESS)
    add("stop", "Stop the agent; jobs go on.", lambda options: stop(_home(options)))
    one = add("status", "Say how the agent stands.", lambda o: show_status(_home(o), as_json=o.json))
    one.add_argument("--json", action="store_true", help="machine-readable output")
    one = add("logs", "Show the agent's log.", lambda o: logs(_home(o), lines=o.lines, follow=o.follow))
    one.add_argument("-n", "--lines", type=int, default=40, help="how many lines")
    one.add_argument("-f", "--follow", action="store_true", help="go on as it grows")
    one = add("policy", "Show the rules of policy.toml.", _policy)
    one.add_argument("--check", type=Path, metavar="FILE", help="say whether this file would be accepted instead")
    one.add_argument("--json", action="store_true", help="machine-readable output")
    one = add("upgrade", "Bring the agent to the server's version, or to a file's.", _upgrade)
    one.add_argument("--sha256", default="", metavar="HEX", help="refuse a new agent with any other SHA-256")
    one.add_argument("--file", type=Path, metavar="FILE", help="take the new agent from here; do not ask the server")
    add("keep", "Run the agent and start it again when it dies.", lambda options: background.keep(_home(options)))
    add("version", "Show the version.", lambda _options: say(f"diamond-agent {__version__}"))
    return parser


def _home(options: argparse.Namespace) -> Path:
    return choose_home(options.home, options.name)


def _enroll(options: argparse.Namespace) -> None:
    enroll(
        options.server,
        code=options.code,
        pin=options.pin,
        ca_file=options.ca,
        home=options.home,
        name=options.name,
        scheduler=options.scheduler,
        take_over=options.take_over,
        start=options.start,
        via=options.via,
    )


def _start(options: argparse.Namespace) -> int:
    home = _home(options)
    if options.from_cron:
        background.start_from_cron(home)
        return 0
    return start(home, via=options.via, foreground=options.foreground)


def _policy(options: argparse.Namespace) -> int:
    from diamond.agent import policy_page

    home = _home(options) if options.check is None else Path()
    return policy_page.show(home, check=options.check, as_json=options.json)


def _upgrade(options: argparse.Namespace) -> None:
    show_upgrade(_home(options), sha256=options.sha256, source=options.file)


def show_upgrade(home: Path, *, sha256: str = "", source: Path | None = None) -> None:
    is_new = upgrade(home, sha256=sha256, source=source)
    if source is None:
        say("The agent was brought to the server's version." if is_new else "The agent is as new as the server.")
    else:
        say(f"The agent was replaced by {source}." if is_new else f"The agent is the same as {source} already.")


def main(argv: list[str] | None = None) -> int:
    """The one-file agent: 0 done, 1 failed, 2 wrongly used."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    if argv[:1] == ["run"]:
        from diamond.agent.__main__ import main as run

        return run(argv[1:])
    options = _parser().parse_args(argv)
    try:
        code = options.action(options)
        return code if isinstance(code, int) else 0
    except DiamondError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInput) else 1
    except KeyboardInterrupt:
        return 130


__all__ = ["enroll", "logs", "main", "running_file", "show_status", "show_upgrade", "start", "stop"]
