"""Owns the processes of one node of a job: starts the ranks, merges their output, passes signals on, records the end.

This file is also copied into job directories and run by whatever Python a container has, so it must not import anything
but the standard library, nor use syntax newer than Python 3.8; with regroup.py and what that needs beside it, it brings
lost ranks back, and alone it does not. It must not know schedulers, the server or torch: it sets the variables that
every framework reads, and leaves SLURM_* as they are.

    python3 launch.py --ranks 4 -- python train.py
    python3 launch.py --ranks 4 --nodes 2 --node-rank 1 --master-addr node1 --master-port 29500 -- python train.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

LONG_LINE_BYTES = 64 * 1024  # a line longer than this is passed on in pieces
READ_BYTES = 64 * 1024
HELD_BYTES = 64 * 1024
PARTIAL_LINE_S = 0.5  # an unfinished line (a prompt, a progress bar) is shown after this time
DRAIN_S = 2.0  # how long processes left behind by the ranks may keep the output open
MEASURED_NODES = 100  # of one job; the same number as in diamond.core.measuring
LOOK_S = 1.0  # between two looks for a warning file, or for ranks that listen to a warning
GIVE_UP_S = 10.0  # after SIGKILL; a process stuck in the kernel (dead file system, GPU driver) must not hold the job
WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_LINE_START = re.compile(rb"(\n|\r(?!\n))(?!\Z)")


class Rank:
    """One process of the job, the leader of its own process group."""

    def __init__(self, number: int, proc: subprocess.Popen[bytes] | None) -> None:
        self.number = number
        self.proc = proc  # None: it could not be started
        self.pipe = -1 if proc is None or proc.stdout is None else proc.stdout.fileno()
        self.started_at = time.time()
        self.held: bytearray | None = None  # what a standby says, until it is needed
        self.ended_at: float | None = None
        self.exit_code: int | None = None  # 128 + n when a signal ended it
        self.signal: int | None = None
        self.unfinished = bytearray()  # output after the last newline, not written yet
        self.flush_at: float | None = None
        self.prefix = b"[%d] " % number
        self.is_warned = False
        self.tail = b"\n"  # the last byte written: says whether the next one begins a line

    def finish(self, status: int) -> None:
        """Record the end; a negative status is a signal, as in subprocess."""
        self.ended_at = time.time()
        self.signal = -status if status < 0 else None
        self.exit_code = 128 - status if status < 0 else status

    def record(self) -> dict[str, Any]:
        return {
            "rank": self.number,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
        }

    def with_prefix(self, data: bytes) -> bytes:
        """Put the rank's number before every line that begins in `data`.

        A lone carriage return begins a line too: a progress bar then repaints its whole line, number included, and no
        byte of the program's own is lost.
        """
        if b"\r" in data:
            lines = _LINE_START.sub(lambda found: found.group(1) + self.prefix, data)
        else:
            lines = data[:-1].replace(b"\n", b"\n" + self.prefix) + data[-1:]
        at_start = self.tail == b"\n" or (self.tail == b"\r" and data[:1] != b"\n")
        self.tail = data[-1:]
        return self.prefix + lines if at_start else lines


class Output:
    """The launcher's stdout. Only whole lines of one rank are written together, unless a line stays unfinished."""

    def __init__(self, prefixed: bool) -> None:
        self._prefixed = prefixed
        self._unended: Rank | None = None  # whose unfinished line is the last thing written
        self._lost_bytes = 0

    def feed(self, rank: Rank, data: bytes) -> None:
        """Take what a rank wrote; pass on the lines that it completes."""
        if not self._prefixed:
            self._put(data)
            return
        rank.unfinished += data
        end = len(rank.unfinished) - len(data) + data.rfind(b"\n") + 1 if b"\n" in data else 0
        if len(rank.unfinished) - end >= LONG_LINE_BYTES:
            end = len(rank.unfinished)
        if end:
            self._write(rank, bytes(rank.unfinished[:end]))
            del rank.unfinished[:end]
        if not rank.unfinished:
            rank.flush_at = None
        elif end or rank.flush_at is None:
            rank.flush_at = time.monotonic() + PARTIAL_LINE_S

    def flush(self, rank: Rank) -> None:
        """Pass on an unfinished line."""
        if rank.unfinished:
            self._write(rank, bytes(rank.unfinished))
            rank.unfinished.clear()
        rank.flush_at = None

    def end_line(self) -> None:
        """Make whatever is written next begin a line."""
        if self._unended is not None:
            self._unended.tail = b"\n"
            self._unended = None
            self._put(b"\n")

    def _write(self, rank: Rank, data: bytes) -> None:
        lead = b""
        if self._unended is not None and self._unended is not rank:
            self._unended.tail = b"\n"
            lead = b"\n"
        text = rank.with_prefix(data)
        self._unended = None if data.endswith(b"\n") else rank
        self._put(lead + text)

    def _put(self, data: bytes) -> None:
        notice = b"\n[diamond] %d bytes of output could not be written here\n" % self._lost_bytes
        rest = notice + data if self._lost_bytes else data
        while rest:
            try:
                rest = rest[os.write(1, rest) :]
            except BlockingIOError:  # whoever made stdout non-blocking did not mean to lose output
                select.select([], [1], [], 1.0)
            except OSError:
                # The disk is full or the reader is gone. That is no reason to stop a training run.
                self._lost_bytes += min(len(rest), len(data))
                return
        self._lost_bytes = 0


class Launcher:
    """Runs one node's ranks to their end. Single-threaded: one selector loop, plus signal handlers that only kill."""

    def __init__(self, options: argparse.Namespace, argv: list[str]) -> None:
        self._options = options
        self._argv = argv
        self._ranks: list[Rank] = []
        self._output = Output(prefixed=options.ranks * options.nodes > 1)
        self._selector = selectors.DefaultSelector()
        self._first_failed: Rank | None = None
        self._stop_at: float | None = None  # when to send SIGTERM to the ranks that outlived a failed one
        self._kill_at: float | None = None  # when to send SIGKILL; set as soon as the ranks were told to stop
        self._killed = False
        self._stop_signal = self._told = 0  # the first is also set by a failure, the second only by others
        self._measurer: subprocess.Popen[bytes] | None = None
        self._look_at: float | None = time.monotonic() if options.warning_file else None
        self._wake_fd = -1
        self.warning = 0  # the signal of a warning that came
        self._warn_at = 0.0
        self._keeper = _keeper(self, options)

    def run(self) -> int:
        """Start the ranks, wait for all of them, and return the exit status for this process."""
        self._catch_signals()
        if not self._options.join:
            self._start()
        if self._kill_at is not None:
            self._signal_groups(self._stop_signal)  # it came while ranks were being started
        self._measure()
        self._loop()
        self._finish_output()
        if self._keeper is not None:
            self._keeper.close()
        # Nothing that a rank started in its group may hold the node's memory and GPUs after the job.
        self._signal_groups(signal.SIGKILL)
        if self._measurer is not None:
            self._measurer.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):  # else it notices by itself that we are gone
                self._measurer.wait(1.0)
        for rank in self._ranks:
            if rank.proc is not None and rank.exit_code is not None:
                rank.proc.wait()
        code = self._exit_code()
        if self._keeper is not None:
            code = self._keeper.code(code)
        self._write_exit_file(code)
        return code

    # Signals

    def _catch_signals(self) -> None:
        read_end, write_end = os.pipe()
        for fd in (read_end, write_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # any signal ends the wait in the selector
        self._wake_fd = write_end
        self._selector.register(read_end, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (*STOP_SIGNALS, *WARNING_SIGNALS, signal.SIGHUP):
            may_ignore = number in (signal.SIGINT, signal.SIGHUP)  # so did nohup, or the shell for a `command &`
            if not (may_ignore and signal.getsignal(number) == signal.SIG_IGN):
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # Acts here, not in the loop: the loop may be held up by a slow reader of stdout.
        if number in WARNING_SIGNALS:
            self._warn_ranks(number)
            return
        if number in STOP_SIGNALS:
            self._told = self._told or number
            self._stop(number)
        else:
            self._signal_groups(number)

    def _stop(self, number: int) -> None:
        self._stop_signal = self._stop_signal or number
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._options.grace_s
        self._signal_groups(number)

    def _signal_groups(self, number: int) -> None:
        for rank in self._ranks:
            if rank.proc is not None:
                # The group may be gone. Its id is not taken by others: see _exit_status.
                with contextlib.suppress(OSError):
                    os.killpg(rank.proc.pid, number)

    def _warn_ranks(self, number: int) -> None:
        self.warning = number
        groups = _live_groups()
        if groups is None:
            _say(f"{signal.Signals(number).name} not passed on: this system does not tell which process catches it")
        for rank in self._ranks:
            rank.is_warned = self._tell(rank, number, groups)

    def _tell(self, rank: Rank, number: int, groups: dict[int, list[int]] | None) -> bool:
        """Pass a warning on, but only to processes that catch it: the default action would kill the others.

        Whether there is one that does.
        """
        group = groups.get(rank.proc.pid, []) if groups is not None and rank.proc is not None else []
        listening = [pid for pid in group if _catches(pid, number)]
        for pid in listening:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        return bool(listening)

    def _warn_the_rest(self, now: float) -> float | None:
        """Ranks that did not listen yet when a warning came, being just started, say. When to look again."""
        rest = [rank for rank in self._ranks if not rank.is_warned and rank.exit_code is None]
        if not self.warning or not rest:
            return None
        if now >= self._warn_at:
            self._warn_at = now + LOOK_S
            groups = _live_groups()
            for rank in rest:
                rank.is_warned = self._tell(rank, self.warning, groups)
        return self._warn_at

    def _look_for_warning(self, now: float) -> None:
        """A scheduler's signal to a job on several nodes reaches every process, also those it ends: hence a file."""
        if self._look_at is None or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        folder, name = os.path.split(self._options.warning_file)
        with contextlib.suppress(OSError):
            # A listing is asked for anew; that a single name is not there a file system may believe for a minute.
            if name in os.listdir(folder):
                self._look_at = None
                self._warn_ranks(signal.SIGUSR1)

    # Life of the ranks

    def _start(self) -> None:
        for local_rank in range(self._options.ranks):
            if self._kill_at is not None or self.spawn(local_rank, {}) is None:
                return

    def spawn(self, local_rank: int, more: dict[str, str], line: Any = None) -> Rank | None:
        """Start a rank; with a `line` of its own it is a standby. None when it cannot be started."""
        env = {**_environment(self._options), **self._place(local_rank), **more}
        # Own groups in the same session: a Ctrl-C or a scheduler's signal to our group reaches a rank once, from us.
        how: dict[str, Any] = {"process_group": 0}
        if sys.version_info < (3, 11):  # noqa: UP036 - containers bring their own, older Python
            how = {"preexec_fn": lambda: os.setpgid(0, 0)}
        joined = line or (self._keeper.line(local_rank) if self._keeper is not None else None)
        if joined is not None:
            how["pass_fds"] = joined.fds
            env.update(joined.env)
        null, pipe = subprocess.DEVNULL, subprocess.PIPE
        try:
            proc = subprocess.Popen(
                self._argv, stdin=null, stdout=pipe, stderr=subprocess.STDOUT, bufsize=0, env=env, **how
            )
        except OSError as error:
            if line is None:
                self._could_not_start(int(env["RANK"]), error)
            return None
        if joined is not None:
            joined.started()
        rank = Rank(int(env["RANK"]), proc)
        if line is None:
            self._ranks.append(rank)
        else:
            rank.held = bytearray()
        self._selector.register(rank.pipe, selectors.EVENT_READ, rank)
        return rank

    def _place(self, local_rank: int) -> dict[str, str]:
        number = str(self._options.node_rank * self._options.ranks + local_rank)
        local = str(local_rank)
        return {"RANK": number, "LOCAL_RANK": local, "DIAMOND_RANK": number, "DIAMOND_LOCAL_RANK": local}

    def _measure(self) -> None:
        """Have what the ranks use of this node noted; they run as well without."""
        options = self._options
        if not options.measure or options.node_rank >= MEASURED_NODES:
            return
        name = "util.jsonl" if options.nodes == 1 else f"util.node{options.node_rank}.jsonl"
        out = os.path.join(os.path.dirname(options.measure[1]), name)
        null = subprocess.DEVNULL
        with contextlib.suppress(OSError):
            self._measurer = subprocess.Popen([*options.measure, out], stdin=null, stdout=null, stderr=null)

    def _could_not_start(self, number: int, error: OSError) -> None:
        missing = isinstance(error, FileNotFoundError)
        reason = error.strerror or str(error)
        if missing and os.path.exists(self._argv[0]):
            reason = "the interpreter named in its first line does not exist"
        elif missing:
            reason = "command not found"
        _say(f"cannot start {self._argv[0]!r}: {reason}")
        rank = Rank(number, None)
        rank.finish(127 if missing else 126)
        self._ranks.append(rank)
        self._first_failed = rank
        if len(self._ranks) > 1:
            self._stop(signal.SIGTERM)

    def _loop(self) -> None:
        drain_until = None
        while True:
            self._reap()
            now = time.monotonic()
            if self._stop_at is not None and self._kill_at is None and now >= self._stop_at:
                self._stop(signal.SIGTERM)
            if self._kill_at is not None and not self._killed and now >= self._kill_at:
                self._killed = True
                self._signal_groups(signal.SIGKILL)
            self._look_for_warning(now)
            deadlines = [self._look_at, self._warn_the_rest(now), *(rank.flush_at for rank in self._ranks)]
            if self._keeper is not None:
                deadlines.append(self._keeper.tick(now))
            if self._keeper is not None and self._keeper.is_busy:
                pass
            elif self.all_ended:
                if self._kill_at is not None and not self._killed and self._groups_live():
                    # SIGTERM ends the shell around a training program at once, while the program saves its state.
                    deadlines.append(now + 0.1)
                else:
                    drain_until = drain_until or now + DRAIN_S
                    if now >= drain_until or all(rank.pipe < 0 for rank in self._ranks):
                        return
            elif self._kill_at is not None and now >= self._kill_at + GIVE_UP_S:
                _say("some ranks did not end after SIGKILL; leaving them")
                return
            deadlines += [self._stop_at if self._kill_at is None else None, drain_until]
            if self._kill_at is not None:
                deadlines.append(self._kill_at + GIVE_UP_S if self._killed else self._kill_at)
            wait_s = min((at for at in deadlines if at is not None), default=None)
            for key, _ in self._selector.select(None if wait_s is None else max(0.0, wait_s - now)):
                self._read(key.fd, key.data)
            now = time.monotonic()
            for rank in self._ranks:
                if rank.flush_at is not None and now >= rank.flush_at:
                    self._output.flush(rank)

    def _reap(self) -> None:
        for rank in self._ranks:
            if rank.exit_code is not None or rank.proc is None:
                continue
            status = _exit_status(rank.proc)
            if status is None:
                continue
            rank.finish(status)
            if self._keeper is not None and not self.is_ending and self._keeper.takes(rank):
                continue
            if status != 0 and self._first_failed is None:
                if self._keeper is not None:
                    self._keeper.finish()
                self._first_failed = rank
                self._stop_at = time.monotonic() + self._options.settle_s
                self._report(rank)

    def _report(self, rank: Rank) -> None:
        if len(self._ranks) == 1 or self._kill_at is not None:
            return
        how = f"exited with status {rank.exit_code}"
        if rank.signal is not None:
            how = f"was killed by {_signal_name(rank.signal)}"
        self._output.end_line()
        _say(f"rank {rank.number} {how}; ranks still running in {self._options.settle_s:g} s are stopped")

    # What `regroup` does with the ranks

    @property
    def ranks(self) -> list[Rank]:
        return self._ranks

    @property
    def all_ended(self) -> bool:
        return all(rank.exit_code is not None for rank in self._ranks)

    @property
    def is_ending(self) -> bool:
        return self._kill_at is not None or self._first_failed is not None

    @property
    def is_told_to_stop(self) -> bool:
        """By whoever ends the job; Ctrl-C is a person's wish, after which nothing goes on."""
        return self._told == signal.SIGTERM

    @property
    def has_killed(self) -> bool:
        return self._killed

    def wake(self) -> None:
        """End the wait in the selector; from any thread."""
        with contextlib.suppress(OSError):
            os.write(self._wake_fd, b"\0")

    def say(self, text: str) -> None:
        self._output.end_line()
        _say(text)

    def kill_ranks(self) -> None:
        self._signal_groups(signal.SIGKILL)

    def ask_to_save(self) -> None:
        groups = _live_groups()
        for rank in self._ranks:
            self._tell(rank, signal.SIGTERM, groups)  # a warning alone lets them use what time is left

    def drop_ranks(self) -> None:
        """They have ended; what they wrote last is still passed on."""
        self._finish_output()
        self._signal_groups(signal.SIGKILL)
        for rank in self._ranks:
            if rank.proc is not None:
                rank.proc.wait()
        self._ranks = []
        # Whoever saved for our sake meant no new job by it.
        with contextlib.suppress(KeyError, OSError):
            if not self.warning:
                os.unlink(os.environ["DIAMOND_CONTINUE_FILE"])

    def take_place(self, index: int, nodes: int, addr: str, port: int) -> None:
        options = self._options
        options.node_rank, options.nodes, options.master_addr, options.master_port = index, nodes, addr, port

    def place(self, local_rank: int) -> dict[str, str]:
        """What tells a rank of this generation where it stands."""
        return {**_shared(self._options), **self._place(local_rank)}

    def promote(self, rank: Rank, number: int) -> None:
        rank.number, rank.prefix, rank.started_at = number, b"[%d] " % number, time.time()
        held, rank.held = rank.held, None
        self._ranks.append(rank)
        if held:
            self._output.feed(rank, bytes(held))

    def processes(self) -> list[int]:
        """Of all ranks, with those they started."""
        groups = _live_groups() or {}
        return [pid for rank in self._ranks if rank.proc is not None for pid in groups.get(rank.proc.pid, [])]

    def trainer(self, rank: Rank | None, said: int, caught: int) -> int:
        """The process that trains in a rank, which itself may be a shell; 0 when it cannot be told.

        What it `said` its number is may be that of another process: containers count for themselves. It is the one
        that catches the signal `caught`; data loaders, its children, may as well.
        """
        if rank is None or rank.proc is None:
            return 0
        group = (_live_groups() or {}).get(rank.proc.pid, [])
        fitting = [pid for pid in group if _catches(pid, caught)]
        return said if said in fitting else min(fitting, default=0)

    def lives(self, rank: Rank) -> bool:
        return rank.proc is not None and _exit_status(rank.proc) is None

    def dismiss(self, rank: Rank) -> None:
        if rank.proc is not None:
            with contextlib.suppress(OSError):
                os.killpg(rank.proc.pid, signal.SIGKILL)
            rank.proc.wait()
        if rank.pipe >= 0:
            self._close(rank)

    def blame(self, local_rank: int) -> None:
        """It failed, even if it has not ended yet."""
        number = self._options.node_rank * self._options.ranks + local_rank
        found = [rank for rank in self._ranks if rank.number == number]
        if found and self._first_failed is None:
            self._first_failed = found[0]
            self._stop_at = time.monotonic() + self._options.settle_s
            if self._keeper is not None:
                self._keeper.finish()

    def fail(self, rank: Rank | None, why: str, code: int | None = None) -> None:
        """Nothing brings the ranks back."""
        first = rank or Rank(self._options.node_rank * self._options.ranks, None)
        if code is not None or first.exit_code is None:
            first.finish(code or 1)
        self._first_failed = first
        self._stop_at = time.monotonic()
        if why:
            self.say(f"{why}; the job ends")

    def _groups_live(self) -> bool:
        pids = [rank.proc.pid for rank in self._ranks if rank.proc is not None]
        groups = _live_groups()
        if groups is not None:
            return any(pid in groups for pid in pids)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.killpg(pid, 0)
                return True
        return False

    # Output

    def _read(self, fd: int, rank: Rank | None) -> bool:
        """Take what is there; False at the end of it."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if rank is None:
            return bool(data)  # the wake-up pipe: its bytes only end the wait
        if data and rank.held is not None:
            rank.held += data[: HELD_BYTES - len(rank.held)]
        elif data:
            self._output.feed(rank, data)
        else:
            self._close(rank)
        return bool(data)

    def _close(self, rank: Rank) -> None:
        self._output.flush(rank)
        self._selector.unregister(rank.pipe)
        rank.pipe = -1
        if rank.proc is not None and rank.proc.stdout is not None:
            rank.proc.stdout.close()

    def _finish_output(self) -> None:
        for rank in self._ranks:
            if rank.pipe >= 0:
                os.set_blocking(rank.pipe, False)
                for _ in range(16):  # no more than a pipe holds: what has it open may write for ever
                    if not self._read(rank.pipe, rank):
                        break
            if rank.pipe >= 0:
                self._close(rank)
        self._output.end_line()

    # The end

    def _exit_code(self) -> int:
        if self._first_failed is not None:
            return self._first_failed.exit_code or 1
        if any(rank.exit_code is None for rank in self._ranks):
            return 128 + signal.SIGKILL
        if len(self._ranks) < self._options.ranks:
            return 128 + self._stop_signal
        return 0

    def _write_exit_file(self, code: int) -> None:
        path = self._options.exit_file
        if not path:
            return
        first = self._first_failed
        record = {
            "node_rank": self._options.node_rank,
            "host": socket.gethostname(),
            "exit_code": code,
            "signal": first.signal if first is not None else None,
            "first_failed_rank": first.number if first is not None else None,
            "restarts": self._keeper.restarts if self._keeper is not None else 0,
            "ranks": [rank.record() for rank in self._ranks],
        }
        try:
            _write_atomically(path, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            _say(f"cannot write {path}: {error.strerror or error}")


def _keeper(launcher: Launcher, options: argparse.Namespace) -> Any:
    """What brings lost ranks back, where its files are beside this one."""
    if options.restarts < 1 and not options.join:
        return None
    try:
        if TYPE_CHECKING or __package__:
            from diamond.train import regroup
        else:
            import regroup
    except ImportError:
        return None
    return regroup.Keeper(launcher, options, free_port)


def _shared(options: argparse.Namespace) -> dict[str, str]:
    """What all ranks of this node share: their place in the job."""
    world_size = str(options.ranks * options.nodes)
    return {
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": str(options.ranks),
        "NODE_RANK": str(options.node_rank),
        "DIAMOND_WORLD_SIZE": world_size,
        "DIAMOND_NODE_RANK": str(options.node_rank),
        "DIAMOND_NUM_NODES": str(options.nodes),
    }


def _environment(options: argparse.Namespace) -> dict[str, str]:
    env = {**os.environ, **_shared(options)}
    # N ranks that each start a thread per core of the node are slower than one.
    env.setdefault("OMP_NUM_THREADS", str(max(1, _num_cpus() // options.ranks)))
    # Into a pipe Python writes blocks of 8 KiB: a log would stand still for minutes, and end too early in a crash.
    env.setdefault("PYTHONUNBUFFERED", "1")
    return env


def _num_cpus() -> int:
    with contextlib.suppress(KeyError, ValueError):
        return int(os.environ["DIAMOND_CPUS"])
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_port() -> int:
    """A port nobody listens on, below the range from which Linux takes ports for outgoing connections."""
    for port in [*(20000 + secrets.randbelow(12000) for _ in range(50)), 0]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return int(probe.getsockname()[1])
    raise OSError("no free port")


def _exit_status(proc: subprocess.Popen[bytes]) -> int | None:
    """How a rank ended, None while it runs.

    The rank stays a zombie where the system allows it, until all is over: as long as it does, no other process
    can get its number, and a signal to its group can reach no stranger.
    """
    if not hasattr(os, "waitid"):
        return proc.poll()
    info = os.waitid(os.P_PID, proc.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


def _live_groups() -> dict[int, list[int]] | None:
    """Process ids by process group, without zombies; None where there is no /proc."""
    groups: dict[int, list[int]] = {}
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return None
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            # The name in brackets may itself hold brackets and blanks; after the last one come state, parent, group.
            state, _parent, group = file.read().rpartition(b")")[2].split()[:3]
            if state not in (b"Z", b"X"):
                groups.setdefault(int(group), []).append(pid)
    return groups or None


def _catches(pid: int, number: int) -> bool:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _write_atomically(path: str, text: str) -> None:
    folder = os.path.dirname(os.path.abspath(path))
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # not every file system can; the rename itself is done
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"diamond: {text}\n".encode("utf-8", "surrogateescape"))


def _parse(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="launch.py",
        usage="%(prog)s --ranks N [options] -- COMMAND [ARGUMENT ...]",
        description="Start the ranks of one node of a job and stay with them to the end.",
    )
    add = parser.add_argument
    add("--ranks", type=int, required=True, metavar="N", help="processes to start on this node")
    add("--nodes", type=int, default=1, metavar="M", help="nodes of the job, each with its own launcher")
    add("--node-rank", type=int, metavar="K", help="number of this node from 0 (else NODE_RANK, SLURM_NODEID)")
    add("--master-addr", metavar="A", help="host of rank 0 (else MASTER_ADDR; 127.0.0.1 on a single node)")
    add("--master-port", type=int, metavar="P", help="port of rank 0 (else MASTER_PORT; a free one on a single node)")
    add("--exit-file", metavar="PATH", help="record of the end (else $DIAMOND_RUN_DIR/exit.node<K>.json)")
    add("--warning-file", metavar="PATH", help="passed on as SIGUSR1 when it appears")
    add("--measure", nargs=2, metavar=("BASH", "SCRIPT"), help="notes what the ranks use, in util.jsonl beside SCRIPT")
    add(
        "--restarts", type=int, default=1000, metavar="N", help="how often lost ranks are brought back (1000; 0: never)"
    )
    add("--no-standby", action="store_true", help="bring ranks back without processes that wait for it")
    add("--min-nodes", type=int, default=1, metavar="M", help="go on with fewer nodes down to this many (1)")
    add("--join", action="store_true", help="come to a job that runs, as a node with a number it does not have yet")
    add("--grace-s", type=float, default=15.0, help="seconds from SIGTERM to SIGKILL (15)")
    add("--settle-s", type=float, default=5.0, help="seconds from a rank's failure to SIGTERM for the others (5)")
    split = args.index("--") if "--" in args else len(args)
    options = parser.parse_args(args[:split])
    argv = args[split + 1 :]
    env = os.environ
    if not argv:
        parser.error("give the command to run after --")
    if options.ranks < 1 or options.nodes < 1:
        parser.error("--ranks and --nodes must be at least 1")
    if options.nodes == 1 and not options.join:
        # Variables left over from an enclosing job do not count: a single node needs no one else's address.
        options.node_rank = options.node_rank or 0
        options.master_addr = options.master_addr or "127.0.0.1"
        options.master_port = free_port() if options.master_port is None else options.master_port
    else:
        try:
            if options.node_rank is None:
                options.node_rank = int(env.get("NODE_RANK") or env["SLURM_NODEID"])
            options.master_addr = options.master_addr or env["MASTER_ADDR"]
            options.master_port = options.master_port or int(env["MASTER_PORT"])
        except (KeyError, ValueError):
            parser.error("several nodes need --node-rank, --master-addr and --master-port")
    if options.join == (0 <= options.node_rank < options.nodes):
        parser.error(f"--node-rank must be from 0 to {options.nodes - 1}")
    if options.exit_file is None and env.get("DIAMOND_RUN_DIR"):
        options.exit_file = os.path.join(env["DIAMOND_RUN_DIR"], f"exit.node{options.node_rank}.json")
    return options, argv


def main(args: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (that of the first rank that failed, 128 + n for a signal)."""
    options, argv = _parse(sys.argv[1:] if args is None else args)
    return Launcher(options, argv).run()


if __name__ == "__main__":
    sys.exit(main())
