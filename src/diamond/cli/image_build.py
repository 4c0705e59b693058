"""`diamond image build` and `copy`: from a recipe to an image that is ready, with log and stages on the way.

Also `definition`, which shows what a builder would be given.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diamond.cli import image_page, live, render
from diamond.cli.launch import progress_bar
from diamond.cli.session import connect, emit, leave, program, say
from diamond.core.errors import InvalidInput
from diamond.core.images import STAGE_DONE_LINE, STAGE_LINE, ReplicaState
from diamond.core.recipes import Recipe, parse_image_name

if TYPE_CHECKING:
    from diamond.core.image_views import Build
    from diamond.core.images import Image
    from diamond.sdk.client import Client

_SETTLE_S = 20.0  # how long a finished task may take to become an image, or not


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says besides the file. Packages are added to the file's, the rest replaces it."""

    name: str | None = None
    base: str | None = None
    pip: tuple[str, ...] = ()
    system: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    infra: str | None = None
    where: str | None = None
    fresh: bool = False


def build(file: str | None, options: Options, *, detach: bool, dry_run: bool, as_json: bool) -> None:
    if options.where not in (None, "login", "batch", "auto"):
        raise InvalidInput(f"{options.where!r} is not one of login, batch", field="--where")
    recipe = read(file, options)
    with connect(patient=True) as client:
        if dry_run:
            plan = client.images.plan(recipe, endpoint=options.infra, where=options.where)
            emit(plan) if as_json else image_page.print_plan(plan, recipe)
            return
        with progress_bar("Reading files") as scanning, progress_bar("Uploading") as sending:
            made = client.images.build(
                recipe, endpoint=options.infra, where=options.where, fresh=options.fresh,
                progress=sending, scan_progress=scanning,
            )  # fmt: skip
        leave(see_through(client, made, detach=detach, as_json=as_json, renamed=made.image.name != recipe.name))


def copy(ref: str, endpoint: str, *, detach: bool, as_json: bool) -> None:
    with connect(patient=True) as client:
        made = client.images.copy(ref, endpoint)
        leave(see_through(client, made, detach=detach, as_json=as_json))


def read(file: str | None, options: Options) -> Recipe:
    """The file's recipe with the command line's changes; errors say where in the file the field stands."""
    from diamond.sdk import recipefile, taskfile

    if file is None and options.base is None:
        raise InvalidInput(
            "say what to build", hint="give a recipe, e.g. diamond image build image.yaml, or --base", field="FILE"
        )
    found = recipefile.load(file) if file is not None else recipefile.RecipeFile("", {})
    try:
        envs = taskfile.parse_env_options(list(options.env))
    except InvalidInput as error:
        raise InvalidInput(error.message, hint=error.hint, field="--env") from error
    raw = recipefile.changed(
        found.raw, name=options.name, base=options.base, pip=options.pip, system=options.system, envs=envs
    )
    if raw.get("base") is None and file is not None:
        is_list = not found.positions  # requirements.txt and its like, where a base has no place
        add = (
            "give --base, e.g. --base python:3.12-slim"
            if is_list
            else "add  base: docker://python:3.12-slim  to it, or give --base"
        )
        recipe = f"; or write a recipe, image.yaml, with  base: …  and  {list_field(file)}" if is_list else ""
        raise InvalidInput(
            f"{found.path} {'lists packages but ' if is_list else ''}does not say what the image starts from",
            hint=f"{add} (--base host: a virtual environment, without containers){recipe}; suggestions: "
            f"{program()} image bases",
            field="--base" if is_list else "base",
        )
    if raw.get("name") is None and file is not None and (name := name_of(file)):
        raw["name"] = name
    try:
        return Recipe.parse(raw)
    except InvalidInput as error:
        top = error.field.split(".")[0].split("[")[0]
        given = {"name": options.name, "base": options.base, "pip": options.pip, "system": options.system, "envs": envs}
        if given.get(top) and (top in ("name", "base") or not found.raw.get(top)):
            option = {"envs": "--env"}.get(top, f"--{top}")
            raise type(error)(error.message, hint=error.hint, field=option) from error
        raise (found.located(error) if found.positions else error) from error


def list_field(file: str) -> str:
    """How a recipe names this list of packages: ``requirements: requirements.txt``."""
    from diamond.sdk.recipefile import list_kind

    name = Path(file).name
    return f"{kind}: {name}" if (kind := list_kind(name)) else "requirements: requirements.txt"


def name_of(file: str) -> str | None:
    """An image without a name is called after its file, or its folder where the file's own name says nothing."""
    if file == "-":
        return None
    path = Path(file).expanduser().absolute()
    says_nothing = path.is_dir() or path.stem in ("image", "recipe", "environment", "requirements", "pyproject")
    stem = (path.name if path.is_dir() else path.parent.name) if says_nothing else path.stem
    try:
        return parse_image_name(stem)
    except ValueError:
        return None


def see_through(client: Client, made: Build, *, detach: bool, as_json: bool, renamed: bool = False) -> int:
    """Follow what makes an image until it is ready or not, and say how it went; gives the exit code.

    `renamed`: a recipe without this name was asked for, and one with the same contents is there.
    """
    name, endpoint = image_page.full_name(made.image), made.replica.endpoint
    if made.cached:
        emit(made) if as_json else image_page.say_ready(made.image, made.replica, cached=True, renamed=renamed)
        return 0
    if detach or not made.task_id:
        if as_json:
            emit(made)
            return 0
        print(made.image.id)
        say(_begun(made))
        say(f"  follow it:  {program()} image logs -f {name} --infra {render.clean(endpoint)}")
        say(f"  stop it:    {program()} image stop {name}")
        return 0
    if not as_json:
        say(_begun(made))
    task = client.tasks.get(made.task_id)
    code, last = live.watch(client, task, as_json=as_json, summary=False, terminal=BuildView)
    if not last.state.is_final:  # the person left; that has been said
        return code
    image = settled(client, made.image.id, endpoint)
    replica = image_page.replica_at(image, endpoint)
    if as_json:
        emit({"type": "image", "image": image}, line=True)
    elif replica is not None and replica.state is ReplicaState.READY:
        image_page.say_ready(image, replica)
    else:
        image_page.say_failed(image, replica, last)
    return 0 if replica is not None and replica.state is ReplicaState.READY else code or 1


_VERBS = {
    "built": "Building",
    "rebuilt": "Rebuilding",
    "copied": "Copying",
    "linked": "Taking over",
    "imported": "Importing",
    "waiting": "Already being made:",
}


def _begun(made: Build) -> str:
    """``Building climate at cluster-a``; where there was a choice of ways, also why this one."""
    place = "to" if made.how in ("copied", "imported") else "at"
    text = f"{_VERBS.get(made.how, 'Making')} {image_page.full_name(made.image)} {place} {made.replica.endpoint}"
    why = "; ".join(made.why) if made.how in ("rebuilt", "copied", "linked") else ""
    return render.clean(f"{text}: {why}" if why else text)


def settled(client: Client, image_id: str, endpoint: str, sleep: Callable[[float], None] = time.sleep) -> Image:
    """The image once the server has read what its task left, which follows the task's end within moments."""
    ends_at = time.monotonic() + _SETTLE_S
    delay_s = 0.1
    while True:
        image = client.images.get(image_id)
        replica = image_page.replica_at(image, endpoint)
        if replica is None or replica.state is not ReplicaState.BUILDING or time.monotonic() > ends_at:
            return image
        sleep(delay_s)
        delay_s = min(delay_s * 2, 1.0)


def definition(source: str, *, infra: str | None, as_json: bool) -> None:
    is_file = source in ("-", ".") or os.path.exists(os.path.expanduser(source)) or source.endswith((".yaml", ".yml"))
    recipe = read(source, Options()) if is_file else None
    with connect() as client:
        if recipe is None:
            recipe = client.images.get(source).recipe
            assert recipe is not None
        plan = client.images.plan(recipe, endpoint=infra)
    if as_json:
        emit({"builder": plan.builder, "endpoint": plan.endpoint, "definition": plan.definition})
        return
    if not plan.definition:
        others = "; ".join(f"{name}: {why}" for name, why in plan.others.items())
        raise InvalidInput(f"no endpoint can build this recipe ({others})" if others else "no endpoint can build this")
    print(render.clean_block(plan.definition).rstrip("\n"))


class BuildView(live.LiveView):
    """A build in the terminal: its stages as headings in the log, and how far it is below."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._number, self._total, self._title = 0, 0, ""
        self._since = 0.0
        super().__init__()

    def _shown(self, line: str) -> str:
        text = line.rstrip("\r")
        if begun := STAGE_LINE.fullmatch(text):
            self._number, self._total, self._title = int(begun[1]), int(begun[2]), render.clean(begun[4])
            self._since = self._clock()
            return render.paint(f"── {self._number}/{self._total} {self._title} ──", "1")
        if done := STAGE_DONE_LINE.fullmatch(text):
            spent = image_page.seconds(float(done[3]))
            words, colour = {
                "kept": ("kept from an earlier build", "2"),
                "failed": (f"failed after {spent}", "31"),
            }.get(done[2], (f"done in {spent}", "32"))
            return render.paint(f"   {words}", colour)
        return super()._shown(line)

    def _below(self, width: int) -> list[str]:
        if not self._total:
            return []
        spent = render.format_duration(self._clock() - self._since)
        bar = render.gauge((self._number - 1) / self._total, min(20, max(5, width // 6)))
        return [f"{bar} {self._number}/{self._total} {self._title} · {spent}"]
