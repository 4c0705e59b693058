"""What proves a form ours looks different in each page, and is the same."""

from __future__ import annotations

import hashlib

import pytest

from diamond.server.forms_token import bare, masked

TOKEN = hashlib.sha256(b"of somebody").hexdigest()


def test_it_never_looks_the_same_and_never_shows_itself() -> None:
    seen = {masked(TOKEN) for _ in range(100)}
    assert len(seen) == 100
    assert not any(TOKEN[:8] in each for each in seen)
    assert {bare(each) for each in seen} == {TOKEN}


def test_the_bare_one_passes_too() -> None:
    assert bare(TOKEN) == TOKEN


@pytest.mark.parametrize("given", ["", "no digits", "ü", "0" * 127, TOKEN[:-1], "0" * 10_000])
def test_what_is_none(given: str) -> None:
    assert bare(given) != TOKEN
