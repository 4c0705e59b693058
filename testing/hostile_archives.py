"""Archives made to do harm, and what became of each: run in a cage (`testing.caged`), never outside of one.

`attack` gives one archive after the other to the code that unpacks them, beside files that must stay as they are.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import platform
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diamond.agent.builders.archives import unpack_image
from diamond.agent.builders.base import BuildProblem, Commands
from diamond.agent.builders.bases import archive_kind
from diamond.agent.builders.charliecloud import CharliecloudBuilder
from diamond.agent.builders.nameless import strip_names
from diamond.agent.builders.removing import remove_tree
from diamond.agent.builders.venv import VenvBuilder

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
Outcome = dict[str, Any]


def entry(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "", **pax: str) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname, info.mode = kind, len(data), link, 0o644
    if kind == tarfile.DIRTYPE:
        info.mode = 0o755
    info.pax_headers = pax
    return info.tobuf(tarfile.PAX_FORMAT) + data + b"\0" * (-len(data) % 512)


def symlink(name: str, to: str) -> bytes:
    return entry(name, tarfile.SYMTYPE, link=to)


def hard(name: str, to: str) -> bytes:
    return entry(name, tarfile.LNKTYPE, link=to)


def raw_header(name: bytes, kind: bytes = b"0", size: bytes = b"00000000000\0", link: bytes = b"") -> bytes:
    """One that the standard library would not write."""
    block = bytearray(512)
    block[0 : len(name)] = name
    block[100:108], block[108:116], block[116:124] = b"0000644\0", b"0000000\0", b"0000000\0"
    block[124:136], block[136:148], block[156:157] = size, b"00000000000\0", kind
    block[157 : 157 + len(link)] = link
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


END = b"\0" * 1024
SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a"}

LAYERS: dict[str, list[bytes]] = {
    # Names
    "whiteout of the parent": [entry(".wh...")],
    "whiteout of the parent, deeper": [entry("a/.wh...")],
    "whiteout of the folder": [entry(".wh..")],
    "whiteout of nothing": [entry(".wh.")],
    "name of slashes": [entry("//")],
    "name of one slash": [entry("/")],
    "name of a dot": [entry(".")],
    "no name": [raw_header(b"") + END],
    "link with a name of slashes": [symlink("//", "/")],
    "hard link with a name of slashes": [entry("a", data=b"x") + hard("//", "a")],
    "leads up": [entry("../escaped", data=b"x")],
    "leads up in the middle": [entry("a/../../escaped", data=b"x")],
    "absolute and up": [entry("/../escaped", data=b"x")],
    "whiteout that leads up": [entry("../.wh.outside")],
    "zero byte": [entry("a", data=b"x", path="a\0b")],
    "long component": [entry("x" * 256, data=b"x")],
    "long path": [entry("/".join(["x" * 200] * 20), data=b"x")],
    "deep path": [entry("/".join("d" * 200), data=b"x")],
    "deep by links": [
        symlink("l", "/".join("a" * 100))
        + entry("l/x/x", tarfile.DIRTYPE)
        + symlink("l/m", "/".join("b" * 100))
        + entry("l/m/file", data=b"x")
    ],
    "link to a long name": [symlink("l", "x" * 5000)],
    "link to nothing": [symlink("l", "")],
    "link with a zero byte": [entry("l", tarfile.SYMTYPE, link="x", linkpath="a\0b")],
    "link of long components": [symlink("l", "y" * 300) + entry("l/file", data=b"x")],
    "circle of links": [symlink("a", "b") + symlink("b", "a") + entry("a/x", data=b"x")],
    "size below nothing": [raw_header(b"a", size=b"\xff" * 12) + END],
    "size beyond all": [raw_header(b"a", size=b"\x80" + b"\x7f" * 11) + END],
    "time beyond all": [entry("a", data=b"x", mtime="1e300")],
    "time that is none": [entry("a", data=b"x", mtime="nan")],
    "cut off": [entry("a", data=b"x" * 5000)[:2000]],
    # Links that lead out
    "link out": [symlink("a", "{outside}") + entry("a/precious", data=b"bad") + entry("a/.wh.precious")],
    "link out, opaque": [symlink("a", "{outside}"), entry("a/.wh..wh..opq")],
    "link up and out": [symlink("a", "../../outside") + entry("a/precious", data=b"bad") + entry("a/.wh.precious")],
    "link in place of a folder": [
        entry("a", tarfile.DIRTYPE) + entry("a/precious", data=b"1"),
        symlink("a", "../../outside") + entry("a/precious", data=b"bad"),
    ],
    "folder in place of a link": [symlink("a", "{outside}"), entry("a", tarfile.DIRTYPE) + entry("a/new", data=b"x")],
    "file through a link": [symlink("precious", "{outside}/precious") + entry("precious", data=b"bad")],
    "hard link out": [hard("a", "../outside/precious") + entry("a", data=b"bad")],
    "absolute hard link": [hard("a", "{outside}/precious")],
    "hard link through a link": [symlink("l", "{outside}") + hard("a", "l/precious")],
    "hard link to a link, then written": [
        symlink("l", "{outside}/precious") + hard("a", "l") + entry("a", data=b"bad")
    ],
    "hard link to a folder": [entry("d", tarfile.DIRTYPE) + hard("a", "d")],
    "hard link to nothing": [hard("a", "")],
    "hard link into itself": [entry("d/f", data=b"x") + hard("d", "d/f")],
    "root by another name": [symlink("r", ".") + entry("r/r/r/.wh.r") + entry("x", data=b"x")],
    # Kinds
    "devices": [
        entry("dev/null", tarfile.CHRTYPE)
        + entry("sda", tarfile.BLKTYPE)
        + entry("p", tarfile.FIFOTYPE)
        + entry("x", data=b"x")
    ],
    "all gone at the top": [entry("old", data=b"x"), entry(".wh..wh..opq") + entry("new", data=b"x")],
    "notes of a file system": [entry("a", data=b"x") + entry(".wh..wh.plnk") + entry(".wh..wh.aufs")],
    "whiteout of what the layer itself brings": [
        entry("d/old", data=b"x"),
        entry("d/new", data=b"x") + entry(".wh.d"),
    ],
    "opaque after a folder came": [
        entry("d/s/old", data=b"x"),
        entry("d/s/new", data=b"x") + entry("d/.wh..wh..opq"),
    ],
    # Headers that want memory
    "endless header": [raw_header(b"x", kind=b"x", size=b"77777777777\0") + b"1" * 4096],
    "endless name": [raw_header(b"x", kind=b"L", size=b"77777777777\0") + b"1" * 4096],
    "endless holes": [
        entry("a", data=b"999999999\n" + b"1\n1\n" * 100_000, **SPARSE, **{"GNU.sparse.realsize": "1"}),
    ],
    "holes of petabytes": [
        entry("a", data=b"1\n0\n0\n".ljust(512, b"\0"), **SPARSE, **{"GNU.sparse.realsize": str(2**60)})
    ],
    "damaged gzip": [b"\x1f\x8b\x08\x00" + b"broken" * 100],
    "cut gzip": [gzip.compress(os.urandom(20000))[:900]],
    "damaged xz": [b"\xfd7zXZ\x00" + b"broken" * 100],
    "damaged bzip2": [b"BZh9" + b"broken" * 100],
    "zstd": [b"\x28\xb5\x2f\xfd" + b"x" * 100],
    "good xz": [lzma.compress(entry("a", data=b"x" * 100_000) + END) + lzma.compress(b"\0" * 10_000)],
    "good bzip2": [bz2.compress(entry("a", data=b"x" * 100_000) + END)],
}


def tar(path: Path, files: dict[str, bytes]) -> Path:
    path.write_bytes(b"".join(entry(name, data=data) for name, data in files.items()) + END)
    return path


def image(path: Path, layers: list[bytes]) -> Path:
    config = {"architecture": MACHINE, "config": {"Env": []}}
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "Layers": names}]
    papers = {"manifest.json": json.dumps(manifest).encode(), "config.json": json.dumps(config).encode()}
    return tar(path, papers | dict(zip(names, layers, strict=True)))


def attack(folder: Path) -> dict[str, Outcome]:
    """What became of every archive, by a name for it."""
    outcomes = {f"layer: {name}": _outcome(folder, _of_layers(layers)) for name, layers in LAYERS.items()}
    for name, action in _others():
        outcomes[name] = _outcome(folder, action)
    return outcomes


def _outcome(folder: Path, action: Callable[[Path], object]) -> Outcome:
    place = folder / "case"
    remove_tree(place)
    for name in ("outside", "image-root", "case"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "outside/precious").write_text("kept")
    before = _listing(folder)
    said: Outcome = {"error": "", "message": "", "code": "", "hint": ""}
    try:
        said["answer"] = action(place)
    except BuildProblem as problem:
        said |= {"error": "BuildProblem", "message": problem.message, "code": problem.code, "hint": problem.hint}
    except Exception as error:
        said |= {"error": type(error).__name__, "message": str(error)}
    after = _listing(folder)
    said["untouched"] = before == after
    said["tree"] = sorted(_below(place / "root"))
    return said


def _listing(folder: Path) -> dict[str, str]:
    """Everything but the case's own folder."""
    found = {}
    for current, folders, names in os.walk(folder.parent):
        if current == str(folder):
            folders.remove("case")
        found[current] = "folder"
        found |= {path: Path(path).read_text() for name in names if os.path.isfile(path := f"{current}/{name}")}
    return found


def _below(root: Path) -> Iterator[str]:
    for current, folders, names in os.walk(root):
        for name in (*folders, *names):
            path = os.path.join(current, name)
            if os.path.islink(path) or not os.path.isdir(path):
                yield os.path.relpath(path, root)


def _of_layers(layers: list[bytes]) -> Callable[[Path], object]:
    def action(place: Path) -> None:
        outside = str(place.parent / "outside").encode()
        # The place of the files outside is as long as what stands for it, so that headers stay right.
        given = [_with_outside(layer, outside) for layer in layers]
        unpack_image(image(place / "a.tar", given), place / "root")

    return action


def _with_outside(layer: bytes, outside: bytes) -> bytes:
    """Headers that name {outside} name the folder instead, with their checksums put right."""
    if b"{outside}" not in layer:
        return layer
    blocks = bytearray(layer)
    for at in range(0, len(blocks), 512):
        link = bytes(blocks[at + 157 : at + 257]).rstrip(b"\0")
        if b"{outside}" in link:
            blocks[at + 157 : at + 257] = link.replace(b"{outside}", outside).ljust(100, b"\0")
            blocks[at + 148 : at + 156] = b" " * 8
            blocks[at + 148 : at + 156] = b"%06o\0 " % sum(blocks[at : at + 512])
    return bytes(blocks)


def _others() -> Iterator[tuple[str, Callable[[Path], object]]]:
    yield "limit: bytes", _bomb
    yield "limit: entries", _many
    yield "limit: disk", _full_disk
    yield "limit: files of the disk", _full_of_files
    yield "limit: names, bytes", _nameless_bomb
    yield "limit: a base of zeros", _kind_of_a_bomb
    yield "limit: memory of xz", _greedy_xz
    yield "rights: of others", _rights
    for name, members in NAMELESS.items():
        yield f"nameless: {name}", _strip(members)
    for name, members in VENVS.items():
        yield f"venv: {name}", _venv(members)
    for name, members in ROOTS.items():
        yield f"folder: {name}", _load(members)
    for name, data in KINDS.items():
        yield f"kind: {name}", _kind(data)
    yield "remove: a deep tree", _deep
    yield "remove: folders without rights", _locked
    yield "remove: links", _linked


NAMELESS: dict[str, bytes] = {
    "leads up": entry("../x", data=b"x"),
    "slashes": entry("//", data=b"x"),
    "link out": symlink("a", "/etc"),
    "link up": symlink("a/b", "../../c"),
    "hard link out": hard("a", "../../etc/passwd"),
    "hard link to a list": entry("x", data=b"x") + hard("x", "./manifest.json"),
    "hard link to a link": symlink("l", "x/y") + hard("a", "l"),
    "another name for other readers": entry("x/y", data=b"x", path="../../manifest.json"),
    "endless header": raw_header(b"x", kind=b"x", size=b"77777777777\0"),
    "good": entry("a/layer.tar", data=b"x") + symlink("b/layer.tar", "../a/layer.tar") + hard("c", "a/layer.tar"),
}
VENVS: dict[str, bytes] = {
    "leads up": entry("../outside/precious", data=b"bad"),
    "leads up later": entry("image/../../outside/precious", data=b"bad"),
    "absolute": entry("/image/x", data=b"x"),
    "link out": symlink("image/a", "../../outside") + entry("image/a/precious", data=b"bad"),
    "absolute link": symlink("image/a", "/etc"),
    "chain of links": entry("image/b/c", tarfile.DIRTYPE)
    + symlink("image/b/c/up", "../..")
    + symlink("image/x", "b/c/up/../../outside")
    + entry("image/x/precious", data=b"bad"),
    "pipe for its papers": entry("image/diamond-venv.json", tarfile.FIFOTYPE),
}
ROOTS: dict[str, bytes] = {
    "leads up": entry("../outside/precious", data=b"bad"),
    "link out": symlink("a", "../../outside") + entry("a/precious", data=b"bad"),
    "names of whiteouts": entry("./.wh.x", data=b"x") + entry("./.wh...", data=b"x"),
    "devices": entry("dev/sda", tarfile.BLKTYPE) + entry("x", data=b"x"),
}
KINDS: dict[str, bytes] = {
    "damaged gzip": LAYERS["damaged gzip"][0],
    "cut xz": lzma.compress(os.urandom(9000))[:700],
    "endless header": LAYERS["endless header"][0],
    "size below nothing": LAYERS["size below nothing"][0],
    "good, gzip": gzip.compress(entry("./oci-layout", data=b"{}") + END),
}


def _bomb(place: Path) -> None:
    """Two and a half gigabytes of zeros in a few kilobytes: refused by the header, before a byte is written."""
    archive = image(place / "a.tar", [gzip.compress(raw_header(b"zeros", size=b"%011o\0" % (5 << 29)) + b"\0" * 2**20)])
    try:
        unpack_image(archive, place / "root")
    finally:
        assert not (place / "root/zeros").exists()


def _limits(**changes: int) -> Any:
    from diamond.agent.builders.room import Limits

    return Limits(**changes)


def _many(place: Path) -> None:
    layer = b"".join(entry(f"f{number}") for number in range(101))
    unpack_image(image(place / "a.tar", [layer]), place / "root", _limits(max_entries=100))


def _full_disk(place: Path) -> None:
    """The tmpfs of the cage has 64 MiB; this takes 80."""
    piece = gzip.compress(b"\0" * 2**20)
    files = (gzip.compress(raw_header(b"%d" % number, size=b"%011o\0" % 2**20)) + piece for number in range(80))
    archive = image(place / "a.tar", [b"".join(files)])
    try:
        unpack_image(archive, place / "root")
    finally:
        disk = os.statvfs(place)
        assert disk.f_bavail * disk.f_frsize > disk.f_blocks * disk.f_frsize // 25


def _full_of_files(place: Path) -> None:
    """The tmpfs of the cage has places for 20,000 files."""
    layer = b"".join(raw_header(b"d/%d" % number) for number in range(20_000))
    archive = image(place / "a.tar", [gzip.compress(layer, 1)])
    try:
        unpack_image(archive, place / "root")
    finally:
        assert os.statvfs(place).f_favail > 500


def _nameless_bomb(place: Path) -> None:
    (place / "a.tar").write_bytes(gzip.compress(raw_header(b"zeros", size=b"%011o\0" % (5 << 29)) + b"\0" * 2**20))
    strip_names(place / "a.tar", place / "root")


def _kind_of_a_bomb(place: Path) -> str:
    """A first member of a terabyte, beyond which nobody should look for a second one."""
    (place / "a.tar").write_bytes(gzip.compress(raw_header(b"opt/a", size=b"\x80" + (2**40).to_bytes(11, "big"))))
    return archive_kind(place / "a.tar")


def _greedy_xz(place: Path) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30, "preset": 0}]
    packed = bytearray(lzma.compress(entry("a", data=b"x") + END, filters=[{**filters[0], "dict_size": 4096}]))
    # The size of the dictionary is one byte of the block's header: 37 stands for two gigabytes. Its checksum follows.
    at = packed.index(b"\x21\x01", 12) + 2
    packed[at] = 37
    start, size = 12, (packed[12] + 1) * 4
    packed[start + size - 4 : start + size] = zlib.crc32(bytes(packed[start : start + size - 4])).to_bytes(4, "little")
    unpack_image(image(place / "a.tar", [bytes(packed)]), place / "root")


def _rights(place: Path) -> list[str]:
    layer = bytearray(entry("su", data=b"x"))
    layer[100:108], layer[148:156] = b"0006755\0", b" " * 8
    layer[148:156] = b"%06o\0 " % sum(layer[:512])
    unpack_image(image(place / "a.tar", [bytes(layer)]), place / "root")
    return [oct(stat.S_IMODE((place / "root/su").stat().st_mode))]


def _strip(data: bytes) -> Callable[[Path], object]:
    def action(place: Path) -> list[str]:
        (place / "a.tar").write_bytes(entry("manifest.json", data=b"[]") + data + END)
        strip_names(place / "a.tar", place / "b.tar")
        with tarfile.open(place / "b.tar") as found:
            return [f"{member.name} {member.linkname}".strip() for member in found]

    return action


def _venv(data: bytes) -> Callable[[Path], object]:
    def action(place: Path) -> None:
        (place / "payload").write_bytes(data + END)
        VenvBuilder().load(place / "payload", place / "root", Commands())

    return action


def _load(data: bytes) -> Callable[[Path], object]:
    def action(place: Path) -> None:
        (place / "payload").write_bytes(data + END)
        CharliecloudBuilder().load(place / "payload", place / "root", Commands())

    return action


def _kind(data: bytes) -> Callable[[Path], object]:
    def action(place: Path) -> str:
        (place / "a.tar").write_bytes(data)
        return archive_kind(place / "a.tar")

    return action


def _deep(place: Path) -> bool:
    """Two thousand folders in one another, further than any path can name."""
    (place / "root").mkdir()
    folder = os.open(place / "root", os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("deeper", dir_fd=folder)
        below = os.open("deeper", os.O_RDONLY, dir_fd=folder)
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=folder))
        os.close(folder)
        folder = below
    os.close(folder)
    remove_tree(place / "root")
    return (place / "root").exists()


def _locked(place: Path) -> bool:
    (place / "root/a/b").mkdir(parents=True)
    (place / "root/a/b/file").write_text("x")
    for name in ("root/a/b", "root/a", "root"):
        (place / name).chmod(0)
    remove_tree(place / "root")
    return (place / "root").exists()


def _linked(place: Path) -> bool:
    (place / "root").mkdir()
    (place / "root/out").symlink_to(place.parent / "outside")
    (place / "top").symlink_to(place.parent / "outside")
    remove_tree(place / "root")
    remove_tree(place / "top")
    return (place / "root").exists()
