"""Exports of images: what is written is what is read, broken writes are continued, hostile files are refused."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diamond.core.bundles import BundleFile, Manifest
from diamond.core.codec import encode
from diamond.core.errors import DigestMismatch, InvalidInput, TooLarge
from diamond.core.images import ImageFacts, Lock, Package
from diamond.core.recipes import Recipe
from diamond.sdk import imagefile
from diamond.sdk.bundles import _read
from diamond.sdk.imagefile import Contents, Member

PAYLOAD = bytes(range(256)) * 5000 + b"end"
SOURCE = b"print('hello')\n"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


LOCK = Lock(packages=(Package(kind="pip", name="six", version="1.17.0"),), python="3.12.3")
TEXTS = {"lock.json": json.dumps(encode(LOCK)).encode(), "sbom.cdx.json": b"{}", "definition.txt": b"From: x\n"}
BUNDLE = Manifest(
    files=(BundleFile(path="a.py", size_bytes=len(SOURCE), digest=f"sha256:{sha256(SOURCE)}"),), is_file=True
)


def contents(builder: str = "apptainer") -> Contents:
    payload = Member(name=imagefile.payload_name(builder), size_bytes=len(PAYLOAD), sha256=sha256(PAYLOAD))
    recipe = Recipe.parse({"base": "host", "pip": ["six"], "files": {"/opt/a.py": BUNDLE.ref}})
    facts = ImageFacts(image_id="img_000000000", recipe_digest=recipe.digest, builder=builder, built_at=1.7e9)
    members = imagefile.members_of(TEXTS, {f"sha256:{sha256(SOURCE)}": len(SOURCE)}, payload)
    return Contents(name="climate", recipe=recipe, facts=facts, members=members, bundles={BUNDLE.ref: BUNDLE})


class Source:
    """Gives members' bytes, at most so many at a time before it breaks."""

    def __init__(self, *breaks: int) -> None:
        self.breaks = list(breaks)
        self.began_at: list[int] = []

    def __call__(self, member: Member, part: Path, base: int, tell: Callable[[int], None]) -> str:
        data = PAYLOAD if member.size_bytes == len(PAYLOAD) else SOURCE
        with open(part, "a+b") as file:
            have = file.seek(0, 2) - base
            self.began_at.append(have)
            stop = self.breaks.pop(0) if self.breaks and data is PAYLOAD else len(data)
            file.write(data[have : max(have, stop)])
            if stop < len(data):
                raise ConnectionError
            file.seek(base)
            return sha256(file.read())


def write(path: Path, source: Source | None = None, found: Contents | None = None) -> Path:
    imagefile.write(path, found or contents(), TEXTS, source or Source())
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    path = tmp_path / "climate.diamond"
    imagefile.write(path, contents(), TEXTS, Source(), lambda *args: seen.append(args))
    total = sum(member.size_bytes for member in contents().members)
    assert seen[-1] == (total, total, len(contents().members))
    found = imagefile.read(path)
    assert found.contents == contents()
    assert found.lock == LOCK
    assert found.texts == TEXTS
    imagefile.verify(found)
    scan = imagefile.payload_scan(found)
    (local,) = scan.sources.values()
    assert b"".join(_read(local, 0, local.size_bytes)) == PAYLOAD
    assert b"".join(_read(local, 1000, 2000)) == PAYLOAD[1000:2000]
    (files,) = imagefile.file_scans(found).values()
    assert files.manifest == BUNDLE
    assert b"".join(_read(next(iter(files.sources.values())), 0, len(SOURCE))) == SOURCE
    assert list(tmp_path.iterdir()) == [path]


def test_other_tools_can_open_it(tmp_path: Path) -> None:
    with tarfile.open(write(tmp_path / "x.tar")) as tar:
        names = tar.getnames()
        assert names[0] == "diamond-image.json"
        assert names[-1] == "image.sif"
        payload = tar.extractfile("image.sif")
        assert payload is not None and payload.read() == PAYLOAD
    found = contents("podman")
    with tarfile.open(write(tmp_path / "y.tar", found=found)) as tar:
        assert tar.getnames()[-1] == "oci-archive.tar"


def test_a_broken_export_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "x.diamond"
    source = Source(100_000, 300_000)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="cannot be written"):  # ConnectionError is an OSError
            write(path, source)
        assert not path.exists()
    write(path, source)
    assert source.began_at == [0, 0, 100_000, 300_000]  # the small file once, the payload from where it broke
    imagefile.verify(imagefile.read(path))


def test_what_an_earlier_try_left_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "x.diamond"
    with pytest.raises(InvalidInput):
        write(path, Source(100_000))
    (part,) = tmp_path.iterdir()
    data = bytearray(part.read_bytes())
    data[-50_000] ^= 1  # in what is there of the payload
    part.write_bytes(data)
    write(path)
    imagefile.verify(imagefile.read(path))
    part.write_bytes(path.read_bytes().replace(b"From: x", b"From: y") + b"rest of something longer" * 100)
    write(path)
    imagefile.verify(imagefile.read(path))


def test_a_member_that_arrives_wrong_twice(tmp_path: Path) -> None:
    def wrong(member: Member, part: Path, base: int, tell: Callable[[int], None]) -> str:
        with open(part, "ab") as file:
            file.write(b"x" * member.size_bytes)
        return sha256(b"x" * member.size_bytes)

    with pytest.raises(DigestMismatch, match="arrived twice"):
        imagefile.write(tmp_path / "x", contents(), TEXTS, wrong)
    assert not (tmp_path / "x").exists()


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is a folder"):
        write(tmp_path)
    with pytest.raises(InvalidInput, match="cannot be written"):
        write(tmp_path / "none" / "x")


def build_tar(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def first(**more: Any) -> tuple[tarfile.TarInfo, bytes]:
    raw = {**encode(contents()), **more}
    return tarfile.TarInfo("diamond-image.json"), json.dumps(raw).encode()


def refused(path: Path) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        imagefile.verify(imagefile.read(path))
    return caught.value


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"format": 2}, "format '2'"),
        ({"format": None}, "format"),
        ({"name": "../x"}, "not an image name"),
        ({"members": []}, "list of members"),
        ({"members": [encode(contents().payload)] * 2}, "twice"),
        ({"members": [{"name": "../../etc/x", "size_bytes": 1, "sha256": "0" * 64}]}, "does not fit"),
        ({"recipe": {"base": "a b"}}, "not a base"),
        ({"facts": {**encode(contents().facts), "builder": "other"}}, "does not fit"),
        ({"facts": {**encode(contents().facts), "builder": "venv"}}, "does not fit"),
        ({"bundles": {"bundle:sha256:" + "0" * 64: encode(BUNDLE)}}, "other contents"),
        ({"members": [encode(contents().payload)]}, "is not in it"),
    ],
)
def test_contents_that_make_no_sense(tmp_path: Path, more: dict[str, Any], part: str) -> None:
    assert part in str(refused(build_tar(tmp_path / "x", [first(**more)])))


def test_members_between_with_other_names(tmp_path: Path) -> None:
    raw = [encode(member) for member in contents().members]
    raw.insert(1, {"name": "/etc/passwd", "size_bytes": 3, "sha256": sha256(b"abc")})
    assert "has no place" in str(refused(build_tar(tmp_path / "x", [first(members=raw)])))
    raw[1] = {"name": "files/../../x", "size_bytes": 3, "sha256": sha256(b"abc")}
    assert "has no place" in str(refused(build_tar(tmp_path / "x", [first(members=raw)])))


def all_members(path: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    found = []
    with tarfile.open(path) as tar:
        for info in tar:
            file = tar.extractfile(info)
            assert file is not None
            found.append((info, file.read()))
    return found


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_members_that_are_not_files(tmp_path: Path, kind: bytes) -> None:
    members = all_members(write(tmp_path / "good"))
    members[1][0].type = kind
    members[1][0].linkname = "/etc/passwd"
    assert "not a plain file" in str(refused(build_tar(tmp_path / "x", [*members[:1], (members[1][0], b"")])))


def test_order_surplus_and_shortage(tmp_path: Path) -> None:
    good = write(tmp_path / "good")
    members = all_members(good)
    swapped = [members[0], members[2], members[1], *members[3:]]
    assert "stands where" in str(refused(build_tar(tmp_path / "x", swapped)))
    surplus = [*members, (tarfile.TarInfo("../../evil"), b"x")]
    assert "there is more in it" in str(refused(build_tar(tmp_path / "x", surplus)))
    data = good.read_bytes()
    for cut in (0, 100, 600, 3000, len(data) // 2, len(data) - 1024):
        (tmp_path / "x").write_bytes(data[:cut])
        assert refused(tmp_path / "x")
    for other in (b"", b"no tar at all" * 100, b"\0" * 10240):
        (tmp_path / "x").write_bytes(other)
        assert refused(tmp_path / "x")
    with pytest.raises(InvalidInput, match="No such file"):
        imagefile.read(tmp_path / "none")


def test_changed_bytes_are_noticed(tmp_path: Path) -> None:
    data = write(tmp_path / "good").read_bytes()
    for old, new in ((b"1.17.0", b"1.17.1"), (b"print('h", b"print('H"), (PAYLOAD[-300:], PAYLOAD[-299:] + b"x")):
        assert old in data
        (tmp_path / "x").write_bytes(data.replace(old, new))
        with pytest.raises(DigestMismatch):
            imagefile.verify(imagefile.read(tmp_path / "x"))


def test_headers_that_ask_for_memory(tmp_path: Path) -> None:
    info = tarfile.TarInfo("diamond-image.json")
    info.size = 2**40
    (tmp_path / "x").write_bytes(info.tobuf(format=tarfile.GNU_FORMAT) + b"{}")
    with pytest.raises(TooLarge):
        imagefile.read(tmp_path / "x")
    long_name = tarfile.TarInfo("././@LongLink")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 2**40
    pax = tarfile.TarInfo("pax")
    pax.type, pax.size = tarfile.XHDTYPE, 2**40
    for each in (long_name, pax):
        (tmp_path / "x").write_bytes(each.tobuf(format=tarfile.GNU_FORMAT) + b"x" * 1024)
        assert "is not an image that Diamond exported" in str(refused(tmp_path / "x"))
    huge = replace(contents(), members=(replace(contents().members[0], size_bytes=2**40), *contents().members[1:]))
    block = imagefile.contents_block(huge) + imagefile.header(huge.members[0], 0)
    (tmp_path / "x").write_bytes(block)
    with pytest.raises(TooLarge):
        imagefile.read(tmp_path / "x")
    deep = tarfile.TarInfo("diamond-image.json"), b"[" * 100_000
    assert "not JSON" in str(refused(build_tar(tmp_path / "x", [deep])))


def test_what_is_no_export_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"hello")
    with tarfile.open(tmp_path / "folder.tar", "w") as tar:
        tar.add(tmp_path, "root", recursive=False)
    for name in ("short", "folder.tar"):
        error = refused(tmp_path / name)
        assert "is not an image that Diamond exported" in error.message
        assert "image export" in error.hint


def test_payloads_beyond_eight_gigabytes_have_headers_too() -> None:
    block = imagefile.header(Member(name="image.sif", size_bytes=2**36, sha256=""), 0)
    assert tarfile.TarInfo.frombuf(block, "utf-8", "strict").size == 2**36
