"""Backups: everything the server knows in one tar file, taken while it runs, restored into SQLite or PostgreSQL.

The tar holds, in this order: manifest.json, tables/<name>.jsonl (one consistent snapshot), files of series/, streams/
and blobs/, and end.json: a tar that was cut between two files looks whole. Files come after the tables and only ever
grow, or are replaced by what says the same in fewer bytes, so each row's bytes are there. Curves come before the
streams they are derived from, so that no curve is ahead of its stream.
Must not know what the tables mean: they are dumped and loaded as the database describes them.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError

import diamond
from diamond.core.errors import Conflict, InstallationProblem, InvalidInput, NotFound
from diamond.server.main import open_database, server_lock
from diamond.server.settings import Settings
from diamond.server.store import db as db_module
from diamond.server.store.db import Database
from diamond.server.store.files import locked
from diamond.server.store.streams import LOCK_NAME

FORMAT = 2  # since 2 the end is marked
_END = "end.json"
DATA_FOLDERS = ("series", "streams", "blobs")
_VERSION_TABLE = "alembic_version"
_BATCH = 500
_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")
_TABLE = re.compile(r"tables/([a-z][a-z0-9_]{0,62})\.jsonl")
_MAX_MANIFEST_BYTES = 1024 * 1024

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many of how many bytes (0 of 0 when unknown)."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a backup says of itself."""

    revision: str
    epoch: str
    version: str
    created_at: float
    tables: dict[str, int]  # rows of each


def backup(settings: Settings, target: Path, progress: Progress | None = None) -> Manifest:
    """Write a backup to `target` (.tar, or .tar.gz/.tgz for a compressed one). Works while the server runs.

    The file appears under its name only once it is complete; an older one there is replaced.

    Raises:
        NotFound: there is no server's data in this home.
    """
    progress = progress or _silent
    data = settings.home_dir.server
    with ExitStack() as stack:
        database = open_database(settings)
        stack.callback(database.close)
        if database.is_sqlite and not Path(database.url.database or "").exists():
            raise NotFound(f"there is no database at {database.url.database}", hint="is DIAMOND_HOME right?")
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".backup-"))
        )
        progress("tables", 0, 0)
        manifest = _dump_tables(database, scratch)
        files = list(_data_files(data))
        total = sum(size for _, _, size in files)
        unfinished = scratch / "unfinished"
        mode = "w:gz" if target.name.endswith((".gz", ".tgz")) else "w"
        with tarfile.open(unfinished, mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
            head = json.dumps({"format": FORMAT, **manifest.__dict__}, indent=2).encode()
            _add(tar, "manifest.json", io.BytesIO(head), len(head))
            for name in manifest.tables:
                with open(scratch / f"{name}.jsonl", "rb") as table:
                    _add(tar, f"tables/{name}.jsonl", table, os.fstat(table.fileno()).st_size)
            done = 0
            for name, path, size in _as_they_are(data, files):
                done += size
                try:
                    with open(path, "rb") as file:
                        _add(tar, name, file, os.fstat(file.fileno()).st_size)
                except FileNotFoundError:
                    continue  # dropped by the log cap since it was listed
                progress("files", done, total)
            _add(tar, _END, io.BytesIO(b"{}"), 2)
        with open(unfinished, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(unfinished, 0o600)
        os.replace(unfinished, target)
    return manifest


def _dump_tables(database: Database, scratch: Path) -> Manifest:
    counts: dict[str, int] = {}
    with database.read() as session:
        connection = session.connection()
        revision = MigrationContext.configure(connection).get_current_revision()
        if revision is None:
            raise NotFound("the database is empty: no server has ever run on it")
        tables = _reflect(connection)
        for table in tables.sorted_tables:
            with open(scratch / f"{table.name}.jsonl", "w", encoding="utf-8") as out:
                counts[table.name] = 0
                for row in connection.execute(sa.select(table).execution_options(yield_per=_BATCH)):
                    out.write(json.dumps(_to_json(row._asdict())) + "\n")
                    counts[table.name] += 1
        epoch = connection.execute(sa.text("SELECT value FROM meta WHERE key = 'epoch'")).scalar_one()
    return Manifest(revision=revision, epoch=epoch, version=diamond.__version__, created_at=time.time(), tables=counts)


def _reflect(connection: sa.Connection) -> sa.MetaData:
    """The tables as they are, which at an older revision is not as the models have them."""
    metadata = sa.MetaData()
    metadata.reflect(connection, only=lambda name, _metadata: name != _VERSION_TABLE)
    for table in metadata.tables.values():
        for column in table.columns:
            if isinstance(column.type, sa.JSON):
                column.type = sa.JSON(none_as_null=True)
    return metadata


def _to_json(row: dict[str, Any]) -> dict[str, Any]:
    return {key: base64.b64encode(value).decode() if isinstance(value, bytes) else value for key, value in row.items()}


def _data_files(data: Path) -> Iterator[tuple[str, Path, int]]:
    """Name in the tar, path and present size of every file worth keeping."""
    for folder in DATA_FOLDERS:
        root = data / folder
        for here, folders, names in os.walk(root):
            folders.sort()
            yield from _worth_keeping(folder, root, Path(here), names)


def _worth_keeping(folder: str, root: Path, here: Path, names: Iterable[str]) -> Iterator[tuple[str, Path, int]]:
    # A curve's state before its records: records beyond what the state counts are ignored.
    for name in sorted(names, key=lambda name: (name != "state.json", name)):
        path = here / name
        relative = path.relative_to(root).as_posix()
        if name.endswith((".lock", ".tmp")) or path.is_symlink() or not path.is_file():
            continue
        if folder == "blobs" and not _BLOB.fullmatch(relative):
            continue  # unfinished uploads
        yield f"{folder}/{relative}", path, path.stat().st_size


def _as_they_are(data: Path, files: Iterable[tuple[str, Path, int]]) -> Iterator[tuple[str, Path, int]]:
    """The files, but for those of one job's curves what is there when it is their turn, held still meanwhile.

    They belong together, and when curves are thinned others take their place.
    """
    for here, some in itertools.groupby(files, key=lambda file: file[1].parent):
        if not here.is_relative_to(data / "series"):
            yield from some
            continue
        with locked(f"{here}/{LOCK_NAME}", create=False) as held:
            if held:
                yield from _worth_keeping("series", data / "series", here, os.listdir(here))


def _add(tar: tarfile.TarFile, name: str, file: IO[bytes], size: int) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o600, int(time.time())
    tar.addfile(info, _Exactly(file, size))


class _Exactly:
    """Reads exactly `size` bytes: no more of a file that grew, and zeros for what one lost (a failed append)."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._left = size

    def read(self, wanted: int = -1) -> bytes:
        count = self._left if wanted < 0 else min(wanted, self._left)
        data = self._file.read(count).ljust(count, b"\0")
        self._left -= count
        return data


def restore(source: Path, settings: Settings, *, force: bool = False, progress: Progress | None = None) -> Manifest:
    """Put a backup in place of what is there. Gives the database a new epoch, so that live cursors start over.

    Nothing changes before the backup has been read and checked completely; the database changes in one transaction.

    Args:
        force: replace a database or data that is not empty.

    Raises:
        Conflict: a server runs on this home, or there is data and `force` is off.
        InvalidInput: the file is not a backup, or is damaged.
        InstallationProblem: it was made by a newer Diamond.
    """
    progress = progress or _silent
    with ExitStack() as stack:
        stack.enter_context(server_lock(settings.home_dir))
        data = settings.home_dir.server
        staging = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=data, prefix="restore-")))
        manifest = _unpack(source, staging, progress)
        database = open_database(settings)
        stack.callback(database.close)
        if not force:
            _refuse_data(database, data)
        _load_tables(database, manifest, staging, progress)
        for folder in DATA_FOLDERS:
            (staging / folder).mkdir(exist_ok=True)
            if (data / folder).exists():
                os.rename(data / folder, staging / f"old-{folder}")
            os.rename(staging / folder, data / folder)
    return manifest


def _unpack(source: Path, staging: Path, progress: Progress) -> Manifest:
    try:
        size = source.stat().st_size
        with open(source, "rb") as file, tarfile.open(fileobj=file, mode="r:*") as tar:
            first = tar.next()
            if first is None or first.name != "manifest.json" or first.size > _MAX_MANIFEST_BYTES:
                raise InvalidInput(f"{source.name} is not a Diamond backup: it does not begin with manifest.json")
            manifest, form = _read_manifest(tar, first, source.name)
            has_end = form < 2
            while (member := tar.next()) is not None:
                if member.name == _END and member.size < _MAX_MANIFEST_BYTES:
                    has_end = True
                    continue
                path = staging / _checked_name(member, manifest)
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                content = tar.extractfile(member)
                assert content is not None  # a regular file, as checked
                with open(path, "xb") as out:
                    shutil.copyfileobj(content, out, 1024 * 1024)
                    if out.tell() != member.size:
                        raise InvalidInput(f"{source.name} is cut short in {member.name}")
                progress("reading", file.tell(), size)
    except (tarfile.TarError, EOFError, OSError) as error:
        if isinstance(error, FileNotFoundError) and error.filename == str(source):
            raise NotFound(f"there is no file {source}") from error
        if isinstance(error, FileExistsError):
            raise InvalidInput(f"{source.name} holds a file twice") from error
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidInput(f"{source.name} is not a complete tar file: {error}") from error
    if not has_end:
        raise InvalidInput(f"{source.name} is cut short: its end is missing")
    for name in manifest.tables:
        if not (staging / "tables" / f"{name}.jsonl").exists():
            raise InvalidInput(f"{source.name} lacks the table {name}; it is damaged")
    return manifest


def _read_manifest(tar: tarfile.TarFile, member: tarfile.TarInfo, shown: str) -> tuple[Manifest, int]:
    """The manifest, and the format of the backup."""
    content = tar.extractfile(member)
    try:
        raw = json.loads(content.read() if content else b"")
        made = Manifest(
            revision=str(raw["revision"]),
            epoch=str(raw["epoch"]),
            version=str(raw["version"]),
            created_at=float(raw["created_at"]),
            tables={str(name): int(rows) for name, rows in raw["tables"].items()},
        )
        form = int(raw["format"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{shown} is not a Diamond backup: its manifest makes no sense") from error
    if form > FORMAT:
        raise InstallationProblem(
            f"{shown} has format {form}, made by Diamond {made.version}; this version reads up to {FORMAT}",
            hint="restore it with that version of Diamond or a newer one",
        )
    return made, form


def _checked_name(member: tarfile.TarInfo, manifest: Manifest) -> str:
    """The member's name, if it is a regular file that belongs where a backup may write."""
    top, _, rest = member.name.partition("/")
    parts = rest.split("/")
    table = _TABLE.fullmatch(member.name)
    plausible = (table and table[1] in manifest.tables) or (
        top in DATA_FOLDERS
        and all(part and part not in (".", "..") and "\\" not in part and part.isprintable() for part in parts)
        and (top != "blobs" or _BLOB.fullmatch(rest))
    )
    if not plausible or not member.isreg():
        raise InvalidInput(f"the backup holds {member.name[:80]!r}, which no backup should: it is not trusted")
    return member.name


def _refuse_data(database: Database, data: Path) -> None:
    hint = "choose an empty home or database, or use --force to replace what is there"
    with database.engine.connect() as connection:
        for table in _reflect(connection).sorted_tables:
            # A fresh schema holds only its own bookkeeping.
            if table.name not in ("meta", "counters") and connection.execute(sa.select(table).limit(1)).first():
                raise Conflict(f"the database is not empty: table {table.name} has rows", hint=hint)
    for folder in DATA_FOLDERS:
        if any(names for _, _, names in os.walk(data / folder)):
            raise Conflict(f"{data / folder} is not empty", hint=hint)


def _load_tables(database: Database, manifest: Manifest, staging: Path, progress: Progress) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(db_module.__file__).parent / "migrations"))
    try:
        ScriptDirectory.from_config(config).get_revision(manifest.revision)
    except CommandError as error:
        raise InstallationProblem(
            f"the backup was made by Diamond {manifest.version}, which is newer than this one ({diamond.__version__})",
            hint="install that version, or a newer one, and restore with it",
        ) from error
    # All in one transaction, which both databases allow for tables too: it is the old state or the new one.
    with database.engine.execution_options(diamond_write=True).begin() as connection:
        config.attributes["connection"] = connection
        _reflect(connection).drop_all(connection)
        connection.execute(sa.text(f"DROP TABLE IF EXISTS {_VERSION_TABLE}"))
        command.upgrade(config, manifest.revision)
        tables = _reflect(connection)
        for table in reversed(tables.sorted_tables):
            if connection.execute(sa.select(table).limit(1)).first():
                connection.execute(table.delete())  # what the migration itself put there
        for table in tables.sorted_tables:
            if table.name in manifest.tables:
                progress(f"table {table.name}", 0, 0)
                rows = _load_table(connection, table, staging / "tables" / f"{table.name}.jsonl")
                if rows != manifest.tables[table.name]:
                    raise InvalidInput(f"table {table.name} has {rows} rows instead of {manifest.tables[table.name]}")
        if not database.is_sqlite:
            _advance_sequences(connection, tables)
        connection.execute(
            sa.text("UPDATE meta SET value = :epoch WHERE key = 'epoch'"), {"epoch": secrets.token_hex(8)}
        )
        # Who was online then need not be now; each is when it is heard from.
        connection.execute(sa.text("UPDATE endpoints SET last_seen_at = NULL"))
        command.upgrade(config, "head")


def _load_table(connection: sa.Connection, table: sa.Table, path: Path) -> int:
    binary = [column.name for column in table.columns if isinstance(column.type, sa.LargeBinary)]
    batch: list[dict[str, Any]] = []
    count = 0
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            for name in binary:
                row[name] = base64.b64decode(row[name]) if row[name] is not None else None
            batch.append(row)
            count += 1
            if len(batch) == _BATCH:
                connection.execute(table.insert(), batch)
                batch.clear()
    if batch:
        connection.execute(table.insert(), batch)
    return count


def _advance_sequences(connection: sa.Connection, tables: sa.MetaData) -> None:
    """Rows came with their numbers; the next one PostgreSQL hands out must be a new one."""
    for table in tables.sorted_tables:
        for column in table.primary_key.columns:
            if isinstance(column.type, sa.Integer):
                where = {"table": table.name, "column": column.name}
                sequence = connection.execute(sa.text("SELECT pg_get_serial_sequence(:table, :column)"), where).scalar()
                highest = connection.execute(sa.select(sa.func.max(column))).scalar()
                if sequence and highest:
                    connection.execute(sa.text("SELECT setval(:name, :value)"), {"name": sequence, "value": highest})


def _silent(_what: str, _done: int, _total: int) -> None:
    pass
