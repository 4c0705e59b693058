"""Where a task may go, and why: the one answer that a dry run tells and a launch, a retry and a move act on.

Where it may go at all is `access` (one's own endpoints, and those that owners of its project approved of). This adds
what the endpoint's agent says of itself, and how far that is believed of endpoints that are another's (`proofs`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.errors import InvalidInput
from diamond.core.tasks import TaskSpec
from diamond.planner.partitions import Obstacle
from diamond.planner.placement import Candidate, Placement, place
from diamond.server.services import access, proofs, snapshots
from diamond.server.services.context import Context
from diamond.server.services.image_placing import Need
from diamond.server.store.identity_models import EndpointShareRow, ProjectRow
from diamond.server.store.models import EndpointRow, TaskRow, UserRow

UNPROVEN = "nothing has run there yet; name it with --infra"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Somebody's task in a project.

    Attributes:
        stays: it goes on where its files are, and was let in there before.
    """

    user_id: str
    project_id: str | None
    spec: TaskSpec
    stays: bool = False

    @classmethod
    def of(cls, task: TaskRow, spec: TaskSpec, *, stays: bool = False) -> Asked:
        return cls(user_id=task.owner_id, project_id=task.project_id, spec=spec, stays=stays)


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Where it goes; `endpoint` is None where it goes nowhere now."""

    endpoint: EndpointRow | None
    placement: Placement

    @property
    def others(self) -> dict[str, str]:
        """Why not at each of the others."""
        return {name: obstacle.text for name, obstacle in self.placement.obstacles.items()}


def rows_for(session: Session, asked: Asked) -> list[EndpointRow]:
    """The endpoints that it may use, by name."""
    return snapshots.for_tasks(session, asked.user_id, asked.project_id)


def decide(
    ctx: Context,
    session: Session,
    asked: Asked,
    rows: list[EndpointRow],
    need: Need | None,
    *,
    online: bool = False,
) -> Decided:
    """Choose among these of `rows_for`.

    Args:
        need: what the task needs of images there.
        online: only among those whose agent is there now.
    """
    found = [one for one in _candidates(ctx, session, asked, rows, need) if one.online or not online]
    placement = place(asked.spec, found)
    endpoint = next((row for row in rows if row.name == placement.endpoint), None)
    return Decided(endpoint=endpoint, placement=placement)


def _candidates(
    ctx: Context, session: Session, asked: Asked, rows: list[EndpointRow], need: Need | None
) -> list[Candidate]:
    obstacles = unwanted(session, asked.user_id, rows, None if asked.stays else asked.spec)
    found = []
    for row in rows:
        mine = row.owner_id == asked.user_id
        one = snapshots.candidate(
            ctx, row, obstacle=obstacles.get(row.id), doubt=int(not mine and not proofs.has_run(row, asked.spec))
        )
        if need is not None:
            one = replace(
                one,
                rank=need.rank(row),
                note=need.note(row),
                obstacle=one.obstacle or need.obstacles.get(row.id),
                facts=one.facts if need.is_decided(row) or row.id in obstacles else None,
            )
        found.append(one)
    return found


def unwanted(session: Session, user_id: str, rows: list[EndpointRow], spec: TaskSpec | None) -> dict[str, Obstacle]:
    """Others' endpoints that do not come into question, by id: their own policy file does not want this user's tasks,
    or nothing has run there yet and the task (None: it is there already) does not name them."""
    found = dict(snapshots.barred(session, user_id, rows))
    if spec is not None:
        named = spec.resources.infra
        for row in rows:
            if row.owner_id != user_id and row.proven_at is None and row.name != named:
                found.setdefault(row.id, Obstacle(field="resources.infra", text=UNPROVEN))
    return found


def readers(session: Session, user_id: str, endpoint: EndpointRow | None, spec: TaskSpec) -> str:
    """What somebody should know before their secrets go to an endpoint; empty when there is nothing to say."""
    if not spec.secrets or endpoint is None or endpoint.owner_id == user_id:
        return ""
    owner = session.get_one(UserRow, endpoint.owner_id).name
    return (
        f"endpoint {endpoint.name} belongs to {owner}: the task runs under their account there, so {owner} will be "
        f"able to read its secrets ({', '.join(spec.secrets)})"
    )


def where_else(session: Session, user_id: str, project_id: str | None, infra: str | None) -> str:
    """Of an endpoint that a task may not use in its project: what stands in the way, as far as its user may know."""
    if infra is None or not infra.isprintable():
        return ""
    query = (
        sa.select(ProjectRow.id, ProjectRow.name, EndpointShareRow.approved_at)
        .join(EndpointShareRow, EndpointShareRow.project_id == ProjectRow.id)
        .join(EndpointRow, EndpointRow.id == EndpointShareRow.endpoint_id)
        .where(EndpointRow.name == infra, EndpointRow.removed_at.is_(None))
        .where(ProjectRow.id.in_(access.projects_of(user_id)))
        .order_by(ProjectRow.name)
    )
    found = session.execute(query).all()
    for found_id, name, approved_at in found:
        if found_id == project_id and approved_at is None:
            return (
                f"{infra} is to be shared with project {name}, and waits for one of its owners: "
                f"diamond project approve {name} {infra}"
            )
    names = [name for _, name, approved_at in found if approved_at is not None]
    return f"{infra} is shared with project {', '.join(names)}: launch the task there" if names else ""


def refuse(session: Session, asked: Asked, decided: Decided) -> None:
    """Say no at once to what no known endpoint can ever do; wait only for what may still become possible.

    Raises:
        InvalidInput: naming the field, and each endpoint with what is in the way.
    """
    infra, placement = asked.spec.resources.infra, decided.placement
    known = sorted([*placement.obstacles, *placement.undecided])
    if infra is not None and infra not in known:
        elsewhere = where_else(session, asked.user_id, asked.project_id, infra)
        raise InvalidInput(
            f"there is no endpoint {infra[:60]!r}",
            hint=elsewhere or f"endpoints: {', '.join(known) or 'none yet'}",
            field="resources.infra",
        )
    if placement.undecided or not placement.obstacles:
        return
    # Of others than the one that was named, it counts for nothing that they were not.
    real = {
        name: item
        for name, item in placement.obstacles.items()
        if infra in (None, name) or item.field != "resources.infra"
    }
    if len(real) == 1:
        (name, obstacle), *_ = real.items()
        raise InvalidInput(f"endpoint {name} cannot run this: {obstacle.text}", field=obstacle.field)
    raise InvalidInput(
        "no endpoint can run this: " + "; ".join(f"{name}: {item.text}" for name, item in sorted(real.items())),
        field="resources",
    )
