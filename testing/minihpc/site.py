"""A miniature HPC centre on this machine: real Slurm, real users, a network of its own.

    with Site(name="alpha") as site:
        job = site.sbatch("hostname", "user1")
        print(site.run(["squeue"]).stdout)

Any number can run at once. Each has its own mount, host name, IPC, network and process namespaces over a shared
read-only root file system (`rootfs.py`); nothing of it outlives the process that made it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType

from testing.minihpc import memory, registry, rootfs, slurm_conf
from testing.minihpc.inside import ACCOUNTS, Inside, child_of
from testing.minihpc.network import Network, free_network
from testing.minihpc.pythons import find as find_python
from testing.minihpc.pythons import inside as python_inside
from testing.minihpc.slurm_conf import Node, Partition
from testing.waiting import eventually

TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "ip": "iproute2", "nft": "nftables"}
NAMESPACES = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--propagation", "private"]


@lru_cache
def available(release: str = "trixie") -> str | None:
    """What keeps a site from running here; None when nothing is known to."""
    if os.geteuid() != 0:
        return "a miniature HPC centre needs root, for namespaces and mounts"
    tools = TOOLS if rootfs.is_cached(release) else {**TOOLS, "apt-get": "apt", "mmdebstrap": "mmdebstrap"}
    if missing := [f"{tool} (Debian: {package})" for tool, package in tools.items() if not shutil.which(tool)]:
        return f"a miniature HPC centre needs {', '.join(missing)}"
    if "\toverlay\n" not in Path("/proc/filesystems").read_text():
        return "a miniature HPC centre needs a kernel with overlayfs"
    done = subprocess.run(["unshare", *NAMESPACES, "--", "true"], capture_output=True, text=True, check=False)
    return f"new namespaces are refused here ({done.stderr.strip()})" if done.returncode else None


class Site(Inside):
    """One centre. Use as a context manager, or `start()` and `stop()`.

    Args:
        name: its host and cluster name; sites of one name may run at once.
        release: a key of `rootfs.RELEASES`: "trixie" is Slurm 24.11 with Apptainer, "bookworm" Slurm 22.05 without.
        nodes: what it has instead of the four default nodes.
        partitions: instead of the default ones; `extra_partitions` come on top.
        conf: global slurm.conf parameters to set ({"MinJobAge": "2"}); an empty value removes one.
        binds: files and folders of the host to show inside, read-only: {"/opt/data": Path(...)}.
        memory_limits: let Slurm end jobs that take more memory than they asked for (see `memory.available`).
        pythons: further Python versions to have, such as "3.10", where this machine has them (`pythons.find`).

    Attributes:
        facts: versions of what is inside, and `warnings` about what should be and is not.
        network: its line to the server, to cut and to spoil.
    """

    def __init__(
        self,
        name: str = "alpha",
        *,
        release: str = "trixie",
        nodes: Sequence[Node] | None = None,
        partitions: Sequence[Partition] | None = None,
        extra_partitions: Sequence[Partition] = (),
        conf: Mapping[str, str] | None = None,
        binds: Mapping[str, Path] | None = None,
        memory_limits: bool = False,
        pythons: Sequence[str] = (),
    ) -> None:
        super().__init__(0)
        self.name = name
        self.release = release
        self.nodes = tuple(slurm_conf.default_nodes() if nodes is None else nodes)
        chosen = slurm_conf.default_partitions(self.nodes) if partitions is None else partitions
        self.partitions = (*chosen, *extra_partitions)
        self.started_in_s = 0.0
        self._memory_limits = memory_limits
        self._conf = (memory.CONF if memory_limits else {}) | dict(conf or {})
        self._binds = dict(binds or {})
        self._pythons = tuple(pythons)
        for version in self._pythons:
            if (prefix := find_python(version)) is None:
                raise RuntimeError(f"this machine has no self-contained Python {version} to lend to a site")
            self._binds[python_inside(version)] = prefix
        self._record: registry.Record | None = None
        self._life: subprocess.Popen[str] | None = None

    facts: rootfs.Rootfs
    network: Network

    def __enter__(self) -> Site:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def server_address(self) -> str:
        """Where on the host a server must listen to be reached from this site."""
        return self.network.server_address

    @property
    def address(self) -> str:
        return self.network.address

    def start(self) -> None:
        """Build the root file system if need be, start everything, and return when every node is idle."""
        if reason := available(self.release) or (memory.available() if self._memory_limits else None):
            raise RuntimeError(reason)
        self.facts = rootfs.get(self.release)
        began = time.monotonic()
        try:
            self._start_namespaces()
            self._configure()
            self._start_daemons()
        except BaseException:
            self.stop()
            raise
        self.started_in_s = time.monotonic() - began

    def stop(self) -> None:
        """End every process, remove every trace. Safe to repeat."""
        atexit.unregister(self.stop)
        if self._life is not None:
            # Process 1 first: the kernel then ends the rest, and unshare returns when the last of them is gone.
            if (init := child_of(self._life.pid)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(init, signal.SIGKILL)
            try:
                self._life.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                self._life.kill()
                self._life.communicate()
            self._life = None
        self._end_processes()
        if self._record is not None:
            self.network.stop()
            registry.clear(self._record)
            self._record = None

    # -- starting ------------------------------------------------------------------------------------------------

    def _start_namespaces(self) -> None:
        site_id = f"{self.name}-{secrets.token_hex(3)}"
        with registry.locked():
            registry.sweep()
            folder = registry.new_folder(self.name)
            record = registry.Record(
                id=site_id, name=self.name, release=self.release, folder=str(folder),
                interface=f"dm{site_id[-6:]}", network=free_network(other.network for other in registry.running()),
                owner=registry.mark(os.getpid()),
            )  # fmt: skip
            registry.save(record)
        self._record = record
        self.network = Network(record.interface, record.network)
        atexit.register(self.stop)
        for name, mode in (("home", 0o755), ("scratch", 0o1777)):
            (folder / name).mkdir()
            (folder / name).chmod(mode)
        binds = {inside: str(source.resolve(strict=True)) for inside, source in self._binds.items()}
        config = {"hostname": self.name, "lower": str(self.facts.path), "folder": str(folder)}
        group = str(memory.make_group(record.id)) if self._memory_limits else ""
        settings = {**config, "binds": binds, "memory": group}
        (folder / "config.json").write_text(json.dumps(settings))
        program = [sys.executable, "-I", str(Path(__file__).with_name("init.py")), str(folder / "config.json")]
        with (folder / "init.log").open("w") as log:
            # The pipe on its standard input is the site's life: the kernel closes it when this process is gone.
            self._life = subprocess.Popen(
                ["unshare", *NAMESPACES, "--", *program],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        assert self._life.stdout is not None
        if self._life.stdout.readline() != "ready\n":
            raise RuntimeError(f"site {self.name} could not be put together:\n{(folder / 'init.log').read_text()}")
        init = child_of(self._life.pid)
        assert init is not None
        self.init_pid = init
        wire = self.network.start(init)
        self._record = replace(record, init=registry.mark(init), wire=registry.mark(wire))
        registry.save(self._record)

    def _configure(self) -> None:
        """What tells this site from another: accounts, names, keys, Slurm's configuration."""
        people = [account for account in ACCOUNTS.values() if account.uid]
        etc = self.path("/etc")
        with (etc / "passwd").open("a") as passwd, (etc / "group").open("a") as group:
            for person in people:
                passwd.write(f"{person.name}:x:{person.uid}:{person.uid}::{person.home}:/bin/bash\n")
                group.write(f"{person.name}:x:{person.uid}:\n")
            # For the partition only some may use.
            group.write("privileged:x:1100:user2\n")
        for number, person in enumerate(people):
            for name in ("subuid", "subgid"):
                with (etc / name).open("a") as file:
                    file.write(f"{person.name}:{100000 + number * 65536}:65536\n")
            home = self.path(person.home)
            shutil.copytree(etc / "skel", home)
            home.chmod(0o700)
            for path in (home, *home.rglob("*")):
                os.chown(path, person.uid, person.uid)
        nodes = " ".join(node.name for node in self.nodes)
        (etc / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {self.name} {nodes}\n")
        (etc / "hostname").write_text(f"{self.name}\n")
        # There is nobody to ask: names that are not in the file fail at once instead of after a timeout.
        (etc / "resolv.conf").unlink(missing_ok=True)
        (etc / "resolv.conf").write_text("")
        switch = (etc / "nsswitch.conf").read_text().splitlines()
        lines = ["hosts: files" if line.startswith("hosts:") else line for line in switch]
        (etc / "nsswitch.conf").write_text("\n".join(lines) + "\n")
        (etc / "munge").mkdir(exist_ok=True)
        (etc / "munge/munge.key").write_bytes(secrets.token_bytes(128))
        self.write_slurm_conf()
        for folder in ("/run/munge", "/run/slurm", "/var/log/slurm", "/var/spool/slurmctld"):
            self.path(folder).mkdir(parents=True, exist_ok=True)

    def write_slurm_conf(self, conf: Mapping[str, str] | None = None) -> None:
        """Write Slurm's configuration, with `conf` added to what the site was made with."""
        self._conf |= dict(conf or {})
        etc = self.path("/etc/slurm")
        etc.mkdir(exist_ok=True)
        text = slurm_conf.slurm_conf(
            cluster=self.name, address=self.address, nodes=self.nodes, partitions=self.partitions, overrides=self._conf
        )
        (etc / "slurm.conf").write_text(text)
        (etc / "gres.conf").write_text(slurm_conf.gres_conf(self.nodes))
        # slurmd looks for cgroups even when no plugin uses them; the old one has no word for going without.
        plugin = "cgroup/v1" if self.facts.slurm.startswith("22.") else "disabled"
        (etc / "cgroup.conf").write_text(memory.CGROUP_CONF if self._memory_limits else f"CgroupPlugin={plugin}\n")

    def _start_daemons(self) -> None:
        # munged insists on its own user and on nobody else reading the key.
        script = """
            chown -R munge:munge /etc/munge /run/munge /var/log/munge /var/lib/munge
            chmod 700 /etc/munge && chmod 400 /etc/munge/munge.key && chmod 755 /run/munge
            setpriv --reuid=munge --regid=munge --clear-groups munged
        """
        for version in self._pythons:
            folder = python_inside(version)
            script += f"""
            ln -s {folder}/bin/python{version} /usr/local/bin/
            echo {folder}/lib > /etc/ld.so.conf.d/python-{version}.conf && ldconfig
            """
        self.run(["sh", "-ec", script], user="root")
        self.start_controller()
        self.start_node(*(node.name for node in self.nodes))

    # -- the scheduler's own troubles ----------------------------------------------------------------------------

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        self.run(["slurmctld"], user="root")
        try:
            eventually(self._controller_answers, within_s=30, what="slurmctld answers")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log('slurmctld.log')}") from None

    def kill_controller(self) -> None:
        """SIGKILL slurmctld: commands fail, jobs run on."""
        self._end_controller(signal.SIGKILL)

    def restart_controller(self) -> None:
        """Stop slurmctld in order and start it again, with the configuration as it is now."""
        self._end_controller(signal.SIGTERM)
        self.start_controller()

    def start_node(self, *names: str, wait: bool = True) -> None:
        """Start the slurmd of these nodes, each under a host name of its own, and wait until they are idle."""
        lines = [f"unshare --uts sh -ec {shlex.quote(f'hostname {name}; exec slurmd -N {name}')}" for name in names]
        done = self.run(["sh", "-ec", "\n".join(lines)], user="root", check=False)
        if done.returncode != 0:
            raise AssertionError("slurmd did not start\n" + "\n".join(self.log(f"slurmd.{name}.log") for name in names))
        if wait:
            self.wait_for_nodes(*names)

    def kill_node(self, name: str, *, steps: bool = True) -> None:
        """SIGKILL a node's slurmd and, as when the power goes, everything that runs on it.

        With `steps=False` its jobs run on unsupervised. Slurm calls the node down after about twice MessageTimeout
        and SlurmdTimeout: 30 s, or 12 s with `conf=slurm_conf.QUICK_NODE_FAIL`.
        """
        daemons = [found for found in self.processes() if found.argv[0].endswith("slurmd") and name in found.argv[1:]]
        assert daemons, f"no slurmd of {name} runs"
        while victims := [
            found.pid for found in self.processes() if (found.uts == daemons[0].uts if steps else found in daemons)
        ]:
            for pid in victims:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def wait_for_nodes(self, *names: str, within_s: float = 60) -> None:
        """Wait until these nodes are idle; all of them when none is named."""
        wanted = set(names or [node.name for node in self.nodes])

        def idle() -> bool:
            listed = self.run(["sinfo", "--all", "-h", "-N", "-o", "%N %t"], user="root", check=False).stdout
            states = dict(line.split() for line in listed.splitlines())
            return all(states.get(name) == "idle" for name in wanted)

        try:
            eventually(idle, within_s=within_s, every_s=0.1, what="all nodes are idle")
        except AssertionError as error:
            said = self.run(["sinfo", "--all", "-N", "-l"], user="root", check=False).stdout
            raise AssertionError(f"{error}\n{said}\n{self.log('slurmctld.log')}") from None

    def log(self, name: str, lines: int = 30) -> str:
        """The end of one of Slurm's logs: slurmctld.log, slurmd.c1.log."""
        path = self.path(f"/var/log/slurm/{name}")
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else f"(no {name})"

    def _controller_answers(self) -> bool:
        done = self.run(["scontrol", "ping"], user="root", check=False, timeout=30)
        return " is UP" in done.stdout

    def _end_controller(self, how: signal.Signals) -> None:
        def controllers() -> list[int]:
            return [found.pid for found in self.processes() if found.argv[0].endswith("slurmctld")]

        for pid in controllers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, how)
        eventually(lambda: not controllers(), within_s=30, what="slurmctld ends")
