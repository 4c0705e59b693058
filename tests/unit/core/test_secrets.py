"""How a task asks for secrets, and what may be one."""

from __future__ import annotations

from typing import Any

import pytest

from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.secrets import SecretUse, check_secret_name, check_value, is_maskable
from diamond.core.tasks import TaskSpec


def parsed(secrets: Any, **more: Any) -> dict[str, SecretUse]:
    return TaskSpec.parse({"run": "x", "secrets": secrets, **more}).secrets


def test_by_name_by_variable_and_as_a_file() -> None:
    assert parsed("HF_TOKEN") == parsed(["HF_TOKEN"]) == {"HF_TOKEN": SecretUse(secret="HF_TOKEN")}
    assert parsed({"HF_TOKEN": "my-token"}) == {"HF_TOKEN": SecretUse(secret="my-token")}
    assert parsed({"HF_TOKEN": None}) == {"HF_TOKEN": SecretUse(secret="HF_TOKEN")}
    assert parsed({"NETRC": {"secret": "netrc", "file": True}}) == {"NETRC": SecretUse(secret="netrc", file=True)}
    spec = TaskSpec.parse({"run": "x", "secrets": {"A": "b"}})
    assert decode(TaskSpec, encode(spec)) == spec == TaskSpec.parse(encode(spec))


@pytest.mark.parametrize(
    ("secrets", "field", "words"),
    [
        (5, "secrets", "a list of names"),
        ([5], "secrets", "names of secrets"),
        (["A", "A"], "secrets", "twice"),
        (["my-token"], "secrets", "VARIABLE: name"),
        (["RANK"], "secrets", "set by Diamond"),
        (["DIAMOND_X"], "secrets", "set by Diamond"),
        ({"A": "9"}, "secrets.A", "not a name for a secret"),
        ({"A": {"secret": "b", "fil": True}}, "secrets.A", "secret, file"),
        ({"A": {"secret": "b", "file": "yes"}}, "secrets.A.file", "true or false"),
        ({"A": {"secret": 5}}, "secrets.A.secret", "not a name"),
    ],
)
def test_mistakes_name_the_field(secrets: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        parsed(secrets)
    assert caught.value.field == field
    assert words in f"{caught.value.message} {caught.value.hint}"


def test_a_variable_has_one_source() -> None:
    with pytest.raises(InvalidInput, match="envs as well"):
        parsed(["A"], envs={"A": "1"})
    with pytest.raises(TooLarge):
        parsed([f"A{number}" for number in range(33)])


def test_values() -> None:
    assert check_value("two\nlines ' \" é") == "two\nlines ' \" é"
    for wrong in ("", "a\0b", 5, "\udcff", "x" * 65_537):
        with pytest.raises(InvalidInput) as caught:
            check_value(wrong)
        assert "xxx" not in str(caught.value) and caught.value.field == "value"
    assert is_maskable("1234") and not is_maskable("123")
    for name in ("", "9a", "a b", "a" * 65, "a/b", "é"):
        with pytest.raises(InvalidInput):
            check_secret_name(name)
