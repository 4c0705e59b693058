"""Brings lost ranks back: what a launcher does when a process that uses `diamond.train.run` dies or stands still.

All ranks of the generation end, on every node, and the next one begins from the last checkpoint: with standbys, which
wait where the script calls `run()`, so that no import has to be made again. Programs that do not use `run` are left
alone. Copied beside launch.py into job directories: standard library only, Python 3.8 syntax.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from diamond.train.lines import HUNG, PEER_LOST, STACK_SIGNAL, Line, free_bytes, hang_report, hung, resident_bytes
    from diamond.train.team import SAVE_S, Plan, Team
else:  # beside launch.py in a job's directory
    from lines import HUNG, PEER_LOST, STACK_SIGNAL, Line, free_bytes, hang_report, hung, resident_bytes
    from team import SAVE_S, Plan, Team

LOOK_S = 1.0
CAUSE_S = 2.0  # for the cause to show, when all that is known is that somebody else is gone
FRUITLESS = 3  # generations in a row that came no further than those before them
ANSWER_S = 30.0
ROOM_BYTES = 2**29
UNKILLABLE_S = 10.0
CONTINUE = 85  # the same number as in diamond.core.scripts
# What nobody sends a program that is to end. SIGTERM and the like are somebody's wish, and not undone.
CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
RUNNING, STOPPING, WAITING = range(3)


class Keeper:
    """Works for one launcher, in its loop."""

    def __init__(self, launcher: Any, options: Any, free_port: Any) -> None:
        self._launcher, self._options = launcher, options
        self._node = options.node_rank  # as the team knows it; in a generation it may be another
        self._generation = 0
        self._state = WAITING if options.join else RUNNING  # who comes later begins with the next generation
        self._stop_by = self._end_by = 0.0
        self._lines: dict[int, Line] = {}  # by local rank
        self._standby: dict[int, Any] = {}  # ranks that wait, by local rank
        self._standby_lines: dict[int, Line] = {}
        self._wants_standby = not options.no_standby and os.environ.get("DIAMOND_STANDBYS") != "0"
        self._bad_standbys = 0
        self._due: float | None = None
        self._asked_at: float | None = None  # when the first node was told of a loss, until it answers
        self._is_known = False  # whether the program uses `run`
        self._lost: Any = None  # the rank whose loss ended the generation
        self._why = ""
        self._best = self._fruitless = self._hangs = 0
        self._has_saved = False  # whether there is a checkpoint to go on from
        self._has_trained = True  # all ranks of this generation; those of the first end as they like
        self._is_cut_short: bool | None = None  # whether it was told to stop while ranks were coming back
        self.restarts = 0
        self._look_at = self._looked_at = self._awake_since = 0.0
        several = options.nodes > 1 or options.join
        self._team = Team(
            node=self._node, nodes=options.nodes, addr=options.master_addr,
            port=_words_port(options.master_port) if several else 0, key=_key(), min_nodes=options.min_nodes,
            wake=launcher.wake, free_port=free_port, may_go_on=lambda: self._is_known,
        )  # fmt: skip

    # ---- lines to the ranks ------------------------------------------------------------------------------------------

    def line(self, local_rank: int) -> Line:
        made = self._lines[local_rank] = Line()
        return made

    def _all_here_once(self) -> bool:
        self._is_known = self._is_known or self._all_here()
        return self._is_known

    def _all_here(self) -> bool:
        return len(self._lines) == self._options.ranks and all("here" in one.said() for one in self._lines.values())

    # ---- losses ------------------------------------------------------------------------------------------------------

    def takes(self, rank: Any) -> bool:
        """Whether the loss of a rank is mended here, instead of ending the job."""
        if self._state != RUNNING:
            return True
        crashed = _crash(rank)
        if not (crashed or rank.exit_code == PEER_LOST) or not self._may():
            return False
        if self._blame_failed():
            return True
        if self._lost is None or crashed:
            self._lost = rank
        now = time.monotonic()
        self._due = now if crashed else self._due or now + CAUSE_S
        return True

    def _blame_failed(self) -> bool:
        """A rank that says that it failed by itself: others end for want of it, perhaps before it does."""
        for local_rank, line in self._lines.items():
            if "failed" in line.said():
                self._due = None
                self._launcher.blame(local_rank)
                return True
        return False

    def _may(self) -> bool:
        return (
            self._all_here_once()
            and not self._team.is_final()
            and self._team.is_joined
            and self.restarts < self._options.restarts
            and self._fruitless < FRUITLESS
        )

    @property
    def is_busy(self) -> bool:
        return self._state != RUNNING or self._due is not None or self._asked_at is not None

    def tick(self, now: float) -> float | None:
        """Do what is due; when to come again."""
        if self._launcher.is_ending and self._is_cut_short is None and not self._launcher.has_killed:
            # Not only once: a rank that was lost before the signal came may take a moment to be gone.
            if not self._launcher.is_told_to_stop:
                self._is_cut_short = False
            elif self._is_regrouping():
                self._is_cut_short = self._may_go_on_later()
        if self._state == RUNNING:
            if self._launcher.is_ending:
                self._due = self._asked_at = None
                return None
            if self._due is not None and now >= self._due:
                self._due = None
                if not self._may():
                    self._launcher.fail(self._lost, self._why)
                    return None
                self._count()
                self._asked_at = now
                self._team.failed(self._generation)
            if self._asked_at is not None and (self._team.is_final() or now > self._asked_at + ANSWER_S):
                self._asked_at = None
                self._launcher.fail(self._lost, self._why)
                return None
            if self._team.must_stop(self._generation):
                self._begin_stop(now)
            elif now >= self._look_at:
                self._look_at = now + LOOK_S
                self._look(now)
        if self._state == STOPPING and now >= self._stop_by:
            self._launcher.kill_ranks()
            self._stop_by, self._end_by = float("inf"), now + UNKILLABLE_S
        if self._state == STOPPING and (self._launcher.is_ending or now >= self._end_by):
            if not self._launcher.is_ending:
                self._why = "some ranks did not end after SIGKILL"  # a dead file system, a driver
            self._team.finish()
            self._give_up()
        if self._state == STOPPING and self._launcher.all_ended:
            self._launcher.drop_ranks()
            self._close_lines()
            self._state = WAITING
            self._team.stopped(self._generation)
        if self._state == WAITING:
            if self._launcher.is_ending or self._team.is_final():
                self._give_up()
            elif (plan := self._team.next_plan()) is not None:
                self._begin(plan)
        deadlines = [self._look_at if self._state == RUNNING else now + 0.2]
        return min(deadlines + ([self._due] if self._due is not None else []))

    def _is_regrouping(self) -> bool:
        """From the loss of a rank until all train again: nobody can save meanwhile."""
        is_under_way = self._state != RUNNING or self._due is not None or self._asked_at is not None
        if is_under_way or any(map(_is_lost, self._launcher.ranks)):  # lost in the very moment of the stop
            return True
        return not self._has_trained and not all(line.sign().steps for line in self._lines.values())

    def _may_go_on_later(self) -> bool:
        """Whether another job can do what this one was about to: no rank failed by itself, and something is saved."""
        failed = any("failed" in line.said() for line in self._lines.values())
        return self._is_known and self._fruitless < FRUITLESS and not failed and self._knows_of_save()

    def _knows_of_save(self) -> bool:
        self._has_saved = self._has_saved or any("saved" in line.said() for line in self._lines.values())
        return self._has_saved

    def _count(self) -> None:
        """Whether the generation came further than those before it."""
        reached = max((line.sign().step for line in self._lines.values()), default=0)
        self._fruitless = 0 if reached > self._best else self._fruitless + 1
        self._best = max(self._best, reached)

    def _begin_stop(self, now: float) -> None:
        late = [
            line
            for line in self._lines.values()
            if (sign := line.sign()).steps and now - sign.since > line.limit_s() / 2
        ]
        if late and not self._why:
            self._note_hang(now)  # another node found it first; who is to blame may be here
        self._state, self._stop_by, self._asked_at = STOPPING, now, None
        self._end_by = float("inf")
        if self._team.is_gentle:
            self._stop_by = now + SAVE_S
            self._launcher.ask_to_save()

    def _begin(self, plan: Plan) -> None:
        self.restarts += 1
        self._generation, self._state, self._has_trained = plan.generation, RUNNING, False
        how = "a node is taken in" if self._team.is_gentle else "others were lost"
        if self._lost is not None:
            how = f"rank {self._lost.number} {_ending(self._lost)}"
        if plan.nodes < self._options.nodes:  # which others lost their connection to
            how = "a node was lost" if plan.nodes == self._options.nodes - 1 else "nodes were lost"
        self._launcher.say(
            f"{self._why or how}; going on with {plan.nodes * self._options.ranks} ranks on {plan.nodes} "
            f"node{'s' if plan.nodes > 1 else ''} (restart {self.restarts})"
        )
        self._lost, self._why, self._due = None, "", None
        self._looked_at = time.monotonic()
        self._launcher.take_place(plan.place, plan.nodes, plan.addr, plan.port)
        env = {"DIAMOND_GENERATION": str(plan.generation), "DIAMOND_RESTARTS": str(self.restarts)}
        for local_rank in range(self._options.ranks):
            self._start_rank(local_rank, env)

    def _start_rank(self, local_rank: int, env: dict[str, str]) -> None:
        waiting, line = self._standby.pop(local_rank, None), self._standby_lines.pop(local_rank, None)
        wanted = {**self._launcher.place(local_rank), **env}
        if waiting is not None and line is not None and self._launcher.lives(waiting) and line.tell(wanted):
            self._lines[local_rank] = line
            self._launcher.promote(waiting, int(wanted["RANK"]))
            return
        if waiting is not None:
            self._launcher.dismiss(waiting)
        if line is not None:
            line.close()
        self._launcher.spawn(local_rank, wanted)

    def _give_up(self) -> None:
        self._state = RUNNING
        if not self._team.is_too_small:
            self._launcher.fail(self._lost, self._why)
            return
        # What is saved is worth going on from: where another job follows, it has all its nodes again.
        code = CONTINUE if "DIAMOND_CONTINUE_FILE" in os.environ else None
        self._launcher.fail(self._lost, f"fewer than {self._options.min_nodes} nodes are left", code=code)

    # ---- looking after those that run --------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        self._team.look()
        if not self._all_here_once() or not self._all_here() or self._blame_failed():
            return
        signs = [line.sign() for line in self._lines.values()]
        if now - self._looked_at > 5 * LOOK_S:  # this process itself was stopped, and so were the ranks: suspended
            self._awake_since = now
        self._looked_at = now
        if hung(self._lines, now, self._awake_since):
            self._on_hang(now)
        elif all(one.steps > 0 for one in signs):
            self._has_trained = True
            self._keep_standbys()

    def _keep_standbys(self) -> None:
        """One for each rank; one after the other, so that their imports do not crowd out the training."""
        if any("cuda" in line.said() for line in self._lines.values()):  # so would a standby, before it is needed
            self._wants_standby = False
        for local_rank, waiting in list(self._standby.items()):
            said = self._standby_lines[local_rank].said()
            if "cuda" in said:  # it would hold memory of the GPU that the ranks need
                self._wants_standby = False
            if "cuda" in said or not self._launcher.lives(waiting):
                self._bad_standbys += 1
                self._drop_standby(local_rank)
            elif "here" not in said:
                return
        if not self._wants_standby or self._bad_standbys > 2:
            return
        for local_rank in range(self._options.ranks):
            if local_rank not in self._standby:
                if not self._has_room():
                    return
                try:
                    line = Line()
                except OSError:  # too many files are open
                    self._bad_standbys += 1
                    return
                rank = self._launcher.spawn(local_rank, {"DIAMOND_STANDBY": "1"}, line)
                if rank is not None:
                    self._standby[local_rank], self._standby_lines[local_rank] = rank, line
                else:
                    self._bad_standbys += 1
                    line.close()
                return

    def _has_room(self) -> bool:
        """Whether a standby may be as large as a rank and leave as much again: memory that runs out ends the job."""
        used = resident_bytes(self._launcher.processes())
        return free_bytes(used) > 2 * used // int(self._options.ranks) + ROOM_BYTES

    def _drop_standby(self, local_rank: int) -> None:
        self._launcher.dismiss(self._standby.pop(local_rank))
        self._standby_lines.pop(local_rank).close()

    def _on_hang(self, now: float) -> None:
        self._hangs += 1
        is_final = self._hangs > 1 or not self._may()
        rank = self._note_hang(now, is_final)
        if not is_final:
            self._due = now
            return
        self._team.finish()
        self._launcher.fail(rank, self._why, code=HUNG)

    def _note_hang(self, now: float, is_final: bool = False) -> Any:
        ranks = {rank.number: rank for rank in self._launcher.ranks}
        lines = {int(self._launcher.place(local)["RANK"]): line for local, line in self._lines.items()}
        pids = {
            number: self._launcher.trainer(ranks.get(number), line.sign().pid, STACK_SIGNAL)
            for number, line in lines.items()
        }
        guilty, text, stacks = hang_report(lines, pids, now)
        self._why = text
        self._launcher.say(f"{text}\n{stacks}")
        sign = lines[guilty].sign()
        record = {"rank": guilty, "step": sign.step, "phase": sign.phase, "text": text, "stack": stacks[:4000]}
        record["final"] = is_final
        if folder := os.environ.get("DIAMOND_RUN_DIR"):
            path = os.path.join(folder, f"hung.node{self._node}.json")
            with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
                json.dump(record, file)
        return ranks.get(guilty)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """A rank failed in a way that no new beginning mends."""
        self._team.finish()

    def code(self, code: int) -> int:
        """With which code the launcher ends; `code` is what its ranks make of it.

        A chain goes on where a job was told to stop while nobody could save: from its last checkpoint.
        """
        path = os.environ.get("DIAMOND_CONTINUE_FILE")
        if code in (0, CONTINUE) or path is None or not self._is_cut_short:
            return code
        # Not through a link, which a program in a container may have put there to have something out here emptied.
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
        self._launcher.say("stopped while ranks were coming back; the next job goes on from the last checkpoint")
        return CONTINUE

    def dismiss_standbys(self) -> None:
        self._wants_standby = False
        for local_rank in list(self._standby):
            self._drop_standby(local_rank)

    def close(self) -> None:
        self.dismiss_standbys()
        self._team.close()
        self._close_lines()

    def _close_lines(self) -> None:
        self._knows_of_save()
        while self._lines:
            self._lines.popitem()[1].close()


def _crash(rank: Any) -> int:
    """The signal that ended a rank; a shell around the program makes an exit code of it. 0: none did."""
    if rank.signal:
        return int(rank.signal)
    return rank.exit_code - 128 if rank.exit_code - 128 in CRASHES else 0


def _is_lost(rank: Any) -> bool:
    """Whether it ended in a way that a new beginning mends."""
    return rank.exit_code is not None and (rank.exit_code == PEER_LOST or _crash(rank) in CRASHES)


def _ending(rank: Any) -> str:
    number = _crash(rank)
    if not number:
        return "lost another one"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(number).name}"
    return f"was killed by signal {number}"


def _words_port(master_port: int) -> int:
    """Where launchers talk: far from the port that is the program's own, and those beside it."""
    return 20000 + (master_port + 7919) % 12000


def _key() -> str:
    """What only the launchers of this job know; alone, nobody has to."""
    return os.environ.get("DIAMOND_LAUNCH_KEY") or secrets.token_hex(16)
