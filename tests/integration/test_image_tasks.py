"""Tasks in an image on a real Slurm site, end to end: two nodes, variables, shells, signals, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from diamond.core.images import ReplicaState
from diamond.core.tasks import Task
from diamond.sdk.client import Client
from testing.cluster import BINDS, Cluster
from testing.images import BASE_INSIDE, image_binds
from testing.minihpc import Site
from testing.minihpc.fixtures import require
from testing.waiting import eventually

SIF = "/home/user1/image.sif"
ODD = "two\nlines 'quoted' \"twice\" $HOME `x` ünï\t end "
WORDS = ["", "$(touch pwned)", "a\nb", "'\"\\", "--", "%j", "; exit 1"]
SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]))"
DEFINITION = f"""\
Bootstrap: localimage
From: {BASE_INSIDE}
%post
  mkdir -p /opt/diamond
  printf "export WHO='recipe'\\nexport OF_RECIPE='r'\\n" > /opt/diamond/env.sh
  echo of the image > /etc/where
%environment
  export WHO=image OF_IMAGE=i
"""
# What it has not read from its image yet, it needs when it is told to stop.
PROGRAM = """\
import os, signal, sys, time
rank = os.environ["RANK"]
def on_stop(number, frame):
    print("told to stop", flush=True)
    time.sleep(1)
    import xml.dom.minidom, sqlite3, email.mime.text
    print("saved", rank, flush=True)
    os._exit(0)
if int(rank) % 2 == 0:
    signal.signal(signal.SIGUSR1, lambda number, frame: print("warned", rank, flush=True))
signal.signal(signal.SIGTERM, on_stop)
print("up", rank, open("/etc/where").read().strip(), flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require("trixie")
    folder = tmp_path_factory.mktemp("image-tasks") / "home"
    with Site("imaged", binds={**BINDS, **image_binds()}) as site:
        site.write("/home/user1/image.def", DEFINITION, user="user1")
        site.run(["apptainer", "--quiet", "build", SIF, "image.def"], timeout=300)
        with Cluster(site, folder) as made:
            eventually(lambda: _has_builders(made), within_s=60, what="the agent has looked at its machine")
            yield made


def _has_builders(cluster: Cluster) -> bool:
    facts = cluster.endpoint().facts
    return facts is not None and {"apptainer", "charliecloud", "venv"} <= set(facts.builders)


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.service.client() as made:
        yield made


def launch(client: Client, run: str, **spec: Any) -> Task:
    resources = {"cpus": 1, **spec.pop("resources", {})}
    return client.tasks.create({"run": run, "resources": {"image_id": SIF, **resources}, **spec})


def log_of(client: Client, task: Task) -> str:
    return b"".join(client.tasks.logs(task.id)).decode()


def test_the_endpoint_says_what_it_can_build(cluster: Cluster) -> None:
    facts = cluster.endpoint().facts
    assert facts is not None
    assert (facts.architecture, facts.builds) == ("x86_64", "any")
    assert facts.image_root == f"{cluster.home_inside}/images"


def test_two_nodes_in_one_image(client: Client) -> None:
    names = ("RANK", "WORLD_SIZE", "SLURMD_NODENAME", "WHO", "OF_RECIPE", "OF_IMAGE")
    show = f"print(*map(os.environ.get, {names}), os.environ['TASK'] == sys.argv[1], open('/etc/where').read())"
    task = launch(
        client,
        f'python3 -c "import os, sys; {show}" "$TASK"; echo "from $RANK" > "made-$RANK"',
        num_nodes=2,
        ranks_per_node=2,
        envs={"WHO": "task", "TASK": ODD},
        setup="echo setting up in $(cat /etc/where)",
        outputs=["made-*"],
    )
    done = client.tasks.wait(task.id, timeout_s=120)
    log = log_of(client, task)
    assert done.state == "SUCCEEDED", f"{done.detail}\n{log}"
    assert "setting up in of the image\n" in log
    lines = sorted(re.findall(r"^\[\d\] (\d) 4 (c\d) task r i True of the image$", log, re.MULTILINE))
    assert [rank for rank, _ in lines] == ["0", "1", "2", "3"], log
    assert len({node for _, node in lines}) == 2
    assert sorted(output.path for output in done.outputs) == [f"made-{rank}" for rank in range(4)]


def test_exit_codes_come_through(client: Client) -> None:
    for run, code in (("exit 9", 9), ("kill -SEGV $$", 139)):
        done = client.tasks.wait(launch(client, run).id, timeout_s=60)
        assert (done.state, done.jobs[-1].exit_code) == ("FAILED", code)


@pytest.fixture
def running(client: Client) -> Iterator[Task]:
    task = launch(
        client,
        f"cat > program-$RANK.py <<'END'\n{PROGRAM}END\nexec python3 program-$RANK.py",
        num_nodes=2,
        ranks_per_node=2,
        envs={"ODD": ODD},
    )
    eventually(lambda: log_of(client, task).count("] up ") == 4, within_s=90, what="four ranks run")
    yield task
    client.tasks.cancel(task.id)
    client.tasks.wait(task.id, timeout_s=60)


def test_shells_are_in_the_image_too(client: Client, running: Task) -> None:
    job = client.tasks.get(running.id).jobs[-1]
    for node, host in enumerate(job.hosts):
        done = client.tasks.exec(running.id, ["python3", "-c", SHOW, *WORDS], node=node)
        assert (done.exit_code, done.stderr) == (0, b""), done
        words, where, env = json.loads(done.stdout)
        assert (words, where) == (WORDS, f"{job.run_dir}/work")
        assert (env["ODD"], env["OF_IMAGE"], env["WHO"], env["SLURMD_NODENAME"]) == (ODD, "i", "recipe", host)
        assert (env["DIAMOND_JOB_ID"], env["SLURM_JOB_ID"]) == (job.id, job.scheduler_id)
        assert env["DIAMOND_IMAGE"] == SIF
    assert client.tasks.exec(running.id, ["cat", "/etc/where"]).stdout == b"of the image\n"
    assert client.tasks.exec(running.id, ["cat"], stdin=b"in and out").stdout == b"in and out"
    done = client.tasks.exec(running.id, ["sh", "-c", "echo err >&2; exit 7"])
    assert (done.exit_code, done.stderr) == (7, b"err\n")
    assert client.tasks.exec(running.id, ["no-such-program"]).exit_code == 127
    assert b"pwned" not in client.tasks.exec(running.id, ["find", job.run_dir]).stdout


def test_signals_reach_programs_and_their_image_stays(cluster: Cluster, client: Client, running: Task) -> None:
    job = client.tasks.get(running.id).jobs[-1]
    # As --signal=B:USR1@… does at the end of a job's time. Ranks 1 and 3 do not expect it.
    cluster.site.run(["scancel", "--batch", "--signal=USR1", str(job.scheduler_id)])
    eventually(lambda: log_of(client, running).count("] warned ") == 2, within_s=30, what="two ranks are warned")
    client.tasks.cancel(running.id)
    assert client.tasks.wait(running.id, timeout_s=60).state == "CANCELLED"
    log = log_of(client, running)
    assert log.count("] warned ") == 2, log
    assert sorted(re.findall(r"\] saved (\d)", log)) == ["0", "1", "2", "3"], log


def test_one_rank_gets_its_warning_too(cluster: Cluster, client: Client) -> None:
    task = launch(
        client,
        f"cat > program.py <<'END'\n{PROGRAM}END\npython3 program.py & python3 -c 'import time; time.sleep(20)'; wait",
    )
    eventually(lambda: "up 0" in log_of(client, task), within_s=60, what="it runs")
    job = client.tasks.get(task.id).jobs[-1]
    cluster.site.run(["scancel", "--batch", "--signal=USR1", str(job.scheduler_id)])
    eventually(lambda: "warned 0" in log_of(client, task), within_s=30, what="it is warned")
    client.tasks.cancel(task.id)
    client.tasks.wait(task.id, timeout_s=60)
    log = log_of(client, task)
    assert (log.count("warned 0"), log.count("saved 0")) == (1, 1), log


def test_an_image_that_is_not_there(client: Client) -> None:
    task = launch(client, "true", resources={"image_id": "/home/user1/none.sif"})
    done = client.tasks.wait(task.id, timeout_s=60)
    assert (done.state, done.jobs[-1].reason) == ("FAILED", "IMAGE_MISSING")
    assert "/home/user1/none.sif: No such file" in done.jobs[-1].detail


# Jobs on the login node


RECIPE = {
    "name": "slow",
    "base": "host",
    "builder": "venv",
    "envs": {"WHO": "recipe", "OF_RECIPE": ODD},
    "build": 'echo "nice $(nice), Slurm ${SLURM_JOB_ID:-none}"; touch begun; sleep 4; echo built',
}


def test_a_build_on_the_login_node_survives_the_agent(cluster: Cluster, client: Client) -> None:
    built = client.images.build(RECIPE, endpoint="cluster")
    name = built.image.id
    eventually(lambda: b"nice 10, Slurm none" in b"".join(client.images.logs(name)), within_s=90, what="it builds")
    cluster.kill_agent()
    cluster.start_agent()
    image = client.images.wait(name, timeout_s=120)
    assert image.state is ReplicaState.READY
    log = b"".join(client.images.logs(name)).decode()
    assert log.count("built\n") == 1, log
    assert len(client.tasks.get(client.images.task_id(name)).jobs) == 1, "it was taken up, not begun again"
    eventually(lambda: (cluster.endpoint().facts or _none()).image_bytes > 0, within_s=60, what="the facts tell of it")
    task = client.tasks.create(
        {"run": 'echo "$WHO $VIRTUAL_ENV"; [[ $OF_RECIPE == "$TASK" ]] && python -c "import sys; print(sys.prefix)"',
         "resources": {"image_id": "slow"}, "envs": {"TASK": ODD}}
    )  # fmt: skip
    done = client.tasks.wait(task.id, timeout_s=60)
    place = f"{cluster.home_inside}/images/store/{name}/image"
    assert (done.state, log_of(client, task)) == ("SUCCEEDED", f"recipe {place}\n{place}\n"), done.detail


def _none() -> Any:
    raise AssertionError("the endpoint has facts")


def test_the_owners_rules_hold_for_images(cluster: Cluster, client: Client) -> None:
    path = f"{cluster.home_inside}/policy.toml"
    cluster.site.write(path, 'path_roots = ["/scratch"]\nbuilds = "off"\n', user="user1")

    def told() -> bool:
        facts = cluster.endpoint().facts
        return facts is not None and facts.builds == "off"

    eventually(told, within_s=60, what="the rules are in force")
    done = client.tasks.wait(launch(client, "true").id, timeout_s=60)
    assert (done.state, done.jobs[-1].reason) == ("FAILED", "REJECTED")
    assert f"path_roots = /scratch, the task names {SIF} as its image" in done.jobs[-1].detail
    cluster.site.write(path, "", user="user1")
