"""One check of account names, wherever they come from."""

from __future__ import annotations

import pytest

from diamond.core.accounts import RESERVED_NAMES, check_name
from diamond.core.errors import InvalidInput


@pytest.mark.parametrize("name", [*sorted(RESERVED_NAMES), "root.", "diamond-", "unknown_"])
def test_nobody_gets_a_name_that_stands_for_somebody_else(name: str) -> None:
    with pytest.raises(InvalidInput, match="reserved") as caught:
        check_name(name, "suggested")
    assert caught.value.field == "suggested" and caught.value.hint


@pytest.mark.parametrize("name", ["a", "0", "alice", "roots", "diamond.fan", "x" * 39])
def test_other_names_are_fine(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "Root", "-x", "a b", "x" * 40, "é", "a\n"])
def test_names_of_another_form_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="user name"):
        check_name(name)
