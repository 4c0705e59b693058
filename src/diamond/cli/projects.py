"""Commands about projects: making them, who is in them, what they share; and giving things away."""

from __future__ import annotations

from diamond.cli import render
from diamond.cli.session import confirm, connect, emit, program, say, task_json
from diamond.cli.session import leave as stop_here
from diamond.core.errors import InvalidInput
from diamond.core.projects import Project, Role, Visibility, parse_role

KINDS = ("task", "image", "endpoint", "project")


def create(name: str, title: str, *, as_json: bool) -> None:
    with connect() as client:
        made = client.projects.create(name, title)
    if as_json:
        emit(made)
        return
    say(f"Made project {made.name}. Let others in with: {program()} project add {made.name} USER")


def ls(*, everybody: bool = False, as_json: bool) -> None:
    with connect() as client:
        found = client.projects.list_all() if everybody else client.projects.list()
    if as_json:
        emit({"projects": found})
        return
    rows = [
        (
            render.clean(each.name),
            "your own" if each.personal else str(each.role or ""),
            str(each.num_members),
            render.ago(each.created_at),
            render.clean(each.title),
        )
        for each in found
    ]
    heads = ("NAME", "ROLE", ">MEMBERS", "CREATED", "TITLE")
    render.print_table(heads, rows, flexible={"NAME": 16, "TITLE": 16}, droppable=("CREATED", "TITLE"))


def show(name: str, *, as_json: bool) -> None:
    with connect() as client:
        found = client.projects.get(name)
    if as_json:
        emit(found)
        return
    print_project(found)


def print_project(found: Project) -> None:
    own = "your own project" if found.personal else f"you are {'an' if found.role is Role.OWNER else 'a'} {found.role}"
    print(f"{render.paint(render.clean(found.name), '1')}  {render.clean(found.title)}".rstrip())
    print(f"  {own}; made {render.ago(found.created_at)}")
    print("Members")
    width = max((len(one.user) for one in found.members), default=0)
    for one in found.members:
        print(f"  {render.clean(one.user).ljust(width)}  {one.role!s:<7} {render.clean(one.full_name)}".rstrip())
    _print_shares(found)


def _print_shares(found: Project) -> None:
    approved = [share for share in found.shares if share.approved_at is not None]
    waiting = [share for share in found.shares if share.approved_at is None]
    if approved:
        print("Endpoints shared with it")
    for share in approved:
        by = f", approved by {render.clean(share.approved_by)}" if share.approved_by not in ("", share.owner) else ""
        new = "" if share.proven else "; nothing has run there yet: name it with --infra"
        print(f"  {render.clean(share.endpoint)}  {render.clean(share.owner)}'s{by}{new}")
    if waiting:
        print("Endpoints that wait for an owner of the project")
    for share in waiting:
        print(f"  {render.clean(share.endpoint)}  {render.clean(share.owner)}'s, asked {render.ago(share.asked_at)}")
    if waiting and found.role is Role.OWNER:
        print(f"  {program()} project approve {render.clean(found.name)} ENDPOINT (or: project decline)")


def rename(name: str, title: str, *, as_json: bool) -> None:
    with connect() as client:
        found = client.projects.rename(name, title)
    emit(found) if as_json else say(f"Project {name} is titled: {render.clean(found.title)}")


def set_member(name: str, user: str, role: str, *, as_json: bool) -> None:
    wanted = parse_role(role, "--role")
    with connect() as client:
        found = client.projects.set_member(name, user, wanted)
    article = "an" if wanted is Role.OWNER else "a"
    emit(found) if as_json else say(f"{user} is {article} {wanted} of project {name}.")


def remove_member(name: str, user: str, *, as_json: bool) -> None:
    with connect() as client:
        client.projects.remove_member(name, user)
    emit({"project": name, "removed": user}) if as_json else say(f"{user} is no longer in project {name}.")


def leave(name: str, *, yes: bool, as_json: bool) -> None:
    if not confirm(f"Leave project {name}? An owner of it would have to let you in again.", yes=yes):
        say("Nothing was changed; -y goes on without asking.")
        stop_here(1)
    with connect() as client:
        client.projects.leave(name)
    emit({"project": name, "left": True}) if as_json else say(f"You are no longer in project {name}.")


def remove(name: str, *, yes: bool, as_json: bool) -> None:
    if not confirm(
        f"Remove project {name}? Its secrets go with it; tasks and images go to their owners' own projects.", yes=yes
    ):
        say("Nothing was changed; -y goes on without asking.")
        stop_here(1)
    with connect() as client:
        moved = client.projects.remove(name)
    emit({"project": name, "moved": moved}) if as_json else say(f"Project {name} is gone; {moved} objects went home.")


def share_endpoint(name: str, endpoint: str, *, stop: bool, as_json: bool) -> None:
    with connect() as client:
        if stop:
            found = client.projects.unshare_endpoint(name, endpoint)
        else:
            found = client.projects.share_endpoint(name, endpoint)
            place = client.endpoints.get(endpoint)
    if as_json:
        emit(found)
        return
    if stop:
        say(f"Endpoint {endpoint} is no longer shared with project {name}. What runs there goes on.")
        return
    if endpoint not in found.endpoints:
        owners = ", ".join(render.clean(one.user) for one in found.members if one.role is Role.OWNER)
        say(f"Asked. Tasks of project {name} go to endpoint {endpoint} once one of its owners ({owners}) approves.")
    else:
        say(f"Members of project {name} can send its tasks to endpoint {endpoint}.")
    facts = place.facts
    if facts is None or not (facts.allows_others or facts.allowed_users):
        lines = "`allow_others = true` and `containers_only = true`"
        say(f"Its own policy file still refuses them: put {lines} into policy.toml in its agent's home.")
        say("`diamond endpoint show` says what its agent makes of the file.")


def approve(name: str, endpoint: str, *, yes: bool, as_json: bool) -> None:
    with connect() as client:
        wanted = next((one for one in client.projects.get(name).shares if one.endpoint == endpoint), None)
        owner = wanted.owner if wanted is not None else None  # what is not there, the server says in its own words
        if owner is not None and not confirm(
            f"Let tasks of project {name} go to endpoint {endpoint} of {owner}? {owner} can then read what is sent "
            "there, secrets of members and of the project included.",
            yes=yes,
        ):
            say("Nothing was changed; -y goes on without asking.")
            stop_here(1)
        found = client.projects.approve_endpoint(name, endpoint, owner=owner)
    emit(found) if as_json else say(f"Members of project {name} can send its tasks to endpoint {endpoint}.")


def decline(name: str, endpoint: str, *, as_json: bool) -> None:
    with connect() as client:
        found = client.projects.decline_endpoint(name, endpoint)
    emit(found) if as_json else say(f"Endpoint {endpoint} is not shared with project {name}. Its owner is told.")


def give(kind: str, ref: str, to: str, *, yes: bool, as_json: bool) -> None:
    if kind not in KINDS:
        raise InvalidInput(f"{kind[:40]!r} is none of {', '.join(KINDS)}", field="KIND")
    if not confirm(f"Give {kind} {ref} to {to}? Only they can give it back.", yes=yes):
        say("Nothing was changed; -y goes on without asking.")
        stop_here(1)
    with connect() as client:
        ref = client.tasks.resolve(ref).id if kind == "task" and not ref.startswith("tsk_") else ref
        given = client.projects.transfer(kind, ref, to)
    if as_json:
        emit({"kind": kind, "ref": ref, "owner": given.owner, **({"name": given.name} if given.name else {})})
    else:
        say(f"{kind} {ref} is {given.owner}'s now{f', as {given.owner}/{given.name}' if given.name else ''}.")


def hand_over(user: str, to: str, *, yes: bool, as_json: bool) -> None:
    if not confirm(f"Give all that {user} has to {to}?", yes=yes):
        say("Nothing was changed; -y goes on without asking.")
        stop_here(1)
    with connect() as client:
        given = client.projects.hand_over(user, to)
    if as_json:
        emit(given)
        return
    say(f"{to} has all that was {user}'s: " + ", ".join(f"{count} {kind}" for kind, count in given.items()))


def share_task(ref: str, *, private: bool, project: str | None, public: bool, as_json: bool) -> None:
    wanted = visibility_of(private=private, project=project, public=public)
    with connect() as client:
        task = client.tasks.share(client.tasks.resolve(ref).id, wanted, project=project)
    emit(task_json(task)) if as_json else say(seen_by(f"Task {render.clean(task.name)}", wanted, task.project))


def visibility_of(*, private: bool, project: str | None, public: bool) -> Visibility:
    given = [(private, Visibility.PRIVATE), (project is not None, Visibility.PROJECT), (public, Visibility.PUBLIC)]
    chosen = [visibility for is_given, visibility in given if is_given]
    if len(chosen) != 1:
        raise InvalidInput("say one of --private, --project NAME, --public", field="--private")
    return chosen[0]


def seen_by(what: str, wanted: Visibility, project: str) -> str:
    whom = {
        Visibility.PRIVATE: "its owner alone",
        Visibility.PROJECT: f"the members of project {render.clean(project)}",
        Visibility.PUBLIC: "everybody with an account here",
    }
    return f"{what} is seen by {whom[wanted]}."
