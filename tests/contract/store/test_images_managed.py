"""Looking through images, choosing where to build, and images as files, on every database."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diamond.core.errors import DigestMismatch, InvalidInput, NotFound, QuotaExceeded
from diamond.core.image_views import Build
from diamond.core.imagefile import look_through
from diamond.core.quotas import Limits
from diamond.core.recipes import Recipe
from diamond.server.services import (
    build_places,
    image_builds,
    image_copies,
    image_files,
    image_search,
    images,
    quotas,
    tasks,
)
from diamond.server.services.context import Context
from diamond.server.services.image_search import Filters
from testing.image_agent import ImageAgent


def build(ctx: Context, user_id: str, agent: ImageAgent, name: str, *, ends: bool = True, **more: Any) -> Build:
    recipe = {"name": name, "base": "docker://python:3.13-slim", "pip": [f"package-{name}"]}
    made, _ = image_builds.build(ctx, user_id, recipe, endpoint=agent.name, **more)
    if ends:
        agent.finish(next(order for order in agent.orders() if order.task_id == made.task_id))
    return made


def names(ctx: Context, user_id: str, page: int = 1, size: int = 50, **filters: Any) -> list[str]:
    found = image_search.search(ctx, user_id, Filters(**filters), page=page, size=size)
    return [image.name for image in found.images]


def test_a_list_is_searched_filtered_and_sorted(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    beta = ImageAgent(ctx, user_id, "beta")
    build(ctx, user_id, agent, "Torch")
    build(ctx, user_id, beta, "jax")
    build(ctx, user_id, agent, "half_done", ends=False)
    failing = build(ctx, user_id, beta, "failing", ends=False)
    beta.fail(next(order for order in beta.orders() if order.task_id == failing.task_id))
    assert names(ctx, user_id) == ["failing", "half_done", "jax", "Torch"]
    assert names(ctx, user_id, sort="oldest")[0] == "Torch"
    assert names(ctx, user_id, sort="name") == ["failing", "half_done", "jax", "Torch"]
    assert names(ctx, user_id, sort="size")[:2] == ["jax", "Torch"]
    assert names(ctx, user_id, text="TOR") == ["Torch"]
    assert names(ctx, user_id, text="_") == ["half_done"]  # not a pattern
    assert names(ctx, user_id, text="%") == []
    assert names(ctx, user_id, text="\x00") == names(ctx, user_id)
    assert names(ctx, user_id, state="READY") == ["jax", "Torch"]
    assert names(ctx, user_id, state="BUILDING") == ["half_done"]
    assert names(ctx, user_id, state="FAILED") == ["failing"]
    assert names(ctx, user_id, endpoint="alpha") == ["half_done", "Torch"]
    assert names(ctx, user_id, endpoint="beta", state="READY") == ["jax"]
    assert names(ctx, user_id, endpoint="nowhere") == []
    assert names(ctx, user_id, visibility="public") == []
    assert names(ctx, user_id, whose="others") == []
    second = image_search.search(ctx, user_id, Filters(), page=2, size=3)
    assert ([image.name for image in second.images], second.total, second.pages) == (["Torch"], 4, 2)
    assert image_search.search(ctx, user_id, Filters(), page=99, size=3).page == 2


def test_of_a_name_the_newest_and_who_uses_it(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    old = build(ctx, user_id, agent, "env")
    new, _ = image_builds.build(ctx, user_id, {"name": "env", "base": "docker://python:3.13-slim"}, endpoint="alpha")
    agent.finish(next(order for order in agent.orders() if order.task_id == new.task_id))
    assert names(ctx, user_id) == ["env"]
    assert names(ctx, user_id, everything=True) == ["env", "env"]
    for _ in range(2):
        tasks.create(ctx, user_id, {"run": "true", "resources": {"image_id": new.image.id}})
    found = image_search.search(ctx, user_id, Filters(everything=True))
    assert found.used == {new.image.id: 2} and old.image.id not in found.used


def test_others_see_what_is_shared(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    build(ctx, user_id, agent, "mine")
    shared = build(ctx, user_id, agent, "ours", project="lab", visibility="project")
    assert names(ctx, other_id) == ["ours"]
    assert names(ctx, other_id, whose="others") == ["ours"] and names(ctx, other_id, whose="mine") == []
    assert image_search.search(ctx, other_id, Filters()).used == {}
    assert image_search.may_change(ctx, user_id, shared.image.id)
    assert not image_search.may_change(ctx, other_id, shared.image.id)
    lock, where = image_search.packages(ctx, other_id, shared.image.id)
    assert lock is not None and lock.of_kind("pip") == {"numpy": "2.3.4"}
    assert where == images.ELSEWHERE  # its endpoint is not shared with them
    with pytest.raises(NotFound):
        image_search.packages(ctx, other_id, "mine")


def test_where_one_can_build(ctx: Context, user_id: str, other_id: str, agent: ImageAgent) -> None:
    ImageAgent(ctx, user_id, "gamma", builds="off")
    ImageAgent(ctx, user_id, "empty", builders=())
    found = [place for place in build_places.places(ctx, user_id) if place.name != "local"]
    assert [place.name for place in found] == ["alpha", "empty", "gamma"]
    assert found[0].problem == "" and found[0].root == "/images" and found[0].builders == ("apptainer", "venv")
    assert "policy" in found[2].problem and found[1].problem
    assert build_places.places(ctx, other_id) == []


def test_what_to_think_of_beforehand(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    place = build_places.places(ctx, user_id)[0]
    loose = Recipe(base="docker://python", pip=("numpy", "torch==2.9.1"))
    said = " ".join(build_places.warnings(loose, place))
    assert "(numpy)" in said and "no fixed tag" in said and "no validation command" in said
    exact = Recipe(base="docker://python:3.13-slim", pip=("torch==2.9.1",), test="true")
    assert build_places.warnings(exact, place) == []
    ctx.clock.advance(3600)  # type: ignore[attr-defined]
    place = build_places.places(ctx, user_id)[0]
    assert "offline" in build_places.warnings(exact, place)[0]


def test_an_image_goes_out_and_comes_in(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    made = build(ctx, user_id, agent, "env")
    ref = made.image.id
    assert image_files.exporting(ctx, user_id, ref).state == "none"
    with pytest.raises(NotFound):
        image_files.download(ctx, user_id, ref)
    task = image_copies.export(ctx, user_id, ref)
    running = image_files.exporting(ctx, user_id, ref)
    assert (running.state, running.task_id) == ("running", task.id)
    agent.finish(next(order for order in agent.orders() if order.task_id == task.id))
    assert image_files.exporting(ctx, user_id, ref).state == "ready"
    got = image_files.download(ctx, user_id, ref)
    data = b"".join(got.pieces)
    assert (got.name, got.size_bytes) == ("env.diamond.tar", len(data))
    with pytest.raises(NotFound):
        image_files.download(ctx, other_id, ref)

    lab("alpha")
    taken, is_new = image_files.take_in(
        ctx, other_id, io.BytesIO(data), "C:\\x\\env.tar", endpoint="alpha", name="given"
    )
    assert is_new and (taken.image.name, taken.how) == ("given", "imported")
    order = next(order for order in agent.orders() if order.task_id == taken.task_id)
    assert order.work is not None and order.work.action == "import"
    found = look_through(io.BytesIO(data), Path("x"))
    assert ctx.blobs.has(f"sha256:{found.contents.payload.sha256}")


def test_what_is_no_export_is_refused_before_anything_is_kept(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    made = build(ctx, user_id, agent, "env")
    task = image_copies.export(ctx, user_id, made.image.id)
    agent.finish(next(order for order in agent.orders() if order.task_id == task.id))
    data = b"".join(image_files.download(ctx, user_id, made.image.id).pieces)
    for bad, kind in (
        (b"", InvalidInput),
        (b"not a tar" * 100, InvalidInput),
        (data[:-3000], InvalidInput),
        (data.replace(b"payload of", b"PAYLOAD of"), DigestMismatch),
    ):
        with pytest.raises(kind) as refused:
            image_files.take_in(ctx, user_id, io.BytesIO(bad), "../../etc/evil\x07.tar")
        assert (
            refused.value.field == "file"
            and "evil.tar" in refused.value.message
            and "/etc" not in refused.value.message
        )
    with pytest.raises(InvalidInput) as refused:
        image_files.take_in(ctx, user_id, io.BytesIO(data), "x.tar", name="no/name")
    assert refused.value.field == "name"
    with pytest.raises(InvalidInput) as refused:
        image_files.take_in(ctx, user_id, io.BytesIO(data), "x.tar", endpoint="nowhere", name="new")
    assert refused.value.field == "endpoint"


def test_a_file_needs_room(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    lab("alpha")
    made = build(ctx, user_id, agent, "env")
    task = image_copies.export(ctx, user_id, made.image.id)
    agent.finish(next(order for order in agent.orders() if order.task_id == task.id))
    data = b"".join(image_files.download(ctx, user_id, made.image.id).pieces)
    quotas.set_limits(ctx, "user", "other", Limits(storage_bytes=3))
    with pytest.raises(QuotaExceeded):
        image_files.take_in(ctx, other_id, io.BytesIO(data), "x.tar", endpoint="alpha")
