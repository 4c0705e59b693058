"""Pools: made, found, changed, closed. What goes on in them is decided in `pool_rounds`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import decode, encode
from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from diamond.core.ids import is_id, new_id
from diamond.core.pools import Pool, PoolSpec
from diamond.core.projects import Role
from diamond.core.tasks import TaskSpec
from diamond.planner.placement import place
from diamond.server.services import access, audit, pilots, places, pool_views, projects, snapshots
from diamond.server.services.context import Context
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import EndpointRow, TaskRow, UserRow
from diamond.server.store.pool_models import PoolRow

MAX_OPEN = 50  # of one owner
CHANGEABLE = ("nodes", "walltime", "idle")


def create(ctx: Context, user_id: str, raw: object) -> Pool:
    """Make a pool; its first pilots are asked for at once.

    Raises:
        InvalidInput: it cannot be held there.
        Conflict: one's own has that name already.
    """
    spec = PoolSpec.parse(raw)
    now = ctx.clock()
    with ctx.db.write() as session:
        # PostgreSQL: two of a name at once would not see each other.
        session.execute(sa.select(UserRow.id).where(UserRow.id == user_id).with_for_update())
        project = projects.resolve(session, user_id, spec.project)
        endpoint = _endpoint(session, user_id, project, spec)
        _check_nodes(ctx, endpoint, spec)
        mine = list(session.scalars(sa.select(PoolRow).where(PoolRow.owner_id == user_id, PoolRow.closed_at.is_(None))))
        if any(row.name == spec.name for row in mine):
            raise Conflict(f"there is a pool {spec.name!r} already", hint="choose another name", field="name")
        if len(mine) >= MAX_OPEN:
            raise InvalidInput(f"you have {MAX_OPEN} pools already", hint="close those you do not need", field="name")
        row = PoolRow(
            id=new_id("pol"),
            owner_id=user_id,
            project_id=project.id,
            endpoint_id=endpoint.id,
            name=spec.name,
            spec=encode(replace(spec, project=project.name)),
            created_at=now,
            plan={},
        )
        session.add(row)
        session.flush()
        audit.record(session, now, "pool.created", row.id, name=row.name, endpoint=endpoint.name, nodes=spec.nodes)
        found = pool_views.view(ctx, session, user_id, row, whole=True)
    ctx.hub.notify("pools", f"pool:{row.id}")
    return found


def list_pools(ctx: Context, user_id: str, *, closed: bool = False) -> list[Pool]:
    """Those that the user sees, by name; open ones, unless `closed`: then all, the newest first."""
    with ctx.db.read() as session:
        query = sa.select(PoolRow).where(_sees(user_id))
        rows = session.scalars(
            query.order_by(PoolRow.id.desc()).limit(200)
            if closed
            else query.where(PoolRow.closed_at.is_(None)).order_by(PoolRow.name, PoolRow.id)
        ).all()
        return [pool_views.view(ctx, session, user_id, row) for row in rows]


def get(ctx: Context, user_id: str, ref: str) -> Pool:
    """One with its pilots, tasks and newest decisions, by id or name.

    Raises:
        NotFound: there is none that this user sees.
    """
    with ctx.db.read() as session:
        return pool_views.view(ctx, session, user_id, find(session, user_id, ref), whole=True)


def change(ctx: Context, user_id: str, ref: str, changes: Mapping[str, Any]) -> Pool:
    """Change what is given of `CHANGEABLE`; pilots that run keep the walltime they have.

    Raises:
        Forbidden: the user sees it, and may not change it.
    """
    if unknown := sorted(set(changes) - set(CHANGEABLE)):
        raise InvalidInput(
            f"{unknown[0][:40]!r} of a pool cannot be changed", hint=f"change {', '.join(CHANGEABLE)}", field=unknown[0]
        )
    with ctx.db.write() as session:
        row = _managed(session, user_id, ref)
        if row.closed_at is not None:
            raise Conflict(f"pool {row.name!r} is closed", hint="make another")
        spec = spec_of(row).changed(changes)
        _check_nodes(ctx, session.get_one(EndpointRow, row.endpoint_id), spec)
        row.spec = encode(spec)
        audit.record(
            session, ctx.clock(), "pool.changed", row.id, name=row.name, **{k: str(changes[k]) for k in changes}
        )
        found = pool_views.view(ctx, session, user_id, row, whole=True)
    ctx.hub.notify("pools", f"pool:{row.id}")
    return found


def close(ctx: Context, user_id: str, ref: str) -> Pool:
    """Let its nodes go once its tasks have saved their state. Tasks that are not done wait: for another pool, or to be
    stopped."""
    with ctx.db.write() as session:
        row = _managed(session, user_id, ref)
        if row.closed_at is None:
            row.closed_at = ctx.clock()
            audit.record(session, row.closed_at, "pool.closed", row.id, name=row.name)
        found = pool_views.view(ctx, session, user_id, row, whole=True)
    ctx.hub.notify("pools", f"pool:{row.id}")
    return found


def find(session: Session, user_id: str, ref: str) -> PoolRow:
    """One's own of that name before others'.

    Raises:
        NotFound: there is none that this user sees.
    """
    query = sa.select(PoolRow).where(_sees(user_id))
    if is_id(ref, "pol"):
        query = query.where(PoolRow.id == ref)
    elif ref.isprintable():
        query = query.where(PoolRow.name == ref)
    else:  # PostgreSQL would stumble over a NUL
        query = query.where(sa.false())
    # Of open ones the oldest: nobody takes another's place by the name. Of closed ones the newest.
    age = sa.case((PoolRow.closed_at.is_(None), PoolRow.id), else_="")
    order = (PoolRow.closed_at.is_(None).desc(), (PoolRow.owner_id == user_id).desc(), age, PoolRow.id.desc())
    row = session.scalars(query.order_by(*order).limit(1)).one_or_none()
    if row is None:
        raise NotFound(f"there is no pool {ref[:60]!r}", hint="`diamond pool ls` lists them", field="pool")
    return row


def for_task(session: Session, user_id: str, project_id: str | None, spec: TaskSpec) -> str | None:
    """The id of the pool that a new task names; None where it names none.

    Raises:
        InvalidInput: there is none that it may run in, or the task will never fit into it.
    """
    if spec.pool is None:
        return None
    try:
        row = find(session, user_id, spec.pool)
    except NotFound as error:
        raise InvalidInput(error.message, hint=error.hint, field="pool") from error
    if row.closed_at is not None:
        raise InvalidInput(
            f"pool {row.name!r} is closed", hint="`diamond pool ls` lists those that are open", field="pool"
        )
    _check_may_use(session, user_id, project_id, row)
    _check_fits(row, spec)
    return row.id


def spec_of(row: PoolRow) -> PoolSpec:
    return decode(PoolSpec, row.spec)


def endpoint_of(session: Session, pool_id: str | None) -> str | None:
    """Where a round may at any time give a task of the pool a job."""
    return session.scalars(sa.select(PoolRow.endpoint_id).where(PoolRow.id == pool_id)).one_or_none()


def open_pools(session: Session) -> Sequence[PoolRow]:
    """Those that have work to do: open ones, and closed ones with pilots left."""
    live = sa.select(TaskRow.pool_id).where(TaskRow.kind == "pilot", TaskRow.ended_at.is_(None))
    where = sa.or_(PoolRow.closed_at.is_(None), PoolRow.id.in_(live))
    return session.scalars(sa.select(PoolRow).where(where).order_by(PoolRow.id)).all()


def run_rounds(ctx: Context) -> float | None:
    """See `pool_rounds.run`."""
    with ctx.db.read() as session:
        if not open_pools(session):
            return None
    # Loaded where there is a pool: its solvers take a while to load, and many servers have none.
    from diamond.server.services import pool_rounds

    return pool_rounds.run(ctx)


def _sees(user_id: str) -> sa.ColumnElement[bool]:
    return sa.or_(PoolRow.owner_id == user_id, PoolRow.project_id.in_(access.projects_of(user_id)))


def _managed(session: Session, user_id: str, ref: str) -> PoolRow:
    row = find(session, user_id, ref)
    row = session.scalars(sa.select(PoolRow).where(PoolRow.id == row.id).with_for_update()).one()
    if row.owner_id != user_id and access.role_in(session, user_id, row.project_id) is not Role.OWNER:
        raise Forbidden(
            f"pool {row.name!r} is another's: you can run tasks in it, not change it",
            hint="ask its owner, or an owner of its project",
        )
    return row


def _endpoint(session: Session, user_id: str, project: ProjectRow, spec: PoolSpec) -> EndpointRow:
    rows = snapshots.for_tasks(session, user_id, project.id)
    found = next((row for row in rows if row.name == spec.endpoint), None)
    if found is None:
        names = ", ".join(row.name for row in rows) or "none yet"
        raise InvalidInput(
            f"there is no endpoint {spec.endpoint[:60]!r}",
            hint=places.where_else(session, user_id, project.id, spec.endpoint) or f"endpoints: {names}",
            field="endpoint",
        )
    if obstacle := snapshots.barred(session, user_id, [found]).get(found.id):
        raise InvalidInput(f"endpoint {found.name} cannot hold it: {obstacle.text}", field="endpoint")
    facts = snapshots.facts_of(found)
    if facts is not None and not facts.holds_pools:
        raise InvalidInput(
            f"the agent of {found.name} does not hold pools",
            hint="update it (an older version knows none), or set allow_pools = true in its policy.toml",
            field="endpoint",
        )
    return found


def _check_nodes(ctx: Context, endpoint: EndpointRow, spec: PoolSpec) -> None:
    """Refuse what no node of the endpoint can hold; one whose agent has not spoken yet may have any."""
    facts = snapshots.facts_of(endpoint)
    if facts is not None and facts.scheduler == "local" and spec.most_nodes > 1:
        raise InvalidInput(
            f"{endpoint.name} is one machine",
            hint="give nodes: 1 there, with as many slots as it should have",
            field="nodes",
        )
    placement = place(pilots.task_spec(spec), [snapshots.candidate(ctx, endpoint)])
    obstacle = placement.obstacles.get(endpoint.name)
    if placement.endpoint is None and obstacle is not None:
        field = obstacle.field.removeprefix("resources.").replace("max_duration", "walltime")
        raise InvalidInput(
            f"endpoint {endpoint.name} cannot hold it: {obstacle.text}",
            hint="a pilot asks for all slots of a node together",
            field=field if field in PoolSpec.__dataclass_fields__ else "endpoint",
        )


def _check_may_use(session: Session, user_id: str, project_id: str | None, row: PoolRow) -> None:
    endpoint = session.get_one(EndpointRow, row.endpoint_id)
    if not snapshots.usable(session, user_id, project_id, [endpoint]):
        hint = (
            places.where_else(session, user_id, project_id, endpoint.name)
            or "launch it in a project that the endpoint is shared with"
        )
        raise InvalidInput(f"the task may not run at {endpoint.name}, where the pool is", hint=hint, field="pool")
    if obstacle := snapshots.barred(session, user_id, [endpoint]).get(endpoint.id):
        raise InvalidInput(
            f"the task may not run at {endpoint.name}, where the pool is: {obstacle.text}",
            hint="use a pool at an endpoint that lets you run tasks",
            field="pool",
        )
    if row.owner_id != user_id and row.project_id != project_id:
        raise InvalidInput(
            f"pool {row.name!r} belongs to another project than the task",
            hint="launch the task in the pool's project",
            field="pool",
        )


def _check_fits(row: PoolRow, spec: TaskSpec) -> None:
    pool, needs = spec_of(row), spec.resources
    at = "resources.slots" if needs.slots else "resources.accelerators"
    if needs.infra is not None and needs.infra != pool.endpoint:
        raise InvalidInput(f"pool {row.name!r} is at {pool.endpoint}", hint="leave infra out", field="resources.infra")
    if needs.accelerators and not pool.has_gpus:
        most = pool.slots_per_node * pool.most_nodes
        range_ = f"1..{most}" if most > 1 else "1"
        raise InvalidInput(f"pool {row.name!r} has no GPUs", hint=f'say resources: {{slots: "{range_}"}}', field=at)
    if needs.gpu_type is not None and pool.kind.lower() not in (needs.gpu_type.lower(), "gpu"):
        raise InvalidInput(f"pool {row.name!r} has {pool.kind}s", hint="name these, or gpu for any", field=at)
    if spec.num_nodes > pool.most_nodes:
        raise InvalidInput(
            f"pool {row.name!r} has at most {pool.most_nodes} node{'s' if pool.most_nodes != 1 else ''}, the task asks "
            f"for {spec.num_nodes}",
            hint="leave num_nodes out and ask for slots (Diamond picks the nodes), or let the pool have more nodes "
            "(`diamond pool set`)",
            field="num_nodes",
        )
    low = least(spec)
    if low > pool.slots_per_node * pool.most_nodes:
        raise InvalidInput(
            f"pool {row.name!r} has at most {pool.slots_per_node * pool.most_nodes} slots, the task needs {low}",
            hint="ask for fewer, or let the pool have more nodes",
            field=at,
        )
    if not _lies_evenly(pool.slots_per_node, low, spec):
        raise InvalidInput(
            f"{low} slots do not lie evenly on nodes of {pool.slots_per_node}",
            hint=f"ask for at most {pool.slots_per_node}, or for a multiple of that",
            field=at,
        )


def _lies_evenly(per_node: int, low: int, spec: TaskSpec) -> bool:
    """Whether a number of slots that the task takes fits on one node or fills several."""
    bounds = spec.resources.range
    high = max(low, bounds[1]) if bounds is not None and spec.resources.is_elastic else low
    return low <= per_node or high // per_node > (low - 1) // per_node


def is_free(spec: TaskSpec) -> bool:
    """Whether the task says nothing of its size, so that Diamond picks it."""
    return spec.resources.range is None and spec.num_nodes == 1 and spec.ranks_per_node == 1


def sizes(pool: PoolSpec, spec: TaskSpec) -> tuple[int, int]:
    """At least and at most so many slots, as long as nothing is known of the task."""
    low, asked = least(spec), spec.resources.range
    if asked is None or not spec.resources.is_elastic:
        return low, low
    return low, max(low, min(asked[1], pool.slots_per_node * pool.most_nodes))


def least(spec: TaskSpec) -> int:
    """Slots without which the task cannot run."""
    bounds = spec.resources.range
    if bounds is None:
        return 1 if spec.num_nodes == 1 and spec.ranks_per_node <= 1 else spec.num_nodes * max(1, spec.ranks_per_node)
    return bounds[0] * (1 if spec.resources.slots else spec.num_nodes)
