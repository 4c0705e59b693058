"""Whose task is next: priority, then who has had least, then age; and everybody's turn comes."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diamond.planner.shares import AHEAD_S, HALF_LIFE_S, Turns, Waiting, arrange, faded, price

USERS = ("alice", "bob", "carol")


def waiting(user: str, number: int, *, priority: int = 0, cost: float = AHEAD_S) -> Waiting:
    return Waiting(id=f"{user}-{number}", user=user, priority=priority, created_at=float(number), cost=cost)


def test_two_users_with_a_hundred_tasks_each_take_turns() -> None:
    tasks = [waiting("alice", number) for number in range(100)] + [
        waiting("bob", 100 + number) for number in range(100)
    ]
    order = [one.user for one in arrange(tasks)]
    assert order == ["alice", "bob"] * 100


def test_priority_goes_before_everything_else() -> None:
    tasks = [waiting("alice", 1), waiting("bob", 2, priority=5), waiting("alice", 3, priority=5)]
    assert [one.id for one in arrange(tasks, {"bob": 1e9})] == ["alice-3", "bob-2", "alice-1"]


def test_who_has_had_less_goes_first_and_large_tasks_count_for_more() -> None:
    small = [waiting("alice", number, cost=price(1, 0)) for number in range(4)]
    large = [waiting("bob", 10, cost=price(1, 3)), waiting("bob", 11, cost=price(1, 3))]
    order = [one.user for one in arrange(small + large)]
    assert order == ["alice", "bob", "alice", "alice", "alice", "bob"]
    assert [one.user for one in arrange(small[:1] + large[:1], {"alice": 1.0})] == ["bob", "alice"]


def test_use_fades_by_half_in_a_week() -> None:
    assert faded(100.0, 0) == 100.0
    assert faded(100.0, HALF_LIFE_S) == pytest.approx(50.0)
    assert faded(100.0, 2 * HALF_LIFE_S) == pytest.approx(25.0)
    assert faded(100.0, -5.0) == 100.0


def test_only_who_is_served_is_charged() -> None:
    turns = Turns()
    served = []
    for one in turns.each([waiting("alice", 1), waiting("alice", 2), waiting("bob", 3), waiting("bob", 4)]):
        served.append(one.id)
        if one.user == "bob":  # nothing fits alice's tasks
            turns.charge(one.user, one.cost)
    assert served == ["alice-1", "alice-2", "bob-3", "bob-4"]


tasks_of_many = st.lists(
    st.builds(
        Waiting,
        id=st.uuids().map(str),
        user=st.sampled_from(USERS),
        priority=st.integers(-2, 2),
        created_at=st.floats(0, 1e6),
        cost=st.floats(1, 1e6),
    ),
    max_size=60,
)
had_before = st.dictionaries(st.sampled_from(USERS), st.floats(0, 1e9))


@given(tasks_of_many, had_before)
def test_every_task_is_named_once_higher_priorities_first(tasks: list[Waiting], had: dict[str, float]) -> None:
    order = arrange(tasks, had)
    assert Counter(one.id for one in order) == Counter(one.id for one in tasks)
    assert [one.priority for one in order] == sorted((one.priority for one in tasks), reverse=True)


@given(tasks_of_many, had_before)
def test_of_one_user_and_priority_the_oldest_goes_first(tasks: list[Waiting], had: dict[str, float]) -> None:
    lines: dict[tuple[str, int], list[tuple[float, str]]] = defaultdict(list)
    for one in arrange(tasks, had):
        lines[one.user, one.priority].append((one.created_at, one.id))
    assert all(line == sorted(line) for line in lines.values())


@given(tasks_of_many, had_before)
def test_nobody_is_served_while_another_has_had_less(tasks: list[Waiting], had: dict[str, float]) -> None:
    """At every step, of those who wait at the same priority, one with the least is chosen."""
    left = list(tasks)
    standing = {user: had.get(user, 0.0) for user in USERS}
    for one in arrange(tasks, had):
        rivals = [other for other in left if other.priority == one.priority]
        assert standing[one.user] == min(standing[other.user] for other in rivals)
        standing[one.user] += one.cost
        left.remove(one)


@given(st.lists(st.tuples(st.sampled_from(USERS[:2]), st.floats(1, 1e4)), min_size=1, max_size=40), st.floats(0, 100))
def test_nobody_starves_however_much_others_keep_asking(arrivals: list[tuple[str, float]], had: float) -> None:
    """One place a round, and the others always have tasks more: carol's comes once both have had what she has."""
    turns = Turns({"carol": had})
    queue = [waiting("carol", 0)]
    for number in range(2 * int(had + 1) + 2):
        user, cost = arrivals[number % len(arrivals)]
        queue += [waiting(user, 10 + number, cost=cost), waiting("alice", 10**6 + number, cost=1.0)]
        chosen = next(turns.each(queue))
        if chosen.user == "carol":
            return
        turns.charge(chosen.user, chosen.cost)
        queue.remove(chosen)
    pytest.fail("carol was never served")
