"""The line to paste, and what is said around it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import enrolment, main
from diamond.core.endpoints import Endpoint
from diamond.core.enrolment import Enrolment, enrolment_lines
from diamond.sdk.endpoints import Rotation

PIN = "sha256:" + "a" * 64
MADE = Enrolment(endpoint="hpc", code="ABCD-EFGH-JKMN", expires_at=2e9, agent_sha256="b" * 64)
PRIVATE = Enrolment(endpoint="hpc", code="ABCD-EFGH-JKMN", expires_at=2e9, agent_sha256="b" * 64, pin=PIN,
                    names=("localhost", "10.1.2.3"))  # fmt: skip
Given = Callable[..., None]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    def give(url: str = "http://127.0.0.1:7421", **answers: Any) -> None:
        calls = {name: (lambda *_a, _answer=answer, **_o: _answer) for name, answer in answers.items()}

        @contextmanager
        def connect() -> Iterator[Any]:
            yield SimpleNamespace(endpoints=SimpleNamespace(**calls), url=url)

        monkeypatch.setattr(enrolment, "connect", connect)

    return give


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(list(argv))
    return int(caught.value.code or 0)


def created(made: Enrolment = MADE) -> tuple[Endpoint, Enrolment]:
    return Endpoint(id="end_1", name="hpc"), made


def test_the_lines_are_as_they_should_be() -> None:
    curl, python = enrolment_lines(PRIVATE, "https://10.1.2.3:7421/")
    fetch, check, then = curl.split(" && ")[0], curl.split(" && ")[1], curl.split(" && ")[2]
    assert fetch == "curl -fsSk https://10.1.2.3:7421/agent/diamond-agent.pyz -o diamond-agent.pyz"
    assert check == f"echo '{'b' * 64}  diamond-agent.pyz' | sha256sum -c -"
    assert shlex.split(then) == [
        *("python3", "diamond-agent.pyz", "enroll", "https://10.1.2.3:7421/"),
        *("--code", "ABCD-EFGH-JKMN", "--pin", PIN, "--start"),
    ]
    compile(shlex.split(python)[2], "line", "exec")
    assert "unverified" in python
    public, _ = enrolment_lines(MADE, "https://diamond.example.org")
    assert "-fsSk" not in public
    assert "--pin" not in public


def test_one_line_on_standard_output(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(create_with_code=created(PRIVATE), url="https://10.1.2.3:7421")
    assert call("endpoint", "create", "hpc") == 0
    out, err = capsys.readouterr()
    assert out == enrolment_lines(PRIVATE, "https://10.1.2.3:7421")[0] + "\n"
    assert "warning" not in err
    assert "Without curl" in err
    given(create_with_code=created(PRIVATE), url="https://10.1.2.3:7421")
    assert call("endpoint", "create", "hpc", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["line"] + "\n", said["warnings"], said["endpoint"]["name"]) == (out, [], "hpc")


@pytest.mark.parametrize(
    ("made", "url", "words"),
    [
        (
            MADE,
            "http://127.0.0.1:7421",
            ("serve --multi-user --tls --host 0.0.0.0", "DIAMOND_PUBLIC_URL", "ssh -R 7421:127.0.0.1:7421"),
        ),
        (MADE, "http://10.1.2.3:7421", ("plain HTTP", "--tls")),
        (PRIVATE, "https://other.example.org", ("does not name other.example.org", "DIAMOND_PUBLIC_URL=https://other")),
    ],
)
def test_addresses_that_will_not_do(
    given: Given, capsys: pytest.CaptureFixture[str], made: Enrolment, url: str, words: tuple[str, ...]
) -> None:
    given(enrol=made)
    assert call("endpoint", "enroll", "hpc", "--url", url) == 0
    out, err = capsys.readouterr()
    assert url in out
    assert all(word in err for word in words), err


def test_an_address_that_is_none_changes_nothing(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given()  # any call would fail
    for url in ("cluster:7421", "https://h/\nrm -r x", "https://h/\x1b[2J", "https://h/a b", "https://me:secret@h"):
        assert call("endpoint", "create", "hpc", "--url", url) == 2, url
        assert "--url" in capsys.readouterr().err
    given(enrol=Enrolment(**{**vars(MADE), "url": "https://h/\x1b]0;x\x07"}))  # a server that says that of itself
    assert call("endpoint", "enroll", "hpc") != 0
    assert "\x1b" not in "".join(capsys.readouterr())


def test_the_server_knows_its_address_best_but_the_user_better(
    given: Given, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Enrolment(**{**vars(MADE), "url": "https://public.example.org"})
    given(enrol=told)
    assert call("endpoint", "enroll", "hpc") == 0
    assert "enroll https://public.example.org " in capsys.readouterr().out
    given(enrol=told)
    assert call("endpoint", "enroll", "hpc", "--url", "https://other.example.org/") == 0
    assert "enroll https://other.example.org " in capsys.readouterr().out


def test_a_token_file_still_does(given: Given, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given(create=(Endpoint(id="end_1", name="hpc"), "secret"), url="https://diamond.example.org")
    assert call("endpoint", "create", "hpc", "--token-file", str(tmp_path / "t")) == 0
    out, err = capsys.readouterr()
    assert f"1. copy the token file {tmp_path / 't'} there (it is secret)" in err
    assert "diamond agent run --server https://diamond.example.org --token-file t" in err
    assert "secret" not in out
    assert (tmp_path / "t").read_text() == "secret"
    assert call("endpoint", "create", "hpc", "--token-file", str(tmp_path / "t")) == 2


def test_rotating_says_how_far_it_got(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(rotate=Rotation(rotated=True, online=True))
    assert call("endpoint", "rotate", "hpc") == 0
    assert "the old one is dead" in capsys.readouterr().out
    given(rotate=Rotation(rotated=False, online=True))
    assert call("endpoint", "rotate", "hpc") == 0
    assert "has not answered" in capsys.readouterr().err
    given(rotate=Rotation(rotated=False, online=False, enrolment=MADE))
    assert call("endpoint", "rotate", "hpc") == 0
    out, err = capsys.readouterr()
    assert MADE.code in out
    assert "offline" in err


def test_ends_are_asked_for_twice(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(revoke=1, remove=2)
    assert call("endpoint", "revoke", "hpc") == 1  # nobody is there to say yes
    assert "nothing was changed" in capsys.readouterr().err
    assert call("endpoint", "revoke", "hpc", "-y") == 0
    assert "1 token of hpc revoked" in capsys.readouterr().out
    assert call("endpoint", "rm", "hpc", "--force") == 0
    assert "2 live jobs given up" in capsys.readouterr().out
