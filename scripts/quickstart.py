"""`make quickstart`: from nothing to a trained model, through the same commands a user types.

Starts Diamond on this machine if it is not running, launches examples/burgers_fno, shows it live, fetches the
result and says how to look at it. Exit code 0 when the model was trained, 1 when not. Without a terminal, what was
started is stopped again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "burgers_fno"
RESULT = ROOT / "quickstart-result"
DIAMOND = str(Path(sys.executable).with_name("diamond"))
BOLD, PLAIN = ("\033[1m", "\033[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("", "")


def say(text: str) -> None:
    print(f"\n{BOLD}{text}{PLAIN}", flush=True)


def diamond(*argv: str) -> int:
    return subprocess.run([DIAMOND, *argv], check=False).returncode


def answer(*argv: str) -> dict[str, object]:
    """What a command says in JSON; an empty object when it fails."""
    done = subprocess.run([DIAMOND, *argv, "--json"], check=False, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout) if done.returncode == 0 else {}
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def main() -> int:
    attended = sys.stdin.isatty() and sys.stdout.isatty()
    say("1  Starting Diamond with this machine as an endpoint")
    was_running = bool(answer("ps"))
    if diamond("up", "--detach"):
        return 1
    try:
        return train()
    finally:
        if was_running or attended:
            say("Diamond goes on running.  Look around:  diamond ps · diamond show · diamond metrics")
            print(f"The command is {DIAMOND}; stop the service with: {DIAMOND} down")
        else:
            diamond("down")


def train() -> int:
    say("2  Training a neural operator for Burgers' equation on two ranks (about a minute)")
    code = diamond("launch", str(EXAMPLE / "task.yaml"))
    task = answer("show")
    if task.get("state") != "SUCCEEDED":
        say(f"The task is {task.get('state', 'unknown')}. See: {DIAMOND} logs · {DIAMOND} check")
        return 1 if code == 0 else code
    say("3  Fetching the result")
    if diamond("outputs", str(task["id"]), "--to", str(RESULT)):
        return 1
    result = json.loads((RESULT / "result.json").read_text())
    print(f"\nrelative L2 error on held-out initial conditions: {result['test_rel_l2'] * 100:.2f} %")
    print(f"saved model:    {RESULT / 'model.pt'}")
    print(f"picture:        {RESULT / 'prediction.svg'}   (open it in a browser)")
    print(f"try it again:   {sys.executable} {EXAMPLE / 'look.py'} {RESULT / 'model.pt'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nDetached; the task goes on.")
        sys.exit(130)
