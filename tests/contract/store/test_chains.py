"""Tasks that outlast the walltime, on every database."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts, NodeGroup, Partition
from diamond.core.reasons import Reason
from diamond.core.states import Desired, JobState, TaskState
from diamond.core.tasks import Task
from diamond.core.wire import Hello, JobOrder, JobReport, Report
from diamond.server.services import agents, endpoints, planning, tasks
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow

HOUR = 3600


class Cluster:
    """An endpoint whose agent is this test."""

    def __init__(self, ctx: Context, user_id: str, clock: Any, *, queues_ahead: bool) -> None:
        self.ctx, self.user_id, self.clock = ctx, user_id, clock
        with ctx.db.read() as session:
            self.id = session.scalars(sa.select(EndpointRow.id)).one()
        partition = Partition(name="gpu", max_walltime_s=HOUR, groups=(NodeGroup(count=4, cpus=8),))
        facts = EndpointFacts(
            scheduler="slurm", nodes=4, cpus_per_node=8, partitions=(partition,), queues_ahead=queues_ahead
        )
        agents.hello(ctx, self.id, Hello(facts=facts))

    def launch(self, **fields: Any) -> str:
        return tasks.create(self.ctx, self.user_id, {"run": "true", **fields})[0].id

    def task(self, task_id: str) -> Task:
        return tasks.get(self.ctx, self.user_id, task_id)

    def orders(self) -> dict[str, JobOrder]:
        return {order.job_id: order for order in agents.desired(self.ctx, self.id, self.ctx.epoch, 0).orders}

    def order(self, task_id: str, attempt: int) -> JobOrder:
        return next(o for o in self.orders().values() if (o.task_id, o.attempt) == (task_id, attempt))

    def tell(self, job_id: str, state: JobState, **fields: Any) -> None:
        job = JobReport(job_id=job_id, state=state, **fields)
        agents.report(self.ctx, self.id, Report(epoch=self.ctx.epoch, jobs=(job,)))

    def run(self, job_id: str) -> None:
        self.began = self.clock()
        self.tell(job_id, JobState.RUNNING, started_at=self.began)

    def end(self, job_id: str, reason: Reason, after_s: float = HOUR) -> None:
        state = JobState.SUCCEEDED if reason in (Reason.COMPLETED, Reason.CONTINUED) else JobState.FAILED
        self.clock.advance(after_s)
        self.tell(job_id, state, reason=reason, started_at=self.began, ended_at=self.clock())


@pytest.fixture(params=[False, True], ids=["one by one", "queued ahead"])
def cluster(request: pytest.FixtureRequest, ctx: Context, user_id: str, clock: Any) -> Cluster:
    return Cluster(ctx, user_id, clock, queues_ahead=request.param)


@pytest.fixture
def ahead(ctx: Context, user_id: str, clock: Any) -> Cluster:
    return Cluster(ctx, user_id, clock, queues_ahead=True)


def test_a_long_task_goes_on_in_job_after_job_until_it_is_done(cluster: Cluster) -> None:
    task_id = cluster.launch(max_duration="10h")
    before = ""
    for attempt, reason in enumerate((Reason.TIME_LIMIT, Reason.CONTINUED, Reason.COMPLETED), start=1):
        planning.run_due(cluster.ctx)
        order = cluster.order(task_id, attempt)
        assert (order.chained, order.continues, order.time_limit_s, order.partition) == (True, before, HOUR, "gpu")
        cluster.run(order.job_id)
        assert cluster.task(task_id).state is TaskState.RUNNING
        assert cluster.task(task_id).attempt == attempt
        cluster.end(order.job_id, reason)
        before = order.job_id
    done = cluster.task(task_id)
    assert (done.state, done.reason) == (TaskState.SUCCEEDED, Reason.COMPLETED)
    assert all(order.desired == Desired.CANCEL for order in cluster.orders().values())


def test_max_duration_bounds_the_whole_chain(cluster: Cluster) -> None:
    task_id = cluster.launch(max_duration="2h30m")
    for attempt, limit_s in enumerate((HOUR, HOUR, HOUR / 2), start=1):
        planning.run_due(cluster.ctx)
        order = cluster.order(task_id, attempt)
        assert order.time_limit_s == limit_s
        cluster.run(order.job_id)
        cluster.end(order.job_id, Reason.TIME_LIMIT, limit_s)
    planning.run_due(cluster.ctx)
    done = cluster.task(task_id)
    assert (done.state, done.reason, len(done.jobs)) == (TaskState.FAILED, Reason.TIME_LIMIT, 3)
    assert not cluster.orders()


def test_links_do_not_count_as_retries_and_failures_do(cluster: Cluster) -> None:
    task_id = cluster.launch(max_duration="10h", retry={"max_retries": 1, "backoff": "1s"})
    for attempt, reason in enumerate((Reason.CONTINUED, Reason.CONTINUED, Reason.EXIT_NONZERO), start=1):
        planning.run_due(cluster.ctx)
        order = cluster.order(task_id, attempt)
        cluster.run(order.job_id)
        cluster.end(order.job_id, reason)
    assert cluster.task(task_id).state is TaskState.PENDING
    cluster.clock.advance(5)
    planning.run_due(cluster.ctx)
    retry = max(cluster.orders().values(), key=lambda order: order.attempt)
    assert retry.continues == "", "a program that failed begins anew"
    cluster.run(retry.job_id)
    cluster.end(retry.job_id, Reason.EXIT_NONZERO)
    assert cluster.task(task_id).state is TaskState.FAILED


@pytest.mark.parametrize("reason", [Reason.PREEMPTED, Reason.NODE_FAIL])
def test_a_job_that_was_shot_is_continued_if_it_may_be_retried(cluster: Cluster, reason: Reason) -> None:
    for retries in (0, 1):
        task_id = cluster.launch(max_duration="10h", retry={"max_retries": retries, "backoff": "1s"})
        first = cluster.order(task_id, 1)
        cluster.run(first.job_id)
        cluster.end(first.job_id, reason, 60)
        cluster.clock.advance(5)
        planning.run_due(cluster.ctx)
        if retries == 0:
            assert cluster.task(task_id).state is TaskState.FAILED
        else:
            assert cluster.order(task_id, cluster.task(task_id).attempt).continues == first.job_id


def test_the_next_link_waits_behind_the_one_that_runs(ahead: Cluster) -> None:
    task_id = ahead.launch(max_duration="10h")
    first = ahead.order(task_id, 1)
    assert len(ahead.orders()) == 1, "nothing is queued behind a job that waits itself"
    ahead.run(first.job_id)
    second = ahead.order(task_id, 2)
    assert (second.after, second.continues) == (first.job_id, first.job_id)
    ahead.tell(second.job_id, JobState.QUEUED, pending_reason="behind another job", expected_start_at=5.0)
    shown = ahead.task(task_id)
    assert (shown.state, shown.attempt, shown.pending_reason) == (TaskState.RUNNING, 1, "")
    assert shown.jobs[-1].pending_reason == "behind another job"
    ahead.tell(second.job_id, JobState.RUNNING, started_at=ahead.clock() + HOUR)  # told before the end of the first
    assert ahead.task(task_id).jobs[-1].pending_reason == "", "it waits no longer"
    ahead.tell(second.job_id, JobState.QUEUED, pending_reason="told too late")
    assert ahead.task(task_id).jobs[-1].pending_reason == ""
    ahead.end(first.job_id, Reason.TIME_LIMIT)
    shown = ahead.task(task_id)
    assert (shown.state, shown.attempt) == (TaskState.RUNNING, 2)
    assert ahead.order(task_id, 3).after == second.job_id, "it runs, so the next one waits behind it"


def test_a_chain_whose_endpoint_is_removed_between_two_jobs_ends(cluster: Cluster) -> None:
    task_id = cluster.launch(max_duration="10h")
    first = cluster.order(task_id, 1)
    cluster.run(first.job_id)
    cluster.end(first.job_id, Reason.CONTINUED)
    name = cluster.task(task_id).endpoint
    assert name is not None
    endpoints.remove(cluster.ctx, cluster.user_id, name, force=True)
    planning.run_due(cluster.ctx)
    done = cluster.task(task_id)
    assert (done.state, done.reason) == (TaskState.FAILED, Reason.LOST)
    assert "removed" in done.detail


def test_a_link_that_finishes_the_task_sends_the_next_one_home(ahead: Cluster) -> None:
    task_id = ahead.launch(max_duration="10h")
    first = ahead.order(task_id, 1)
    ahead.run(first.job_id)
    second = ahead.order(task_id, 2)
    ahead.end(first.job_id, Reason.COMPLETED, 60)
    assert ahead.orders()[second.job_id].desired == Desired.CANCEL
    ahead.tell(second.job_id, JobState.CANCELLED, reason=Reason.CANCELLED)
    done = ahead.task(task_id)
    assert (done.state, done.reason, [job.state for job in done.jobs]) == (
        TaskState.SUCCEEDED, Reason.COMPLETED, [JobState.SUCCEEDED, JobState.CANCELLED],
    )  # fmt: skip


def test_cancelling_a_chain_cancels_both_links(ahead: Cluster) -> None:
    task_id = ahead.launch(max_duration="10h")
    ahead.run(ahead.order(task_id, 1).job_id)
    assert len(ahead.orders()) == 2
    tasks.cancel(ahead.ctx, ahead.user_id, task_id)
    assert {order.desired for order in ahead.orders().values()} == {Desired.CANCEL}
    for order in list(ahead.orders().values()):
        ahead.tell(order.job_id, JobState.CANCELLED, reason=Reason.CANCELLED)
    assert ahead.task(task_id).state is TaskState.CANCELLED


def test_a_program_that_only_asks_to_go_on_is_not_obeyed_for_ever(cluster: Cluster) -> None:
    task_id = cluster.launch(max_duration="10h")
    for attempt in (1, 2, 3):
        planning.run_due(cluster.ctx)
        order = cluster.order(task_id, attempt)
        cluster.run(order.job_id)
        cluster.end(order.job_id, Reason.CONTINUED, 1)
    done = cluster.task(task_id)
    assert (done.state, done.reason) == (TaskState.FAILED, Reason.EXIT_NONZERO)
    assert "3 times in a row" in done.detail


def test_reports_cancels_and_planning_at_once_leave_one_job_for_each_number(ahead: Cluster) -> None:
    """Ends of links, starts of their successors, planning and a user who gives up, all at the same moment."""
    ids = [ahead.launch(max_duration="10h", retry={"max_retries": 2, "backoff": 1}) for _ in range(6)]
    ahead.began = ahead.clock()
    failed: list[BaseException] = []

    def agent(turn: int) -> None:
        for order in sorted(ahead.orders().values(), key=lambda order: order.job_id, reverse=bool(turn % 2)):
            ahead.tell(order.job_id, JobState.RUNNING, started_at=ahead.began)
            reason = (Reason.CONTINUED, Reason.PREEMPTED, Reason.EXIT_NONZERO)[(turn + order.attempt) % 3]
            state = JobState.SUCCEEDED if reason is Reason.CONTINUED else JobState.FAILED
            if order.desired == Desired.CANCEL:
                reason, state = Reason.CANCELLED, JobState.CANCELLED
            ahead.tell(order.job_id, state, reason=reason, started_at=ahead.began, ended_at=ahead.began + 60)

    def user(turn: int) -> None:
        if turn > 3:
            tasks.cancel(ahead.ctx, ahead.user_id, ids[turn % len(ids)])

    def again_and_again(action: Any) -> None:
        try:
            for turn in range(8):
                action(turn)
                ahead.clock.advance(1)
        except BaseException as error:
            failed.append(error)

    actions = (agent, agent, user, lambda _turn: planning.run_due(ahead.ctx))
    threads = [threading.Thread(target=again_and_again, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for task_id in ids:
        tasks.cancel(ahead.ctx, ahead.user_id, task_id)
    for order in ahead.orders().values():
        ahead.tell(order.job_id, JobState.CANCELLED, reason=Reason.CANCELLED)
    for task_id in ids:
        done = ahead.task(task_id)
        numbers = [job.attempt for job in done.jobs]
        assert numbers == list(range(1, len(numbers) + 1)) and done.state.is_final, (done.state, numbers)
        assert all(job.state.is_final for job in done.jobs)
