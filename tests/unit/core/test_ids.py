"""Identifiers sort as they were made."""

from __future__ import annotations

import threading

from diamond.core.ids import is_id, new_id


def test_ids_of_one_millisecond_keep_their_order() -> None:
    made = [new_id("tsk") for _ in range(20_000)]
    assert made == sorted(made) and len(set(made)) == len(made)
    assert all(is_id(one, "tsk") for one in made)


def test_threads_never_share_one() -> None:
    made: list[list[str]] = [[] for _ in range(8)]

    def fill(mine: list[str]) -> None:
        mine.extend(new_id("job") for _ in range(2_000))

    threads = [threading.Thread(target=fill, args=(mine,)) for mine in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == sorted(mine) for mine in made)
    assert len({one for mine in made for one in mine}) == 16_000
