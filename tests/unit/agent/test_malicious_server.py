"""A server that lies: the real agent with its real jobs, against one that orders whatever it likes.

The endpoint's owner trusts policy.toml and the folder of the agent's home, not the server. Whatever is ordered, each
rule holds, nothing outside of the home is written, and the agent goes on working for whoever asks properly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.policy import Policy
from diamond.core.bundles import BundleFile, Manifest
from diamond.core.codec import encode
from diamond.core.images import ImageUse, ImageWork
from diamond.core.pools import PilotOrder
from diamond.core.reasons import Reason
from diamond.core.recipes import Recipe
from diamond.core.secrets import JobSecret, JobSecrets, SecretUse
from diamond.core.slurm import SlurmOptions
from diamond.core.states import Desired, JobState
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder
from testing.pools import pilot_order, pooled_order
from tests.unit.agent.conftest import FakeServer, wait_until

Start = Callable[[], Any]
Change = Callable[[JobOrder], JobOrder]
OWNER = "alice"


class Liar(FakeServer):
    """Sends what the protocol forbids: raw orders, and answers that make no sense."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = OWNER
        self.raw: list[Any] = []  # orders as they are, beside the proper ones
        self.nonsense: dict[str, list[Any]] = {}  # by path: answers instead of the right one, each once
        self.secrets: dict[str, tuple[JobSecret, ...]] = {}
        self.shells: list[dict[str, Any]] = []
        self.told: dict[str, Any] = {}  # by path: the last that was sent there

    def call(self, method: str, path: str, body: Any = None, *, query: Any = None, timeout_s: float = 0) -> Any:
        self.told[path] = body
        if self.nonsense.get(path):
            return self.nonsense[path].pop(0)
        if path.startswith("/agent/jobs/") and path.endswith("/secrets"):
            job_id = path.split("/")[3]
            return encode(JobSecrets(job_id=job_id, secrets=self.secrets.get(job_id, ())))
        answer = super().call(method, path, body, query=query, timeout_s=timeout_s)
        if path == "/agent/hello":
            answer = {**answer, "owner": self.owner}
        if path == "/agent/desired":
            answer = {**answer, "orders": [*answer["orders"], *self.raw], "shells": self.shells}
        return answer

    def fetch_bytes(self, path: str, *, query: Any = None, timeout_s: float = 0) -> bytes:
        """What somebody types into a shell: nothing."""
        return b""

    def release(self) -> None:
        """There is no connection to close."""

    def put(self, order: JobOrder) -> str:
        self._put(order)
        return order.job_id


@pytest.fixture
def server() -> Liar:
    return Liar()


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Path]:
    """What is not the agent's: nothing in it changes, whatever the test does."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "precious").write_text("do not touch")
    before = _listing(tmp_path)
    yield folder
    assert _listing(tmp_path) == before


def _listing(root: Path) -> dict[str, str]:
    found = sorted(path for path in root.rglob("*") if "home" not in path.relative_to(root).parts[:1])
    return {str(path): path.read_text() if path.is_file() else "" for path in found}


def an_order(outside: Path, job_id: str = "job_00000001", **spec: Any) -> JobOrder:
    return JobOrder(
        job_id=job_id, task_id="tsk_00000001", task_name="test", attempt=1, desired=Desired.RUN, user=OWNER,
        spec=TaskSpec.parse({"run": f"touch '{outside}/ran'", **spec}),
    )  # fmt: skip


# ---- every rule of policy.toml ------------------------------------------------------------------------------------


def _spec(**changes: Any) -> Change:
    def change(order: JobOrder) -> JobOrder:
        return replace(order, spec=TaskSpec.parse({"run": order.spec.run, **changes}))

    return change


def _order(**changes: Any) -> Change:
    return lambda order: replace(order, **changes)


def _work(**changes: Any) -> Change:
    work = ImageWork(action="build", image_id="img_00000001", name="env", builder="apptainer", where="login",
                     recipe=Recipe.parse({"base": "docker://example.org/evil:1"}))  # fmt: skip
    time_limit_s = changes.pop("time_limit_s", None)

    def change(order: JobOrder) -> JobOrder:
        spec = TaskSpec.parse({"run": "true"})
        return replace(order, spec=spec, work=replace(work, **changes), time_limit_s=time_limit_s)

    return change


def _both(*changes: Change) -> Change:
    def change(order: JobOrder) -> JobOrder:
        for one in changes:
            order = one(order)
        return order

    return change


@dataclass(frozen=True)
class Breaks:
    """A rule, and an order that goes beyond it."""

    rule: str
    order: Change


_IMAGE = ImageUse(image_id="img_00000001", kind="apptainer", path="/elsewhere/image.sif")

BEYOND = {
    "max_nodes": Breaks("max_nodes = 1", _spec(num_nodes=2)),
    "max_walltime": Breaks('max_walltime = "1h"', _order(time_limit_s=7200)),
    "max_cpus": Breaks("max_cpus = 1", _spec(resources={"cpus": 2})),
    "max_gpus": Breaks("max_gpus = 0", _spec(resources={"accelerators": "A100:1"})),
    "max_memory": Breaks('max_memory = "1GB"', _spec(resources={"memory": 2})),
    "max_gpu_hours": Breaks("max_gpu_hours = 1", _both(_spec(resources={"accelerators": "A100:8"}),
                                                       _order(time_limit_s=3600))),
    "allow_others": Breaks("allow_others = false", _order(user="mallory")),
    "allow_others_on_host": Breaks("allow_others = true", _order(user="mallory")),
    "allowed_users": Breaks('allowed_users = ["alice"]', _order(user="mallory")),
    "allowed_accounts": Breaks('allowed_accounts = ["mine"]', _spec(slurm={"account": "other"})),
    "denied_accounts": Breaks('denied_accounts = ["other"]', _spec(slurm={"account": "OTHER"})),
    "allowed_partitions": Breaks('allowed_partitions = ["small"]', _order(partition="small,large")),
    "denied_partitions": Breaks('denied_partitions = ["large"]', _order(partition="small,large")),
    "allowed_qos": Breaks('allowed_qos = ["normal"]', _spec(slurm={"qos": "urgent"})),
    "allowed_extra": Breaks("allowed_extra = []", _spec(slurm={"extra": ["--nice=5"]})),
    "allowed_envs": Breaks('allowed_envs = ["MINE"]', _spec(envs={"LD_PRELOAD": "x"})),
    "denied_envs": Breaks('denied_envs = ["LD_*"]', _spec(envs={"LD_PRELOAD": "x"})),
    "containers_only": Breaks("containers_only = true", _order()),
    "path_roots": Breaks('path_roots = ["/allowed"]', _order(image=_IMAGE)),
    "queue_ahead": Breaks("queue_ahead = false", _order(after="job_00000009", continues="job_00000009")),
    "allow_secrets": Breaks("allow_secrets = false", _spec(secrets={"KEY": "KEY"})),
    "allow_pools": Breaks("allow_pools = false", _order(pilot=PilotOrder(pool_id="pol_00000001", slots=1))),
    "builds": Breaks('builds = "off"', _work()),
    "allowed_builders": Breaks('allowed_builders = ["venv"]', _work()),
    "allowed_bases": Breaks('allowed_bases = ["docker://docker.io/*"]', _work()),
    "max_build_time": Breaks('max_build_time = "1h"', _work(time_limit_s=7200)),
    "max_image_bytes": Breaks('max_image_bytes = "1GB"', _work(action="import", recipe=None, size_bytes=2**40)),
}  # fmt: skip
# Rules that refuse no order: what they do instead is tested below, or no order has a word for it.
HELD_OTHERWISE = {
    "max_concurrent_jobs": "test_more_jobs_at_once_than_allowed_wait",
    "max_output_bytes": "test_no_more_outputs_leave_than_allowed",
    "allow_shells": "test_no_shell_where_none_is_allowed",
    "allow_shells_of_others": "test_no_shell_for_others_by_default",
    "image_root": "where images lie; orders name images by id, and ids are checked: test_names_that_lead_elsewhere",
    "image_binds": "what containers see; no order adds to it",
    "keep_finished": "how long run directories stay; no order says otherwise",
    "cache_bytes": "how much the cache may hold; no order says otherwise",
}


def test_every_rule_has_a_row() -> None:
    assert {*BEYOND, *HELD_OTHERWISE} == {rule.name for rule in fields(Policy)}
    for told in HELD_OTHERWISE.values():
        name = told.rpartition(" ")[2]
        assert not name.startswith("test_") or name in globals(), f"{name} is gone"


@pytest.mark.parametrize("rule", BEYOND)
def test_no_order_goes_beyond_a_rule(rule: str, server: Liar, start: Start, home: Path, outside: Path) -> None:
    home.mkdir()
    text = BEYOND[rule].rule + "\n"
    (home / "policy.toml").write_text(text)
    start()
    result = server.result(server.put(BEYOND[rule].order(an_order(outside))))
    assert (result.state, result.reason) == (JobState.FAILED, Reason.REJECTED), result.detail
    assert result.detail.startswith(f"policy.toml: {rule}"), result.detail
    assert (home / "policy.toml").read_text() == text
    assert not list((home / "jobs").glob("job_*")), "nothing of it was put in place"


POOLED_BEYOND = {
    "allowed_partitions": ('allowed_partitions = ["small"]', {"partition": "large"}),
    "denied_partitions": ('denied_partitions = ["large"]', {"partition": "large"}),
    "allowed_accounts": ('allowed_accounts = ["mine"]', {"account": "other"}),
    "denied_accounts": ('denied_accounts = ["other"]', {"account": "Other"}),
    "allowed_qos": ('allowed_qos = ["normal"]', {"qos": "urgent"}),
}


@pytest.mark.parametrize("rule", POOLED_BEYOND)
def test_a_pool_is_no_way_around_a_rule(rule: str, server: Liar, start: Start, home: Path, outside: Path) -> None:
    """A rule that came after the pilot began holds for what is to run inside of it, whatever the task itself says."""
    home.mkdir()
    text, slurm = POOLED_BEYOND[rule]
    good = {"partition": "small", "account": "mine", "qos": "normal"}

    def inside(number: int, pilot: int, **said: str) -> JobOrder:
        order = pooled_order(number, f"touch '{outside}/ran'", pilot)
        return replace(order, user=OWNER, spec=replace(order.spec, slurm=SlurmOptions(**said)))

    def pilot(number: int, said: dict[str, str]) -> JobOrder:
        order = pilot_order(number)
        return replace(order, user=OWNER, spec=replace(order.spec, slurm=SlurmOptions(**{**good, **said})))

    start()
    begun = server.put(pilot(1, slurm))
    wait_until(lambda: begun in server.jobs and server.jobs[begun].state == JobState.RUNNING)
    (home / "policy.toml").write_text(text + "\n")
    for number, said in ((2, {}), (3, good)):
        result = server.result(server.put(inside(number, 1, **said)))
        assert result.reason is Reason.REJECTED and result.detail.startswith(f"policy.toml: {rule}"), result.detail
    # Nor does a pilot help that was refused, that is none, or that nobody has heard of.
    ordinary = server.put(replace(an_order(home, "job_00000007"), spec=replace(pilot(7, good).spec, run="sleep 60")))
    server.put(pilot(4, slurm))
    for number, named in ((5, 4), (6, 7), (8, 99)):
        result = server.result(server.put(inside(number, named, **good)))
        assert result.reason in (Reason.REJECTED, Reason.NODE_FAIL), result
    server.cancel(ordinary)
    server.cancel(begun)
    server.result(begun)


def test_more_jobs_at_once_than_allowed_wait(server: Liar, start: Start, home: Path, tmp_path: Path) -> None:
    home.mkdir()
    (home / "policy.toml").write_text("max_concurrent_jobs = 1\n")
    count = f"set -C; echo > {tmp_path}/home/one || exit 9; sleep 0.1; rm {tmp_path}/home/one"
    jobs = [server.order(count, job_id=f"job_1000000{number}") for number in range(4)]
    for order in list(server.orders.values()):
        server.put(replace(order[1], user=OWNER, spec=replace(order[1].spec, priority=1000)))
    start()
    assert [server.result(job).exit_code for job in jobs] == [0, 0, 0, 0]


def test_no_more_outputs_leave_than_allowed(server: Liar, start: Start, home: Path) -> None:
    home.mkdir()
    (home / "policy.toml").write_text("max_output_bytes = 1000\n")
    start()
    spec = TaskSpec.parse({"run": "head -c 5000 /dev/zero > big; echo 1 > small", "outputs": ["big", "small"]})
    result = server.result(server.put(replace(an_order(home), spec=spec)))
    assert {output.path: output.stored for output in result.outputs} == {"big": False, "small": True}
    assert sum(len(blob) for blob in server.blobs.values()) <= 1000


def test_no_shell_where_none_is_allowed(server: Liar, start: Start, home: Path, outside: Path) -> None:
    home.mkdir()
    (home / "policy.toml").write_text("allow_shells = false\n")
    start()
    job = server.put(replace(an_order(outside), spec=TaskSpec.parse({"run": "sleep 60"})))
    wait_until(lambda: job in server.jobs and server.jobs[job].state == JobState.RUNNING)
    argv = ["touch", str(outside / "ran")]
    server.shells = [{"shell_id": "shl_00000001", "job_id": job, "argv": argv, "tty": False, "user": OWNER}]
    server.put(replace(an_order(outside, "job_00000002"), spec=TaskSpec.parse({"run": "true"})))
    told = wait_until(lambda: server.told.get("/agent/shells/shl_00000001/end"), "the shell is refused")
    assert told["message"] == "policy.toml: allow_shells = false"
    server.shells = []


def test_no_shell_for_others_by_default(server: Liar, start: Start, home: Path, outside: Path) -> None:
    home.mkdir()
    (home / "policy.toml").write_text("allow_others = true\nallow_others_on_host = true\n")
    start()
    theirs = replace(an_order(outside), spec=TaskSpec.parse({"run": "sleep 60"}), user="mallory")
    job = server.put(theirs)
    wait_until(lambda: job in server.jobs and server.jobs[job].state == JobState.RUNNING)
    # The server may name whomever it likes as the one who types; the job's own order counts.
    argv = ["touch", str(outside / "ran")]
    server.shells = [{"shell_id": "shl_00000001", "job_id": job, "argv": argv, "tty": False, "user": OWNER}]
    server.put(replace(an_order(outside, "job_00000002"), spec=TaskSpec.parse({"run": "true"})))
    told = wait_until(lambda: server.told.get("/agent/shells/shl_00000001/end"), "the shell is refused")
    assert told["message"].startswith("policy.toml: allow_shells_of_others = false")
    server.shells = []
    assert not (outside / "ran").exists()


# ---- names that lead elsewhere ------------------------------------------------------------------------------------

ODD = ("../../outside/x", "/etc/x", "..", ".", "", "a\0b", "x" * 5000, "job_00000001/../../../outside", "a\nb", "~root")


def test_names_that_lead_elsewhere(server: Liar, start: Start, home: Path, outside: Path) -> None:
    good = an_order(outside)
    plain = json.loads(json.dumps(encode(replace(good, spec=TaskSpec.parse({"run": "true"})))))
    work = json.loads(json.dumps(encode(_work()(good))))
    use = encode(_IMAGE)
    for number, odd in enumerate(ODD):
        ids = (f"job_{number:06d}{letter}0" for letter in "abcdefghijklmnop")
        server.raw += [
            {**plain, "job_id": odd},
            {**plain, "job_id": next(ids), "task_name": odd, "task_id": odd},
            {**plain, "job_id": next(ids), "continues": odd},
            {**plain, "job_id": next(ids), "spec": {"run": "true", "file_mounts": {odd: "bundle:x"}}},
            {**plain, "job_id": next(ids), "spec": {"run": "true", "workdir": odd}},
            {**plain, "job_id": next(ids), "spec": {"run": "true", "outputs": [odd]}},
            {**plain, "job_id": next(ids), "spec": {"run": "true", "secrets": {odd: {"secret": "x", "file": True}}}},
            {**plain, "job_id": next(ids), "spec": {"run": "true", "envs": {odd: "x"}}},
            {**plain, "job_id": next(ids), "image": {**use, "image_id": odd}},
            {**plain, "job_id": next(ids), "image": {**use, "path": odd}},
            {**work, "job_id": next(ids), "work": {**work["work"], "image_id": odd}},
            {**work, "job_id": next(ids), "work": {**work["work"], "action": "remove", "image_id": odd}},
            {**work, "job_id": next(ids), "work": {**work["work"], "files": {"x": odd}}},
            {**work, "job_id": next(ids), "work": {**work["work"], "action": "link", "source_path": odd}},
        ]
    start()
    named = {raw["job_id"] for raw in server.raw if raw["job_id"] not in ODD}
    server.orders |= {job: (0, replace(good, job_id=job)) for job in named}  # so that their ends are taken
    wait_until(lambda: all(server._is_final(job) for job in named), "all are answered", 60)
    made = {path.name for path in (home / "jobs").iterdir()}
    assert made <= named
    server.raw.clear()
    assert server.result(server.put(an_order(home, "job_11111111"))).state == JobState.SUCCEEDED


def test_bundles_that_lead_elsewhere(server: Liar, start: Start, home: Path, outside: Path) -> None:
    data = b"evil"
    digest = "sha256:" + "0" * 64
    start()
    entries: list[tuple[BundleFile, ...]] = [
        (BundleFile(path=odd, size_bytes=4, digest=_upload(server, data)),) for odd in ODD
    ]
    through = BundleFile(path="link/ran", size_bytes=4, digest=_upload(server, data))
    entries += [
        (BundleFile(path="link", link_to=str(outside)), through),
        (BundleFile(path="link", link_to="../../../../outside"), through),
        (BundleFile(path="x", size_bytes=4, digest="sha256:../../../../outside/ran"),),
        (BundleFile(path="x", size_bytes=4, digest=digest),),
        (BundleFile(path="x", size_bytes=2**60, digest=_upload(server, data)),),
        (BundleFile(path="x", size_bytes=-1, digest=_upload(server, data)),),
    ]
    for number, files in enumerate(entries):
        manifest = Manifest(files=files)
        server.manifests[manifest.digest] = manifest
        server.blobs[digest] = data
        spec = replace(TaskSpec.parse({"run": "true"}), workdir=manifest.ref)
        result = server.result(server.put(replace(an_order(outside, f"job_{number:08d}"), spec=spec)))
        assert result.state == JobState.FAILED, files
    other = Manifest(files=(BundleFile(path="x", size_bytes=4, digest=_upload(server, data)),))
    server.manifests[digest] = other  # not what was asked for
    spec = replace(TaskSpec.parse({"run": "true"}), workdir=f"bundle:{digest}")
    assert server.result(server.put(replace(an_order(outside, "job_99999999"), spec=spec))).state == JobState.FAILED


def _upload(server: Liar, data: bytes) -> str:
    (file,) = server.manifests[server.bundle({"x": data}).removeprefix("bundle:")].files
    return file.digest


def test_secrets_nobody_asked_for(server: Liar, start: Start, home: Path, outside: Path) -> None:
    start()
    spec = TaskSpec.parse({"run": 'echo "$KEY" ${LD_PRELOAD:-none} ${PATH:0:1}; ls "$DIAMOND_RUN_DIR" 2>/dev/null'})
    order = replace(an_order(outside), spec=replace(spec, secrets={"KEY": SecretUse(secret="KEY")}))
    server.secrets[order.job_id] = (
        JobSecret(variable="KEY", value="short but mine"),
        JobSecret(variable="LD_PRELOAD", value="/evil.so"),
        JobSecret(variable="../../../../outside/ran", value="x", file=True),
        JobSecret(variable="PATH", value="evil", file=True),
    )
    result = server.result(server.put(order))
    assert result.state == JobState.SUCCEEDED, result.detail
    assert server.log(order.job_id).split("\n")[0].endswith("none /")


# ---- answers without sense, and servers that change -----------------------------------------------------------------


def test_nonsense_is_survived(server: Liar, start: Start, home: Path, outside: Path) -> None:
    words: list[Any] = [None, [], "x", 5, {}, {"epoch": 5}, {"epoch": server.epoch, "orders": 7}]
    words += [{"epoch": server.epoch, "revision": 0, "full": True, "orders": [1, None, {}, {"job_id": 5}]}]
    server.nonsense = {"/agent/hello": [[], {"epoch": 7}], "/agent/reports": [[], {"states": 5}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diamond.agent.session._REFUSED_S", 0.01)
        start()
        server.nonsense["/agent/desired"] = words
        job = server.put(an_order(home))
        assert server.result(job).state == JobState.SUCCEEDED


def test_the_same_name_is_not_run_twice(server: Liar, start: Start, home: Path, outside: Path) -> None:
    start()
    first = replace(an_order(outside), spec=TaskSpec.parse({"run": "echo once"}))
    server.result(server.put(first))
    for epoch in ("epoch-2", "epoch-3"):
        server.epoch = epoch
        server.jobs.pop(first.job_id)  # it has forgotten, and says something else
        server.put(replace(first, spec=an_order(outside).spec))
        server.result(first.job_id)
        assert server.log(first.job_id) == "once\n"
        start()


def test_another_owner_is_not_believed(server: Liar, start: Start, home: Path, outside: Path) -> None:
    start()
    assert server.result(server.put(replace(an_order(home, "job_00000002"), user=OWNER))).state == JobState.SUCCEEDED
    server.owner, server.epoch = "mallory", "epoch-2"
    result = server.result(server.put(replace(an_order(outside), user="mallory")))
    assert result.reason == Reason.REJECTED and "allow_others" in result.detail
    assert (home / "owner").read_text() == OWNER


def test_an_enormous_order(server: Liar, start: Start, home: Path, outside: Path) -> None:
    start()
    spec = TaskSpec.parse({"run": "true"})
    huge = replace(spec, envs={f"N{number}": "x" * 100 for number in range(20_000)}, run=":" * 2_000_000)
    result = server.result(server.put(replace(an_order(outside), spec=huge)))
    assert result.state.is_final
    assert server.result(server.put(an_order(home, "job_00000002"))).state == JobState.SUCCEEDED
