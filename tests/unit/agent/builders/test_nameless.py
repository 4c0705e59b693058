"""Archives that would take names from other images."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from diamond.agent.builders.base import BuildProblem
from diamond.agent.builders.nameless import strip_names

VICTIM = "localhost/diamond/img_00000001:latest"
DOCKER = json.dumps([{"Config": "c.json", "RepoTags": [VICTIM], "Layers": ["a/layer.tar"]}])
OCI = json.dumps(
    {
        "schemaVersion": 2,
        "manifests": [{"digest": "sha256:0", "annotations": {"org.opencontainers.image.ref.name": VICTIM}}],
    }
)


def write(path: Path, *members: tuple[str, str, bytes]) -> Path:
    """Members as name, target of a link or nothing, and contents."""
    with tarfile.open(path, "w") as archive:
        for name, link, data in members:
            entry = tarfile.TarInfo(name)
            if link:
                entry.type, entry.linkname = tarfile.SYMTYPE, link
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return path


def test_names_are_gone_and_all_else_is_there(tmp_path: Path) -> None:
    archive = write(
        tmp_path / "a.tar", ("./manifest.json", "", DOCKER.encode()), ("index.json", "", OCI.encode()),
        ("repositories", "", b"{}"), ("a/layer.tar", "", b"\0\1"), ("b/layer.tar", "../a/layer.tar", b""),
    )  # fmt: skip
    strip_names(archive, tmp_path / "b.tar")
    with tarfile.open(tmp_path / "b.tar") as found:
        assert found.getnames() == ["manifest.json", "index.json", "a/layer.tar", "b/layer.tar"]
        file = found.extractfile("a/layer.tar")
        assert file is not None and file.read() == b"\0\1"
        lists = found.extractfile("manifest.json"), found.extractfile("index.json")
        texts = [one.read().decode() for one in lists if one is not None]
    assert VICTIM not in "".join(texts)
    assert json.loads(texts[0])[0]["Config"] == "c.json"
    assert json.loads(texts[1])["manifests"] == [{"digest": "sha256:0"}]


@pytest.mark.parametrize(
    "members",
    [
        [("index.json", "other", b""), ("other", "", OCI.encode())],
        [("a", ".", b""), ("a/index.json", "", OCI.encode())],
        [("manifest.json", "", b"[" * 100_000)],
        [("manifest.json", "", b"[1]")],
        [("index.json", "", b"[]")],
    ],
)
def test_archives_that_hide_a_list_are_refused(tmp_path: Path, members: list[tuple[str, str, bytes]]) -> None:
    with pytest.raises(BuildProblem, match="not an archive"):
        strip_names(write(tmp_path / "a.tar", *members), tmp_path / "b.tar")
