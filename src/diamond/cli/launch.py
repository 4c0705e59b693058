"""`diamond launch`: from a task file to a followed task."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diamond.cli import browser, render
from diamond.cli import spec as spec_text
from diamond.cli.session import connect, emit, leave, program, say, task_json
from diamond.core.codec import encode
from diamond.core.errors import InvalidInput
from diamond.core.fields import parse_name
from diamond.core.tasks import TaskSpec

if TYPE_CHECKING:
    from diamond.sdk.client import Client
    from diamond.sdk.folders import Progress


_SLURM = ("partition", "account", "qos", "constraint", "reservation", "time")
_NUMBERS = re.compile(r"\d+(\.\.\d+)?")  # of GPUs of any type


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What the command line says instead of the file. None: as in the file."""

    name: str | None = None
    project: str | None = None
    pool: str | None = None
    workdir: str | None = None
    num_nodes: int | None = None
    ranks_per_node: int | None = None
    max_duration: str | None = None
    priority: int | None = None
    infra: str | None = None
    cpus: str | None = None
    memory: str | None = None
    gpus: str | None = None
    slots: str | None = None
    image_id: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    time: str | None = None
    secret: tuple[str, ...] = ()

    def applied(self, raw: dict[str, Any]) -> dict[str, Any]:
        top = ("name", "project", "pool", "num_nodes", "ranks_per_node", "max_duration", "priority")
        found = dict(raw) | {key: value for key in top if (value := getattr(self, key)) is not None}
        if self.workdir is not None:
            found["workdir"] = os.path.abspath(os.path.expanduser(self.workdir))
        wanted: dict[str, Any] = {key: getattr(self, key) for key in ("infra", "cpus", "memory", "image_id", "slots")}
        wanted["accelerators"] = f"gpu:{self.gpus}" if _NUMBERS.fullmatch(self.gpus or "") else self.gpus
        given = {key: value for key, value in wanted.items() if value is not None}
        if self.image_id is not None:
            found.pop("image", None)  # named instead of described
        resources = found.get("resources") or {}
        if given and isinstance(resources, dict):
            found["resources"] = {**resources, **given}
        said = {key: value for key in _SLURM if (value := getattr(self, key)) is not None}
        slurm = found.get("slurm") or {}
        if said and isinstance(slurm, dict):
            found["slurm"] = {**slurm, **said}
        if self.secret:
            found["secrets"] = _with_secrets(found.get("secrets"), self.secret)
        return found

    def option_for(self, field: str) -> str:
        """The option that gave a field of the spec its value; empty when it stands in the file."""
        top, _, variable = field.partition(".")
        if top == "secrets" and (variable in _by_variable(self.secret) if variable else self.secret):
            return "--secret"
        name = field.removeprefix("resources.").removeprefix("slurm.")
        name = {"accelerators": "gpus"}.get(name, name)
        given = name in type(self).__dataclass_fields__ and getattr(self, name) not in (None, ())
        return f"--{name.removesuffix('_id').replace('_', '-')}" if given else ""


def _by_variable(options: Iterable[str]) -> dict[str, str]:
    """``NAME`` or ``VARIABLE=NAME``, as the file's ``secrets:`` would say it."""
    parted = (option.partition("=") for option in options)
    return {variable: name if equals else variable for variable, equals, name in parted}


def _with_secrets(raw: object, options: tuple[str, ...]) -> object:
    """The file's secrets in any of their forms, and those of the command line; nonsense stays for the parser."""
    names = [raw] if isinstance(raw, str) else raw
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return {**{name: name for name in names}, **_by_variable(options)}
    if names is None or isinstance(names, dict):
        return {**(names or {}), **_by_variable(options)}
    return raw


def launch(
    file: str,
    env: list[str],
    changes: Changes,
    *,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    show_page: bool = False,
) -> None:
    spec = read(file, env, changes)
    with connect(patient=True) as client:
        if dry_run:
            with progress_bar("Reading files") as scanning:
                plan = client.tasks.plan(spec, scan_progress=scanning)
            # For people the paths they wrote: nothing has been uploaded.
            local = {"workdir": spec.workdir, "file_mounts": spec.file_mounts, "image": encode(spec.image)}
            emit(plan) if as_json else show_plan(plan, local)
            return
        with progress_bar("Reading files") as scanning, progress_bar("Uploading") as sending:
            task = client.tasks.create(spec, progress=sending, scan_progress=scanning)
        for warning in task.warnings:
            say(f"Note: {render.clean(warning)}")
        if task.endpoint is not None and task.why:
            say(f"It goes to {render.clean(task.endpoint)}: {render.clean('; '.join(task.why))}")
        if show_page:
            browser.open_page(browser.task_page(client.url, task.id))
        if detach:
            emit(task_json(task)) if as_json else _launched(client, task.id, task.name)
            return
        if not as_json:
            say(f"Launched {render.clean(task.name)} ({task.id})")
            say(f"  its page: {browser.task_page(client.url, task.id)}")
        from diamond.cli import live

        leave(live.follow(client, task, as_json=as_json))


def read(file: str, env: list[str], changes: Changes) -> TaskSpec:
    """The file's spec with the command line's changes; errors say where in the file the field stands."""
    from diamond.sdk import taskfile

    found = taskfile.load(file)
    try:
        envs = taskfile.with_envs(found.raw, taskfile.parse_env_options(env))
    except InvalidInput as error:
        raise InvalidInput(error.message, hint=error.hint, field="--env") from error
    raw = changes.applied(envs)
    if changes.image_id is not None and (said := _image_of(found.raw)):
        say(f"--image {render.clean(changes.image_id)} is used instead of the file's {render.clean(said)}")
    if raw.get("name") is None and (name := name_of(file)):
        raw["name"] = name
    # A field that the command line gave stands nowhere in the file.
    overridden = {key for key, value in raw.items() if found.raw.get(key) != value}
    positions = {
        path: place for path, place in found.positions.items() if path.split(".")[0].split("[")[0] not in overridden
    }
    located = taskfile.TaskFile(found.path, raw, positions)
    try:
        return TaskSpec.parse(raw)
    except InvalidInput as error:
        if option := changes.option_for(error.field):
            raise type(error)(error.message, hint=error.hint, field=option) from error
        top = error.field.split(".")[0].split("[")[0]
        if top in overridden and top != "envs" and found.raw.get(top) is None:
            raise
        raise located.located(error) from error


def _image_of(raw: dict[str, Any]) -> str:
    """What a file says of its image, in the words of the file; empty when it says nothing."""
    if raw.get("image") is not None:
        return "`image:`"
    resources = raw.get("resources")
    named = resources.get("image_id") if isinstance(resources, dict) else None
    return f"`image_id: {named}`" if named else ""


def name_of(file: str) -> str | None:
    """A task without a name is called after its file, unless the file's own name says nothing."""
    stem = Path(file).stem
    if stem in ("task", "-", "diamond"):
        stem = Path(file).expanduser().absolute().parent.name if stem != "-" else ""
    try:
        return parse_name(stem)
    except (ValueError, InvalidInput):
        return None


@contextmanager
def progress_bar(title: str) -> Iterator[Progress | None]:
    """A progress bar on a terminal that appears with the first byte, so that a small upload shows nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(title)
    try:
        yield bar.tell
    finally:
        bar.close()


class _Bar:
    def __init__(self, title: str) -> None:
        self._title = title
        self._progress: Any = None
        self._row: Any = None

    def tell(self, done: int, total: int, files: int) -> None:
        if self._progress is None:
            if total < 4 * 1024 * 1024:
                return
            self._start()
        self._progress.update(self._row, completed=done, total=total, files=render.count(files, "file"))

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[files]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._progress.start()
        self._row = self._progress.add_task(self._title, total=None, files="")

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


def _launched(client: Client, task_id: str, name: str) -> None:
    print(task_id)
    say(f"Launched {render.clean(name)}.")
    say(f"  follow it:  {program()} logs -f {task_id}")
    say(f"  stop it:    {program()} stop {task_id}")
    say(f"  its page:   {browser.task_page(client.url, task_id)}")


def show_plan(plan: dict[str, Any], local: dict[str, Any]) -> None:
    """A dry run for people. `local`: fields of the spec as this machine has them.

    The long parts come first, so that where and why stand at the end, where a terminal shows them.
    """
    if plan.get("script"):
        _head("Job script")
        _print_text(plan["script"])
    if plan.get("envs"):
        _head("Environment")
        for key, value in plan["envs"].items():
            print(f"  {render.clean(key)}={render.clean(value)}")
    for name, text in (plan.get("files") or {}).items():
        _head(render.clean(name))
        _print_text(text)
    _head("Spec")
    for line in spec_text.lines((plan.get("spec") or {}) | local, without=("run", "setup")):
        print(f"  {line}")
    if image := plan.get("image"):
        _head("Image")
        print(f"  {render.clean(image['name'])}" + (f"  {image['image_id']}" if image.get("image_id") else ""))
        if image.get("why"):
            print(f"  - {render.clean(image['why'])}")
        if use := image.get("use"):
            print(f"  - {render.clean(use['kind'])}: {render.clean(use['path'])}")
    endpoint = plan.get("endpoint")
    _head("Where")
    print(f"  {render.clean(endpoint) if endpoint else 'nowhere at present'}")
    for sentence in plan.get("why") or ():
        print(f"  - {render.clean(sentence)}")
    if (jobs := plan.get("jobs") or 1) > 1:
        limit = render.written_duration(plan.get("time_limit_s") or 0)
        print(f"  - one job may run for {limit} there, less than max_duration: about {jobs} jobs, one after the other.")
        print("    Save your state when warned (SIGUSR1), and exit with code 85 to go on in the next")
    if plan.get("waits") and endpoint:
        print(f"  - it waits at first: {render.clean(plan['waits'])}")
    for warning in plan.get("warnings") or ():
        print(f"  - note: {render.clean(warning)}")
    for name, why in (plan.get("others") or {}).items():
        print(f"  - not {render.clean(name)}: {render.clean(why)}")


def _head(title: str) -> None:
    print(render.paint(title, "1"))


def _print_text(text: str) -> None:
    for line in render.clean_block(text).rstrip("\n").split("\n"):
        print(f"  {line}".rstrip())
