"""Who may have uploaded bytes: who sent them, and who may see what holds them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from diamond.core.bundles import BundleFile, Manifest
from diamond.core.codec import encode
from diamond.core.errors import InvalidInput
from diamond.server.services import bundles, holdings, image_builds, images, ownership, tasks
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from testing.image_agent import ImageAgent
from testing.uploads import upload

DATA = b"print('hello')"


def bundle(ctx: Context, user_id: str, data: bytes = DATA) -> Manifest:
    digest = upload(ctx, user_id, data)
    manifest = Manifest(files=(BundleFile(path="train.py", size_bytes=len(data), digest=digest),))
    assert bundles.register(ctx, encode(manifest), user_id)["complete"]
    return manifest


def reads(ctx: Context, user_id: str, manifest: Manifest) -> tuple[bool, bool]:
    """Whether somebody gets the list, and the file in it."""
    who = Identity(user_id=user_id, name="x")
    return holdings.may_read(ctx, who, manifest.digest), holdings.may_read(ctx, who, manifest.files[0].digest)


def test_giving_twice_is_giving_once(ctx: Context, user_id: str, other_id: str) -> None:
    refs = [f"sha256:{number:064x}" for number in range(5000)]
    assert holdings.give(ctx, user_id, refs[:3000]) == set(refs[:3000])
    assert holdings.give(ctx, user_id, refs) == set(refs[3000:])
    assert holdings.held(ctx, user_id, [*refs, "sha256:" + "f" * 64]) == set(refs)
    assert holdings.held(ctx, other_id, refs) == set()


def test_who_sees_a_task_has_its_files_for_as_long(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    lab("alpha")
    manifest = bundle(ctx, user_id)
    assert (reads(ctx, user_id, manifest), reads(ctx, other_id, manifest)) == ((True, True), (False, False))
    spec = {"run": "python train.py", "workdir": manifest.ref, "project": "lab"}
    with pytest.raises(InvalidInput, match="is not here"):
        tasks.create(ctx, other_id, spec)
    task, _ = tasks.create(ctx, user_id, spec)
    ownership.change_task(ctx, user_id, task.id, visibility="project")
    assert reads(ctx, other_id, manifest) == (True, True)
    ownership.change_task(ctx, user_id, task.id, visibility="private")
    assert reads(ctx, other_id, manifest) == (False, False)
    ownership.change_task(ctx, user_id, task.id, visibility="project")
    again, _ = tasks.create(ctx, other_id, spec)
    ownership.change_task(ctx, user_id, task.id, visibility="private")
    assert reads(ctx, other_id, manifest) == (True, True), "it is in a task of their own now"
    assert again.id != task.id


def test_naming_a_bundle_in_a_text_is_not_having_it(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent, lab: Callable[..., None]
) -> None:
    lab("alpha")
    manifest = bundle(ctx, user_id)
    tasks.create(ctx, other_id, {"run": f"echo {manifest.ref}", "project": "lab", "envs": {"REF": manifest.ref}})
    assert reads(ctx, other_id, manifest) == (False, False)
    with pytest.raises(InvalidInput, match="is not here"):
        tasks.create(ctx, other_id, {"run": "x", "file_mounts": {"data": manifest.ref}, "project": "lab"})


def test_who_may_use_an_image_has_what_went_into_it(
    ctx: Context, user_id: str, other_id: str, agent: ImageAgent
) -> None:
    manifest = bundle(ctx, user_id)
    recipe = {"base": "docker://python:3.12-slim", "name": "env", "files": {"/opt/x": manifest.ref}}
    image_builds.build(ctx, user_id, recipe)
    assert reads(ctx, other_id, manifest) == (False, False)
    images.share(ctx, user_id, "env", "public")
    assert reads(ctx, other_id, manifest) == (True, True)


def test_agents_have_what_their_jobs_need(ctx: Context, user_id: str, agent: ImageAgent) -> None:
    manifest, unused = bundle(ctx, user_id), bundle(ctx, user_id, b"not needed")
    elsewhere = ImageAgent(ctx, user_id, "beta")
    tasks.create(ctx, user_id, {"run": "x", "workdir": manifest.ref, "resources": {"infra": "alpha"}})
    for digest in (manifest.digest, manifest.files[0].digest):
        assert holdings.may_read(ctx, Identity(endpoint_id=agent.id), digest)
        assert not holdings.may_read(ctx, Identity(endpoint_id=elsewhere.id), digest)
    assert not holdings.may_read(ctx, Identity(endpoint_id=agent.id), unused.digest)
