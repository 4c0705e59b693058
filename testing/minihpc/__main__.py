"""`python -m testing.minihpc`: a site to play with, and ways into it from another terminal."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys

from testing.minihpc import registry, rootfs
from testing.minihpc.inside import ACCOUNTS, Inside
from testing.minihpc.site import Site, available


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m testing.minihpc", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    start = commands.add_parser("start", help="start a site and keep it until Ctrl-C (the default)")
    start.add_argument("name", nargs="?", default="alpha")
    start.add_argument("--release", choices=sorted(rootfs.RELEASES), default="trixie")
    for name, text in (("run", "run a command in a running site"), ("shell", "open a shell in a running site")):
        command = commands.add_parser(name, help=text)
        command.add_argument("name")
        command.add_argument("--user", choices=sorted(ACCOUNTS), default="user1")
        if name == "run":
            command.add_argument("argv", nargs="+", metavar="-- COMMAND")
    commands.add_parser("list", help="list running sites")
    commands.add_parser("build", help="build the root file systems now instead of at first use")
    args = parser.parse_args()
    if os.geteuid() != 0:
        print(f"{available()}: run this as root.", file=sys.stderr)
        return 1
    match args.command:
        case "run":
            return _enter(args.name, args.user, args.argv)
        case "shell":
            # The caller's terminal does not exist inside; `script` makes one that does.
            return _enter(args.name, args.user, ["script", "-qec", "bash -l", "/dev/null"])
        case "list":
            return _list()
        case "build":
            for release in rootfs.RELEASES:
                print(rootfs.get(release))
            return 0
        case "start":
            return _start(args.name, args.release)
        case _:
            return _start("alpha", "trixie")


def _start(name: str, release: str) -> int:
    if reason := available(release):
        print(f"No site can run here: {reason}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), Site(name, release=release) as site:
        facts = site.facts
        for warning in facts.warnings:
            print(f"WARNING: {warning}", file=sys.stderr)
        call = f"{os.path.relpath(sys.executable)} -m testing.minihpc"
        print(
            f"""
Site {name} runs, started in {site.started_in_s:.1f} s.
  Slurm {facts.slurm}, Python {facts.python}, Apptainer {facts.apptainer or "none"}
  nodes {", ".join(node.name for node in site.nodes)}; accounts user1 and user2; /scratch is everyone's

From another terminal, in this folder:
  a command    {call} run {name} -- sinfo
  a shell      {call} shell {name} [--user user2]

A Diamond server for it listens on {site.server_address}; nothing else can be reached from inside, and nothing gets in:
  serve        diamond up -d --tls --host {site.server_address}      (where one runs already: diamond down, first)
  enrol        diamond endpoint create {name}      then paste the line "Without curl" into a shell of the site

Ctrl-C stops the site and removes everything in it.
""",
            flush=True,
        )
        signal.pause()
    print(f"Site {name} is gone.")
    return 0


def _enter(name: str, user: str, argv: list[str]) -> int:
    record = registry.find(name)
    if record is None:
        known = ", ".join(sorted({other.name for other in registry.running()})) or "none"
        print(f"No site {name!r} runs here (running: {known}). Start one: make site", file=sys.stderr)
        return 1
    env = {"TERM": os.environ.get("TERM", "dumb")}
    command = Inside(record.init[0]).argv(argv, user=user, env=env)
    os.execvp(command[0], command)  # noqa: S606 - an argv list, as everywhere


def _list() -> int:
    for record in registry.running():
        state = "running" if registry.is_alive(record.init) else "left over; the next start clears it away"
        print(f"{record.name:12} {record.release:10} {record.network:18} {record.id:20} {state}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
