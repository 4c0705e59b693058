"""People sign in through identity providers: real processes on both sides, and a browser between them."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from testing.postgres import free_port
from testing.service import Service
from testing.sign_in import (
    Browser,
    Tenant,
    as_admin,
    lying_provider,
    parameters,
    process,
    provider_toml,
    rows,
    running,
    write_identity_file,
)

_ALGORITHMS = ("RS512", "PS256", "ES256", "ES384", "EdDSA", "Ed25519")


@dataclass
class World:
    service: Service
    mock: str  # the issuer of oidc-provider-mock
    url: str  # below which tenants of our own provider are
    main: Tenant
    closed: Tenant
    github: Tenant

    def browser(self) -> Browser:
        return Browser(self.service)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    mock = f"http://127.0.0.1:{free_port()}"
    port = str(urlsplit(mock).port)
    with (
        process("-m", "oidc_provider_mock", "--port", port, "--require-nonce", url=f"{mock}/jwks"),
        lying_provider() as url,
    ):
        text = "\n".join(
            (
                provider_toml("mock", mock, allow='{ domains = ["example.org"] }'),
                provider_toml("main", f"{url}/main"),
                provider_toml("closed", f"{url}/closed", allow="", create_accounts="false"),
                provider_toml(
                    "managed",
                    f"{url}/managed",
                    allow='{ domains = ["example.org", "*.lab.org"], emails = ["bob@other.org"] }',
                    domain_claims='["hd"]',
                    address_claims='["eppn"]',
                    email_domains="false",
                ),
                *(provider_toml(f"by-{alg.lower()}", f"{url}/{alg}") for alg in _ALGORITHMS),
                provider_toml(
                    "hub",
                    "",
                    kind='"github"',
                    web_url=f'"{url}/hub"',
                    api_url=f'"{url}/hub"',
                    allow='{ groups = ["laboratory"] }',
                ),
            )
        )
        with running(tmp_path_factory.mktemp("oidc") / "home", text) as service:
            yield World(service, mock, url, Tenant(f"{url}/main"), Tenant(f"{url}/closed"), Tenant(f"{url}/hub"))


def at_mock(world: World, browser: Browser, sub: str, **claims: object) -> httpx.Response:
    """Sign in at the mock provider as `sub`, by its own form."""
    httpx.put(f"{world.mock}/users/{sub}", json=claims, timeout=10).raise_for_status()
    place = browser.begin("mock")
    assert browser.http.get(place).status_code == 200
    answer = browser.http.post(place, data={"sub": sub})
    assert answer.status_code in (302, 303), answer.text
    return browser.get(answer.headers["location"])


def test_somebody_new_gets_an_account_and_finds_it_again(world: World) -> None:
    claims = {"email": "carol@example.org", "email_verified": True, "preferred_username": "Carol.S", "name": "Carol S"}
    with world.browser() as browser:
        answer = at_mock(world, browser, "c-1", **claims)
        assert (answer.status_code, answer.headers["location"]) == (303, "/dashboard")
        me = browser.me()
        assert (me["name"], me["full_name"], me["email"], me["is_admin"]) == (
            "carol.s", "Carol S", "carol@example.org", False,
        )  # fmt: skip
        assert [item["provider"] for item in me["identities"]] == ["mock"]
        assert "Carol S" in browser.get("/settings").text
    with world.browser() as another:
        at_mock(world, another, "c-1", **claims | {"email": "new@example.org", "preferred_username": "other"})
        assert another.me()["id"] == me["id"]
    methods = [row[0] for row in rows(world.service, f"SELECT method FROM sessions WHERE user_id = '{me['id']}'")]
    assert methods == ["mock", "mock"]
    assert rows(world.service, "SELECT count(*) FROM codes WHERE kind = 'oidc' AND used_at IS NULL") == [(0,)]


def test_only_addresses_the_provider_has_verified_count(world: World) -> None:
    with world.browser() as browser:
        for claims in (
            {"email": "dora@example.org", "email_verified": False},
            {"email": "dora@example.org"},
            {"email": "dora@elsewhere.org", "email_verified": True},
            {"email": "dora@example.org.elsewhere.org", "email_verified": True},
        ):
            answer = at_mock(world, browser, "d-1", **claims)
            assert answer.status_code == 403, claims
            assert "may not sign in here" in answer.text
            assert "invitation" in answer.text
        assert not browser.is_signed_in()
    assert rows(world.service, "SELECT count(*) FROM identities WHERE subject = 'd-1'") == [(0,)]


_MAIL = {"email": "bob@example.org", "email_verified": True}


@pytest.mark.parametrize(
    ("claims", "userinfo", "comes_in"),
    [
        ({"hd": "example.org"}, {}, True),
        ({"hd": "EXAMPLE.org"}, {}, True),
        ({"hd": "bob@example.org"}, {}, False),
        ({"eppn": "bob@example.org"}, {}, True),
        ({"eppn": "bob@a.lab.org"}, {}, True),
        ({"eppn": "bob@lab.org"}, {}, False),
        ({"eppn": "example.org"}, {}, False),  # a name one may have chosen, not an address
        ({"eppn": "x@example.org@other.org"}, {}, False),
        (_MAIL, {}, False),  # this provider's word on addresses does not count for domains
        (_MAIL | {"email": "bob@other.org"}, {}, True),
        (_MAIL | {"email": "Bob@Other.org", "email_verified": "true"}, {}, True),
        (_MAIL | {"email": "bob@other.org", "email_verified": "yes"}, {}, False),
        (_MAIL | {"email": "bob@other.org", "email_verified": 1}, {}, False),
        # What userinfo verified is another address than the one the token names.
        ({"email": "bob@other.org"}, {"email": "eve@evil.org", "email_verified": True}, False),
        ({"email_verified": True}, {"email": "bob@other.org", "email_verified": None}, False),
        ({"email": "bob@other.org", "email_verified": False}, {"email_verified": True}, False),
        ({"email": "bob@other.org"}, {"email_verified": True}, True),
        ({}, {"email": "bob@other.org", "email_verified": True}, True),
    ],
)
def test_which_domains_and_addresses_are_believed(
    world: World, claims: dict[str, object], userinfo: dict[str, object], comes_in: bool
) -> None:
    sub = f"d-{claims}-{userinfo}"[:200]
    Tenant(f"{world.url}/managed").control(reset=True, sub=sub, claims=claims, userinfo=userinfo)
    with world.browser() as browser:
        assert (browser.sign_in("managed").status_code == 303) == comes_in
        assert browser.is_signed_in() == comes_in


def test_an_address_opens_nobody_elses_account(world: World) -> None:
    """The administrator's own address, verified by a provider: still somebody else."""
    as_admin(world.service, "PATCH", "/me", email="alice@example.org")
    world.main.control(reset=True, sub="m-1", claims={
        "email": "alice@example.org", "email_verified": True, "preferred_username": "alice",
    })  # fmt: skip
    with world.browser() as browser:
        assert browser.sign_in("main").status_code == 303
        me = browser.me()
        assert (me["name"], me["is_admin"]) == ("alice-2", False)


def test_the_session_is_a_new_one_and_the_old_one_ends(world: World) -> None:
    world.main.control(reset=True, sub="m-2", claims={"preferred_username": "bob"})
    with world.browser() as browser:
        browser.sign_in("main")
        old = dict(browser.http.cookies)["diamond_session"]
        browser.sign_in("main")
        assert dict(browser.http.cookies)["diamond_session"] != old
        stale = httpx.get(f"{world.service.url}/api/v1/me", cookies={"diamond_session": old}, timeout=10)
        assert stale.status_code == 401
        assert "diamond_provider" not in browser.http.cookies


@pytest.mark.parametrize("next_path", ["//evil.example", "https://evil.example", "/%5Cevil.example", "/sign-out"])
def test_one_goes_on_at_pages_of_ours_only(world: World, next_path: str) -> None:
    world.main.control(reset=True, sub="m-2")
    with world.browser() as browser:
        assert browser.sign_in("main", next_path).headers["location"] == "/dashboard"
        assert browser.sign_in("main", "/device").headers["location"] == "/device"


@pytest.mark.parametrize("alg", _ALGORITHMS)
def test_tokens_signed_in_other_ways(world: World, alg: str) -> None:
    Tenant(f"{world.url}/{alg}").control(sub="m-3", alg=alg)
    with world.browser() as browser:
        answer = browser.sign_in(f"by-{alg.lower()}")
        assert answer.status_code == 303, answer.text


def test_what_the_provider_is_asked(world: World) -> None:
    with world.browser() as browser:
        first, second = (parameters(browser.begin("main")) for _ in range(2))
    assert first["response_type"] == "code"
    assert first["code_challenge_method"] == "S256"
    assert first["scope"] == "openid profile email"
    assert first["redirect_uri"] == f"{world.service.url}/sign-in/main/callback"
    for key in ("state", "nonce", "code_challenge"):
        assert len(first[key]) >= 43
        assert first[key] != second[key]


def invite(service: Service, **fields: str) -> str:
    return str(as_admin(service, "POST", "/invitations", **fields)["code"])


def test_an_invitation_is_used_with_an_identity(world: World) -> None:
    world.closed.control(reset=True, sub="i-1", claims={"preferred_username": "ignored", "name": "Invited One"})
    with world.browser() as browser:
        refused = browser.sign_in("closed")
        assert refused.status_code == 403
        assert "No account here belongs to" in refused.text
        code = invite(world.service, name="guest")
        page = browser.post("/sign-in/closed", "/invitation", code=code)
        assert code not in page.text
        assert browser.get(browser.sent_back(browser.led_on(page))).status_code == 303
        assert browser.me()["name"] == "guest"
    with world.browser() as browser:
        assert browser.sign_in("closed").status_code == 303
        again = browser.post("/sign-in/closed", "/invitation", code=code)
        assert again.status_code == 401
        assert "used already" in again.text


def test_an_invitation_stays_unused_when_its_bearer_has_an_account(world: World) -> None:
    world.main.control(reset=True, sub="m-2")
    code = invite(world.service, name="unused")
    with world.browser() as browser:
        browser.sign_in("main")
        page = browser.post("/sign-in/main", "/invitation", code=code)
        answer = browser.get(browser.sent_back(browser.led_on(page)))
        assert answer.status_code == 403
        assert "was not used" in answer.text
    with world.browser() as browser:
        assert browser.post("/sign-in/closed", "/invitation", code=code).status_code == 200


def test_linking_and_unlinking(world: World) -> None:
    world.main.control(reset=True, sub="l-1", claims={"preferred_username": "linda"})
    world.closed.control(reset=True, sub="l-2", claims={"email": "linda@closed.example"})
    with world.browser() as browser:
        browser.sign_in("main")
        user_id, (first,) = browser.me()["id"], browser.me()["identities"]
        only = browser.post(f"/settings/identities/{first['id']}/unlink", "/settings")
        assert only.status_code == 409
        assert "only way left" in only.text

        page = browser.post("/settings/identities/closed/link", "/settings")
        answer = browser.get(browser.sent_back(browser.led_on(page)))
        assert (answer.status_code, answer.headers["location"]) == (303, "/settings?done=linked")
        assert {item["provider"] for item in browser.me()["identities"]} == {"main", "closed"}

        with world.browser() as elsewhere:
            assert elsewhere.sign_in("closed").status_code == 303
            assert elsewhere.me()["id"] == user_id
            gone = browser.post(f"/settings/identities/{first['id']}/unlink", "/settings")
            assert gone.headers["location"] == "/settings?done=unlinked"
            assert not elsewhere.is_signed_in()  # other sessions end, as with a new password
        assert [item["provider"] for item in browser.me()["identities"]] == ["closed"]
    with world.browser() as browser:
        refused = browser.sign_in("main")
        assert refused.status_code == 403
        assert "was unlinked" in refused.text


def test_unlinking_from_a_terminal(world: World) -> None:
    world.main.control(reset=True, sub="l-7", claims={"preferred_username": "lisa"})
    world.closed.control(reset=True, sub="l-8", claims={"email": "lisa@closed.example"})
    with world.browser() as browser:
        browser.sign_in("main")
        browser.get(browser.sent_back(browser.led_on(browser.post("/settings/identities/closed/link", "/settings"))))
        csrf = re.search(r'name="csrf" value="([0-9a-f]+)"', browser.get("/settings").text)
        assert csrf is not None
        made = browser.http.post(
            f"{world.service.url}/api/v1/tokens",
            json={"name": "terminal", "scopes": ["admin"]},
            headers={"Diamond-CSRF": csrf[1]},
        )
        assert made.status_code == 201, made.text
        env = {**world.service.env, "DIAMOND_URL": world.service.url, "DIAMOND_TOKEN": made.json()["value"]}
        listed = {one["provider"]: one["id"] for one in diamond(env, "user", "identities")["identities"]}
        assert set(listed) == {"main", "closed"}
        assert diamond(env, "user", "unlink", listed["main"], "-y") == {"unlinked": listed["main"]}
        assert [one["provider"] for one in diamond(env, "user", "identities")["identities"]] == ["closed"]
        assert "only way left" in diamond(env, "user", "unlink", listed["closed"], status=1)["error"]["message"]
        assert not browser.is_signed_in()


def diamond(env: dict[str, str], *argv: str, status: int = 0) -> dict[str, Any]:
    command = [sys.executable, "-m", "diamond.cli", *argv, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr + done.stdout
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def test_linking_needs_a_form_of_this_session_and_the_same_session_at_the_end(world: World) -> None:
    world.main.control(reset=True, sub="l-3")
    world.closed.control(reset=True, sub="l-4")
    with world.browser() as browser, world.browser() as thief:
        browser.sign_in("main")
        forged = browser.http.post(f"{world.service.url}/settings/identities/closed/link", data={"csrf": "0" * 64})
        assert forged.status_code == 403
        # Somebody who gets hold of the address on the way back can do nothing with it in a session of their own.
        place = browser.led_on(browser.post("/settings/identities/closed/link", "/settings"))
        back = browser.sent_back(place)
        world.main.control(reset=True, sub="l-5")
        thief.sign_in("main")
        assert thief.get(back).status_code == 403
        # And who has signed out meanwhile links nothing.
        browser.post("/sign-out", "/settings")
        answer = browser.get(back)
        assert answer.status_code == 403
        assert "nothing was linked" in answer.text
    assert rows(world.service, "SELECT count(*) FROM identities WHERE subject = 'l-4'") == [(0,)]


def test_an_identity_of_somebody_else_cannot_be_linked(world: World) -> None:
    world.main.control(reset=True, sub="l-6")
    with world.browser() as browser:
        browser.sign_in("main")
        world.main.control(reset=True, sub="l-7")
        with world.browser() as other:
            other.sign_in("main")
        place = browser.led_on(browser.post("/settings/identities/main/link", "/settings"))
        answer = browser.get(browser.sent_back(place))
        assert answer.status_code == 403
        assert "belongs to another account" in answer.text
        assert len(browser.me()["identities"]) == 1


def test_a_closed_account_stays_closed(world: World) -> None:
    world.main.control(reset=True, sub="x-1", claims={"preferred_username": "xenia"})
    with world.browser() as browser:
        browser.sign_in("main")
        as_admin(world.service, "POST", "/users/xenia/disable")
        assert not browser.is_signed_in()
        answer = browser.sign_in("main")
        assert answer.status_code == 403
        assert "Your account here is closed" in answer.text
        assert not browser.is_signed_in()


def test_github(world: World) -> None:
    person = {
        "id": 4711, "login": "Octo-Cat", "name": "Octo Cat", "orgs": ["laboratory", "others"],
        "emails": [
            {"email": "old@example.org", "primary": False, "verified": True},
            {"email": "octo@example.org", "primary": True, "verified": True},
        ],
    }  # fmt: skip
    world.github.control(reset=True, github=person)
    with world.browser() as browser:
        asked = parameters(browser.begin("hub"))
        assert asked["scope"] == "read:user user:email read:org"
        assert browser.sign_in("hub").status_code == 303
        me = browser.me()
        assert (me["name"], me["email"]) == ("octo-cat", "octo@example.org")
    assert rows(world.service, "SELECT issuer, label FROM identities WHERE subject = '4711'") == [
        (world.github.issuer, "Octo-Cat")
    ]
    # The number says who it is: a login may pass to somebody else.
    world.github.control(github=person | {"login": "renamed"})
    with world.browser() as browser:
        browser.sign_in("hub")
        assert browser.me()["id"] == me["id"]
    world.github.control(github=person | {"id": 4712})
    with world.browser() as browser:
        browser.sign_in("hub")
        assert browser.me()["id"] != me["id"]


@pytest.mark.parametrize(
    ("person", "faults", "says"),
    [
        ({"id": 1, "login": "a", "orgs": ["others"]}, [], "may not sign in here"),
        ({"id": True, "login": "a", "orgs": ["laboratory"]}, [], "does not say who signed in"),
        ({"id": None, "login": "a", "orgs": ["laboratory"]}, [], "does not say who signed in"),
        ({"id": "4711", "login": "a", "orgs": ["laboratory"]}, [], "does not say who signed in"),
        ({"id": 1, "orgs": ["laboratory"]}, ["decline"], "You did not let"),
        ({"id": 1, "orgs": ["laboratory"]}, ["error user"], "cannot sign anybody in"),
        ({"id": 1, "orgs": ["laboratory"]}, ["giant user/emails"], "larger than"),
        ({"id": 1, "orgs": ["laboratory"]}, ["redirect token"], "redirect"),
    ],
)
def test_github_refused(world: World, person: dict[str, object], faults: list[str], says: str) -> None:
    world.github.control(reset=True, github=person, faults=faults)
    log = world.service.log_tail("server.log", 100_000)
    before = rows(world.service, "SELECT count(*) FROM users") + rows(world.service, "SELECT count(*) FROM sessions")
    with world.browser() as browser:
        answer = browser.sign_in("hub")
        assert answer.status_code in (403, 502)
        # What exactly a provider did is for the operator: it may name hosts.
        assert says in answer.text + world.service.log_tail("server.log", 100_000).removeprefix(log)
        assert not browser.is_signed_in()
    after = rows(world.service, "SELECT count(*) FROM users") + rows(world.service, "SELECT count(*) FROM sessions")
    assert before == after


def test_ways_to_sign_in_are_told(world: World) -> None:
    said = httpx.get(f"{world.service.url}/api/v1/sign-in-methods", timeout=10).json()
    assert [item["name"] for item in said["providers"]][:3] == ["mock", "main", "closed"]
    assert said["password"] is True
    page = httpx.get(f"{world.service.url}/sign-in", timeout=10).text
    assert 'href="/sign-in/mock?next=' in page
    assert httpx.get(f"{world.service.url}/sign-in/nobody", timeout=10).status_code == 404


def test_nothing_secret_in_logs_or_audit(world: World) -> None:
    world.main.control(reset=True, sub="m-2")
    with world.browser() as browser:
        back = browser.sent_back(browser.begin("main"))
        assert browser.get(back).status_code == 303
        given = parameters(back)
        cookies = [browser.http.cookies["diamond_session"]]
    log = (world.service.home.path / "server.log").read_text()
    with contextlib.closing(open(world.service.home.server / "diamond.db", "rb")) as file:
        database = file.read()
    for secret in (given["code"], given["state"], *cookies):
        assert secret not in log
        assert secret.encode() not in database


def test_a_mistake_in_the_file_stops_the_start(tmp_path: Path) -> None:
    service = Service(tmp_path / "home", multi_user="1")
    write_identity_file(service, provider_toml("lab", "https://login.example.org", allow="", create_accounts="true"))
    service.start_server(wait=False)
    assert service.server is not None
    assert service.server.wait(timeout=60) == 1
    log = service.log_tail("server.log")
    assert "line 7: provider[0].create_accounts: is true, and `allow` names nobody" in log
    assert "Traceback" not in log
