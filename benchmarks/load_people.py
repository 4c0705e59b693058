"""An installation with many people in it, made before anything is measured: accounts, projects, shared endpoints."""

from __future__ import annotations

import time
from dataclasses import dataclass

from diamond.core.ids import new_id
from diamond.core.projects import Role
from diamond.server.services import passwords, projects, tokens
from diamond.server.store.db import Database
from diamond.server.store.identity_models import EndpointShareRow, MemberRow, ProjectRow
from diamond.server.store.models import EndpointRow, UserRow


@dataclass(frozen=True, kw_only=True)
class Installed:
    """`projects` holds each user's, by name. The first user signs in with `password`."""

    db: Database
    user_ids: list[str]
    names: list[str]
    tokens: list[str]
    projects: list[str]
    agent_tokens: list[str]
    password: str


def install(url: str, *, num_users: int, num_agents: int) -> Installed:
    """So many users in as many projects as there are agents; each project shares the endpoint of its first user."""
    db = Database(url)
    db.migrate()
    now = time.time()
    password = "correct horse battery staple"
    hashed = passwords.hashed(password)
    users, user_tokens, project_names, agent_tokens = [], [], [], []
    with db.write() as session:
        for number in range(num_users):
            user = UserRow(
                id=new_id("usr"), name=f"user{number:03}", created_at=now, is_admin=number == 0, password_hash=hashed
            )
            session.add(user)
            session.flush()
            projects.personal(session, user, now)
            users.append(user)
            user_tokens.append(tokens.issue(session, now=now, user_id=user.id, name="load"))
        for number in range(num_agents):
            team = users[number * num_users // num_agents : (number + 1) * num_users // num_agents]
            project = ProjectRow(id=new_id("prj"), name=f"team{number:02}", created_at=now)
            endpoint = EndpointRow(
                id=new_id("end"), owner_id=team[0].id, name=f"cluster{number:02}", created_at=now, revision=0
            )
            session.add_all([project, endpoint])
            session.flush()
            for member in team:
                role = Role.OWNER if member is team[0] else Role.MEMBER
                session.add(MemberRow(project_id=project.id, user_id=member.id, role=role.value, created_at=now))
                project_names.append(project.name)
            session.add(
                EndpointShareRow(endpoint_id=endpoint.id, project_id=project.id, created_at=now, approved_at=now)
            )
            agent_tokens.append(tokens.issue(session, now=now, endpoint_id=endpoint.id))
    return Installed(
        db=db, user_ids=[user.id for user in users], names=[user.name for user in users], tokens=user_tokens,
        projects=project_names, agent_tokens=agent_tokens, password=password,
    )  # fmt: skip
