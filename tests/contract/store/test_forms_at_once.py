"""Forms that come twice or from two people at the same moment, on every database: one is done, the others are told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from diamond.core.accounts import Scope
from diamond.core.errors import Conflict
from diamond.core.notices import Channel
from diamond.core.quotas import EVERYBODY, Limits
from diamond.server.services import accounts, form_keys, image_drafts, notices, quotas, seen, tokens
from diamond.server.services.context import Context
from testing.context import Clock

MANY = 6


def at_once(action: Callable[[int], Any]) -> tuple[list[Any], list[Conflict]]:
    """What succeeded, and what was refused."""

    def one(number: int) -> Any:
        try:
            return action(number)
        except Conflict as error:
            return error

    with ThreadPoolExecutor(MANY) as pool:
        found = list(pool.map(one, range(MANY)))
    refused = [each for each in found if isinstance(each, Conflict)]
    return [each for each in found if not isinstance(each, Conflict)], refused


def test_one_form_makes_one_thing(ctx: Context, user_id: str, other_id: str) -> None:
    def make(once: str, user: str = user_id) -> Any:
        return tokens.create(ctx, user, "ci", (Scope.READ,), None, held=frozenset(Scope), once=once)

    before = len(tokens.list_tokens(ctx, user_id))
    made, refused = at_once(lambda _: make("a"))
    assert len(made) == 1 and len(refused) == MANY - 1
    assert {each.field for each in refused} == {form_keys.FIELD} and "done already" in refused[0].message
    assert len(tokens.list_tokens(ctx, user_id)) == before + 1
    assert form_keys.made_by(ctx, user_id, "a") == made[0].id
    make("b")
    make("a", other_id)  # another's key is another key
    made, _ = at_once(lambda _: make(""))
    assert len(made) == MANY, "programs say nothing, and get what they ask for"
    assert form_keys.made_by(ctx, user_id, "") == form_keys.made_by(ctx, user_id, "c") == ""

    made, refused = at_once(lambda _: image_drafts.create(ctx, user_id, once="d"))
    assert [each.id for each in image_drafts.list_drafts(ctx, user_id)] == [made[0].id] and len(refused) == MANY - 1


def test_what_failed_can_be_sent_again(
    ctx: Context, user_id: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_more: Any) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr("diamond.server.services.audit.record", fail)
        with pytest.raises(OSError):
            tokens.create(ctx, user_id, "ci", (Scope.READ,), None, held=frozenset(Scope), once="a")
    tokens.create(ctx, user_id, "ci", (Scope.READ,), None, held=frozenset(Scope), once="a")
    clock.now += 8 * 86_400
    tokens.create(ctx, user_id, "ci", (Scope.READ,), None, held=frozenset(Scope), once="b")
    assert form_keys.made_by(ctx, user_id, "a") == "", "keys are forgotten after a week"


@pytest.mark.parametrize(("kind", "name"), [("user", "other"), ("every-user", EVERYBODY)])
def test_of_those_who_saw_the_same_limits_one_sets_them(ctx: Context, other_id: str, kind: str, name: str) -> None:
    for _ in range(2):  # nothing is set at first, then something
        saw = quotas.mark_of(quotas.get(ctx, kind, name))
        at = int(quotas.get(ctx, kind, name).limits.tasks or 0)
        made, refused = at_once(
            lambda number, at=at, saw=saw: quotas.set_limits(ctx, kind, name, Limits(tasks=at + number + 1), saw=saw)  # type: ignore[misc]
        )
        assert len(made) == 1 and len(refused) == MANY - 1, [each.message for each in refused]
        limits = quotas.get(ctx, kind, name).limits
        assert limits == made[0].limits
        assert {each.field for each in refused} == {seen.FIELD}
        assert f"now: tasks {limits.tasks}" in refused[0].message
    quotas.set_limits(ctx, kind, name, Limits(nodes=1))  # the API replaces what is there, as it says


def test_defaults_that_changed_are_a_change_of_what_was_seen(ctx: Context, other_id: str) -> None:
    saw = quotas.mark_of(quotas.get(ctx, "user", "other"))
    quotas.set_limits(ctx, "every-user", EVERYBODY, Limits(tasks=3))
    with pytest.raises(Conflict, match="now: tasks 3"):
        quotas.set_limits(ctx, "user", "other", Limits(nodes=7), saw=saw)


def test_profiles_and_rules(ctx: Context, user_id: str) -> None:
    saw = accounts.mark_of(accounts.me(ctx, user_id))
    made, refused = at_once(lambda number: accounts.change(ctx, user_id, full_name=f"Name {number}", saw=saw))
    assert len(made) == 1 and made[0].full_name in refused[0].message
    rule = notices.create(ctx, user_id, Channel.WEBHOOK, "https://example.org/", ("task.failed",), once="r")
    with pytest.raises(Conflict, match="done already"):
        notices.create(ctx, user_id, Channel.WEBHOOK, "https://example.org/", ("task.failed",), once="r")
    events = [("task.started", f"{one}") for one in ("task.failed", "image.ready", "image.failed", "quota.near")]
    saw = notices.mark_of(rule)
    made, refused = at_once(lambda number: notices.change(ctx, user_id, rule.id, events=events[number % 4], saw=saw))
    assert len(made) == 1 and len(refused) == MANY - 1
    assert notices.get(ctx, user_id, rule.id).events == made[0].events
