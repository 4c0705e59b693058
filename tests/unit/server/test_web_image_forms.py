"""The builder's forms: what is shown is what was stored, and what is sent back is the same again."""

from __future__ import annotations

from typing import Any

import pytest

from diamond.core.image_views import FieldError
from diamond.server.web import image_forms


@pytest.mark.parametrize(
    ("step", "contents"),
    [
        ("endpoint", {"endpoint": "cluster", "builder": "venv", "where": "batch", "time_limit": "30m"}),
        ("base", {"name": "env", "base": "suggested:pytorch", "labels": {"a/b": "x=y", "c": ' "quoted" '}}),
        ("base", {"base": "host"}),
        ("base", {"base": "image:bob/env"}),
        ("base", {"base": "docker://python:3.12-slim"}),
        ("dependencies", {"pip": "# why\nnumpy", "conda": "python=3.12", "files": {"/opt/a": "bundle:sha256:0"}}),
        (
            "envs",
            {"envs": {"A": "1", "B": "two\nlines", "C": " blank ", "D": "", "E": '"', "F": "ü ’ \\n", "G": "a'b"}},
        ),
        ("commands", {"build": "echo a\n\necho b", "test": "true"}),
    ],
)
def test_there_and_back(step: str, contents: dict[str, Any]) -> None:
    typed = image_forms.typed_of(step, contents)
    sent = {name: value.replace("\n", "\r\n") for name, value in typed.items()}
    found, errors = image_forms.contents_of(step, sent, contents)
    assert (found, errors) == (contents, {})


def test_a_recipes_own_values_are_shown_as_text() -> None:
    typed = image_forms.typed_of("dependencies", {"pip": ["numpy", "scipy"]})
    assert typed["pip"] == "numpy\nscipy"
    assert image_forms.typed_of("endpoint", {"time_limit": 5400})["time_limit"] == "1h 30m"
    assert image_forms.typed_of("endpoint", {"time_limit": 7200})["time_limit"] == ""


def test_variables_as_people_have_them() -> None:
    text = "# note\nexport A=1\nB='single $x'\n\nC = spaced \nD=a=b"
    found, errors = image_forms.contents_of("envs", {"envs": text}, {})
    assert errors == {}
    assert found == {"envs": {"A": "1", "B": "single $x", "C": "spaced", "D": "a=b"}}


@pytest.mark.parametrize(("text", "says"), [("A=1\nB", "line 2"), ("A=1\nA=2", "twice")])
def test_what_is_no_variable(text: str, says: str) -> None:
    found, errors = image_forms.contents_of("envs", {"envs": text}, {})
    assert found == {} and says in errors["envs"].message


def test_files_stay_unless_they_are_left_out() -> None:
    stored = {"files": {"/opt/a": "bundle:1", "/opt/b": "bundle:2"}}
    found, _ = image_forms.contents_of("dependencies", {"pip": "", "drop_1": "/opt/a"}, stored)
    assert found == {"files": {"/opt/b": "bundle:2"}}


def test_errors_go_to_their_fields() -> None:
    errors = [FieldError(field="pip[2]", message="is wrong"), FieldError(field="envs.A", message="bad", hint="h")]
    found = image_forms.errors_by_field([*errors, FieldError(field="pip[4]", message="also")])
    assert {name: each.message for name, each in found.items()} == {"pip": "line 3: is wrong", "envs": "A: bad"}
