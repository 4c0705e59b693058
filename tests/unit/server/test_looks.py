from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from diamond.core.errors import NotFound
from diamond.server import looks
from diamond.server.looks import Looks


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def looking(clock: Clock) -> tuple[list[bool], Callable[[float], str]]:
    """Whether each look was done in the main thread, and a look that takes so many seconds."""
    here: list[bool] = []

    def look(seconds: float) -> str:
        here.append(threading.current_thread() is threading.main_thread())
        clock.now += seconds
        return f"after {seconds} s"

    return here, look


def test_a_short_look_stays_in_the_loop_unless_it_must_not() -> None:
    clock = Clock()
    here, look = looking(clock)
    assert asyncio.run(Looks(in_loop=True, clock=clock).look(look, 0.01)) == "after 0.01 s"
    assert asyncio.run(Looks(in_loop=False, clock=clock).look(look, 0.01)) == "after 0.01 s"
    assert here == [True, False]


def test_what_took_long_is_done_in_threads_for_a_while_and_longer_if_it_does_so_again() -> None:
    clock = Clock()
    here, look = looking(clock)
    others, other = looking(clock)

    async def all_looks() -> None:
        pace = Looks(in_loop=True, clock=clock)
        await pace.look(look, 1.0)
        await pace.look(look, 0.01)
        await pace.look(other, 0.01)
        clock.now += looks.FIRST_REST_S
        await pace.look(look, 1.0)
        clock.now += looks.FIRST_REST_S
        await pace.look(look, 0.01)
        clock.now += looks.FIRST_REST_S
        await pace.look(look, 0.01)
        clock.now += looks.LONGEST_REST_S
        await pace.look(look, 1.0)
        clock.now += looks.FIRST_REST_S
        await pace.look(look, 0.01)

    asyncio.run(all_looks())
    assert here == [True, False, True, False, True, True, True], "what is long ago does not count"
    assert others == [True], "of the others nothing is known"


def test_a_look_that_fails_slowly_was_slow_all_the_same() -> None:
    clock = Clock()
    here, look = looking(clock)

    def fail() -> None:
        look(1.0)
        raise NotFound("there is none")

    async def twice() -> None:
        pace = Looks(in_loop=True, clock=clock)
        for _ in range(2):
            with pytest.raises(NotFound):
                await pace.look(fail)

    asyncio.run(twice())
    assert here == [True, False]
