"""Commands about images that are there: ls, show, logs, stop, test, share, rm, prune, bases."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from diamond.cli import image_page, live, render
from diamond.cli.image_build import BuildView
from diamond.cli.logs import write
from diamond.cli.session import confirm, connect, emit, leave, program, say, task_json
from diamond.core.errors import Conflict, InvalidInput
from diamond.core.images import Image, ReplicaState

if TYPE_CHECKING:
    from diamond.core.image_views import EndpointImages
    from diamond.sdk.client import Client


_LOOK_AT = 200  # as many images as one page of the list has


def ls(*, everything: bool, infra: str | None, as_json: bool) -> None:
    with connect() as client:
        found = list(client.images.list(endpoint=infra, everything=everything))
        there = client.images.at(infra) if infra else None
        shown = {image.id for image in found}
        # A failed build hides behind an older image of its name that works: worth a word, not a row.
        older = client.images.list(endpoint=infra, everything=True) if not (everything or as_json) else ()
        failed = [one for one in islice(older, _LOOK_AT) if one.state is ReplicaState.FAILED and one.id not in shown]
    if as_json:
        emit({"images": found, **({"endpoint": there} if there else {})})
        return
    if not found:
        say(f"No images{' there' if infra else ''}. Build one: {program()} image build image.yaml")
    else:
        _table(found, infra)
    if failed:
        names = ", ".join(dict.fromkeys(render.clean(image_page.full_name(one)) for one in failed[:5]))
        say(f"{render.count(len(failed), 'build')} that failed not shown ({names}): {program()} image ls -a")
    if there is not None:
        say(_room(there))


def _table(found: list[Image], infra: str | None) -> None:
    rows = []
    for image in found:
        shown = image_page.replica_at(image, infra) if infra else image_page.best(image)
        facts = shown.facts if shown else None
        places = [one.endpoint for one in image.replicas if one.state is ReplicaState.READY]
        places = places or ([shown.endpoint] if shown else [])
        rows.append(
            (
                render.clean(image_page.full_name(image)),
                str(shown.state if shown else image.state),
                render.clean(", ".join(places)),
                render.size(facts.size_bytes) if facts and facts.size_bytes else "",
                render.clean(facts.builder if facts else ""),
                str(image.visibility) if image.is_mine else "shared",
                render.ago(image.created_at),
                image_page.short_digest(facts.digest if facts else ""),
                image.id,
            )
        )
    render.print_table(
        ("NAME", "STATE", "AT", ">SIZE", "BUILDER", "VISIBLE", "CREATED", "DIGEST", "ID"),
        rows,
        flexible={"NAME": 16, "AT": 12},
        droppable=("ID", "DIGEST", "VISIBLE", "BUILDER", "CREATED", "SIZE"),
    )


def _room(there: EndpointImages) -> str:
    kept = f", kept steps of builds {render.size(there.layer_bytes)}" if there.layer_bytes else ""
    where = f" in {render.clean(there.root)}" if there.root else ""
    return f"{render.clean(there.endpoint)}{where}: images {render.size(there.image_bytes)}{kept}"


def show(ref: str, *, as_json: bool) -> None:
    with connect() as client:
        found = client.images.get(ref)
        making = [one for one in found.replicas if one.state is ReplicaState.BUILDING and not as_json]
        progress = {one.endpoint: client.images.progress(found.id, endpoint=one.endpoint) for one in making}
    emit(found) if as_json else image_page.print_page(found, progress)


def stop(ref: str, *, infra: str | None, as_json: bool) -> None:
    with connect() as client:
        image = client.images.get(ref)
        name = render.clean(image_page.full_name(image))
        making = [one for one in image.replicas if one.state is ReplicaState.BUILDING and one.task_id]
        making = [one for one in making if infra in (None, one.endpoint)]
        tasks = [client.tasks.cancel(one.task_id) for one in making]
    if as_json:
        emit({"tasks": [task_json(task) for task in tasks]})
        return
    if not tasks:
        where = f" at {render.clean(infra)}" if infra else ""
        say(f"{name} is not being made{where}: {image.state}")
    for replica, task in zip(making, tasks, strict=True):
        word = "stopped" if task.state.is_final else "stopping"
        print(f"{word} the making of {name} at {render.clean(replica.endpoint)} ({task.id})")


def logs(ref: str, *, follow: bool, infra: str | None, as_json: bool) -> None:
    with connect(patient=follow) as client:
        task_id = client.images.task_id(ref, endpoint=infra)
        if follow:
            task = client.tasks.get(task_id)
            code, _ = live.watch(client, task, as_json=as_json, summary=False, terminal=BuildView)
            leave(code)
        task = client.tasks.get(task_id)
        if not task.jobs:
            say(f"{render.clean(task.name)} is {task.state}; it has no log yet. {render.clean(task.pending_reason)}")
            pieces: list[bytes] = []
        else:
            pieces = list(client.tasks.logs(task_id))
        if as_json:
            emit({"task_id": task_id, "text": b"".join(pieces).decode(errors="replace")})
            return
        write(pieces)


def test(ref: str, command: str | None, *, infra: str | None, as_json: bool) -> None:
    with connect(patient=True) as client:
        task = client.images.test(ref, command, endpoint=infra)
        if not as_json:
            say(f"Launched {render.clean(task.name)} ({task.id})")
        leave(live.follow(client, task, as_json=as_json))


def share(ref: str, chosen: list[str], project: str | None = None, *, as_json: bool) -> None:
    if len(chosen) != 1:
        if not chosen:
            raise InvalidInput(
                "say who may use it", hint="give --private, --project NAME or --public", field="--public"
            )
        both = " and ".join(f"--{name}" for name in chosen)
        raise InvalidInput(f"{both} exclude each other", hint="give one of them", field=f"--{chosen[-1]}")
    with connect() as client:
        image = client.images.share(ref, chosen[0], project=project)
    if as_json:
        emit(image)
        return
    name = render.clean(image.name)
    if chosen[0] == "private":
        print(f"{name} is for you alone")
        return
    members = f"the members of project {render.clean(image.project)}"
    who = {"project": members, "public": "every user of this server"}[chosen[0]]
    print(f"{name} can be used by {who} as {render.clean(image.owner)}/{name}")


def remove(ref: str, *, infra: str | None, force: bool, yes: bool, as_json: bool) -> None:
    with connect() as client:
        image = client.images.get(ref)
        name = render.clean(image_page.full_name(image))
        if image.used_by and not force:
            if as_json or not confirm(_question(client, image), yes=False):
                raise Conflict(
                    f"image {name} is used by {render.count(len(image.used_by), 'task')} that "
                    f"{'has' if len(image.used_by) == 1 else 'have'} not ended: {', '.join(image.used_by[:5])}",
                    hint="stop them first, or give --force: then they fail",
                )
            force = True
        elif not as_json and not confirm(f"Remove {name}{_everywhere(image, infra)}?", yes=yes or force):
            say("Nothing was removed; -y removes without asking.")
            leave(1)
        done = client.images.remove(image.id, endpoint=infra, force=force)
    if as_json:
        emit(done)
        return
    print(f"removed {name}{_everywhere(image, infra)}")
    if older := done.get("remains"):
        print(f"{name} now means an older image ({render.clean(str(older))})")


def _question(client: Client, image: Image) -> str:
    for task_id in image.used_by[:10]:
        task = client.tasks.get(task_id)
        say(f"  {task.id}  {task.state}  {render.clean(task.name)}")
    number = render.count(len(image.used_by), "task")
    return f"{render.clean(image.name)} is used by {number}, which will fail. Remove it all the same?"


def _everywhere(image: Image, infra: str | None) -> str:
    if infra:
        return f" at {render.clean(infra)}"
    places = [one.endpoint for one in image.replicas if one.state in (ReplicaState.READY, ReplicaState.BUILDING)]
    return f" at {render.clean(', '.join(places))}" if places else ""


def prune(infra: str, *, yes: bool, as_json: bool) -> None:
    with connect(patient=True) as client:
        before = client.images.at(infra)
        if not as_json and not confirm(f"{_room(before)}. Remove steps that no image needs?", yes=yes):
            say("Nothing was removed; -y removes without asking.")
            leave(1)
        task = client.images.prune(infra)
        if as_json:
            task = client.tasks.wait(task.id)
            emit({"task": task_json(task), "before": before, "after": client.images.at(infra)})
            leave(0 if task.state == "SUCCEEDED" else 1)
        leave(live.follow(client, task, as_json=False, summary=False))


def bases(infra: str | None, *, as_json: bool) -> None:
    with connect() as client:
        found = client.images.bases(infra)
    if as_json:
        emit({"bases": found})
        return
    rows = [
        tuple(render.clean(str(each.get(key) or "")) for key in ("key", "title", "reference", "note")) for each in found
    ]
    render.print_table(
        ("KEY", "WHAT", "REFERENCE", "NOTE"), rows, flexible={"NOTE": 20, "WHAT": 16}, droppable=("NOTE",)
    )
    say("in a recipe: base: suggested:KEY")
