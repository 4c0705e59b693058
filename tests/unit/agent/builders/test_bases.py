"""What a recipe's base is, found out from its text and the files that are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from diamond.agent.builders.base import BuildContext, BuildProblem, Commands
from diamond.agent.builders.bases import base_key, find_base, not_for, tree_key
from diamond.core.images import ImageWork
from diamond.core.recipes import Recipe


def context(base: str, tmp_path: Path, *, base_path: str = "", base_digest: str = "") -> BuildContext:
    recipe = Recipe.parse({"base": base})
    work = ImageWork(action="build", image_id="img_00000000", base_path=base_path, base_digest=base_digest)
    return BuildContext(
        work=work, recipe=recipe, folder=tmp_path, inputs=tmp_path, tmp=tmp_path, commands=Commands()
    )  # fmt: skip


def test_kinds(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("x.sif", "x.sqfs", "saved.tar"):
        (tmp_path / name).write_bytes(b"")
    for base, kind, where in (
        ("python:3.12", "registry", "python:3.12"),
        (str(folder), "folder", str(folder)),
        (f"{tmp_path}/x.sif", "sif", f"{tmp_path}/x.sif"),
        (f"{tmp_path}/x.sqfs", "squash", f"{tmp_path}/x.sqfs"),
        (f"oci-archive:{tmp_path}/saved.tar", "oci", f"{tmp_path}/saved.tar"),
        (f"docker-archive:{tmp_path}/saved.tar", "docker", f"{tmp_path}/saved.tar"),
    ):
        found = find_base(context(base, tmp_path))
        assert (found.kind, found.where) == (kind, where)


def test_an_image_of_diamond_is_where_the_order_says(tmp_path: Path) -> None:
    ctx = context("image:mine", tmp_path, base_path="/images/img_1/image", base_digest="sha256:1")
    assert find_base(ctx).where == "/images/img_1/image"
    assert base_key(find_base(ctx), ctx) == "sha256:1"
    with pytest.raises(BuildProblem, match="image:mine is not at this endpoint"):
        find_base(context("image:mine", tmp_path))


@pytest.mark.parametrize("base", ["/not/there", "oci-archive:/not/there.tar"])
def test_a_base_that_is_not_there_is_named(tmp_path: Path, base: str) -> None:
    with pytest.raises(BuildProblem, match="there is no /not/there"):
        find_base(context(base, tmp_path))


@pytest.mark.parametrize("base", ["host", "suggested:pytorch"])
def test_what_is_no_container_is_refused(tmp_path: Path, base: str) -> None:
    with pytest.raises(BuildProblem, match=f"{base} is no base"):
        find_base(context(base, tmp_path))


def test_keys_change_with_the_files_and_not_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    (folder / "etc").mkdir(parents=True)
    (folder / "etc/file").write_text("one")
    (folder / "link").symlink_to("/not/there")
    ctx = context(str(folder), tmp_path)
    first = base_key(find_base(ctx), ctx)
    assert base_key(find_base(ctx), ctx) == first == tree_key(folder)
    (folder / "etc/file").write_text("other")
    second = tree_key(folder)
    (folder / "link").unlink()
    assert len({first, second, tree_key(folder)}) == 3
    registry = context("python:3.12", tmp_path)
    assert base_key(find_base(registry), registry) == ""


def test_the_key_of_a_file_follows_its_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "x.sif"
    path.write_bytes(b"1")
    ctx = context(str(path), tmp_path)
    first = base_key(find_base(ctx), ctx)
    os.utime(path, (1, 1))
    assert base_key(find_base(ctx), ctx) != first


def test_what_a_builder_cannot_read_comes_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "x.sif").write_bytes(b"")
    problem = not_for(find_base(context(f"{tmp_path}/x.sif", tmp_path)), "Charliecloud")
    assert "Charliecloud cannot build on" in problem.message
    assert "Apptainer" in problem.hint
