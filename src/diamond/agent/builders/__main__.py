"""`python -m diamond.agent.builders RUN_DIR/image-work.json`: the program of a job that looks after images.

Exit code 0: done. 1: failed, and failure.json says why. 143: it was told to stop, and left nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from diamond.agent.builders import transfers
from diamond.agent.builders.base import BuildProblem, CommandFailed, Commands
from diamond.agent.builders.build import Bench, ImageJob, bench, build, say
from diamond.agent.builders.diagnosis import diagnose
from diamond.agent.builders.store import write_json
from diamond.core import images
from diamond.core.codec import decode
from diamond.core.errors import DiamondError
from diamond.core.images import BuildFailure
from diamond.core.recipes import Recipe

FAILED = 1
_MAX_CHARS = 300
STOPPED = 128 + signal.SIGTERM
ACTIONS: dict[str, Callable[[Bench], object]] = {
    "build": build,
    "export": transfers.export,
    "import": transfers.take_in,
    "link": transfers.take_over,
    "remove": transfers.remove,
    "prune": transfers.tidy,
}


class Stopped(BaseException):
    """The job is to end now."""


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m diamond.agent.builders RUN_DIR/image-work.json", file=sys.stderr)
        return 2
    job = decode(ImageJob, json.loads(Path(argv[0]).read_bytes()))
    commands = Commands()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    os.umask(0o022)
    work_dir = Path(job.run_dir) / "work"
    for name in images.BUILD_OUTPUTS:  # of an earlier start of the same job
        with contextlib.suppress(FileNotFoundError):
            (work_dir / name).unlink()
    stage = job.work.action
    try:
        action = ACTIONS.get(job.work.action)
        if action is None:
            raise BuildProblem(f"this agent does not know how to {job.work.action!r} an image", hint="update the agent")
        with bench(job, commands) as at:
            try:
                action(at)
            finally:
                stage = at.stage if job.work.action == "build" else stage
    except Stopped:
        say("stopped")
        return STOPPED
    except Exception as error:  # whatever it is: without a sentence in failure.json nobody would learn of it
        _fail(job, work_dir, stage, error)
        return FAILED
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    # One signal is enough: what follows is tidying up, which a second one must not cut short.
    for again in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(again, signal.SIG_IGN)
    raise Stopped


def _fail(job: ImageJob, work_dir: Path, stage: str, error: Exception) -> None:
    if not isinstance(error, BuildProblem | CommandFailed | DiamondError | OSError):
        traceback.print_exception(error)
    failure = explain(job, stage, error)
    say(f"failed: {failure.message}")
    if failure.hint:
        say(f"hint: {failure.hint}")
    with contextlib.suppress(OSError):  # on a full disk the log has to do
        write_json(work_dir / images.FAILURE_FILE, failure)


def explain(job: ImageJob, stage: str, error: Exception) -> BuildFailure:
    if isinstance(error, BuildProblem):
        return BuildFailure(stage=stage, message=error.message, hint=error.hint, code=error.code)
    if isinstance(error, DiamondError):
        return BuildFailure(stage=stage, message=error.message, hint=error.hint)
    if isinstance(error, CommandFailed):
        tail = error.tail
    elif isinstance(error, OSError):
        tail = f"{error} [Errno {error.errno or errno.EIO}]"
    elif isinstance(error, MemoryError):
        tail = "MemoryError"
    else:
        return BuildFailure(
            stage=stage,
            message=f"Diamond did not expect what it found here ({type(error).__name__}: {str(error)[:_MAX_CHARS]})",
            hint="the log says where (diamond image logs); if the base or the file that was sent is whole, report it",
            code="internal",
        )
    recipe = job.work.recipe or Recipe(base="host")
    return diagnose(stage, recipe, tail, job.work.builder, job.work.where)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
