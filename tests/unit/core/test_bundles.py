"""Manifests: the same contents give the same digest, and none can lead outside its folder."""

import pytest

from diamond.core.bundles import BundleFile, Manifest, check_manifest, check_relative_path
from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput

DIGEST = "sha256:" + "a" * 64


def file(path: str, **fields: object) -> BundleFile:
    return BundleFile(path=path, **{"digest": DIGEST, "size_bytes": 1, **fields})  # type: ignore[arg-type]


def link(path: str, target: str) -> BundleFile:
    return BundleFile(path=path, link_to=target)


def test_digest_depends_on_contents_alone() -> None:
    one = Manifest(files=(file("a"), file("b/c")))
    same = decode(Manifest, encode(one), strict=True)
    assert same.digest == one.digest
    assert Manifest(files=(file("a"), file("b/c", executable=True))).digest != one.digest
    check_manifest(one)


@pytest.mark.parametrize(
    "files",
    [
        (file("../evil"),),
        (file("/etc/passwd"),),
        (file("a/../../b"),),
        (file("a/./b"),),
        (file("a//b"),),
        (file("~/.ssh/config"),),
        (file("a\nb"),),
        (file("b"), file("a")),
        (file("a"), file("a")),
        (file("a"), file("a/b")),
        (link("a", "/etc"),),
        (link("a", ".."),),
        (link("a/b", "../../x"),),
        (link("a", "x/../../y"),),
        # A link that climbs through another link: lexically inside, in truth outside.
        (link("a/b/up", "../.."), link("a/b/y", "up/../..")),
        # Writing through a link.
        (link("dir", "elsewhere"), file("dir/file")),
        (file("x", digest="md5:abc"),),
        (file("x", size_bytes=-1),),
        (file("x", digest=""),),
        (BundleFile(path="x", link_to="y", digest=DIGEST),),
    ],
)
def test_hostile_manifests_are_refused(files: tuple[BundleFile, ...]) -> None:
    with pytest.raises(InvalidInput):
        check_manifest(Manifest(files=files))


def test_links_inside_are_fine() -> None:
    check_manifest(Manifest(files=(link("a/l", "../b/c"), file("b/c"), link("here", "b"))))


def test_paths_are_put_in_normal_form() -> None:
    assert check_relative_path("./a//b/", "x") == "a/b"
    assert check_relative_path("sp ace/'q'/$(x)", "x") == "sp ace/'q'/$(x)"
