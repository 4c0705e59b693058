"""Commands about people, as far as no server is needed: what is typed, what is kept, and what is shown."""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import login, main, tokens, users
from diamond.core.accounts import BrowserSession, Invitation, LinkedIdentity, Scope, Token, User
from diamond.core.errors import InvalidInput
from diamond.core.home import ClientConfig, Home
from diamond.sdk.accounts import Closing, ResetCode

TOKEN = Token(
    id="tok_000000001", name="nightly\x1b[2J", scopes=(Scope.READ, Scope.LAUNCH), created_at=1.0, expires_at=2.0,
    used_at=1.5, used_from="192.0.2.7", current=True,
)  # fmt: skip
USER = User(id="usr_000000001", name="bob", full_name="Bob", email="bob@example.org", has_password=True,
            identities=(LinkedIdentity(id="idn_1", provider="orcid", label="0000", created_at=1.0),))  # fmt: skip
Given = Callable[..., None]


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(list(argv))
    return int(caught.value.code or 0)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in ("DIAMOND_URL", "DIAMOND_TOKEN", "DIAMOND_CA", "DIAMOND_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path / "home"))
    return Home(tmp_path / "home")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """A client whose `accounts` and `tokens` answer what a test says."""

    def give(**answers: Any) -> None:
        calls = SimpleNamespace(**{name: (lambda *_a, _v=value, **_o: _v) for name, value in answers.items()})

        @contextmanager
        def connect() -> Iterator[Any]:
            yield SimpleNamespace(accounts=calls, tokens=calls, url="https://diamond.example.org")

        for module in (login, tokens, users):
            monkeypatch.setattr(module, "connect", connect)

    return give


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("https://diamond.example.org/", "https://diamond.example.org"),
        ("diamond.example.org:7421", "https://diamond.example.org:7421"),
        ("localhost:7421", "http://localhost:7421"),
        ("127.0.0.1", "http://127.0.0.1"),
        ("http://10.0.0.1:80", "http://10.0.0.1:80"),
        ("https://example.org/diamond", "https://example.org/diamond"),
    ],
)
def test_addresses_as_people_type_them(typed: str, meant: str) -> None:
    assert login._address(typed) == meant


@pytest.mark.parametrize(
    "typed", ["", "ftp://x", "https://", "https://user:secret@host", "https://a b", "https://a\nb", "https://a:99999"]
)
def test_what_is_no_address_is_wrong_use(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("login", typed) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: URL: ")
    assert "https://diamond.example.org" in error


def test_wrong_words_are_said_before_anybody_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("login", "https://x", "--scopes", "read,root") == 2
    assert "'root' is none of read, launch, agent, admin" in capsys.readouterr().err
    assert call("login", "http://localhost:1", "--pin", "sha256:" + "0" * 64) == 2
    assert call("token", "create", "x", "--expires", "soon") == 2
    assert call("token", "create", "x", "--scopes", "") == 2
    capsys.readouterr()


def test_a_token_on_standard_input_must_be_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("", "\n", "two words\n", "x" * 600, "bell\x07\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert call("login", "https://x", "--token-stdin") == 2
        assert "--token-stdin" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_nobody_is_asked_where_nothing_can_be_kept(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    home.make()
    home.path.chmod(0o500)
    assert call("login", "https://x") == 1
    assert "DIAMOND_HOME" in capsys.readouterr().err


def test_nobody_is_asked_where_there_is_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path / "file" / "home"))
    assert call("login", "https://x") == 1
    assert "cannot be kept" in capsys.readouterr().err


def test_what_is_kept_is_private_and_goes_to_its_own_server_only(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    ClientConfig(url="https://a.example.org", token="secret", ca="/ca.pem", user="bob").save(home)
    assert stat.S_IMODE(home.client_file.stat().st_mode) == 0o600
    assert ClientConfig.load(home) == ClientConfig(
        url="https://a.example.org", token="secret", ca="/ca.pem", user="bob"
    )
    monkeypatch.setenv("DIAMOND_URL", "https://a.example.org/")
    assert ClientConfig.load(home) == ClientConfig(
        url="https://a.example.org", token="secret", ca="/ca.pem", user="bob"
    )
    monkeypatch.setenv("DIAMOND_URL", "https://b.example.org")
    assert ClientConfig.load(home) == ClientConfig(url="https://b.example.org", token="")
    monkeypatch.setenv("DIAMOND_TOKEN", "other")
    assert ClientConfig.load(home) == ClientConfig(url="https://b.example.org", token="other")
    monkeypatch.delenv("DIAMOND_URL")
    assert ClientConfig.load(home) == ClientConfig(url="https://a.example.org", token="other", ca="/ca.pem")


def test_logout_leaves_alone_what_login_did_not_make(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("logout") == 1
    assert "not signed in" in capsys.readouterr().err
    ClientConfig(url="http://127.0.0.1:7421", token="made by the server").save(home)
    assert call("logout") == 1
    assert "made by the server" in capsys.readouterr().err
    monkeypatch.setenv("DIAMOND_TOKEN", "x")
    assert call("logout", "--json") == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "conflict"
    assert (loaded := ClientConfig.load(home)) and loaded.token == "x"
    monkeypatch.delenv("DIAMOND_TOKEN")
    assert (loaded := ClientConfig.load(home)) and loaded.token == "made by the server"


@pytest.mark.parametrize(
    ("env", "opens"),
    [
        ({}, False),
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True),
        ({"DISPLAY": ":10", "SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"}, False),
    ],
)
def test_a_browser_is_opened_only_in_front_of_a_person(
    env: dict[str, str], opens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert login._has_browser() is opens
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    assert not login._has_browser()


def test_lifetimes() -> None:
    assert tokens.lifetime("30d") == 30 * 86_400
    assert tokens.lifetime("Never") is None
    with pytest.raises(InvalidInput):
        tokens.lifetime("2y")


def test_a_tokens_value_is_alone_on_standard_output(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    made = Token(id="tok_1", name="nightly", scopes=(Scope.READ,), created_at=1.0, value="dmdu_value")
    given(create=made)
    assert call("token", "create", "nightly", "--scopes", "read", "--expires", "never") == 0
    out, err = capsys.readouterr()
    assert out == "dmdu_value\n"
    assert "shown this once" in err
    assert "dmdu_value" not in err
    assert call("token", "create", "nightly", "--json") == 0
    assert json.loads(capsys.readouterr().out)["value"] == "dmdu_value"


def test_lists_are_clean_and_say_what_matters(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    session = BrowserSession(id="ses_1", method="password", address="192.0.2.7", browser="Fire\x1b[31mfox",
                             created_at=1.0, used_at=2.0, expires_at=3.0)  # fmt: skip
    given(list=[TOKEN], sessions=[session], users=[USER], me=USER, user=USER)
    assert call("token", "ls") == 0
    out, err = capsys.readouterr()
    for word in ("tok_000000001", "nightly *", "read,launch", "expired", "192.0.2.7"):
        assert word in out
    assert "\x1b" not in out + err
    assert call("session", "list") == 0
    assert "Firefox" in (out := capsys.readouterr().out) and "\x1b" not in out
    assert call("user", "ls") == 0
    assert "password, orcid" in capsys.readouterr().out
    assert call("user", "show", "bob") == 0
    assert "orcid: 0000" in capsys.readouterr().out
    assert call("whoami") == 0
    out, err = capsys.readouterr()
    assert out == "bob\n"
    assert "https://diamond.example.org (Bob, bob@example.org)" in err
    assert call("whoami", "--json") == 0
    assert json.loads(capsys.readouterr().out)["token"]["id"] == "tok_000000001"
    given(list=[], sessions=[], invitations=[])
    for argv in (["token", "ls"], ["session", "ls"], ["user", "invitations"]):
        assert call(*argv) == 0
        out, err = capsys.readouterr()
        assert (out, bool(err)) == ("", True)


def test_what_works_once_is_alone_on_standard_output(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    invitation = Invitation(id="cod_1", code="C", url="https://x/invitation#C", expires_at=2e9, is_admin=True)
    reset = ResetCode(user="bob", code="R", url="https://x/reset#R", expires_at=2e9)
    given(invite=invitation, reset=reset, invitations=[invitation], withdraw=None)
    assert call("user", "invite", "--admin") == 0
    out, err = capsys.readouterr()
    assert out == "https://x/invitation#C\n"
    assert "as an administrator" in err
    assert call("user", "reset", "bob") == 0
    assert capsys.readouterr().out == "https://x/reset#R\n"
    assert call("user", "invitations") == 0
    assert "cod_1" in capsys.readouterr().out
    assert call("user", "withdraw", "cod_1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"withdrawn": "cod_1"}


def test_what_cuts_people_off_is_asked_first(given: Given, capsys: pytest.CaptureFixture[str]) -> None:
    given(disable=Closing(user=USER, stopped=2), enable=USER, set_admin=USER, revoke=TOKEN, end_session=None)
    for argv in (["user", "disable", "bob"], ["token", "revoke", "tok_000000001"]):
        assert call(*argv) == 1  # nobody is there to be asked
        assert "-y does it" in capsys.readouterr().err
        assert call(*argv, "-y") == 0
        assert call(*argv, "--json") == 0
        capsys.readouterr()
    assert call("user", "disable", "bob", "-y") == 0
    assert "2 tasks stopped" in capsys.readouterr().out
    for argv in (["user", "enable", "bob"], ["user", "admin", "bob", "--off"], ["session", "end", "ses_1"]):
        assert call(*argv) == 0
        assert capsys.readouterr().out
