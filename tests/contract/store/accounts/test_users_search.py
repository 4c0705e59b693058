"""Finding people among many, on both databases."""

from __future__ import annotations

from diamond.core.accounts import User
from diamond.server.services import accounts, users
from diamond.server.services.context import Context


def test_people_are_found_by_any_part_of_what_they_are_called(ctx: Context, admin: User, bob: User) -> None:
    for name, full_name in (("carol", "Carol 100% sure"), ("dave_1", "Dave"), ("dave-2", "Dave")):
        accounts.create(ctx, name=name, full_name=full_name)

    def found(words: str) -> list[str]:
        return [user.name for user in users.search(ctx, words)[0]]

    assert sorted(found("")) == ["alice", "bob", "carol", "dave-2", "dave_1"]
    assert found("BOB b") == ["bob"] and found("EXAMPLE.org") == ["bob"]
    assert found("100%") == ["carol"] and found("e_1") == ["dave_1"], "signs of the database mean themselves"
    assert found("nobody") == [] and found("a\x00b") == found(""), "what cannot be typed is not looked for"


def test_pages_hold_everybody_once(ctx: Context, admin: User) -> None:
    for number in range(7):
        accounts.create(ctx, name=f"user-{number}")
    pages = [users.search(ctx, "user-", offset=offset, limit=3) for offset in (0, 3, 6, 9)]
    assert [total for _, total in pages] == [7] * 4
    assert [user.name for page, _ in pages for user in page] == [f"user-{number}" for number in range(7)]
