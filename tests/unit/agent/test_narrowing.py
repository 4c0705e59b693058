"""A centre's rules and an owner's: every field has a way to become one, and none is ever wider than either."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from diamond.agent import narrowing
from diamond.agent.policy import Policy, narrowed

NAMES = ("gpu", "gpu-a", "cpu", "gpu-a-large", "x")
LISTS: tuple[tuple[str, ...], ...] = ((), ("gpu",), ("gpu*",), ("*",), ("*-large", "x"), ("gpu-?",), ("gpu-*", "cpu"))
FOLDERS: tuple[tuple[str, ...], ...] = ((), ("/usr",), ("/usr/lib", "/etc"), ("/",), ("/etc/ssl",))
PATHS = ("/usr", "/usr/lib", "/etc/ssl/certs", "/etc", "/srv")
NUMBERS = (None, 0, 5, 7)

# What a value of a rule lets pass, as a set of things that can be compared; one row for each way of narrowing.
Passes = Callable[[Any], set[Any]]


def _by_pattern(allowed: tuple[str, ...] | None) -> set[str]:
    return {name for name in NAMES if allowed is None or any(fnmatchcase(name, one) for one in allowed)}


def _below(folders: tuple[str, ...] | None) -> set[str]:
    return {p for p in PATHS if folders is None or any(Path(f) in (Path(p), *Path(p).parents) for f in folders)}


PASSES: dict[Any, tuple[tuple[Any, ...], Passes]] = {
    narrowing.both: ((None, False, True), lambda value: {"others"} if value else set()),
    narrowing.either: ((False, True), lambda value: {"image"} | (set() if value else {"host"})),
    narrowing.least: (NUMBERS, lambda value: {number for number in range(10) if value is None or number <= value}),
    narrowing.common: ((None, *LISTS), _by_pattern),
    narrowing.union: (LISTS, lambda denied: set(NAMES) - _by_pattern(denied)),
    narrowing.common_folders: ((None, *FOLDERS), _below),
    narrowing.folder_within: ((None, "/usr", "/usr/lib", "/etc"), lambda value: _below(value and (value,))),
    narrowing.place_of_builds: (
        ("any", "login", "batch", "off"),
        lambda value: {"any": {"login", "batch"}, "off": set()}.get(value, {value}),
    ),
}  # fmt: skip


def test_every_rule_says_how_it_is_narrowed() -> None:
    known = {*PASSES, narrowing.folders_shown}
    for rule in fields(Policy):
        assert rule.metadata.get("narrow") in known, f"{rule.name} does not say how a centre's value narrows it"


@pytest.mark.parametrize("way", PASSES, ids=lambda way: way.__name__)
def test_nothing_passes_that_one_of_them_would_stop(way: Callable[[Any, Any], Any]) -> None:
    values, passes = PASSES[way]
    for centre, own in itertools.product(values, values):
        both = way(centre, own)
        if way is narrowing.both and (centre is None or own is None):
            continue  # nothing said is no permission of its own, and takes none away either
        if way is narrowing.folder_within and not passes(centre) & passes(own):
            own = centre  # there has to be one, and it is the centre's
        assert passes(both) <= passes(centre) & passes(own), (centre, own, both)
        assert way(centre, centre) == centre


@pytest.mark.parametrize("kind", ["allow", "containers_only", "denied", "max", "allowed"])
def test_by_name_rules_go_the_way_their_name_says(kind: str) -> None:
    """A new `allow_x` that is narrowed as a demand would open what a centre closed."""
    ways = {
        "allow": narrowing.both,
        "containers_only": narrowing.either,
        "denied": narrowing.union,
        "max": narrowing.least,
        "allowed": narrowing.common,
    }
    found = [rule for rule in fields(Policy) if kind in (rule.name, rule.name.partition("_")[0])]
    assert found and all(rule.metadata["narrow"] is ways[kind] for rule in found)


def test_a_pattern_covers_only_what_it_holds() -> None:
    letters = ["", *("".join(word) for size in (1, 2, 3) for word in itertools.product("ab*?", repeat=size))]
    names = ["".join(word) for size in range(5) for word in itertools.product("ab", repeat=size)]
    for outer, inner in itertools.product(letters, letters):
        if narrowing.covers(outer, inner):
            assert {name for name in names if fnmatchcase(name, inner)} <= {
                name for name in names if fnmatchcase(name, outer)
            }, (outer, inner)
    for outer, inner in (("gpu*", "gpu-a"), ("gpu*", "gpu-*"), ("*", "a?b*"), ("a?*", "ab"), ("[ab]", "[ab]")):
        assert narrowing.covers(outer, inner), (outer, inner)
    for outer, inner in (("gpu?", "gpu*"), ("gpu*", "*-a"), ("a", "?"), ("[ab]", "[a]"), ("a*b", "a*")):
        assert not narrowing.covers(outer, inner), (outer, inner)


def test_only_what_the_centre_names_is_narrowed() -> None:
    centre = Policy(max_nodes=4, containers_only=True, allowed_partitions=("gpu*",), image_binds=("/usr",))
    own = Policy(max_nodes=8, max_gpus=2, allow_others=True, allowed_partitions=("gpu-a", "cpu"))
    said = ("max_nodes", "containers_only", "allowed_partitions", "image_binds")
    found = narrowed(centre, said, own)
    assert found == replace(
        own, max_nodes=4, containers_only=True, allowed_partitions=("gpu-a",), image_binds=("/usr",)
    )
    assert narrowed(replace(centre, allow_others=True), ("allow_others",), Policy()).allow_others is None, (
        "a centre's yes is not its owner's"
    )
    assert narrowed(centre, ("image_binds",), Policy(image_binds=("/usr/lib", "/etc"))).image_binds == ("/usr/lib",)
