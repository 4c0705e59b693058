"""A program started by hand in a job of this machine enters the job's image, with the variables the job has there."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from diamond.agent.cache import Cache
from diamond.agent.link import Link
from diamond.agent.schedulers.local.scheduler import LocalScheduler
from diamond.agent.staging import Stager
from diamond.agent.table import Tracked, submission_of
from diamond.core.images import ImageUse
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder

ODD = "it's\n$(x) "
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), sys.prefix, dict(os.environ)]))"


def test_the_image_of_the_job(server: Any, tmp_path: Path, until: Any) -> None:
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(image)], check=True)
    order = JobOrder(
        job_id="job_00000001",
        task_id="tsk_00000001",
        task_name="t",
        attempt=1,
        desired=Desired.RUN,
        spec=TaskSpec.parse({"run": "echo up; exec sleep 60", "envs": {"ODD": ODD, "PATH": "/usr/bin:/bin"}}),
        image=ImageUse(kind="venv", path=str(image), image_id="img_00000001"),
    )
    job = Tracked(order, tmp_path / "jobs/job_00000001")
    stager = Stager(cache=Cache(tmp_path / "cache", cast(Link, server)), stop=threading.Event())
    stager.stage(order, job.run_dir)
    stager.close()
    scheduler = LocalScheduler(tmp_path / "jobs", cpus=1, gpus=(), grace_s=0.5)
    try:
        scheduler.submit(replace(submission_of(job, None), cpus=1))
        until(lambda: b"up\n" in (job.run_dir / "log").read_bytes(), "the job runs")
        command = scheduler.shell_argv(order.job_id, [sys.executable, "-c", SHOW, "", "$(x)"], False)
        assert ODD not in command.env.values(), "what the task sets is set inside, and nowhere else"
        done = subprocess.run(command.argv, env=dict(command.env), cwd=command.cwd, capture_output=True, timeout=60)
        words, where, _, env = json.loads(done.stdout)
        assert (words, where) == (["", "$(x)"], str(job.run_dir / "work"))
        assert (env["ODD"], env["DIAMOND_IMAGE"], env["VIRTUAL_ENV"]) == (ODD, "img_00000001", str(image))
        assert env["DIAMOND_RUN_DIR"] == str(job.run_dir)
    finally:
        scheduler.cancel([order.job_id])
        until(lambda: scheduler.observe()[order.job_id].state.is_final, "it is over")
        scheduler.close()
