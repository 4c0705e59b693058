"""Checks of hyper-parameters: each says which argument is wrong and what it may be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from diamond.optim.errors import OptimError

Group = dict[str, Any]
Check = Callable[[str, Any], None]


def check_group(group: Group, checks: dict[str, Check]) -> None:
    """
    Raises:
        OptimError: an option of this parameter group cannot be used.
    """
    for name, check in checks.items():
        check(name, group[name])


def not_negative(name: str, value: Any) -> None:
    if not _is_finite_number(value) or value < 0:
        raise OptimError(f"{name}={value!r} cannot be used: give a finite number of 0 or more")


def positive(name: str, value: Any) -> None:
    if not _is_finite_number(value) or value <= 0:
        raise OptimError(f"{name}={value!r} cannot be used: give a finite number above 0")


def positive_or_none(name: str, value: Any) -> None:
    if value is not None and (not _is_finite_number(value) or value <= 0):
        raise OptimError(f"{name}={value!r} cannot be used: give a finite number above 0, or None")


def fraction(name: str, value: Any) -> None:
    if not _is_finite_number(value) or not 0 <= value < 1:
        raise OptimError(f"{name}={value!r} cannot be used: give a number of 0 or more and below 1")


def fraction_or_none(name: str, value: Any) -> None:
    if value is not None:
        fraction(name, value)


def two_fractions(name: str, value: Any) -> None:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise OptimError(f"{name}={value!r} cannot be used: give two numbers")
    for at, one in enumerate(value):
        fraction(f"{name}[{at}]", one)


def count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptimError(f"{name}={value!r} cannot be used: give a whole number of 1 or more")


def count_or_zero(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise OptimError(f"{name}={value!r} cannot be used: give a whole number of 0 or more")


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptimError(f"{name}={value!r} cannot be used: give True or False")


def one_of(*allowed: str) -> Check:
    def check(name: str, value: Any) -> None:
        if value not in allowed:
            raise OptimError(f"{name}={value!r} cannot be used: give one of {', '.join(allowed)}")

    return check


def _is_finite_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):  # torch's schedulers and optimizers take a learning rate of one element
        return value.numel() == 1 and bool(torch.isfinite(value).all())
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
