"""Archives of images become folders: layers in order, what they take away gone. Hostile ones: test_hostile_archives."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.builders.archives import unpack_image
from diamond.agent.builders.base import BuildProblem
from diamond.agent.builders.bases import archive_kind

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def layer(*entries: tuple[str, Any], mode: int = 0o644) -> bytes:
    """Of (name, bytes), (name, None) for a folder, (name, "link to") and (name, ("hard", "to"))."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, what in entries:
            info = tarfile.TarInfo(name)
            info.mode = mode
            if isinstance(what, bytes):
                info.size = len(what)
                tar.addfile(info, io.BytesIO(what))
                continue
            if what is None:
                info.type, info.mode = tarfile.DIRTYPE, 0o755
            elif isinstance(what, str):
                info.type, info.linkname = tarfile.SYMTYPE, what
            else:
                info.type, info.linkname = (tarfile.LNKTYPE, what[1]) if what[0] == "hard" else (tarfile.CHRTYPE, "")
            tar.addfile(info)
    return buffer.getvalue()


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def docker_archive(path: Path, *layers: bytes, machine: str = MACHINE) -> Path:
    config = {"architecture": machine, "config": {"Env": ["PATH=/opt/bin:/bin", "A=b c"]}}
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "Layers": names}]
    files = {"manifest.json": json.dumps(manifest).encode(), "config.json": json.dumps(config).encode()}
    return archive(path, files | dict(zip(names, layers, strict=True)))


def oci_archive(path: Path, *layers: bytes) -> Path:
    blobs: dict[str, bytes] = {}

    def add(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        return {"digest": f"sha256:{digest}", "size": len(data)}

    def image(machine: str) -> dict[str, Any]:
        config = add(json.dumps({"architecture": machine, "config": {"Env": [f"FOR={machine}"]}}).encode())
        return add(json.dumps({"config": config, "layers": [add(gzip.compress(one)) for one in layers]}).encode())

    several = [{**image(machine), "platform": {"architecture": machine}} for machine in ("s390x", MACHINE)]
    index = {"manifests": [add(json.dumps({"manifests": several}).encode())]}
    return archive(path, {"oci-layout": b"{}", "index.json": json.dumps(index).encode(), **blobs})


def test_layers_are_applied_in_order_with_what_they_take_away(tmp_path: Path) -> None:
    lower = layer(("usr", None), ("usr/lib", None), ("lib", "usr/lib"), ("lib/one", b"1"), ("old", b"x"), ("d", None),
                  ("d/gone", b"x"), ("f", b"file"))  # fmt: skip
    upper = layer(("lib/two", b"2"), (".wh.old", b""), ("d/kept", b"new"), ("d/.wh..wh..opq", b""), ("f", None),
                  ("f/inside", b"i"), ("same", ("hard", "usr/lib/one")), ("dev/null", ("device", "")))  # fmt: skip
    target = tmp_path / "image"
    assert unpack_image(docker_archive(tmp_path / "a.tar", lower, upper), target) == ["PATH=/opt/bin:/bin", "A=b c"]
    found = {str(path.relative_to(target)) for path in target.rglob("*") if not path.is_dir()}
    assert found == {"usr/lib/one", "usr/lib/two", "d/kept", "f/inside", "same"}
    assert os.readlink(target / "lib") == "usr/lib"
    assert (target / "same").samefile(target / "usr/lib/one")


def test_an_oci_archive_of_several_machines_gives_this_one(tmp_path: Path) -> None:
    path = oci_archive(tmp_path / "oci.tar", layer(("etc", None), ("etc/os-release", b"ID=x")))
    assert archive_kind(path) == "oci"
    assert unpack_image(path, tmp_path / "image") == [f"FOR={MACHINE}"]
    assert (tmp_path / "image/etc/os-release").read_bytes() == b"ID=x"


def test_an_image_for_another_machine_is_refused_before_anything_is_unpacked(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "a.tar", layer(("x", b"")), machine="vax")
    with pytest.raises(BuildProblem, match="is for vax") as caught:
        unpack_image(path, tmp_path / "image")
    assert "linux/" in caught.value.hint
    assert not (tmp_path / "image").exists()


def test_modes_are_those_of_an_ordinary_account(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "a.tar", layer(("su", b"x"), mode=0o4711), layer(("secret", b"x"), mode=0))
    unpack_image(path, tmp_path / "image")
    assert stat.S_IMODE((tmp_path / "image/su").stat().st_mode) == 0o711
    assert stat.S_IMODE((tmp_path / "image/secret").stat().st_mode) == 0o600


@pytest.mark.parametrize("data", [b"", b"not a tar at all" * 100])
def test_what_is_no_archive_is_said_to_be_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(BuildProblem):
        unpack_image(tmp_path / "x.tar", tmp_path / "image")


def test_an_archive_is_told_from_a_root_file_system(tmp_path: Path) -> None:
    rootfs = tmp_path / "rootfs.tar"
    rootfs.write_bytes(layer(("./bin", "usr/bin"), ("./manifest.json", b"")))
    assert archive_kind(rootfs) == "rootfs"
    assert archive_kind(docker_archive(tmp_path / "d.tar", layer(("x", b"")))) == "docker"
    (tmp_path / "text.tar").write_text("hello")
    with pytest.raises(BuildProblem, match="neither a folder nor an archive"):
        archive_kind(tmp_path / "text.tar")


@pytest.mark.parametrize("text", [None, "[" * 100_000, '[{"Config": "manifest.json", "Layers": []}]'])
def test_odd_archives_are_sentences(tmp_path: Path, text: str | None) -> None:
    with tarfile.open(tmp_path / "odd.tar", "w") as archive:
        entry = tarfile.TarInfo("manifest.json")
        if text is None:  # a link to itself
            entry.type, entry.linkname = tarfile.SYMTYPE, "manifest.json"
        else:
            entry.size = len(text)
        archive.addfile(entry, io.BytesIO((text or "").encode()))
    with pytest.raises(BuildProblem, match="not an archive"):
        unpack_image(tmp_path / "odd.tar", tmp_path / "out")
