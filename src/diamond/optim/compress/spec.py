"""What the user says about compression: read and checked once, before anything trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from diamond.optim.errors import OptimError

GRADS = (
    "none", "bf16", "fp16", "powersgd:RANK", "powersgd:RANK:CODE", "topk:FRACTION", "topk:FRACTION:CODE",
    "randomk:FRACTION", "int8", "int4", "int2", "int1",
)  # fmt: skip
CODES = {"powersgd": ("bf16", "int8"), "topk": ("int8", "int4")}
FACTORS = ("none", "tri", "bf16-tri", "int8-tri", "filtered8-tri", "filtered4-tri")
# Of these a part of the gradient is lost in every step, always the same way, unless it is kept for a later one.
_LOSSY = ("powersgd", "topk", "randomk")
_MOST_RANK = 4096


class Method(NamedTuple):
    """A way to send gradients: its name, its number (a rank, a fraction, bits; 0 where it has none), and as what the
    numbers travel that it sends ("": as float32)."""

    name: str
    number: float = 0.0
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class Compress:
    """How gradients and factors are sent.

    Attributes:
        grad: one of `GRADS`, for example "powersgd:16:int8" or "topk:0.05:int4". CODE is as what the numbers travel:
            bf16 or int8 for the factors of powersgd, int8 or int4 for the values of topk; float32 without.
        factor: one of `FACTORS`, how the factors of K-FAC are sent; None for what its plan says, or "tri" without one.
        error_feedback: what a step could not send is added to the next one. None: where the method needs it (powersgd,
            topk, randomk). With it, intN rounds to the nearest level instead of at random, because an error memory
            stays bounded only where the error is smaller than the value; and randomk does not scale its values up.
        start_after: so many steps are sent as they are before compression begins.
        chunk: intN: how many values share a scale; a multiple of 8.
        two_step_from: intN: from this many ranks on, each rank averages a share and sends that on (all-to-all, then
            all-gather), so that the bytes a rank sends do not grow with the number of ranks.
        report_every: relative errors are measured in every n-th step.
        seed: of all that is random; the same on all ranks.
    """

    grad: str = "none"
    factor: str | None = None
    error_feedback: bool | None = None
    start_after: int = 0
    chunk: int = 512
    two_step_from: int = 4
    report_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        read_grad(self.grad)
        if self.factor is not None:
            check_factor(self.factor)
        if self.error_feedback not in (None, True, False):
            raise OptimError(f"error_feedback={self.error_feedback!r} is neither True, False nor None; leave it out")
        _check_count("start_after", self.start_after, least=0)
        _check_count("chunk", self.chunk, least=8)
        if self.chunk % 8:
            raise OptimError(f"chunk={self.chunk} is no multiple of 8; give for example chunk=512")
        _check_count("two_step_from", self.two_step_from, least=2)
        _check_count("report_every", self.report_every, least=1)
        _check_count("seed", self.seed, least=0)

    @property
    def method(self) -> Method:
        return read_grad(self.grad)

    @property
    def remembers(self) -> bool:
        """Whether errors are kept for the next step."""
        if self.method.name == "none":
            return False
        return self.method.name in _LOSSY if self.error_feedback is None else self.error_feedback


def read_grad(text: Any) -> Method:
    """
    Raises:
        OptimError: there is no such way, or its number makes no sense.
    """
    if not isinstance(text, str):
        raise _unknown("grad", text, GRADS, "topk:0.01")
    name, colon, number = text.partition(":")
    number, second_colon, code = number.partition(":")
    if name in ("none", "bf16", "fp16") and not colon:
        return Method(name)
    if name in ("int8", "int4", "int2", "int1") and not colon:
        return Method("int", float(name[3:]))
    if second_colon and code not in CODES.get(name, ()):
        raise _no_such_code(text, name)
    if name == "powersgd":
        return Method(name, _rank(text, number), code)
    if name in ("topk", "randomk"):
        return Method(name, _fraction(text, name, number), code)
    raise _unknown("grad", text, GRADS, "topk:0.01")


def check_factor(text: Any) -> str:
    """
    Raises:
        OptimError: factors cannot be sent so.
    """
    if not isinstance(text, str) or text not in FACTORS:
        raise _unknown("factor", text, FACTORS, "bf16-tri")
    return text


def _no_such_code(text: str, name: str) -> OptimError:
    if name not in CODES:
        return _unknown("grad", text, GRADS, "topk:0.01")
    number = {"powersgd": "16", "topk": "0.05"}[name]
    return OptimError(
        f"grad={text!r}: what {name} sends travels as float32, or as {' or '.join(CODES[name])}; "
        f'for example grad="{name}:{number}:int8"'
    )


def _rank(text: str, number: str) -> float:
    if number.isascii() and number.isdecimal() and len(number) <= 4 and 1 <= int(number) <= _MOST_RANK:
        return float(number)
    raise OptimError(f'grad={text!r}: the rank is a whole number from 1 to {_MOST_RANK}; for example grad="powersgd:4"')


def _fraction(text: str, name: str, number: str) -> float:
    try:
        share = float(number)
    except ValueError:
        share = 0.0
    if 0.0 < share <= 1.0:
        return share
    raise OptimError(f'grad={text!r}: the fraction is above 0 and at most 1; for example grad="{name}:0.01"')


def _check_count(field: str, value: Any, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptimError(f"{field}={value!r} is no whole number of {least} or more")


def _unknown(field: str, given: Any, known: tuple[str, ...], example: str) -> OptimError:
    return OptimError(f'{field}={given!r} is unknown; there is {", ".join(known)}; for example {field}="{example}"')
