"""Identity providers that lie, break or hang, and people who meddle on the way: nobody is signed in by any of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
import pytest

from testing.service import Service
from testing.sign_in import Browser, Tenant, lying_provider, parameters, provider_toml, rows, running


@dataclass
class World:
    service: Service
    tenants: dict[str, Tenant]

    def browser(self) -> Browser:
        return Browser(self.service)

    def counts(self) -> list[tuple[Any, ...]]:
        """What grows when somebody gets in."""
        tables = ("users", "identities", "sessions", "projects")
        return [row for table in tables for row in rows(self.service, f"SELECT count(*) FROM {table}")]

    def refusals(self) -> list[str]:
        reasons = "SELECT json_extract(data, '$.reason') FROM audit"
        return [row[0] for row in rows(self.service, f"{reasons} WHERE action = 'session.refused' ORDER BY seq")]


# Each is asked for its discovery document and keys once in an hour: a broken one needs a tenant of its own.
_BROKEN = ("hanging", "giant", "moved", "impostor", "downgraded", "inward", "silent", "keyless")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with lying_provider() as url:
        names = ("main", "other", "vocal", "changing", *_BROKEN)
        tenants = {name: Tenant(f"{url}/{name}") for name in names}
        for name, said in {
            "vocal": {"metadata": {"authorization_response_iss_parameter_supported": True}},
            "hanging": {"faults": ["hang .well-known/openid-configuration"]},
            "giant": {"faults": ["giant .well-known/openid-configuration"]},
            "moved": {"faults": ["redirect .well-known/openid-configuration"]},
            "impostor": {"metadata": {"issuer": f"{url}/main"}},
            "downgraded": {"metadata": {"token_endpoint": "http://login.example.org/token"}},
            "inward": {"metadata": {"jwks_uri": "file:///etc/passwd"}},
            "silent": {"faults": ["text .well-known/openid-configuration"]},
            "keyless": {"faults": ["giant jwks"]},
        }.items():
            tenants[name].control(**said)
        text = "\n".join(provider_toml(name, tenant.issuer, timeout_s="2") for name, tenant in tenants.items())
        with running(tmp_path_factory.mktemp("hostile") / "home", text) as service:
            yield World(service, tenants)


@pytest.fixture
def main(world: World) -> Tenant:
    tenant = world.tenants["main"]
    tenant.control(reset=True, sub="victim", claims={"preferred_username": "bob"})
    return tenant


def assert_refused(world: World, browser: Browser, answer: httpx.Response, status: int = 403) -> None:
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert 'role="alert"' in answer.text
    assert "set-cookie" not in answer.headers or "diamond_session" not in answer.headers["set-cookie"]
    assert not browser.is_signed_in()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("other nonce", "nonce"),
        ("no nonce", "nonce"),
        ("other aud", "aud"),
        ("second aud", "azp"),
        ("other azp", "azp"),
        ("expired", "exp"),
        ("no exp", "exp"),
        ("odd exp", "exp"),
        ("from the future", "iat"),
        ("other issuer", "iss"),
        ("no issuer", "iss"),
        ("no subject", "sub"),
        ("number as subject", "sub"),
        ("other at_hash", "at_hash"),
        ("alg none", "algorithm"),
        ("public key as secret", "algorithm"),
        ("shared key", "algorithm"),
        ("other key", "signature"),
        ("key in header", "signature"),
        ("changed", "signature"),
        ("garbage", "id_token"),
        ("no id_token", "id_token"),
        ("no access_token", "token"),
        ("odd token type", "token"),
        ("other userinfo", "userinfo"),
        ("nobody's userinfo", "userinfo"),
        ("no code", "code"),
        ("decline", "declined"),
        ("other iss", "issuer"),
    ],
)
def test_what_is_not_right_is_refused(world: World, main: Tenant, fault: str, reason: str) -> None:
    main.control(faults=[fault])
    before = world.counts()
    with world.browser() as browser:
        assert_refused(world, browser, browser.sign_in("main"))
    assert world.counts() == before
    assert world.refusals()[-1] == reason


@pytest.mark.parametrize(
    "fault",
    [
        "hang token", "hang userinfo", "giant token", "giant userinfo", "redirect token", "redirect userinfo",
        "error token", "error userinfo", "text token", "text userinfo",
    ],
)  # fmt: skip
def test_a_provider_that_breaks_holds_nobody_up(world: World, main: Tenant, fault: str) -> None:
    main.control(faults=[fault])
    before = world.counts()
    with world.browser() as browser:
        began = time.monotonic()
        assert_refused(world, browser, browser.sign_in("main"), 502)
        assert time.monotonic() - began < 8
    assert world.counts() == before


@pytest.mark.parametrize("name", [name for name in _BROKEN if name != "keyless"])
def test_a_discovery_document_that_cannot_be_believed(world: World, name: str) -> None:
    with world.browser() as browser:
        began = time.monotonic()
        assert_refused(world, browser, browser.get(f"/sign-in/{name}"), 502)
        assert time.monotonic() - began < 8
    assert world.refusals()[-1] == "provider"


def test_keys_that_are_too_many_bytes(world: World) -> None:
    with world.browser() as browser:
        assert_refused(world, browser, browser.sign_in("keyless"), 502)


def test_the_server_answers_others_while_a_provider_hangs(world: World, main: Tenant) -> None:
    main.control(faults=["hang token"])
    with world.browser() as browser, httpx.Client(timeout=5) as other:
        back = browser.sent_back(browser.begin("main"))
        browser.http.timeout = httpx.Timeout(0.5)
        with pytest.raises(httpx.ReadTimeout):
            browser.get(back)
        began = time.monotonic()
        assert other.get(f"{world.service.url}/api/v1/health").status_code == 200
        assert time.monotonic() - began < 1


def test_a_state_works_once(world: World, main: Tenant) -> None:
    with world.browser() as browser:
        back = browser.sent_back(browser.begin("main"))
        kept = dict(browser.http.cookies)
        assert browser.get(back).status_code == 303
        before = world.counts()
        # The same address again, with all cookies the browser ever had.
        again = httpx.get(back, cookies={"diamond_provider": kept["diamond_provider"]}, timeout=10)
        assert again.status_code == 403
        assert "not under way in this browser" in again.text
    assert world.counts() == before
    assert world.refusals()[-1] == "state"


def test_nobody_is_signed_in_as_somebody_else(world: World, main: Tenant) -> None:
    """Login CSRF: a victim follows the attacker's address on the way back. And a thief follows the victim's."""
    before = world.counts()
    with world.browser() as attacker, world.browser() as victim:
        back = attacker.sent_back(attacker.begin("main"))
        assert_refused(world, victim, victim.get(back))
        victim.begin("main")  # with a sign-in of their own under way
        assert_refused(world, victim, victim.get(back))
    assert world.counts() == before


def test_a_code_of_another_sign_in_is_worth_nothing(world: World, main: Tenant) -> None:
    """A stolen code beside the thief's own state: the provider asks for a verifier that the thief has not."""
    before = world.counts()
    with world.browser() as victim, world.browser() as thief:
        stolen = parameters(victim.sent_back(victim.begin("main")))
        back = thief.sent_back(thief.begin("main"))
        mixed = parameters(back) | {"code": stolen["code"]}
        address = urlsplit(back)._replace(query=urlencode(mixed)).geturl()
        assert_refused(world, thief, thief.get(address))
    assert world.counts() == before
    assert world.refusals()[-1] == "code"


def test_providers_cannot_be_mixed_up(world: World, main: Tenant) -> None:
    """An answer of one provider, brought to the address of another; and one that says it is from another."""
    before = world.counts()
    with world.browser() as browser:
        back = browser.sent_back(browser.begin("main"))
        assert_refused(world, browser, browser.get(back.replace("/sign-in/main/", "/sign-in/other/")))
        assert world.refusals()[-1] == "state"
        back = browser.sent_back(browser.begin("vocal"))
        assert parameters(back)["iss"] == world.tenants["vocal"].issuer
        mixed = parameters(back) | {"iss": main.issuer}
        assert_refused(world, browser, browser.get(urlsplit(back)._replace(query=urlencode(mixed)).geturl()))
        assert world.refusals()[-1] == "issuer"
    assert world.counts() == before


def test_who_promises_to_name_itself_must(world: World) -> None:
    vocal = world.tenants["vocal"]
    said = {"authorization_response_iss_parameter_supported": True}
    vocal.control(reset=True, metadata=said, faults=["no iss"])
    with world.browser() as browser:
        assert_refused(world, browser, browser.sign_in("vocal"))
        assert world.refusals()[-1] == "issuer"
        vocal.control(reset=True, metadata=said, sub="v-1")
        assert browser.sign_in("vocal").status_code == 303


def test_a_token_of_one_tenant_means_nothing_to_another(world: World, main: Tenant) -> None:
    """The same subject at two issuers is two people."""
    other = world.tenants["other"]
    other.control(reset=True, sub="victim", claims={"preferred_username": "bob"})
    with world.browser() as first, world.browser() as second:
        assert first.sign_in("main").status_code == 303
        assert second.sign_in("other").status_code == 303
        assert first.me()["id"] != second.me()["id"]
        assert second.me()["name"] == f"{first.me()['name']}-2"


def test_keys_are_changed_while_we_know_the_old_ones(world: World) -> None:
    tenant = world.tenants["changing"]
    with world.browser() as browser:
        assert browser.sign_in("changing").status_code == 303
        old = tenant.control()["kid"]
        assert tenant.control(new_key=True, faults=["odd keys"])["kid"] != old
        assert browser.sign_in("changing").status_code == 303
        tenant.control(faults=["no kid"])
        assert browser.sign_in("changing").status_code == 303


@pytest.mark.parametrize(
    "query",
    [
        "", "state=x&code=y", "state=x&state=y&code=z", "state=x&code=y&code=z", "code=%00&state=%00",
        "state=" + "x" * 5000 + "&code=y", "error=%3Cscript%3Ealert(1)%3C/script%3E&state=x",
    ],
)  # fmt: skip
def test_addresses_made_up_by_anybody(world: World, query: str) -> None:
    with world.browser() as browser:
        answer = browser.get(f"/sign-in/main/callback?{query}")
        assert_refused(world, browser, answer)
        assert "<script>" not in answer.text


def test_an_error_is_shown_as_text(world: World, main: Tenant) -> None:
    with world.browser() as browser:
        state = parameters(browser.begin("main"))["state"]
        query = urlencode({"state": state, "error": "<img src=x onerror=alert(1)>"})
        answer = browser.get(f"/sign-in/main/callback?{query}")
        assert_refused(world, browser, answer)
        assert "onerror" not in answer.text


def test_guessing_states_is_slowed_down(world: World) -> None:
    """Last: this address has to wait a minute afterwards."""
    with world.browser() as browser:
        answers = [browser.get(f"/sign-in/main/callback?state={number}&code=x").status_code for number in range(60)]
        assert answers[-1] == 429
