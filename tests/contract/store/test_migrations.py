"""Migrations: they lead to the schema the models describe, and an old database keeps its data."""

from __future__ import annotations

import json
from pathlib import Path

import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from diamond.core.states import TaskState
from diamond.server.services import tasks, tokens
from diamond.server.store.db import Database
from diamond.server.store.identity_models import EndpointShareRow
from diamond.server.store.models import Base, EndpointRow, HoldingRow
from testing.context import make_context

# As the first release wrote them; never change these rows, add new ones for later releases.
FIRST_RELEASE = (
    "INSERT INTO users (id, name, created_at) VALUES ('usr_00000000a', 'owner', 1.0)",
    "INSERT INTO endpoints (id, owner_id, name, created_at, last_seen_at, facts, revision)"
    " VALUES ('end_00000000a', 'usr_00000000a', 'local', 1.0, 2.0,"
    """ '{"scheduler": "local", "nodes": 1, "cpus_per_node": 4}', 3)""",
    "INSERT INTO tokens (id, hash, user_id, created_at) VALUES"
    " ('tok_00000000a', 'a8cf86a4e86b15a8c4a0b0a3c1c8e6f5d8a0f6a0f1b7f2f5a7e1a0c9a4b2d3e4', 'usr_00000000a', 1.0)",
    "INSERT INTO tasks (id, owner_id, name, spec, state, desired, reason, detail, endpoint_id, attempt, exit_code,"
    " priority, pending_reason, outputs, created_at, started_at, ended_at) VALUES ('tsk_00000000a', 'usr_00000000a',"
    """ 'first', '{"run": "python train.py", "envs": {"A": "b"}, "outputs": ["model.pt"]}', 'SUCCEEDED', 'run',"""
    " 'COMPLETED', '', 'end_00000000a', 1, 0, 0, '',"
    """ '[{"path": "model.pt", "size_bytes": 3, "sha256": "x", "stored": true}]', 1.0, 2.0, 3.0)""",
    "INSERT INTO jobs (id, task_id, endpoint_id, attempt, state, desired, revision, detail, run_dir, hosts, created_at)"
    " VALUES ('job_00000000a', 'tsk_00000000a', 'end_00000000a', 1, 'SUCCEEDED', 'run', 3, '', '/x', '[]', 1.0)",
    "INSERT INTO events (seq, at, kind, owner_id, task_id, data) VALUES"
    " (1, 1.0, 'task.created', 'usr_00000000a', 'tsk_00000000a', '{}')",
    "UPDATE counters SET value = 1 WHERE name = 'events'",
)


def test_a_database_of_the_first_release_keeps_its_data(database_url: str, tmp_path: Path) -> None:
    db = Database(database_url)
    db.migrate("0001")
    with db.engine.begin() as connection:
        for statement in FIRST_RELEASE:
            connection.execute(sa.text(statement.replace(":", r"\:")))
    epoch = db.epoch()
    db.close()

    ctx = make_context(database_url, tmp_path)  # migrates to the newest revision
    assert ctx.db.epoch() == epoch
    task = tasks.get(ctx, "usr_00000000a", "tsk_00000000a")
    assert (task.name, task.state, task.endpoint) == ("first", TaskState.SUCCEEDED, "local")
    assert task.spec is not None
    assert task.spec.envs == {"A": "b"}
    assert task.outputs[0].path == "model.pt"
    assert task.jobs[0].run_dir == "/x"
    new, _ = tasks.create(ctx, "usr_00000000a", {"run": "true"})
    assert tasks.list_tasks(ctx, "usr_00000000a")[2] == 2
    assert new.state is TaskState.QUEUED
    ctx.db.close()


def test_owners_keep_the_bundles_that_their_tasks_and_images_name(database_url: str, tmp_path: Path) -> None:
    """Before files had holders, whoever knew a digest had them; from then on, whose task or image names them."""
    db = Database(database_url)
    db.migrate("0006")
    folder, mount, inside, recipe, said = (f"bundle:sha256:{letter * 64}" for letter in "abcde")
    spec = {
        "workdir": folder,
        "file_mounts": {"x": mount, "y": folder},
        "image": {"files": {"/z": inside}},
        "run": said,
    }
    task = {"id": "tsk_00000000a", "name": "t", "spec": json.dumps(spec), "owner": "usr_00000000a"}
    image = {
        "id": "img_00000000a",
        "name": "i",
        "recipe": json.dumps({"files": {"/w": recipe}}),
        "owner": "usr_00000000b",
    }
    with db.engine.begin() as connection:
        for user_id, name in (("usr_00000000a", "alice"), ("usr_00000000b", "bob")):
            user = {"id": user_id, "name": name}
            connection.execute(sa.text("INSERT INTO users (id, name, created_at) VALUES (:id, :name, 1.0)"), user)
        connection.execute(
            sa.text(
                "INSERT INTO tasks (id, owner_id, name, spec, state, desired, detail, attempt, priority,"
                " pending_reason, outputs, created_at)"
                " VALUES (:id, :owner, :name, :spec, 'SUCCEEDED', 'run', '', 1, 0, '', '[]', 1.0)"
            ),
            task,
        )
        connection.execute(
            sa.text(
                "INSERT INTO images (id, owner_id, name, recipe, recipe_digest, visibility, labels, created_at)"
                " VALUES (:id, :owner, :name, :recipe, '', 'private', '{}', 1.0)"
            ),
            image,
        )
    db.close()
    ctx = make_context(database_url, tmp_path)
    with ctx.db.read() as session:
        kept = {(row.holder, row.ref) for row in session.scalars(sa.select(HoldingRow))}
    assert kept == {*(("usr_00000000a", ref) for ref in (folder, mount, inside)), ("usr_00000000b", recipe)}
    ctx.db.close()


def test_shares_of_owners_are_approved_and_what_ran_is_believed(database_url: str, tmp_path: Path) -> None:
    """Before shares were approved, any member shared; what no owner of the project shared waits for one now."""
    db = Database(database_url)
    db.migrate("0011")
    spec = json.dumps({"run": "x", "num_nodes": 2, "resources": {"cpus": "3.5+"}})
    plain = json.dumps({"run": "x"})
    statements = [
        *(
            f"INSERT INTO users (id, name, created_at) VALUES ('usr_{name}', '{name}', 1.0)"
            for name in ("alice", "bob")
        ),
        *(
            "INSERT INTO endpoints (id, owner_id, name, created_at, revision)"
            f" VALUES ('end_{name}', 'usr_{name}', 'of-{name}', 1.0, 0)"
            for name in ("alice", "bob")
        ),
        "INSERT INTO projects (id, name, title, created_at) VALUES ('prj_lab', 'lab', '', 1.0)",
        *(
            "INSERT INTO members (project_id, user_id, role, created_at)"
            f" VALUES ('prj_lab', 'usr_{name}', '{role}', 1.0)"
            for name, role in (("alice", "owner"), ("bob", "member"))
        ),
        *(
            "INSERT INTO endpoint_shares (endpoint_id, project_id, created_at)"
            f" VALUES ('end_{name}', 'prj_lab', 7.0)"
            for name in ("alice", "bob")
        ),
        *(
            "INSERT INTO tasks (id, owner_id, name, spec, state, desired, detail, attempt, priority, pending_reason,"
            f" outputs, created_at, kind) VALUES ('tsk_{number}', 'usr_bob', 't', '{raw}', 'SUCCEEDED', 'run', '', 1,"
            f" 0, '', '[]', 1.0, '{kind}')"
            for number, raw, kind in ((1, spec, "command"), (2, plain, "command"), (3, plain, "build"))
        ),
        *(
            "INSERT INTO jobs (id, task_id, endpoint_id, attempt, state, desired, revision, detail, run_dir, hosts,"
            f" created_at, ended_at, num_nodes, num_gpus) VALUES ('job_{number}', 'tsk_{number}', 'end_{where}', 1,"
            f" '{state}', 'run', 1, '', '', '[]', 1.0, {ended}, {nodes}, {gpus})"
            for number, where, state, ended, nodes, gpus in (
                (1, "bob", "SUCCEEDED", 9.0, 2, 0), (2, "bob", "SUCCEEDED", 5.0, 1, 4),
                (3, "alice", "SUCCEEDED", 5.0, 0, 0),
            )
        ),
    ]  # fmt: skip
    with db.engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement.replace(":", r"\:")))
    db.close()
    ctx = make_context(database_url, tmp_path)
    with ctx.db.read() as session:
        shares = {
            row.endpoint_id: (row.approved_at, row.approved_by) for row in session.scalars(sa.select(EndpointShareRow))
        }
        places = session.scalars(sa.select(EndpointRow).order_by(EndpointRow.id)).all()
        proven = {row.id: (row.proven_at, row.proven_cpus, row.proven_gpus) for row in places}
    assert shares == {"end_alice": (7.0, "usr_alice"), "end_bob": (None, None)}
    assert proven == {"end_alice": (None, 0, 0), "end_bob": (5.0, 8, 4)}
    ctx.db.close()


def test_the_migrated_schema_is_the_one_the_models_describe(database_url: str) -> None:
    db = Database(database_url)
    db.migrate()
    db.migrate()
    with db.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    db.close()


def test_tokens_are_kept_as_hashes_only() -> None:
    assert tokens.hash_token("dmdu_x") != "dmdu_x"
    assert len(tokens.hash_token("dmdu_x")) == 64
