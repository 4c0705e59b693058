"""Two people at one form, one person who reloads its answer, and what a form may hold at most."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.notices import Channel
from diamond.core.quotas import EVERYBODY, Limits
from diamond.core.secrets import MAX_VALUE_BYTES
from diamond.server.services import (
    accounts,
    image_drafts,
    invitations,
    notices,
    projects,
    quotas,
    secrets,
    tokens,
    users,
)

from .browsing import Browser, forms_in
from .test_web_sign_in import PASSWORD, Town, make_town

SAME = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    yield from make_town(tmp_path)


def user_id(town: Town, name: str) -> str:
    return users.get(town.ctx, name).id


async def filled(browser: Browser, page: str, action: str, **fields: str) -> dict[str, str]:
    """The form as it is on the page now, and what is typed into it."""
    answer = await browser.get(page)
    assert answer.status_code == 200, answer.text
    return forms_in(answer.text)[action].fields | fields


async def send(browser: Browser, action: str, data: dict[str, str]) -> Any:
    return await browser.http.post(action, data=data, headers=SAME)


@pytest.mark.parametrize(
    ("page", "action", "kind", "name"),
    [
        ("/users/bob", "/users/bob/quota", "user", "bob"),
        ("/limits", "/limits/every-user", "every-user", EVERYBODY),
        ("/limits/projects/waves", "/limits/projects/waves", "project", "waves"),
    ],
)
def test_the_later_of_two_administrators_is_told(town: Town, page: str, action: str, kind: str, name: str) -> None:
    projects.create(town.ctx, user_id(town, "alice"), "waves", "")

    async def test(browser: Browser) -> None:
        await browser.sign_in("alice", PASSWORD)
        first = await filled(browser, page, action, tasks="5")
        second = await filled(browser, page, action, nodes="7")
        assert (await send(browser, action, first)).status_code == 303
        refused = await send(browser, action, second)
        assert refused.status_code == 409
        words = html.unescape(refused.text)
        assert "changed meanwhile; now: tasks 5." in words, "what is there now"
        assert forms_in(refused.text)[action].fields["nodes"] == "7", "and what they typed"
        assert quotas.get(town.ctx, kind, name).limits == Limits(tasks=5), "nothing was lost"
        again = forms_in(refused.text)[action].fields
        assert (await send(browser, action, again)).status_code == 303, "who has seen it may replace it"
        assert quotas.get(town.ctx, kind, name).limits == Limits(nodes=7)

    town.run(test)


@pytest.mark.parametrize(
    ("page", "kind", "name"), [("/users/bob", "user", "bob"), ("/limits/projects/waves", "project", "waves")]
)
def test_limits_that_nobody_saw_are_not_dropped(town: Town, page: str, kind: str, name: str) -> None:
    projects.create(town.ctx, user_id(town, "alice"), "waves", "")
    quotas.set_limits(town.ctx, kind, name, Limits(tasks=5))
    action = f"{page}/quota/clear" if kind == "user" else f"{page}/clear"

    async def test(browser: Browser) -> None:
        await browser.sign_in("alice", PASSWORD)
        old = await filled(browser, page, action)
        quotas.set_limits(town.ctx, kind, name, Limits(nodes=7))
        refused = await send(browser, action, old)
        assert refused.status_code == 409
        assert "changed meanwhile; now: nodes 7." in html.unescape(refused.text)
        assert quotas.get(town.ctx, kind, name).limits == Limits(nodes=7)
        again = forms_in(refused.text)[action].fields
        assert (await send(browser, action, again)).status_code == 303, "who has seen them may drop them"
        assert not quotas.get(town.ctx, kind, name).own

    town.run(test)


def test_the_same_person_in_two_windows_is_told_too(town: Town) -> None:
    bob = user_id(town, "bob")

    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        first = await filled(browser, "/settings", "/settings/profile", full_name="Bob One")
        second = await filled(browser, "/settings", "/settings/profile", email="bob@example.org")
        assert (await send(browser, "/settings/profile", first)).status_code == 303
        refused = await send(browser, "/settings/profile", second)
        assert refused.status_code == 409 and "Bob One, no e-mail" in refused.text
        assert forms_in(refused.text)["/settings/profile"].fields["email"] == "bob@example.org"
        assert accounts.me(town.ctx, bob).full_name == "Bob One"

        rule = notices.create(town.ctx, bob, Channel.WEBHOOK, "https://example.org/hook", ("task.failed",))
        at = f"/settings/notifications/{rule.id}"
        token = (await filled(browser, at, at))["csrf"]
        mark = (await filled(browser, at, at))["seen"]
        one = {"csrf": token, "seen": mark, "event.task.failed": "on", "event.task.succeeded": "on"}
        other = {"csrf": token, "seen": mark, "event.image.ready": "on"}
        assert (await send(browser, at, one)).status_code == 303
        refused = await send(browser, at, other)
        assert refused.status_code == 409 and "task.succeeded" in refused.text
        assert "image.ready" not in notices.get(town.ctx, bob, rule.id).events

    town.run(test)


def test_an_error_in_another_form_of_the_page_leaves_the_limits_shown(town: Town) -> None:
    quotas.set_limits(town.ctx, "user", "bob", Limits(tasks=5))

    async def test(browser: Browser) -> None:
        await browser.sign_in("alice", PASSWORD)
        wrong = await browser.submit("/users/bob", "/users/bob/hand-over", to="nobody")
        assert wrong.status_code == 404 or wrong.status_code == 422
        assert forms_in(wrong.text)["/users/bob/quota"].fields["tasks"] == "5"

    town.run(test)


def test_reloading_the_answer_makes_nothing_again(town: Town) -> None:
    alice = user_id(town, "alice")
    projects.create(town.ctx, alice, "waves", "")

    async def test(browser: Browser) -> None:
        await browser.sign_in("alice", PASSWORD)
        before = len(tokens.list_tokens(town.ctx, alice))
        data = await filled(browser, "/settings/tokens", "/settings/tokens", name="ci")
        data = {key: value for key, value in data.items() if not key.startswith("scope.")} | {
            "scope.read": "on",
            "days": "1",
        }
        first = await send(browser, "/settings/tokens", data)
        assert first.status_code == 200 and "dmdu_" in first.text
        second = await send(browser, "/settings/tokens", data)
        assert second.status_code == 409 and "done already" in second.text and "dmdu_" not in second.text
        made = tokens.list_tokens(town.ctx, alice)
        assert len(made) == before + 1
        tokens.revoke(town.ctx, alice, made[0].id)
        assert (await send(browser, "/settings/tokens", data)).status_code == 409, "also when it is gone again"
        # Who goes back to the page and asks for something else gets it.
        assert (await send(browser, "/settings/tokens", data | {"name": "other"})).status_code == 200

        for page, action in (
            ("/users", "/invitations"),
            ("/settings/projects/waves", "/settings/projects/waves/invitations"),
        ):
            there = len(invitations.list_invitations(town.ctx, alice))
            data = await filled(browser, page, action, email="carol@example.org")
            data.pop("is_admin", None)
            assert "/invitation#" in (await send(browser, action, data)).text
            second = await send(browser, action, data)
            assert second.status_code == 409 and "done already" in second.text and "/invitation#" not in second.text
            assert len(invitations.list_invitations(town.ctx, alice)) == there + 1

        data = await filled(browser, "/users/bob", "/users/bob/reset")
        first = await send(browser, "/users/bob/reset", data)
        link = html.unescape(first.text).partition("/reset#")[2].partition('"')[0]
        assert first.status_code == 200 and link
        second = await send(browser, "/users/bob/reset", data)
        assert second.status_code == 409 and "done already" in second.text and "/reset#" not in second.text
        accounts.use_reset(town.ctx, link, "seven green umbrellas")  # the first one still works

        data = await filled(browser, "/image-builder", "/image-builder")
        first, second = [await send(browser, "/image-builder", data) for _ in range(2)]
        (draft,) = image_drafts.list_drafts(town.ctx, alice)
        assert first.status_code == second.status_code == 303
        assert second.headers["location"] == f"/image-builder/{draft.id}"
        image_drafts.remove(town.ctx, alice, draft.id)
        assert (await send(browser, "/image-builder", data)).headers["location"] == "/image-builder?done=already"
        assert "done already" in (await browser.get("/image-builder?done=already")).text
        assert not image_drafts.list_drafts(town.ctx, alice)

    town.run(test)


def test_every_secret_that_is_allowed_fits_into_the_form(town: Town) -> None:
    bob = user_id(town, "bob")

    async def test(browser: Browser) -> None:
        await browser.sign_in("bob", PASSWORD)
        for number, value in enumerate(
            ("+/=\n" * 10_000, "\n" * (MAX_VALUE_BYTES - 1) + "x", "é" * (MAX_VALUE_BYTES // 2))
        ):
            typed = value.replace("\n", "\r\n")  # as browsers send it
            answer = await browser.http.post(
                "/settings/secrets",
                data=await filled(browser, "/settings/secrets", "/settings/secrets", name=f"S{number}")
                | {"value": typed, "project": ""},
                headers=SAME,
            )
            assert answer.status_code == 303, (number, answer.text)
        assert {each.name for each in secrets.list_secrets(town.ctx, bob)} == {"S0", "S1", "S2"}
        over = await browser.submit("/settings/secrets", "/settings/secrets", name="S9")
        assert over.status_code == 422
        data = await filled(browser, "/settings/secrets", "/settings/secrets", name="S9")
        larger = await send(browser, "/settings/secrets", data | {"value": "x" * (MAX_VALUE_BYTES + 1)})
        assert larger.status_code == 413 and "x" * 100 not in larger.text
        nobody = Browser(town.app)
        assert (
            await nobody.http.post("/settings/secrets", data={"csrf": "x", "value": "y" * 100_000})
        ).status_code == 401

    town.run(test)
