"""The steward: what runs in a pilot. It starts, warns and ends the steps that the agent lays into its run directory.

This file is copied into run directories and run by whatever Python the node has, so it must not import anything but the
standard library, nor use syntax newer than Python 3.8. It listens on nothing and knows neither server nor tasks.

In the pilot's run directory:

    pilot.json        where it runs; written when it begins
    ending            made when it is told to stop at once; how its steps then end is not their own doing
    end               made by the agent: it shall end as soon as no step runs
    steps/NAME.json   made by the agent: this step shall run
    steps/NAME.warn   it shall be told to save and stop (SIGUSR1); NAME.stop: it shall be ended
    steps/NAME.run    which of the pilot's GPUs it was given
    steps/NAME.err    what srun said
    steps/NAME.done   it is over, and with which status; or why it was not started

A step is the job.sh of a run directory of its own, which starts once: job.sh itself sees to that. Under Slurm it is a
step of the pilot's job, so that Slurm gives it cores and GPUs of its own; elsewhere a session.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NamedTuple

LOOK_S = 0.5
GRACE_S = 20.0  # from SIGTERM to SIGKILL
HURRY_S = 8.0  # the same, when the pilot itself has been told to stop: whoever said so soon kills
LEADER_S = 1.0  # from the SIGKILL of all others to that of job.sh, which notes how they ended
MEMORY_EVERY_S = 2.0
ALREADY_STARTED = 75  # the same number as in diamond.core.scripts
MAX_BYTES = 4 * 1024 * 1024
MAX_SAID = 2000
_MIB = 1024 * 1024
# Where Slurm itself is found. All else of these families belongs to the pilot's own job, and srun would obey it.
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_FAMILIES = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "DIAMOND_")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")
# The log belongs to the step's own job; what srun itself remarks does not.
_SCRIPT = 'exec bash "$1" >> "$2" 2>&1'


class Stat(NamedTuple):
    parent: int
    session: int
    start_ticks: int
    pages: int  # resident


class Step:
    """One step, from its NAME.json to its NAME.done."""

    def __init__(self, name: str, raw: dict[str, Any]) -> None:
        self.name = name
        self.run_dir = str(raw["run_dir"])
        self.script = str(raw["script"])
        self.log = str(raw["log"])
        self.cpus = int(raw.get("cpus") or 1)
        self.gpus = int(raw.get("gpus") or 0)
        self.mem_bytes = int(raw.get("mem_bytes") or 0)
        self.num_nodes = len(raw.get("nodes") or [0])
        self.envs = {str(key): str(value) for key, value in (raw.get("envs") or {}).items()}
        self.limit_s = float(raw["time_limit_s"]) if raw.get("time_limit_s") else None
        self.warn_s = float(raw.get("warn_s") or 0.0)
        self.limit_text = str(raw.get("limit_text") or "")
        self.process: subprocess.Popen[bytes] | None = None
        self.devices: list[int] = []  # positions in the pilot's own list of GPUs
        self.began_s: float | None = None  # when its job.sh was first seen
        self.is_warned = False
        self.told: set[tuple[int, int]] = set()  # pid and start of whom SIGTERM was sent to
        self.kill_at_s: float | None = None

    def leader(self) -> int:
        """The pid of its job.sh; 0 while there is none, or none any more."""
        found = _read(os.path.join(self.run_dir, "started")).decode(errors="replace").split()
        is_number = len(found) == 3 and found[0].isdecimal() and len(found[0]) <= 10
        if not is_number or int(found[0]) <= 1 or found[2] != _boot_id():
            return 0
        stat = _stat(int(found[0]))
        return int(found[0]) if stat is not None and found[1] in ("0", str(stat.start_ticks)) else 0


class Steward:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._steps_dir = os.path.join(folder, "steps")
        self._pilot: dict[str, Any] = _json(os.path.join(folder, "order.json")).get("pilot") or {}
        self._slurm_id = os.environ.get("SLURM_JOB_ID", "")
        self._host = os.environ.get("SLURMD_NODENAME") or os.environ.get("SLURM_JOB_NODELIST") or socket.gethostname()
        self._devices = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        self._steps: dict[str, Step] = {}
        self._over: dict[str, dict[str, Any]] = {}  # what its NAME.done says
        self._is_closing = False  # its time is nearly over: nothing new is started
        self._is_stopping = False
        self._memory_at_s = 0.0
        self._wake_fd = -1

    def run(self) -> int:
        self._catch_signals()
        os.makedirs(self._steps_dir, mode=0o700, exist_ok=True)
        _write(
            os.path.join(self._folder, "pilot.json"),
            {
                "host": self._host,
                "slurm_id": self._slurm_id or None,
                "pid": os.getpid(),
                "slots": self._pilot.get("slots", 0),
                "started_at": time.time(),
            },
        )
        while not self._is_done():
            self._look()
            with contextlib.suppress(OSError):
                select.select([self._wake_fd], [], [], LOOK_S)
                os.read(self._wake_fd, 4096)
        # Not 0 when somebody else ended it: who that was, and why, then counts as the reason.
        return 128 + signal.SIGTERM if self._is_stopping else 0

    def _is_done(self) -> bool:
        if self._steps:
            return False
        if self._is_stopping or self._is_closing:
            return True
        return "end" in _listing(self._folder) and not self._waiting(_listing(self._steps_dir))

    def _catch_signals(self) -> None:
        self._wake_fd, write_end = os.pipe()
        for fd in (self._wake_fd, write_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # any signal ends the wait for the next look
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGUSR1, lambda *_: self._close())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._stop())

    def _close(self) -> None:
        self._is_closing = True

    def _stop(self) -> None:
        if not self._is_stopping:
            self._is_stopping = self._is_closing = True
            # At once: the agent may see a step end before anything else is done here.
            _write(os.path.join(self._folder, "ending"), {"at": time.time()})

    # What should be

    def _waiting(self, names: set[str]) -> list[str]:
        """Steps that should run and are not known yet."""
        found = (name[: -len(".json")] for name in names if name.endswith(".json") and not name.startswith("."))
        return sorted(n for n in found if n not in self._steps and n not in self._over and f"{n}.done" not in names)

    def _look(self) -> None:
        names = _listing(self._steps_dir)
        self._over = {name: raw for name, raw in self._over.items() if f"{name}.json" in names}
        for name in (one for one in self._over if f"{one}.done" not in names):  # the disk was full, say
            _write(os.path.join(self._steps_dir, f"{name}.done"), self._over[name])
        for name in self._waiting(names):
            self._begin(name, names)
        for step in list(self._steps.values()):
            if self._has_ended(step):
                continue
            if step.began_s is None and step.leader():
                step.began_s = time.monotonic()
            has_time = self._is_closing and not self._is_stopping
            if has_time or f"{step.name}.warn" in names:
                self._warn(step)
            if self._is_stopping or f"{step.name}.stop" in names:
                self._end(step, HURRY_S if self._is_stopping else GRACE_S)
            self._keep_time(step)
        self._keep_memory()

    def _begin(self, name: str, names: set[str]) -> None:
        try:
            step = Step(name, _json(os.path.join(self._steps_dir, f"{name}.json")))
        except Exception as error:  # whatever is in there, all other steps go on
            self._done(name, 1, f"its step file cannot be read: {error!r}")
            return
        if os.path.lexists(os.path.join(step.run_dir, "started")):
            self._done(name, ALREADY_STARTED, "its run directory was begun before")
        elif f"{name}.stop" in names:
            self._done(name, 1, "it was ended before it began", is_refused=True)
        elif self._is_closing:
            self._done(name, 1, "the pilot that holds its node is about to end", is_refused=True)
        else:
            try:
                self._start(step)
            except (OSError, ValueError) as error:
                self._done(name, 1, f"it could not be started: {error}")

    def _start(self, step: Step) -> None:
        argv, env = self._command(step)
        _write(os.path.join(self._steps_dir, f"{step.name}.run"), {"gpus": step.devices})
        # Neither through a link nor into a pipe nobody reads: another job may have put one there.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        said = os.path.join(self._steps_dir, f"{step.name}.err") if self._slurm_id else step.log
        out = os.open(said, flags, 0o600)
        try:
            os.set_blocking(out, True)
            step.process = subprocess.Popen(
                argv,
                cwd=step.run_dir,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                # A warning or a Ctrl-C for the pilot's own session is not meant for srun, which would pass it to all.
                start_new_session=True,
            )
        finally:
            os.close(out)
        self._steps[step.name] = step

    def _command(self, step: Step) -> tuple[list[str], dict[str, str]]:
        """What starts a step, and in which environment. Raises ValueError where there are too few GPUs."""
        env = {k: v for k, v in os.environ.items() if k in _KEPT or not k.startswith(_FAMILIES)}
        env.update(step.envs, DIAMOND_CPUS=str(step.cpus), DIAMOND_RUN_DIR=step.run_dir)
        if not self._slurm_id:
            if self._devices or step.gpus:
                step.devices = self._free_devices(step.gpus)
                env["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices[index] for index in step.devices)
            return ["bash", step.script], env
        for name in _DEVICES:
            env.pop(name, None)
        argv = ["srun", f"--jobid={self._slurm_id}", "--nodes=1", "--ntasks=1", f"--nodelist={self._host}"]
        if step.num_nodes > 1:  # this one only starts what runs on the nodes, each in a step of its own
            argv += ["--overlap", "--cpus-per-task=1"]
        else:
            argv += ["--exact", f"--cpus-per-task={step.cpus}"]
            argv += [f"--mem={-(-step.mem_bytes // _MIB)}M"] if step.mem_bytes else []
        gpus = step.gpus if step.num_nodes == 1 else 0
        if gpus or self._pilot.get("has_gpus"):
            argv.append(f"--gres=gpu:{gpus}" if gpus else "--gres=none")
        argv += ["--kill-on-bad-exit=0", "--export=ALL", "--input=none", f"--job-name={step.name}"]
        return [*argv, "bash", "-c", _SCRIPT, "step", step.script, step.log], env

    def _free_devices(self, count: int) -> list[int]:
        taken = {index for step in self._steps.values() for index in step.devices}
        free = [index for index in range(len(self._devices)) if index not in taken]
        if count > len(free):
            raise ValueError(f"it needs {count} GPUs, and {len(free)} of the pilot's {len(self._devices)} are free")
        return free[:count]

    # Warning and ending

    def _warn(self, step: Step) -> None:
        """Tell its job.sh, which tells the program. As often as it takes for there to be one."""
        leader = 0 if step.is_warned else step.leader()
        if leader:
            step.is_warned = True
            _send(leader, signal.SIGUSR1)

    def _end(self, step: Step, grace_s: float) -> None:
        now = time.monotonic()
        leader = step.leader()
        kill_at_s = now + grace_s
        if step.kill_at_s is None:
            step.kill_at_s = kill_at_s
            self._terminate(step, self._members(step, leader))
            if not leader and step.process is not None:
                _send(step.process.pid, signal.SIGTERM)  # srun that waits for its turn
        step.kill_at_s = min(step.kill_at_s, kill_at_s)
        if now < step.kill_at_s:
            # What job.sh started just after everybody was told: the step from setup to run, say.
            children = [pid for pid, stat in _table().items() if leader and stat.parent == leader]
            self._terminate(step, children)
            return
        with_leader = now >= step.kill_at_s + LEADER_S
        for pid in self._members(step, leader):
            if pid != leader or with_leader:
                _send(pid, signal.SIGKILL)
        if with_leader and step.process is not None:
            _send(step.process.pid, signal.SIGKILL)

    def _members(self, step: Step, leader: int) -> list[int]:
        """A step's processes. Under Slurm those of its script alone: the rest Slurm finds, and ends with the step."""
        return _members(leader, "" if self._slurm_id else step.run_dir)

    @staticmethod
    def _terminate(step: Step, pids: list[int]) -> None:
        for pid in pids:
            stat = _stat(pid)
            if stat is not None and (pid, stat.start_ticks) not in step.told:
                step.told.add((pid, stat.start_ticks))
                _send(pid, signal.SIGTERM)

    def _keep_time(self, step: Step) -> None:
        if step.limit_s is None or step.began_s is None:
            return
        left_s = step.began_s + step.limit_s - time.monotonic()
        if left_s <= step.warn_s:
            self._warn(step)
        if left_s <= 0:
            self._give_cause(step, "TIME_LIMIT", step.limit_text)
            self._end(step, GRACE_S)

    def _keep_memory(self) -> None:
        """Slurm does this itself. Elsewhere one step too large would end the pilot, and all others with it."""
        now = time.monotonic()
        limited = [step for step in self._steps.values() if step.mem_bytes]
        if self._slurm_id or not limited or now < self._memory_at_s:
            return
        self._memory_at_s = now + MEMORY_EVERY_S
        for step in limited:
            used = sum(_memory(pid) for pid in self._members(step, step.leader()))
            if used > step.mem_bytes:
                text = f"it used {used // _MIB} MiB; its slots have {step.mem_bytes // _MIB} MiB"
                self._give_cause(step, "OUT_OF_MEMORY", text)
                self._end(step, 0.0)

    @staticmethod
    def _give_cause(step: Step, reason: str, detail: str) -> None:
        path = os.path.join(step.run_dir, "kill.json")
        if step.kill_at_s is None and not os.path.lexists(path):
            _write(path, {"reason": reason, "detail": detail, "at": time.time()})

    def _has_ended(self, step: Step) -> bool:
        """Whether it is over; then nothing of it is left, and that is noted."""
        process = step.process
        assert process is not None
        # Not reaped yet: as long as it is a zombie, nobody else can get its number, which names the session.
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        left = [] if self._slurm_id else self._members(step, process.pid)
        if left and step.kill_at_s is not None and time.monotonic() < step.kill_at_s:
            return False  # SIGTERM may end the shell around a program that still saves its state
        for pid in left:
            _send(pid, signal.SIGKILL)
        status = process.wait()
        del self._steps[step.name]
        said = _read(os.path.join(self._steps_dir, f"{step.name}.err")).decode(errors="replace")
        self._done(step.name, status, said[-MAX_SAID:].strip() if status else "")
        return True

    def _done(self, name: str, status: int, text: str = "", is_refused: bool = False) -> None:
        self._over[name] = {"status": status, "at": time.time(), "text": text, "refused": is_refused}
        _write(os.path.join(self._steps_dir, f"{name}.done"), self._over[name])


# ---- files -----------------------------------------------------------------------------------------------------------


def _listing(folder: str) -> set[str]:
    """Asked for anew each time; that a single name is not there a file system may believe for a minute."""
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


def _read(path: str) -> bytes:
    """A small file; nothing where there is none, and of what only looks like a file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    found = b""
    try:
        while len(found) < MAX_BYTES and (more := os.read(fd, 65536)):  # of /proc no more can be asked for at once
            found += more
        return found
    except OSError:
        return b""
    finally:
        os.close(fd)


def _json(path: str) -> dict[str, Any]:
    try:
        found = json.loads(_read(path) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: str, raw: dict[str, Any]) -> None:
    """Whole or not at all. A full disk must not end the steps, so this never raises."""
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name}.new")
    with contextlib.suppress(OSError):
        with open(beside, "w") as file:
            json.dump(raw, file)
        os.replace(beside, path)


# ---- processes -------------------------------------------------------------------------------------------------------


def _boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id").decode().strip() or "none"


def _stat(pid: int) -> Stat | None:
    try:  # the name in brackets may itself hold brackets and blanks; the fields begin after the last one
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if fields[0] in (b"Z", b"X"):
            return None
        return Stat(int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]))
    except (ValueError, IndexError):
        return None


def _table() -> dict[int, Stat]:
    found = ((int(name), _stat(int(name))) for name in os.listdir("/proc") if name.isdecimal())
    return {pid: stat for pid, stat in found if stat is not None}


def _members(leader: int, run_dir: str) -> list[int]:
    """A job.sh, its session, all that descends from it, and whoever says that it is of this run directory (if one is
    named), though it left both."""
    table = _table()
    children: dict[int, list[int]] = {}
    for pid, stat in table.items():
        children.setdefault(stat.parent, []).append(pid)
    mark = b"DIAMOND_RUN_DIR=" + os.fsencode(run_dir)
    todo = [pid for pid, stat in table.items() if leader > 1 and leader in (pid, stat.session)]
    if run_dir:
        todo += [pid for pid in table if mark in _read(f"/proc/{pid}/environ").split(b"\0")]
    found: set[int] = set()
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return sorted(found)


def _memory(pid: int) -> int:
    """Bytes a process holds, with shared pages divided among their users where the kernel tells."""
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) * 1024
    stat = _stat(pid)
    return stat.pages * os.sysconf("SC_PAGE_SIZE") if stat is not None else 0


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(Steward(os.environ["DIAMOND_RUN_DIR"]).run())
