"""Templates on every database: who sees, uses, changes and removes them, and what becomes of their files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound
from diamond.core.projects import Visibility
from diamond.server.services import gallery, holdings, ownership, projects, tasks, templates, uploads
from diamond.server.services.context import Context
from diamond.server.store.models import UserRow

SPEC = {"run": "echo", "num_nodes": 2, "envs": {"VERSION": "1.10"}}


def test_saved_found_changed_and_removed(ctx: Context, user_id: str) -> None:
    made = templates.create(ctx, user_id, " begin ", SPEC, description=" what it does ")
    assert (made.name, made.description, made.version, made.visibility) == ("begin", "what it does", 1, "private")
    assert made.spec == SPEC
    assert templates.get(ctx, user_id, "begin") == templates.get(ctx, user_id, made.id) == made
    changed = templates.change(ctx, user_id, made.id, version=1, name="other", raw_spec={"run": "true"})
    assert (changed.name, changed.spec, changed.version) == ("other", {"run": "true"}, 2)
    assert changed.description == "what it does"
    templates.remove(ctx, user_id, made.id)
    with pytest.raises(NotFound):
        templates.get(ctx, user_id, made.id)


def test_the_later_of_two_changes_is_refused(ctx: Context, user_id: str) -> None:
    made = templates.create(ctx, user_id, "begin", SPEC)
    templates.change(ctx, user_id, made.id, version=1, description="first")
    with pytest.raises(Conflict, match="version 2") as caught:
        templates.change(ctx, user_id, made.id, version=1, description="second")
    assert caught.value.field == "version"
    assert templates.get(ctx, user_id, made.id).description == "first"


def test_what_cannot_be_launched_is_not_saved(ctx: Context, user_id: str) -> None:
    for spec, field in (({"run": ""}, "run"), ({"run": "x", "workdir": "/home/me"}, "workdir"), ([], "")):
        with pytest.raises(InvalidInput) as caught:
            templates.create(ctx, user_id, "begin", spec)
        assert caught.value.field == field
    for name in ("", "  ", "x" * 200, "two\nlines"):
        with pytest.raises(InvalidInput) as caught:
            templates.create(ctx, user_id, name, SPEC)
        assert caught.value.field == "name"
    with pytest.raises(InvalidInput, match="nobody to share"):
        templates.create(ctx, user_id, "begin", SPEC, visibility="project")
    templates.create(ctx, user_id, "begin", SPEC)
    for taken in ("begin", "fine-tune"):
        with pytest.raises(Conflict):
            templates.create(ctx, user_id, taken, SPEC)
    assert templates.list_templates(ctx, user_id)[2] == 1


def test_who_sees_and_changes_them(ctx: Context, user_id: str, other_id: str, lab: Callable[..., None]) -> None:
    own = templates.create(ctx, user_id, "own", SPEC)
    shared = templates.create(ctx, user_id, "shared", SPEC, visibility="project", project="lab")
    public = templates.create(ctx, user_id, "public", SPEC, visibility="public")
    seen = {each.id: each.is_mine for each in templates.list_templates(ctx, other_id)[0]}
    assert seen == {shared.id: False, public.id: False}
    for act in (
        lambda ref: templates.change(ctx, other_id, ref, version=1, name="mine"),
        lambda ref: templates.remove(ctx, other_id, ref),
    ):
        with pytest.raises(NotFound):
            act(own.id)
        for each in (shared, public):
            with pytest.raises(Forbidden):
                act(each.id)
    projects.set_member(ctx, user_id, "lab", "other", "owner")
    assert templates.change(ctx, other_id, shared.id, version=1, description="ours").changed_by == "other"
    with pytest.raises(Forbidden):
        templates.change(ctx, other_id, shared.id, version=2, project="lab")


def test_its_files_come_along(ctx: Context, user_id: str, other_id: str, lab: Callable[..., None]) -> None:
    ref = uploads.change(ctx, user_id, "", {"a.txt": b"one", "run.sh": b"#!/bin/sh\n"})
    spec = {"run": "cat a.txt", "workdir": ref}
    made = templates.create(ctx, user_id, "with files", spec, visibility="private", project="lab")
    with pytest.raises(InvalidInput, match="not here"):
        tasks.checked_spec(ctx, other_id, spec)
    templates.change(ctx, user_id, made.id, version=1, visibility="project")
    assert tasks.checked_spec(ctx, other_id, templates.get(ctx, other_id, made.id).spec).workdir == ref
    assert [item.path for item in uploads.contents(ctx, other_id, ref)] == ["a.txt", "run.sh"]
    less = uploads.change(ctx, other_id, ref, {"b.txt": b"two"}, drop=["a.txt"])
    found = uploads.contents(ctx, other_id, less)
    assert [(item.path, item.executable) for item in found] == [("b.txt", False), ("run.sh", True)]
    assert uploads.change(ctx, other_id, less, {}, drop=["b.txt", "run.sh"]) == ""
    for path in ("../up", "/abs", ""):
        with pytest.raises(InvalidInput):
            uploads.change(ctx, user_id, "", {path: b"x"})


def test_those_of_ours_are_everybodys(ctx: Context, user_id: str, other_id: str) -> None:
    for ours in templates.built_in():
        whole = templates.get(ctx, other_id, ours.id)
        assert whole.builtin
        spec = tasks.checked_spec(ctx, other_id, whole.spec)
        assert spec.workdir is not None
        assert holdings.user_may_read(ctx, user_id, spec.workdir.removeprefix("bundle:"))
        assert uploads.contents(ctx, user_id, spec.workdir)
        with pytest.raises(Forbidden, match="comes with Diamond"):
            templates.change(ctx, user_id, ours.id, version=1, name="x")
    assert not gallery.has("sha256:" + "0" * 64)


def test_pages_and_search(ctx: Context, user_id: str) -> None:
    for number in range(5):
        templates.create(ctx, user_id, f"number {number}", SPEC, description="100% of it")
    first, cursor, total = templates.list_templates(ctx, user_id, limit=3)
    rest, end, _ = templates.list_templates(ctx, user_id, limit=3, cursor=cursor)
    assert (len(first), len(rest), end, total) == (3, 2, None, 5)
    assert [each.name for each in templates.list_templates(ctx, user_id, search="BER 3")[0]] == ["number 3"]
    assert templates.list_templates(ctx, user_id, search="100%")[2] == 5
    assert templates.list_templates(ctx, user_id, search="1%0")[2] == 0
    assert all(each.spec is None for each in first)


def test_they_go_home_with_their_owner(ctx: Context, user_id: str, other_id: str, lab: Callable[..., None]) -> None:
    made = templates.create(ctx, user_id, "shared", SPEC, visibility="project", project="lab")
    projects.remove(ctx, user_id, "lab")
    assert templates.get(ctx, user_id, made.id).visibility is Visibility.PRIVATE
    with pytest.raises(NotFound):
        templates.get(ctx, other_id, made.id)
    with ctx.db.read() as session:
        name = session.get_one(UserRow, user_id).name
    assert ownership.hand_over(ctx, name, "other")["templates"] == 1
    assert templates.get(ctx, other_id, made.id).is_mine
