"""What `slurm.extra` lets through: sbatch takes the beginning of an option's name for the option, and so must we."""

from __future__ import annotations

import pytest

from diamond.core.errors import InvalidInput
from diamond.core.sbatch.options import ALIASES
from diamond.core.slurm import OWN_OPTIONS, parse_extra


@pytest.mark.parametrize("name", sorted(OWN_OPTIONS))
def test_no_beginning_of_an_option_that_diamond_sets_gets_through(name: str) -> None:
    for length in range(1, len(name) + 1):
        with pytest.raises(InvalidInput):
            parse_extra([f"--{name[:length]}=x"])


@pytest.mark.parametrize("name", sorted(name for name, meant in ALIASES.items() if meant in OWN_OPTIONS))
def test_other_spellings_of_such_options_do_not_either(name: str) -> None:
    with pytest.raises(InvalidInput, match="is set by Diamond itself"):
        parse_extra([f"--{name}=2"])


def test_an_option_that_wants_a_value_cannot_swallow_the_next_word() -> None:
    with pytest.raises(InvalidInput, match="--comment needs a value"):
        parse_extra(["--comment"])


def test_what_is_whole_or_unknown_here_is_passed_on() -> None:
    whole = ("--comment=a b", "--hold", "--nice", "--time-min=10", "--mem-bind=local", "--gres-flags=enforce-binding")
    of_a_plug_in = ("--container-image=docker://x", "--no-container-entrypoint", "--tunnel=8888:8888")
    assert parse_extra([*whole, *of_a_plug_in]) == whole + of_a_plug_in
