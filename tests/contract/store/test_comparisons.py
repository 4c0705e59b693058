"""Runs beside each other: which are found, and what differs between them; on every database."""

from __future__ import annotations

from typing import Any

from diamond.core.states import JobState
from diamond.core.wire import Report, StreamChunk
from diamond.server.services import agents, comparisons, ownership, tasks
from diamond.server.services.comparisons import PAGE, Row
from diamond.server.services.context import Context
from testing.image_agent import ImageAgent


def launch(ctx: Context, user_id: str, name: str, **spec: Any) -> str:
    return tasks.create(ctx, user_id, {"name": name, "run": "true", **spec})[0].id


def rows_of(ctx: Context, user_id: str, *ids: str) -> dict[str, Row]:
    runs, missing = comparisons.find(ctx, user_id, ids)
    assert not missing
    return {row.key: row for row in comparisons.rows(ctx, runs)}


def found(ctx: Context, user_id: str, text: str) -> list[str]:
    return [task.name for task in comparisons.search(ctx, user_id, text)[0]]


def test_runs_are_found_by_a_part_of_their_name_or_their_id(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    first = launch(ctx, user_id, "Burgers-100%")
    launch(ctx, user_id, "heat_1")
    launch(ctx, user_id, "heatx1")
    assert found(ctx, user_id, "burg") == ["Burgers-100%"]
    assert found(ctx, user_id, "") == ["heatx1", "heat_1", "Burgers-100%"]
    assert found(ctx, user_id, "heat_") == ["heat_1"], "what is typed is text, not a pattern"
    assert found(ctx, user_id, "0%") == ["Burgers-100%"]
    assert found(ctx, user_id, first) == ["Burgers-100%"]
    assert found(ctx, user_id, "\x00") == ["heatx1", "heat_1", "Burgers-100%"]
    assert found(ctx, user_id, "'; drop table") == []


def test_many_runs_come_in_pages(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    tasks.create_many(ctx, user_id, [{"name": f"t{number:03}", "run": "true"} for number in range(PAGE + 5)])
    first, cursor = comparisons.search(ctx, user_id)
    second, end = comparisons.search(ctx, user_id, cursor=cursor)
    assert len(first) == PAGE and len(second) == 5 and end == ""
    assert len({task.id for task in (*first, *second)}) == PAGE + 5
    assert comparisons.search(ctx, user_id, cursor="nonsense")[0] == first


def test_what_is_anothers_is_neither_found_nor_compared(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent
) -> None:
    mine = launch(ctx, user_id, "mine")
    assert comparisons.search(ctx, other_id) == ([], "")
    assert comparisons.find(ctx, other_id, [mine, "tsk_x", "<b>"]) == ([], [mine, "tsk_x", "<b>"])
    ownership.change_task(ctx, user_id, mine, visibility="public")
    assert found(ctx, other_id, "mine") == ["mine"]


def test_what_differs_is_told_from_what_is_the_same(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ids = [
        launch(ctx, user_id, "one", envs={"LR": "0.1", "SEED": "1"}, resources={"cpus": 1}, priority=3),
        launch(ctx, user_id, "two", envs={"LR": "0.2", "SEED": "1"}, resources={"cpus": 2}, setup="pip list"),
    ]
    rows = rows_of(ctx, user_id, *ids)
    assert (rows["envs.LR"].cells, rows["envs.LR"].label, rows["envs.LR"].group) == (("0.1", "0.2"), "LR", "Variables")
    assert rows["resources.cpus"].cells == ("1", "2") and rows["priority"].cells == (3, 0)
    assert rows["setup"].cells == (None, "pip list") and rows["setup"].differs and rows["setup"].kind == "text"
    assert not rows["envs.SEED"].differs and not rows["run"].differs and not rows["endpoint"].differs
    assert "name" not in rows, "every column has it at its head"
    assert "resources.accelerators" not in rows, "what nobody set is left out"
    assert [task.id for task in comparisons.find(ctx, user_id, [ids[1], ids[0], ids[1]])[0]] == [ids[1], ids[0]]


def test_the_newest_value_of_every_metric_is_compared(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    ids = [launch(ctx, user_id, name) for name in ("one", "two")]
    lines = {
        ids[0]: b'{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25, "acc": 1}\n',
        ids[1]: b'{"step": 1, "loss": "NaN"}\n',
    }
    for order in agent.orders():
        agent.tell(order.job_id, JobState.RUNNING, started_at=ctx.clock())
        chunks = (
            StreamChunk.of(order.job_id, "metrics", 0, lines[order.task_id]),
            StreamChunk.of(order.job_id, "util", 0, b'{"t": 1.0, "sys/rss_bytes": 5}\n'),
        )
        agents.report(ctx, agent.id, Report(epoch=ctx.epoch, streams=chunks), f"agt_{agent.name}")
    rows = rows_of(ctx, user_id, *ids)
    assert rows["metric acc"].cells == (1.0, None)
    loss = rows["metric loss"]
    assert loss.cells[0] == 0.25 and str(loss.cells[1]) == "nan" and loss.differs
    assert "metric sys/rss_bytes" not in rows, "what the machine did is no result"
    nan = rows_of(ctx, user_id, ids[1])["metric loss"]
    assert not nan.differs, "nothing differs from itself"


def test_nothing_is_compared_with_nothing(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    assert comparisons.rows(ctx, []) == []
    assert comparisons.search(ctx, user_id) == ([], "")
