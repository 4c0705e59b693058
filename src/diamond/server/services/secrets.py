"""Secrets of users and projects: set, listed, removed, checked at launch, and given to the jobs that name them.

A value comes in once and leaves only through `deliver`, for a live job, to the agent of the endpoint that runs it.
A task's own user's secrets come first, then those of the task's project, of which the user must still be a member when
the job begins. Who may use and change what is in `access` and `core.projects`.
"""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.orm import Session, undefer

from diamond.core.codec import decode
from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound, TooLarge
from diamond.core.ids import is_id, new_id
from diamond.core.projects import Role
from diamond.core.secrets import JobSecret, JobSecrets, Secret, check_secret_name, check_value
from diamond.core.states import FINAL_JOB_STATES
from diamond.core.tasks import TaskSpec
from diamond.server.services import access, audit, projects, sealing
from diamond.server.services.context import Context
from diamond.server.store.identity_models import ProjectRow, SecretRow
from diamond.server.store.models import EndpointRow, JobRow, TaskRow, UserRow

USER, PROJECT = "user", "project"
MAX_KEPT = 500  # of one user or project
_FINAL = [state.value for state in FINAL_JOB_STATES]


def about(row: SecretRow) -> tuple[str, ...]:
    """What its value is sealed for: it opens in no other row."""
    return "secret", row.kind, row.subject_id, row.name


def put(
    ctx: Context, user_id: str, name: str, value: object, project: str | None = None, *, retry: bool = True
) -> tuple[Secret, bool]:
    """Set a secret; True when there was none of that name.

    Raises:
        InvalidInput: the name or the value cannot be used; no text shows anything of the value.
        NotFound: there is no such project for the user.
        Forbidden: the user is in it, and not one of its owners.
    """
    check_secret_name(name)
    text = check_value(value)
    now = ctx.clock()
    try:
        with ctx.db.write() as session:
            kind, subject_id = _whose(session, user_id, project, Role.OWNER)
            row = _find(session, kind, subject_id, name)
            is_new = row is None
            if row is None:
                mine = [SecretRow.kind == kind, SecretRow.subject_id == subject_id]
                if session.execute(sa.select(sa.func.count()).where(*mine)).scalar_one() >= MAX_KEPT:
                    raise TooLarge(f"there are {MAX_KEPT} secrets already, as many as may be", hint="remove some first")
                row = SecretRow(id=new_id("sec"), kind=kind, subject_id=subject_id, name=name, created_at=now)
                row.created_by = user_id
                session.add(row)
            row.sealed = sealing.seal(ctx, text.encode(), *about(row))
            row.updated_at = now
            session.flush()
            audit.record(session, now, "secret.set", row.id, name=name, project=project or "", new=is_new)
            found = _views(session, [row])[0]
    except exc.IntegrityError:  # PostgreSQL: another request made it meanwhile
        if not retry:
            raise
        return put(ctx, user_id, name, value, project, retry=False)
    return found, is_new


def list_secrets(ctx: Context, user_id: str) -> list[Secret]:
    """The user's own, and those of projects in which they may use them; by project and name. Never a value."""
    usable = sa.and_(SecretRow.kind == PROJECT, SecretRow.subject_id.in_(access.projects_of(user_id, Role.MEMBER)))
    own = sa.and_(SecretRow.kind == USER, SecretRow.subject_id == user_id)
    with ctx.db.read() as session:
        rows = session.scalars(sa.select(SecretRow).where(sa.or_(own, usable))).all()
        return sorted(_views(session, rows), key=lambda secret: (secret.project, secret.name))


def remove(ctx: Context, user_id: str, name: str, project: str | None = None) -> None:
    """Forget a secret. Jobs that have it already keep it; those that begin later fail.

    Raises:
        NotFound: there is none of that name, or no such project for the user.
        Forbidden: the user is in the project, and not one of its owners.
    """
    with ctx.db.write() as session:
        kind, subject_id = _whose(session, user_id, project, Role.OWNER)
        row = _find(session, kind, subject_id, name) if name.isprintable() else None
        if row is None:
            whose = f"project {project} has" if kind == PROJECT else "you have"
            raise NotFound(f"{whose} no secret {name[:80]!r}", hint="`diamond secret ls` lists them", field="name")
        session.delete(row)
        audit.record(session, ctx.clock(), "secret.removed", row.id, name=name, project=project or "")


def check(session: Session, user_id: str, project_id: str | None, spec: TaskSpec) -> None:
    """At launch: every secret a task names is there.

    Raises:
        InvalidInput: naming the first that is not.
    """
    if not spec.secrets:
        return
    found = _usable(session, user_id, project_id, {use.secret for use in spec.secrets.values()})
    for variable, use in spec.secrets.items():
        if use.secret not in found:
            where = "you or the task's project have" if project_id else "you have"
            raise InvalidInput(
                f"there is no secret {use.secret!r} that {where}",
                hint=f"set it with `diamond secret set {use.secret}`; `diamond secret ls` lists yours",
                field=f"secrets.{variable}",
            )


def deliver(ctx: Context, endpoint_id: str, job_id: str, instance: str = "") -> JobSecrets:
    """What a job is given: the values of the secrets its task names, at this moment.

    Raises:
        NotFound: the endpoint has no such live job, or its task names no secrets.
        Conflict: another agent home speaks for the endpoint.
        Forbidden: the task's user may not use the endpoint (any more).
        InvalidInput: a secret is gone since the task was launched; names it.
    """
    now = ctx.clock()
    with ctx.db.write() as session:
        query = sa.select(JobRow).where(
            JobRow.id == job_id, JobRow.endpoint_id == endpoint_id, JobRow.state.not_in(_FINAL)
        )
        job = session.scalars(query).one_or_none() if is_id(job_id, "job") else None
        task = session.get(TaskRow, job.task_id, options=[undefer(TaskRow.spec)]) if job else None
        spec = decode(TaskSpec, task.spec) if task is not None and task.kind == "command" else None
        if job is None or task is None or spec is None or not spec.secrets:
            raise NotFound(f"this endpoint has no live job {job_id[:60]!r} with secrets")
        _check_place(session, task, endpoint_id, instance)
        found = _usable(session, task.owner_id, task.project_id, {use.secret for use in spec.secrets.values()})
        given = []
        for variable, use in spec.secrets.items():
            row = found.get(use.secret)
            if row is None:
                raise InvalidInput(
                    f"the secret {use.secret!r} was there when the task was launched, and is not any more",
                    hint=f"set it again with `diamond secret set {use.secret}` and launch again",
                    field=f"secrets.{variable}",
                )
            value = sealing.unseal(ctx, row.sealed, *about(row)).decode()
            version = f"{row.id}@{row.updated_at!r}"
            given.append(JobSecret(variable=variable, value=value, file=use.file, version=version))
            row.used_at = now
        names = sorted(found)
        audit.record(session, now, "secret.delivered", job.id, task=task.id, endpoint=endpoint_id, names=names)
    return JobSecrets(job_id=job_id, secrets=tuple(given))


def _check_place(session: Session, task: TaskRow, endpoint_id: str, instance: str) -> None:
    endpoint = session.get_one(EndpointRow, endpoint_id)
    if endpoint.instance not in (None, instance):
        raise Conflict(f"another agent now speaks for endpoint {endpoint.name}", hint="stop this one")
    owner = session.get_one(UserRow, task.owner_id)
    allowed = sa.select(EndpointRow.id).where(
        EndpointRow.id == endpoint_id, access.runs_at(task.owner_id, task.project_id)
    )
    if owner.disabled_at is not None or session.scalars(allowed).one_or_none() is None:
        raise Forbidden(f"{owner.name} may not run tasks at endpoint {endpoint.name} (any more)")


def _usable(session: Session, user_id: str, project_id: str | None, names: Iterable[str]) -> dict[str, SecretRow]:
    """Those of the named ones that a task of this user in this project may have, by name: the user's own first."""
    own = sa.and_(SecretRow.kind == USER, SecretRow.subject_id == user_id)
    shared = sa.and_(
        SecretRow.kind == PROJECT,
        SecretRow.subject_id == (project_id or ""),
        SecretRow.subject_id.in_(access.projects_of(user_id, Role.MEMBER)),
    )
    rows = session.scalars(sa.select(SecretRow).where(SecretRow.name.in_(list(names)), sa.or_(own, shared))).all()
    found = {row.name: row for row in rows if row.kind == PROJECT}
    return found | {row.name: row for row in rows if row.kind == USER}


def _whose(session: Session, user_id: str, project: str | None, role: Role) -> tuple[str, str]:
    """Of whom a secret is. What belongs to somebody's own project is theirs."""
    if project is None:
        return USER, user_id
    row = projects.look_up(session, user_id, project, role)
    if row is None or row.personal_of == user_id:
        return USER, user_id
    return PROJECT, row.id


def _find(session: Session, kind: str, subject_id: str, name: str) -> SecretRow | None:
    query = sa.select(SecretRow).where(
        SecretRow.kind == kind, SecretRow.subject_id == subject_id, SecretRow.name == name
    )
    return session.scalars(query.with_for_update()).one_or_none()


def _views(session: Session, rows: Iterable[SecretRow]) -> list[Secret]:
    listed = list(rows)
    of_projects = sa.select(ProjectRow.id, ProjectRow.name).where(
        ProjectRow.id.in_({row.subject_id for row in listed if row.kind == PROJECT})
    )
    names = {str(key): str(name) for key, name in session.execute(of_projects)}
    makers = sa.select(UserRow.id, UserRow.name).where(UserRow.id.in_({row.created_by for row in listed}))
    users = {str(key): str(name) for key, name in session.execute(makers)}
    return [
        Secret(
            name=row.name,
            project=names.get(row.subject_id, "") if row.kind == PROJECT else "",
            created_by=users.get(row.created_by, ""),
            created_at=row.created_at,
            updated_at=row.updated_at,
            used_at=row.used_at,
        )
        for row in listed
    ]
