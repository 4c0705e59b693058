"""Waiting for an approval: what is asked, how outages are borne, and how it can end."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from diamond.core.enrolment import token_hash
from diamond.core.errors import Forbidden
from diamond.core.logins import LoginState
from diamond.sdk import logins as module
from diamond.sdk.logins import Logins, PendingLogin
from diamond.sdk.transport import Transport

STARTED = {
    "device_code": "device", "user_code": "ABCD-EFGH", "verification_url": "https://diamond.example.org/device",
    "expires_in_s": 900.0, "interval_s": 2.0,
}  # fmt: skip


class World:
    """A server that answers in turn, and a clock that sleeping moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> None:
        self.now = 0.0
        self.sent: list[Any] = []
        self._answers = list(answers)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        transport = httpx.MockTransport(self.answer)
        self.logins = Logins(
            Transport("https://here.example.org", "", retries=0, transport=transport, sleep=self.sleep)
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.sent.append((request.url.path, json.loads(request.read() or b"null")))
        given = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(given, Exception):
            raise given
        status, body = given
        return httpx.Response(status, content=body)

    def begin(self, **more: Any) -> PendingLogin:
        self._answers.insert(0, (201, json.dumps(STARTED | more).encode()))
        return self.logins.begin("diamond login on laptop", scopes=("read",))


def said(state: str, **more: Any) -> tuple[int, bytes]:
    return 200, json.dumps({"state": state, **more}).encode()


def failure(status: int, code: str) -> tuple[int, bytes]:
    return status, json.dumps({"error": {"code": code, "message": code}}).encode()


def test_only_the_hash_of_the_token_leaves_and_each_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, said("approved", user="bob"))
    pending, other = world.begin(), world.begin()
    (path, body), _ = world.sent
    assert (path, body["scopes"]) == ("/api/v1/logins", ["read"])
    assert body["token_sha256"] == token_hash(pending.token)
    assert pending.token not in json.dumps(world.sent)
    assert pending.token != other.token


def test_outages_and_impatience_are_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(
        monkeypatch,
        said("pending"), httpx.ConnectError("refused"), failure(429, "rate_limited"), failure(503, "unavailable"),
        said("pending"), said("approved", user="bob"),
    )  # fmt: skip
    told: list[str] = []
    answer = world.logins.wait(world.begin(), tell=told.append)
    assert (answer.state, answer.user, world.now) == (LoginState.APPROVED, "bob", 12.0)
    assert [bool(text) for text in told] == [False, True, True, True, False, False]
    assert {body["device_code"] for path, body in world.sent if path.endswith("/poll")} == {"device"}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (said("refused"), "refused"),
        (said("expired"), "in time"),
        (failure(404, "not_found"), "in time"),
    ],
)
def test_how_it_can_fail(monkeypatch: pytest.MonkeyPatch, answer: Any, says: str) -> None:
    world = World(monkeypatch, said("pending"), answer)
    with pytest.raises(Forbidden, match=says):
        world.logins.wait(world.begin())
    assert world.now == 4.0


@pytest.mark.parametrize("silent", [said("pending"), httpx.ConnectError("refused")])
def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch, silent: Any) -> None:
    world = World(monkeypatch, silent)
    with pytest.raises(Forbidden, match="in time"):
        world.logins.wait(world.begin(interval_s=1e9))  # nor is a server believed that says to ask once in 30 years
    assert 900 <= world.now < 1000


@pytest.mark.parametrize("interval_s", [0.0, -5.0])
def test_a_server_cannot_be_drowned(monkeypatch: pytest.MonkeyPatch, interval_s: float) -> None:
    world = World(monkeypatch, said("pending"))
    with pytest.raises(Forbidden):
        world.logins.wait(world.begin(interval_s=interval_s, expires_in_s=10.0))
    assert len(world.sent) < 60


@pytest.mark.parametrize("url", ["javascript:alert(1)", "", "https://x/\x1b[2J", "file:///etc/passwd"])
def test_only_an_address_on_the_web_is_shown(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    world = World(monkeypatch, said("pending"))
    assert world.logins.url_of(world.begin(verification_url=url)) == "https://here.example.org/device"
    assert world.logins.url_of(world.begin()) == "https://diamond.example.org/device"
