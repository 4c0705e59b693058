"""`make quickstart`: from nothing to a trained model, through the same commands a user types.

Starts Diamond on this machine if it is not running, launches examples/burgers_fno, shows it live (where there is a
desktop, its page opens in a browser as well), fetches the result and says how to look at it. Exit code 0 when the model
was trained or Ctrl-C left it training, 1 when not. Without a terminal, what was started is stopped again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "burgers_fno"
RESULT = ROOT / "quickstart-result"
DIAMOND = str(Path(sys.executable).with_name("diamond"))
BOLD, PLAIN = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")


def say(text: str) -> None:
    print(f"\n{BOLD}{text}{PLAIN}", flush=True)


def diamond(*argv: str) -> int:
    return subprocess.run([DIAMOND, *argv], check=False).returncode


def answer(*argv: str) -> dict[str, Any]:
    """What a command says in JSON; an empty object when it fails without a word."""
    done = subprocess.run([DIAMOND, *argv, "--json"], check=False, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def follow(*argv: str) -> int:
    """Run a command that makes something of Ctrl-C itself: here it only waits for what the command says then."""
    # A function and not SIG_IGN, which the command would inherit.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return diamond(*argv)
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> int:
    attended = sys.stdin.isatty() and sys.stdout.isatty()
    say("1  Starting Diamond with this machine as an endpoint")
    up = answer("up", "--detach")
    if "url" not in up:
        error = up.get("error") or {"message": "it did not start", "hint": f"see: {DIAMOND} check"}
        print(f"error: {error['message']}\nhint: {error['hint']}", file=sys.stderr)
        return 1
    print(f"web page: {up['url']}/dashboard")
    code, goes_on = 1, False
    try:
        code, goes_on = train()
    finally:
        if up.get("already_running") or attended or goes_on:
            say("Diamond goes on running.")
            print(f"look around:  {DIAMOND} ps · show · metrics      web page: {up['url']}/dashboard")
            print(f"stop it:      {DIAMOND} down")
        else:
            diamond("down")
    return code


def train() -> tuple[int, bool]:
    """The exit code, and whether the task goes on because somebody pressed Ctrl-C."""
    say("2  Training a neural operator for Burgers' equation on two ranks (about a minute; Ctrl-C detaches)")
    code = follow("launch", "--open", str(EXAMPLE / "task.yaml"))
    if code == 130:
        return code, False  # interrupted before there was a task; the command has said so
    task = answer("show", "burgers-fno")
    state = task.get("state", "unknown")
    if code == 0 and state in ("PENDING", "QUEUED", "RUNNING", "FINISHING"):
        return 0, True  # the command has said how to come back
    if state != "SUCCEEDED":
        say(f"The task is {state}. See: {DIAMOND} logs · {DIAMOND} check")
        return code or 1, False
    say("3  Fetching the result")
    if diamond("outputs", str(task["id"]), "--to", str(RESULT)):
        return 1, False
    result = json.loads((RESULT / "result.json").read_text())
    print(f"\nrelative L2 error on held-out initial conditions: {result['test_rel_l2'] * 100:.2f} %")
    print(f"saved model:    {RESULT / 'model.pt'}")
    print(f"picture:        {RESULT / 'prediction.svg'}   (open it in a browser)")
    print(f"try it again:   {sys.executable} {EXAMPLE / 'look.py'} {RESULT / 'model.pt'}")
    return 0, False


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted.")
        sys.exit(130)
