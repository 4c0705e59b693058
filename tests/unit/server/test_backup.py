"""A backup brings everything back, between both kinds of database, and a hostile one changes nothing."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import Conflict, DiamondError, InstallationProblem, InvalidInput, NotFound
from diamond.core.states import JobState
from diamond.core.wire import Hello, JobReport, Report, StreamChunk
from diamond.server import backup as backups
from diamond.server.hub import Hub
from diamond.server.main import make_context, open_database, server_lock
from diamond.server.services import (
    agents,
    audit,
    bootstrap,
    endpoints,
    image_builds,
    image_drafts,
    images,
    tasks,
    tokens,
)
from diamond.server.settings import Settings, load_settings
from testing.image_agent import ImageAgent

LOG = b"line\n" * 1000
METRICS = b'{"step": 1, "loss": 0.5}\n'


@pytest.fixture
def other_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A second, empty database: the other kind's where PostgreSQL is there, else SQLite in the new home."""
    if "postgresql" in request.node.callspec.params.values():
        yield ""
        return
    try:
        admin_url = sa.make_url(request.getfixturevalue("postgres_server")).set(drivername="postgresql+psycopg")
    except pytest.skip.Exception:
        yield ""
        return
    admin = sa.create_engine(admin_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(sa.text("CREATE DATABASE restored"))
    yield admin_url.set(database="restored").render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(sa.text("DROP DATABASE restored WITH (FORCE)"))
    admin.dispose()


def fill(settings: Settings) -> dict[str, Any]:
    """A server's data with one finished task; returns what must be there again later."""
    settings.home_dir.make()
    settings.home_dir.server.mkdir(exist_ok=True)
    database = open_database(settings)
    database.migrate()
    ctx = make_context(settings, database, Hub())
    token = bootstrap.prepare(ctx, embedded=None).user_token
    user_id = tokens.authenticate(ctx, token).user_id
    assert user_id
    endpoint, _ = endpoints.create(ctx, user_id, "here")
    endpoints.create(ctx, user_id, "never-seen")
    agents.hello(ctx, endpoint.id, Hello(facts=EndpointFacts(scheduler="local", cpus_per_node=4)))
    task, _ = tasks.create(ctx, user_id, {"run": "écho 'ü'", "name": "täsk"}, "key")
    job_id = task.jobs[0].id
    streams = (StreamChunk.of(job_id, "log", 0, LOG), StreamChunk.of(job_id, "metrics", 0, METRICS))
    report = Report(epoch=ctx.epoch, jobs=(JobReport(job_id=job_id, state=JobState.SUCCEEDED),), streams=streams)
    agents.report(ctx, endpoint.id, report)
    digest = "sha256:2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    ctx.blobs.put_bytes(digest, b"hello")
    other = "sha256:" + "0" * 64
    ctx.blobs.put_chunk(other, 100, 0, [b"unfinished"])
    images_agent = ImageAgent(ctx, user_id, "builder")
    image_builds.build(ctx, user_id, {"name": "env", "base": "docker://x:1", "envs": {"A": "ü"}}, endpoint="builder")
    images_agent.finish()
    image_drafts.create(ctx, user_id, {"base": "docker://y:1"})
    found = look(settings, token) | {"token": token, "epoch": ctx.epoch, "digest": digest, "partial": other}
    database.close()
    return found


def look(settings: Settings, token: str) -> dict[str, Any]:
    database = open_database(settings)
    ctx = make_context(settings, database, Hub())
    user_id = tokens.authenticate(ctx, token).user_id
    assert user_id
    (row,), _, _ = tasks.list_tasks(ctx, user_id)
    task = tasks.get(ctx, user_id, row.id)
    with database.read() as session:
        events = session.execute(sa.text("SELECT seq, kind FROM events ORDER BY seq")).all()
        counters = session.execute(sa.text("SELECT name, value FROM counters ORDER BY name")).all()
        nulls = session.execute(sa.text("SELECT count(*) FROM endpoints WHERE facts IS NULL")).scalar_one()
    found = {
        "task": task,
        "log": ctx.streams.read(task.jobs[0].id, "log", 0, 10**6).data,
        "series": ctx.series.keys(task.jobs[0].id),
        "images": [images.get(ctx, user_id, item.id) for item in images.list_images(ctx, user_id)[0]],
        "drafts": image_drafts.list_drafts(ctx, user_id),
        "endpoints": [item.facts for item in endpoints.list_endpoints(ctx, user_id)],
        "events": [tuple(event) for event in events],
        "counters": [tuple(counter) for counter in counters],
        "nulls": nulls,
        "audit": audit.verify(ctx),
    }
    assert found["audit"].ok and found["audit"].entries >= 5
    database.close()
    return found


@pytest.mark.parametrize("name", ["backup.tar", "backup.tar.gz"])
def test_everything_comes_back(database_url: str, other_url: str, tmp_path: Path, name: str) -> None:
    source = load_settings(home=tmp_path / "home", database_url=database_url)
    target = load_settings(home=tmp_path / "new", database_url=other_url or None)
    before = fill(source)
    said: list[str] = []
    made = backups.backup(source, tmp_path / name, progress=lambda what, *_: said.append(what))
    assert (
        made.tables["tasks"] == 2 and made.tables["replicas"] == 1 and made.epoch == before["epoch"] and "files" in said
    )
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert not list(tmp_path.glob(".backup-*"))
    backups.restore(tmp_path / name, target)
    after = look(target, before["token"])
    assert {key: before[key] for key in after} == after
    ctx = make_context(target, database := open_database(target), Hub())
    assert ctx.epoch != before["epoch"]
    assert ctx.blobs.path(before["digest"]).read_bytes() == b"hello"
    assert ctx.blobs.partial_size(before["partial"]) == 0
    database.migrate()
    database.close()
    assert not list(target.home_dir.server.glob("restore-*"))
    # Once there is something, it takes force to replace it.
    with pytest.raises(Conflict, match="not empty"):
        backups.restore(tmp_path / name, target)
    backups.restore(tmp_path / name, target, force=True)
    assert look(target, before["token"])["log"] == LOG


@pytest.fixture
def made(tmp_path: Path) -> tuple[Settings, Path]:
    settings = load_settings(home=tmp_path / "home")
    fill(settings)
    backups.backup(settings, tmp_path / "backup.tar")
    return load_settings(home=tmp_path / "new"), tmp_path / "backup.tar"


def test_not_while_a_server_runs(made: tuple[Settings, Path]) -> None:
    settings, source = made
    with server_lock(settings.home_dir), pytest.raises(Conflict, match="already runs"):
        backups.restore(source, settings, force=True)


def rewrite(source: Path, change: Any) -> None:
    """Change a backup: `change(members)` gets and returns (TarInfo, bytes) pairs."""
    with tarfile.open(source) as tar:
        members = [(info, content.read() if (content := tar.extractfile(info)) else b"") for info in tar]
    with tarfile.open(source, "w") as tar:
        for info, data in change(members):
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def extra(name: str, **fields: Any) -> Any:
    info = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(info, key, value)
    return lambda members: [*members, (info, b"" if fields else b"data")]


def manifest_with(**fields: Any) -> Any:
    def change(members: Any) -> Any:
        (info, data), *rest = members
        return [(info, json.dumps(json.loads(data) | fields).encode()), *rest]

    return change


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (extra("../evil"), InvalidInput, "not trusted"),
        (extra("/etc/evil"), InvalidInput, "not trusted"),
        (extra("streams/../../evil"), InvalidInput, "not trusted"),
        (extra("blobs/partial/x"), InvalidInput, "not trusted"),
        (extra("tables/unknown.jsonl"), InvalidInput, "not trusted"),
        (extra("streams/link", type=tarfile.SYMTYPE, linkname="/etc/passwd"), InvalidInput, "not trusted"),
        (extra("streams/link", type=tarfile.LNKTYPE, linkname="manifest.json"), InvalidInput, "not trusted"),
        (extra("streams/device", type=tarfile.CHRTYPE), InvalidInput, "not trusted"),
        (extra("tables/tasks.jsonl"), InvalidInput, "twice"),
        (lambda members: members[1:], InvalidInput, "manifest.json"),
        (lambda members: [m for m in members if m[0].name != "tables/tasks.jsonl"], InvalidInput, "lacks the table"),
        (manifest_with(format=3), InstallationProblem, "format 3"),
        (manifest_with(revision="9999"), InstallationProblem, "newer"),
        (manifest_with(tables=3), InvalidInput, "manifest"),
        (manifest_with(tables={"tasks": 7}), InvalidInput, "not trusted"),
    ],
)
def test_a_hostile_or_damaged_backup_changes_nothing(
    made: tuple[Settings, Path], change: Any, error: type[DiamondError], says: str
) -> None:
    settings, source = made
    rewrite(source, change)
    with pytest.raises(error, match=says):
        backups.restore(source, settings)
    data = settings.home_dir.server
    assert not [
        path for path in data.rglob("*") if path.is_file() and not path.name.startswith(("server.lock", "diamond.db"))
    ]
    assert not (data.parent.parent / "evil").exists()


def test_a_backup_that_fails_in_the_database_leaves_what_was_there(tmp_path: Path) -> None:
    settings = load_settings(home=tmp_path / "home")
    before = fill(settings)
    backups.backup(settings, tmp_path / "backup.tar")

    def lose_users(members: Any) -> Any:
        return [(info, b"" if info.name == "tables/users.jsonl" else data) for info, data in members]

    rewrite(tmp_path / "backup.tar", lose_users)
    with pytest.raises(InvalidInput, match="users has 0 rows"):
        backups.restore(tmp_path / "backup.tar", settings, force=True)
    after = look(settings, before["token"])
    assert {key: before[key] for key in after} == after


def test_cut_short_or_something_else(made: tuple[Settings, Path], tmp_path: Path) -> None:
    settings, source = made
    whole = source.read_bytes()
    ends = list(range(512, len(whole), 512))  # some of them between two files
    cuts = [whole[:end] for end in ends[:: max(1, len(ends) // 60)] if b"end.json" not in whole[:end]]
    assert len(cuts) > 20
    for data in (*cuts, whole[: len(whole) // 2], whole[:700], b"", b"hello" * 500):
        source.write_bytes(data)
        with pytest.raises(InvalidInput):
            backups.restore(source, settings)
    with pytest.raises(NotFound):
        backups.restore(tmp_path / "nothing.tar", settings)
    with pytest.raises(NotFound, match="no database"):
        backups.backup(load_settings(home=tmp_path / "empty"), tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()
