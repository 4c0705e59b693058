"""A site's network: one line to the server and no other, a firewall that lets nothing in, and ways to spoil the line.

host (server_address) ─ veth ─ wire ─ veth ─ site (address). The middle is `wire.py` in a namespace of its own.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

# Carved into networks of two addresses each. Private, and out of the way of what machines commonly use.
POOL = ipaddress.ip_network("10.213.0.0/16")

FIREWALL = """
table inet site {{
  chain inbound {{
    type filter hook input priority 0; policy drop;
    iif "lo" accept
    ct state established,related accept
    meta l4proto tcp reject with tcp reset
    reject
  }}
  chain outbound {{
    type filter hook output priority 0; policy drop;
    oif "lo" accept
    ip daddr {server} accept
    reject
  }}
}}
"""


class Network:
    """The line of one site.

    Attributes:
        server_address: the host's end, where a server may listen for this site.
        address: the site's end.
    """

    def __init__(self, interface: str, network: str) -> None:
        self.interface = interface
        hosts = list(ipaddress.ip_network(network).hosts())
        self.server_address, self.address = str(hosts[0]), str(hosts[1])
        self._wire: subprocess.Popen[str] | None = None

    def start(self, init_pid: int) -> int:
        """Connect the site whose process 1 is `init_pid`; the process id of the wire."""
        program = [sys.executable, "-I", str(Path(__file__).with_name("wire.py"))]
        self._wire = subprocess.Popen(
            ["unshare", "--net", "--", *program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._ask("hello")
        wire = self._wire.pid
        _ip(
            f"link add {self.interface} type veth peer name left netns {wire}",
            f"address add {self.server_address}/30 dev {self.interface}",
            f"link set {self.interface} up",
        )
        _ip(f"link add right type veth peer name eth0 netns {init_pid}", inside=wire)
        _ip(
            "link set lo up",
            f"address add {self.address}/30 dev eth0",
            "link set eth0 up",
            inside=init_pid,
        )
        self._ask("prepare")
        subprocess.run(
            [*_enter(init_pid), "nft", "-f", "-"],
            input=FIREWALL.format(server=self.server_address), text=True, check=True, capture_output=True,
        )  # fmt: skip
        return wire

    def cut(self) -> None:
        """Pull the cable somewhere on the way: packets vanish, open connections hang."""
        self._ask("cut")

    def mend(self) -> None:
        """The line as it was built; ends cut and delay alike."""
        self._ask("direct")

    clear = mend

    def delay(self, ms: float, jitter_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        """Every packet arrives `ms` ± `jitter_ms` late, in each direction (a round trip takes twice that), or never."""
        self._ask("relay", delay_s=ms / 1000, jitter_s=jitter_ms / 1000, loss=loss_percent / 100)

    def stop(self) -> None:
        if self._wire is not None:
            with self._wire:
                self._wire.kill()
            self._wire = None

    def _ask(self, mode: str, **values: float) -> None:
        assert self._wire is not None and self._wire.stdin is not None and self._wire.stdout is not None
        self._wire.stdin.write(json.dumps({"mode": mode, **values}) + "\n")
        self._wire.stdin.flush()
        answer = self._wire.stdout.readline().strip()
        if answer != "ok":
            raise RuntimeError(f"the line of the site could not be put into mode {mode!r}: {answer or 'it ended'}")


def free_network(taken: Iterable[str]) -> str:
    """A network of two addresses that neither another site nor the machine itself uses."""
    listed = subprocess.run(["ip", "-json", "-4", "route", "show", "table", "all"], capture_output=True, check=True)
    used = [ipaddress.ip_network(network) for network in taken]
    for route in json.loads(listed.stdout):
        if (destination := route["dst"]) not in ("default", "0.0.0.0/0"):
            used.append(ipaddress.ip_network(destination, strict=False))
    for candidate in POOL.subnets(new_prefix=30):
        if not any(candidate.overlaps(other) for other in used):
            return str(candidate)
    raise RuntimeError(f"no free network in {POOL}")


def _enter(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--net", "--"]


def _ip(*commands: str, inside: int | None = None) -> None:
    enter = _enter(inside) if inside is not None else []
    done = subprocess.run(
        [*enter, "ip", "-batch", "-"], input="\n".join(commands) + "\n", text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"ip {'; '.join(commands)}: {done.stderr.strip()}")
