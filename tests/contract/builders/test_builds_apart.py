"""Builds in containers see nothing of the account that makes them: a recipe may be somebody else's."""

from __future__ import annotations

import shlex

import pytest

from testing.builders import BuilderBench

pytestmark = pytest.mark.parametrize("bench", ["apptainer", "charliecloud", "podman"], indirect=True)

TOKEN = "t0ken-of-the-agent"
# Says TOKEN or STOLEN where it gets at something. $place is the folder that stands for the agent's home.
LOOK = """\
for file in "$place/token" /tmp/of-the-node /var/tmp/of-the-node ../token; do cat "$file" 2>/dev/null || true; done
for at in /proc/[0-9]*; do cat "$at/root$place/token" "$at/cwd/token" 2>/dev/null || true; done
if ls "$place/jobs" 2>/dev/null | grep -q job_; then echo STOLEN: other jobs; fi
echo changed 2>/dev/null > "$place/token" || true
echo looked
"""


def test_a_recipe_gets_at_nothing_of_the_account(bench: BuilderBench) -> None:
    bench.make_folder(f"{bench.folder}/jobs/job_other")
    bench.write(f"{bench.folder}/token", TOKEN)
    kept = bench.outside(f"{bench.folder}/token")
    kept.write_text(TOKEN)
    left = bench.outside("/tmp/of-the-node")
    left.write_text(TOKEN)
    look = f"place={shlex.quote(bench.folder)}\n{LOOK}"
    try:
        job = bench.build(bench.recipe(build=look, test=look))
        assert job.log.count("looked") == 2, job.log
        assert TOKEN not in job.log and "STOLEN" not in job.log, job.log
        assert kept.read_text() == TOKEN
    finally:
        left.unlink()
        kept.unlink()


def test_a_build_cannot_end_what_else_the_account_runs(bench: BuilderBench) -> None:
    """Numbers of processes out here mean nothing in there."""
    log = bench.outside(bench.folder) / "other.log"
    other = bench.start(["sh", "-c", "echo $$; exec sleep 300"], log=log)
    try:
        while not log.read_text().strip():
            assert other.poll() is None
        number = log.read_text().strip()
        bench.build(bench.recipe(build=f"kill -9 {number} 2>/dev/null || echo tried\n"))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
