"""What the services promise, on every database: one suite, SQLite and PostgreSQL."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.errors import Conflict, IdempotencyMismatch, InvalidInput, NotFound, Unauthenticated
from diamond.core.ids import new_id
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import Output
from diamond.core.wire import Hello, JobReport, Report, StreamChunk
from diamond.server.services import agents, bootstrap, bundles, endpoints, events, planning, tasks, tokens
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow, JobRow
from testing.uploads import upload

FACTS = EndpointFacts(scheduler="local", nodes=1, cpus_per_node=4, mem_bytes_per_node=8 * 1024**3)


def endpoint_id(ctx: Context, name: str = "local") -> str:
    with ctx.db.read() as session:
        return session.scalars(sa.select(EndpointRow.id).where(EndpointRow.name == name)).one()


@pytest.fixture
def online(ctx: Context, user_id: str) -> str:
    """The embedded endpoint after its agent said hello."""
    found = endpoint_id(ctx)
    agents.hello(ctx, found, Hello(facts=FACTS))
    return found


def launch(ctx: Context, user_id: str, **fields: Any) -> str:
    task, made = tasks.create(ctx, user_id, {"run": "true", **fields})
    assert made
    return task.id


def job_of(ctx: Context, user_id: str, task_id: str) -> str:
    return tasks.get(ctx, user_id, task_id).jobs[-1].id


def tell(ctx: Context, endpoint: str, job_id: str, state: JobState, **fields: Any) -> None:
    agents.report(ctx, endpoint, Report(epoch=ctx.epoch, jobs=(JobReport(job_id=job_id, state=state, **fields),)))


def test_a_task_goes_from_wanted_to_done(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id, name="first", envs={"A": "x\ny"})
    orders = agents.desired(ctx, online, ctx.epoch, 0).orders
    assert [(o.task_id, o.desired, o.spec.envs) for o in orders] == [(task_id, Desired.RUN, {"A": "x\ny"})]
    job_id = orders[0].job_id
    for state in (JobState.STAGING, JobState.QUEUED, JobState.RUNNING):
        tell(ctx, online, job_id, state, started_at=5.0 if state is JobState.RUNNING else None)
    assert tasks.get(ctx, user_id, task_id).state is TaskState.RUNNING
    outputs = (
        Output(path="model.pt", size_bytes=3, sha256="a" * 64, stored=True),
        Output(path="../evil", size_bytes=1),
    )
    tell(ctx, online, job_id, JobState.SUCCEEDED, reason=Reason.COMPLETED, exit_code=0, ended_at=9.0, outputs=outputs)
    done = tasks.get(ctx, user_id, task_id)
    assert (done.state, done.reason, done.exit_code, done.started_at, done.ended_at) == (
        TaskState.SUCCEEDED, Reason.COMPLETED, 0, 5.0, 9.0,
    )  # fmt: skip
    assert [item.path for item in done.outputs] == ["model.pt"]
    kinds = [(e.kind, e.data.get("state")) for e in events.since(ctx, user_id, 0, task_id=task_id)]
    assert kinds == [
        ("task.created", None),
        *[("task.state", s) for s in ("QUEUED", "RUNNING", "SUCCEEDED")],
    ]
    assert agents.desired(ctx, online, ctx.epoch, 0).orders == ()


def test_jobs_only_advance(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id)
    job_id = job_of(ctx, user_id, task_id)
    tell(ctx, online, job_id, JobState.FAILED, reason=Reason.EXIT_NONZERO, exit_code=3)
    tell(ctx, online, job_id, JobState.RUNNING)
    tell(ctx, online, job_id, JobState.SUCCEEDED, exit_code=0)
    task = tasks.get(ctx, user_id, task_id)
    assert (task.state, task.exit_code, task.jobs[0].state) == (TaskState.FAILED, 3, JobState.FAILED)


def test_same_key_makes_one_task_even_at_once(ctx: Context, user_id: str, online: str) -> None:
    answers: list[tuple[str, bool]] = []
    barrier = threading.Barrier(8)

    def post() -> None:
        barrier.wait()
        task, made = tasks.create(ctx, user_id, {"run": "true"}, "key-1")
        answers.append((task.id, made))

    threads = [threading.Thread(target=post) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 8
    assert len({task_id for task_id, _ in answers}) == 1
    assert [made for _, made in answers].count(True) == 1
    with pytest.raises(IdempotencyMismatch):
        tasks.create(ctx, user_id, {"run": "false"}, "key-1")
    assert tasks.list_tasks(ctx, user_id)[2] == 1


def test_a_batch_is_made_whole_or_not_at_all(ctx: Context, user_id: str, online: str) -> None:
    specs: list[Any] = [{"run": "true", "name": f"n{number}"} for number in range(5)]
    made, is_new = tasks.create_many(ctx, user_id, specs, "sweep")
    again, is_new_again = tasks.create_many(ctx, user_id, specs, "sweep")
    assert (is_new, is_new_again) == (True, False)
    assert [task.id for task in again] == [task.id for task in made]
    assert [task.name for task in made] == [f"n{number}" for number in range(5)]
    assert len(agents.desired(ctx, online, ctx.epoch, 0).orders) == 5
    for bad, field in (({"rum": "x"}, "specs[1].rum"), ({"run": "x", "num_nodes": 99}, "specs[1].num_nodes")):
        with pytest.raises(InvalidInput) as caught:
            tasks.create_many(ctx, user_id, [{"run": "true"}, bad], "other")
        assert caught.value.field == field
    for other in ([{"run": "false"}], specs[:3], [*specs, {"run": "true"}]):  # the key names the whole batch
        with pytest.raises(IdempotencyMismatch):
            tasks.create_many(ctx, user_id, other, "sweep")
    with pytest.raises(IdempotencyMismatch):
        tasks.create(ctx, user_id, specs[0], "sweep/0")
    assert tasks.list_tasks(ctx, user_id)[2] == 5


def test_event_numbers_have_no_gaps_and_never_go_back(ctx: Context, user_id: str, online: str) -> None:
    seen: list[int] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.extend(e.seq for e in events.since(ctx, user_id, seen[-1] if seen else 0))

    reader = threading.Thread(target=read)
    reader.start()
    writers = [threading.Thread(target=lambda: [launch(ctx, user_id) for _ in range(15)]) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    stop.set()
    reader.join()
    seen.extend(e.seq for e in events.since(ctx, user_id, seen[-1] if seen else 0))
    first = seen[0]
    assert seen == list(range(first, first + len(seen)))
    assert len(seen) >= 4 * 15 * 2


def test_cancel_before_any_agent_knows(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id)
    assert tasks.cancel(ctx, user_id, task_id).state is TaskState.CANCELLED
    assert agents.desired(ctx, online, ctx.epoch, 0).orders == ()
    assert tasks.cancel(ctx, user_id, task_id).state is TaskState.CANCELLED


def test_cancel_of_a_delivered_job_is_the_agents_to_confirm(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id)
    first = agents.desired(ctx, online, ctx.epoch, 0)
    tell(ctx, online, first.orders[0].job_id, JobState.RUNNING)
    stopped = tasks.cancel(ctx, user_id, task_id)
    assert (stopped.state, stopped.desired) == (TaskState.RUNNING, Desired.CANCEL)
    news = agents.desired(ctx, online, ctx.epoch, first.revision)
    assert not news.full
    assert [o.desired for o in news.orders] == [Desired.CANCEL]
    tell(ctx, online, first.orders[0].job_id, JobState.FAILED, reason=Reason.SIGNALLED)
    assert tasks.get(ctx, user_id, task_id).state is TaskState.CANCELLED


def test_retry_waits_then_tries_again_then_gives_up(ctx: Context, user_id: str, online: str, clock: Any) -> None:
    retry = {"max_retries": 1, "on": ["EXIT_NONZERO"], "backoff": "20s"}
    task_id = launch(ctx, user_id, retry=retry)
    tell(ctx, online, job_of(ctx, user_id, task_id), JobState.FAILED, reason=Reason.EXIT_NONZERO, exit_code=1)
    waiting = tasks.get(ctx, user_id, task_id)
    assert waiting.state is TaskState.PENDING
    assert waiting.next_attempt_at == clock() + 20
    assert planning.run_due(ctx) == waiting.next_attempt_at
    assert tasks.get(ctx, user_id, task_id).attempt == 1
    clock.advance(21)
    assert planning.run_due(ctx) is None
    again = tasks.get(ctx, user_id, task_id)
    assert (again.state, again.attempt, len(again.jobs)) == (TaskState.QUEUED, 2, 2)
    tell(ctx, online, job_of(ctx, user_id, task_id), JobState.FAILED, reason=Reason.EXIT_NONZERO, exit_code=2)
    over = tasks.get(ctx, user_id, task_id)
    assert (over.state, over.exit_code) == (TaskState.FAILED, 2)


def test_reasons_not_listed_are_not_retried(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id, retry={"max_retries": 5, "on": ["NODE_FAIL"]})
    tell(ctx, online, job_of(ctx, user_id, task_id), JobState.FAILED, reason=Reason.EXIT_NONZERO)
    assert tasks.get(ctx, user_id, task_id).state is TaskState.FAILED


def test_max_duration_bounds_all_attempts_together(ctx: Context, user_id: str, online: str, clock: Any) -> None:
    task_id = launch(ctx, user_id, max_duration="100s", retry={"max_retries": 9, "backoff": "1s"})
    for number, left in ((1, 100), (2, 40)):
        order = agents.desired(ctx, online, ctx.epoch, 0).orders[0]
        assert (order.attempt, order.time_limit_s) == (number, left)
        tell(ctx, online, order.job_id, JobState.FAILED, reason=Reason.SIGNALLED, started_at=1000.0, ended_at=1060.0)
        clock.advance(30)
        planning.run_due(ctx)
    over = tasks.get(ctx, user_id, task_id)
    assert (over.state, over.reason) == (TaskState.FAILED, Reason.TIME_LIMIT)


def test_streams_are_stored_before_states_and_repeats_change_nothing(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id)
    job_id = job_of(ctx, user_id, task_id)
    message = Report(
        epoch=ctx.epoch,
        jobs=(JobReport(job_id=job_id, state=JobState.SUCCEEDED),),
        streams=(
            StreamChunk.of(job_id, "log", 0, b"hello\n"),
            StreamChunk.of(job_id, "metrics", 0, b'{"step":1,"t":2.0,"loss":0.5}\n'),
        ),
        usage=EndpointUsage(at=1.0, jobs_running=1),
    )
    for _ in range(3):
        ack = agents.report(ctx, online, message)
        assert ack.states == {job_id: JobState.SUCCEEDED}
        assert ack.received == {job_id: {"log": 6, "metrics": 30}}
    assert ctx.streams.read(job_id, "log", 0, 100).data == b"hello\n"
    assert [(s.key, s.count) for s in ctx.series.keys(job_id)] == [("loss", 1)]
    gap = agents.report(ctx, online, Report(epoch=ctx.epoch, streams=(StreamChunk.of(job_id, "log", 99, b"x"),)))
    assert gap.received == {job_id: {"log": 6}}


def test_an_agent_cannot_touch_jobs_of_another_endpoint(ctx: Context, user_id: str, online: str) -> None:
    other, token = endpoints.create(ctx, user_id, "elsewhere")
    assert tokens.authenticate(ctx, token).endpoint_id == other.id
    task_id = launch(ctx, user_id)
    job_id = job_of(ctx, user_id, task_id)
    report = Report(
        epoch=ctx.epoch,
        jobs=(JobReport(job_id=job_id, state=JobState.SUCCEEDED), JobReport(job_id="../x", state=JobState.FAILED)),
        streams=(StreamChunk.of(job_id, "log", 0, b"forged"),),
    )
    ack = agents.report(ctx, other.id, report)
    assert ack.unknown == tuple(sorted(["../x", job_id]))
    assert ack.states == {}
    assert tasks.get(ctx, user_id, task_id).state is TaskState.QUEUED
    assert ctx.streams.size(job_id, "log") == 0


def test_an_endpoint_has_one_agent_home(ctx: Context, user_id: str, clock: Any) -> None:
    endpoint = endpoint_id(ctx)
    agents.hello(ctx, endpoint, Hello(facts=FACTS), "agt_first")
    with pytest.raises(Conflict, match="another agent"):
        agents.hello(ctx, endpoint, Hello(facts=FACTS), "agt_second")
    for call in (
        lambda: agents.desired(ctx, endpoint, ctx.epoch, 0, "agt_second"),
        lambda: agents.report(ctx, endpoint, Report(epoch=ctx.epoch), "agt_second"),
    ):
        with pytest.raises(Conflict):
            call()
    agents.hello(ctx, endpoint, Hello(facts=FACTS), "agt_first")

    # Silent for long and with nothing in hand, it may be replaced; with a job in hand only on purpose.
    clock.advance(3600)
    agents.hello(ctx, endpoint, Hello(facts=FACTS), "agt_second")
    task_id = launch(ctx, user_id, retry={"max_retries": 1, "backoff": "1s"})
    agents.desired(ctx, endpoint, ctx.epoch, 0, "agt_second")
    clock.advance(3600)
    with pytest.raises(Conflict, match="1 jobs in hand"):
        agents.hello(ctx, endpoint, Hello(facts=FACTS), "agt_third")
    agents.hello(ctx, endpoint, Hello(facts=FACTS, take_over=True), "agt_third")
    lost = tasks.get(ctx, user_id, task_id)
    assert (lost.state, lost.reason) == (TaskState.PENDING, Reason.LOST)
    with pytest.raises(Conflict):
        agents.report(ctx, endpoint, Report(epoch=ctx.epoch), "agt_second")


def test_a_silent_endpoint_is_named_and_untold_jobs_move_on(
    ctx: Context, user_id: str, online: str, clock: Any
) -> None:
    other, _ = endpoints.create(ctx, user_id, "other")
    agents.hello(ctx, other.id, Hello(facts=FACTS), "agt_other")
    told, untold, bound = (
        launch(ctx, user_id, resources={"infra": "local"}),
        launch(ctx, user_id),
        launch(ctx, user_id, resources={"infra": "local"}),
    )
    assert tasks.get(ctx, user_id, untold).endpoint == "local"
    assert planning.run_due(ctx) is None
    with ctx.db.write() as session:  # as if the agent had heard of the first job only
        first = sa.update(JobRow).where(JobRow.task_id == told).values(delivered_at=1.0)
        session.execute(first)
    agents.goodbye(ctx, online)
    assert "offline" in tasks.get(ctx, user_id, told).pending_reason
    assert planning.run_due(ctx) is not None
    assert [tasks.get(ctx, user_id, one).endpoint for one in (told, untold, bound)] == ["local", "other", "local"]
    orders = agents.desired(ctx, other.id, ctx.epoch, 0, "agt_other").orders
    assert [order.task_id for order in orders] == [untold]
    agents.hello(ctx, online, Hello(facts=FACTS))
    assert tasks.get(ctx, user_id, told).pending_reason == ""
    assert {order.task_id for order in agents.desired(ctx, online, ctx.epoch, 0).orders} == {told, bound}


def test_what_an_agent_says_of_times_and_outputs_is_bounded(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id)
    bad = (
        Output(path="a", size_bytes=-1),
        Output(path="b", size_bytes=1, sha256="zz/../..", stored=True),
        Output(path="c", size_bytes=1, stored=True),
    )
    job_id = job_of(ctx, user_id, task_id)
    tell(ctx, online, job_id, JobState.SUCCEEDED, started_at=1e300, ended_at=-5.0, outputs=bad)
    task = tasks.get(ctx, user_id, task_id)
    assert (task.started_at, task.outputs) == (None, ())
    assert task.ended_at == ctx.clock()


def test_text_no_database_can_hold_is_cleaned(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id)
    job_id = job_of(ctx, user_id, task_id)
    tell(
        ctx, online, job_id, JobState.FAILED, detail="a\x00b\ud800c" + "x" * 10_000, hosts=("n\x001",), run_dir="/r\x00"
    )
    job = tasks.get(ctx, user_id, task_id).jobs[0]
    assert job.detail.startswith("ab?cx")
    assert len(job.detail) < 5000
    assert (job.hosts, job.run_dir) == (("n1",), "/r")


def test_another_epoch_is_told_so_and_changes_nothing(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id)
    report = Report(epoch="old", jobs=(JobReport(job_id=job_of(ctx, user_id, task_id), state=JobState.SUCCEEDED),))
    assert agents.report(ctx, online, report).epoch == ctx.epoch
    assert tasks.get(ctx, user_id, task_id).state is TaskState.QUEUED
    assert agents.desired(ctx, online, "old", 10**9).full


def test_impossible_tasks_are_refused_with_the_field(ctx: Context, user_id: str, online: str) -> None:
    for fields, field in (
        ({"num_nodes": 2}, "num_nodes"),
        ({"resources": {"cpus": 64}}, "resources.cpus"),
        ({"resources": {"memory": "900+"}}, "resources.memory"),
        ({"resources": {"accelerators": "H100:1"}}, "resources.accelerators"),
        ({"resources": {"image_id": "x"}}, "resources.image_id"),
        ({"resources": {"infra": "mars"}}, "resources.infra"),
        ({"workdir": "/home/me"}, "workdir"),
        ({"workdir": "bundle:sha256:" + "0" * 64}, "workdir"),
    ):
        with pytest.raises(InvalidInput) as caught:
            tasks.create(ctx, user_id, {"run": "true", **fields})
        assert caught.value.field == field
    assert tasks.list_tasks(ctx, user_id) == ([], None, 0)


def test_mounts_must_not_replace_files_of_the_workdir(ctx: Context, user_id: str, online: str) -> None:
    blob = upload(ctx, user_id, b"x")
    ref = bundles.register(ctx, {"files": [{"path": "a/b", "digest": blob, "size_bytes": 1}]}, user_id)["ref"]
    for target in ("a/b", "a/b/c"):
        with pytest.raises(InvalidInput, match="already has a file 'a/b'") as caught:
            tasks.create(ctx, user_id, {"run": "x", "workdir": ref, "file_mounts": {target: ref}})
        assert caught.value.field == f"file_mounts.{target}"
    tasks.create(ctx, user_id, {"run": "x", "workdir": ref, "file_mounts": {"a/c": ref, "d": ref}})


def test_a_task_waits_for_an_endpoint_that_never_connected(ctx: Context, user_id: str) -> None:
    task_id = launch(ctx, user_id)
    waiting = tasks.get(ctx, user_id, task_id)
    assert waiting.state is TaskState.PENDING
    assert "local" in waiting.pending_reason
    agents.hello(ctx, endpoint_id(ctx), Hello(facts=FACTS))
    planning.run_due(ctx)
    assert tasks.get(ctx, user_id, task_id).state is TaskState.QUEUED


def test_plan_shows_what_would_run_and_writes_nothing(ctx: Context, user_id: str, online: str) -> None:
    plan = tasks.plan(
        ctx, user_id, {"run": "echo $(reboot)", "setup": "pip list", "workdir": "bundle:sha256:" + "0" * 64}
    )
    assert plan["endpoint"] == "local"
    assert plan["why"]
    assert plan["files"] == {"run.sh": "echo $(reboot)", "setup.sh": "pip list"}
    assert "reboot" not in plan["script"]
    assert tasks.list_tasks(ctx, user_id)[2] == 0


def test_lists_are_paged_newest_first_and_filtered(ctx: Context, user_id: str, online: str, clock: Any) -> None:
    made = [launch(ctx, user_id, name=f"t{n % 2}") for n in range(7)]
    newest = sorted(made, reverse=True)
    page, cursor, total = tasks.list_tasks(ctx, user_id, limit=3)
    assert (total, [t.id for t in page]) == (7, newest[:3])
    rest, end, _ = tasks.list_tasks(ctx, user_id, limit=10, cursor=cursor)
    assert ([t.id for t in rest], end) == (newest[3:], None)
    assert tasks.list_tasks(ctx, user_id, name="t1")[2] == 3
    assert tasks.list_tasks(ctx, user_id, states=[TaskState.RUNNING])[2] == 0
    assert [t.id for t in tasks.list_tasks(ctx, user_id, id_prefix=made[0])[0]] == [made[0]]
    assert tasks.list_tasks(ctx, user_id, id_prefix="%")[2] == 0
    assert [e.task_id for e in endpoints.queue(ctx, user_id)] == made


def test_objects_of_others_do_not_exist(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id)
    for call in (tasks.get, tasks.cancel):
        with pytest.raises(NotFound):
            call(ctx, "usr_somebodyelse", task_id)
    with pytest.raises(NotFound):
        tasks.get(ctx, user_id, new_id("tsk"))
    with pytest.raises(NotFound):
        tasks.get(ctx, user_id, "tsk_'; DROP TABLE tasks")


def test_tokens_and_endpoints(ctx: Context, user_id: str) -> None:
    with pytest.raises(Unauthenticated):
        tokens.authenticate(ctx, "dmdu_wrong\udcff")
    endpoints.create(ctx, user_id, "site-a")
    with pytest.raises(Conflict):
        endpoints.create(ctx, user_id, "site-a")
    for bad in ("", "Ärger", "a b", "../x", "A", "x" * 64):
        with pytest.raises(InvalidInput):
            endpoints.create(ctx, user_id, bad)
    assert [e.name for e in endpoints.list_endpoints(ctx, user_id)] == ["local", "site-a"]


def test_bootstrap_keeps_what_is_there(ctx: Context, user_id: str) -> None:
    from diamond.core.home import ClientConfig

    first = bootstrap.prepare(ctx, embedded="local")
    ClientConfig(url="http://127.0.0.1:1", token=first.user_token).save(ctx.home)
    second = bootstrap.prepare(ctx, embedded="local")
    assert second == first
    assert first.agent_token_file is not None
    assert first.agent_token_file.stat().st_mode & 0o777 == 0o600


def test_a_delivered_job_is_noted_before_it_is_told(ctx: Context, user_id: str, online: str) -> None:
    task_id = launch(ctx, user_id)
    agents.desired(ctx, online, ctx.epoch, 0)
    with ctx.db.read() as session:
        row = session.scalars(sa.select(JobRow).where(JobRow.task_id == task_id)).one()
        assert row.delivered_at is not None
