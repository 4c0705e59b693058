"""What comes from endpoints and other installations about images is checked where it is decoded."""

from __future__ import annotations

import json

import pytest

from diamond.core.codec import decode
from diamond.core.errors import InvalidInput
from diamond.core.images import ImageFacts, Lock, Package, parse_stages


@pytest.mark.parametrize("field", ["kind", "name", "version"])
@pytest.mark.parametrize(
    "word", ["", "1\n--extra-index-url http://x", "--pre", "-e .", "a b", "a\x00", "a\u2028b", "1\r", "x" * 400, " a"]
)
def test_a_package_of_a_lock_is_three_words(field: str, word: str) -> None:
    raw = {"kind": "pip", "name": "six", "version": "1.16.0", field: word}
    with pytest.raises(InvalidInput, match="not a package's name or version"):
        decode(Lock, {"packages": [raw]})
    assert not Package(**raw).is_plain


@pytest.mark.parametrize("version", ["1:2.36-9+deb12u1", "2.0~rc1", "1!1.0+cu128", "20240105.1", "3.12.4-r0"])
def test_versions_as_they_are(version: str) -> None:
    raw = {"kind": "deb", "name": "libstdc++6:i386", "version": version}
    assert decode(Lock, {"packages": [raw]}).packages[0].is_plain


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999"])
def test_numbers_are_finite(number: str) -> None:
    raw = json.loads(f'{{"image_id": "img_x", "recipe_digest": "", "builder": "venv", "built_at": {number}}}')
    with pytest.raises(InvalidInput, match="finite"):
        decode(ImageFacts, raw)


def test_stages_of_a_log_and_lines_that_only_look_like_some() -> None:
    log = (
        "diamond: stage 1/3 base: base image\nnoise\ndiamond: stage base done in 1.5 s\n"
        "diamond: stage 2/3 pip: Python packages\n"
        "diamond: stage pip done in 1.2.3 s\ndiamond: stage pip done in " + "9" * 5000 + " s\n"
        "diamond: stage " + "9" * 5000 + "/3 late: x\ndiamond: stage nobody done in 1 s\n"
    )
    found = [(record.name, record.state, record.seconds) for record in parse_stages(log)]
    assert found == [("base", "done", 1.5), ("pip", "running", 0.0)]
