"""Suggested bases: a sound list, and the right one for the GPUs of an endpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from diamond.core import bases, sites
from diamond.core.codec import decode
from diamond.core.errors import InvalidInput
from diamond.core.recipes import Recipe

FILE = Path(bases.__file__).with_suffix(".json")


def by_key(*models: str) -> dict[str, bases.Base]:
    return {base.key: base for base in bases.suggest(models)}


def test_the_list_is_sound() -> None:
    catalogue = bases.catalogue()
    assert {"pytorch", "jax", "python"} <= {base.key for base in catalogue.bases}
    for base in catalogue.bases:
        assert Recipe.parse({"base": base.reference}).base == base.reference
        assert Recipe.parse({"base": f"suggested:{base.key}"})
        assert base.title and base.note and base.architectures
        assert bool(base.vendor) == bool(base.gpus)
        assert base.vendor in ("", "nvidia", "amd", "intel")
        assert set(base.architectures) <= {"x86_64", "aarch64"}
    for source in catalogue.sources.values():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", source.date)
        assert source.url.startswith("https://")
    cited = {name for base in catalogue.bases for name in base.sources}
    assert cited == set(catalogue.sources)
    assert len({base.reference for base in catalogue.bases}) == len(catalogue.bases)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reference": "docker://python:latest"}, "pinned"),
        ({"reference": "docker://python"}, "pinned"),
        ({"key": "No Key"}, "not a key"),
        ({"sources": []}, "no source"),
        ({"sources": ["nowhere"]}, "no source"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_careless_entry_is_refused(change: dict[str, Any], words: str) -> None:
    raw = json.loads(FILE.read_text())
    raw["bases"][0] |= change
    with pytest.raises((InvalidInput, ValueError), match=words):
        decode(bases.Catalogue, raw, strict=True)


@pytest.mark.parametrize(
    ("models", "reference"),
    [
        (["A100"], "cuda12.8"),
        (["nvidia_a100-sxm4-80gb"], "cuda12.8"),
        (["NVIDIA H200"], "cuda12.8"),
        (["B200"], "cuda12.8"),
        (["V100"], "cuda12.6"),
        (["Tesla V100-SXM2-32GB"], "cuda12.6"),
        (["A100", "v100", "H100"], "cuda12.6"),  # one that runs on all of them
        (["GH200"], "nvcr.io/nvidia/pytorch"),
        (["GB200"], "nvcr.io/nvidia/pytorch"),
        (["MI250X"], "rocm6"),
        (["AMD Instinct MI300A"], "rocm6"),
        (["MI355X"], "rocm7"),
        (["Max-1550"], "intel"),
        (["Intel Data Center GPU Max 1550"], "intel"),
        (["PVC"], "intel"),
        (["some-future-gpu"], "cuda12.8"),  # nothing is known of it, so the commonest
        ([], "cuda12.8"),
        (["some-future-gpu", "MI250X"], "rocm6"),
    ],
)
def test_pytorch_for_the_gpus_there_are(models: list[str], reference: str) -> None:
    assert reference in bases.resolve("suggested:pytorch", models)
    assert by_key(*models)["pytorch"].reference == bases.resolve("suggested:pytorch", models)


def test_models_are_told_apart() -> None:
    """An A10 is no A100, an L4 no L40, a B200 no GB200."""
    base = bases.Base(key="x", title="x", reference="docker://x:1", gpus=("A10", "L4", "B200", "MI250", "RTX-6000"))
    assert [
        model for model in ("A10", "A10G", "L4", "B200", "MI250X", "rtx_6000", "Quadro RTX 6000") if base.fits(model)
    ] == [*("A10", "A10G", "L4", "B200", "MI250X", "rtx_6000", "Quadro RTX 6000")]
    assert not [model for model in ("A100", "L40", "GB200", "XA10", "MI2500", "RTX 60000") if base.fits(model)]


def test_gpus_too_old_for_anything_get_what_needs_none() -> None:
    found = by_key("K80")
    assert "pytorch" not in found and "python" in found
    with pytest.raises(InvalidInput) as caught:
        bases.resolve("suggested:pytorch", ["K80"])
    assert "K80" in caught.value.message and caught.value.field == "base" and caught.value.hint
    assert bases.resolve("suggested:python", ["K80"]) == "docker://python:3.12-slim"


def test_an_unknown_suggestion_lists_the_known_ones() -> None:
    with pytest.raises(InvalidInput, match="no suggested base 'fortran'") as caught:
        bases.resolve("suggested:fortran", [])
    assert "suggested:pytorch" in caught.value.hint


@pytest.mark.parametrize("base", ["host", "docker://x:1", "/sw/x.sif", "image:mine"])
def test_any_other_base_is_left_as_it_is(base: str) -> None:
    assert bases.resolve(base, ["A100"]) == base


def test_every_gpu_of_the_known_sites_has_an_answer() -> None:
    """And it is for that GPU and, where the site's processors are known, for them."""
    for site in sites.catalogue():
        for gpu in site.hardware.gpus:
            found = by_key(gpu.model).get("pytorch")
            if found is None:
                assert gpu.model == "K80", f"{site.key}: {gpu.model}"
                continue
            assert found.fits(gpu.model), f"{site.key}: {gpu.model}"
            assert not site.hardware.arch or site.hardware.arch in found.architectures, f"{site.key}: {gpu.model}"
