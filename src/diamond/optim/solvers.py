"""Inverses of damped symmetric matrices: batched by shape, with a way out where a factorisation fails.

Owns how one matrix is inverted and what happens if that fails, now or in the background. Knows nothing of layers,
ranks or periods. A vector stands for a diagonal matrix everywhere here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diamond.optim.errors import OptimError
from diamond.optim.products import exactly

METHODS = ("auto", "cholesky", "newton-schulz", "eigen")
CHUNK_BYTES = 1 << 30  # of working memory that one batched call may take
NEWTON_SCHULZ_STEPS = 24  # enough for condition numbers up to about 1e6; what has not converged goes to Cholesky
_NEWTON_SCHULZ_RESIDUAL = 1e-3  # before the last step, which squares it
_WORKING_COPIES = 5
_RAISES = 5
_cuda: Any = torch.cuda
_linalg: Any = torch.linalg
_FAILURES = (_linalg.LinAlgError, torch.OutOfMemoryError)
Damping = float | Tensor


class Solved(NamedTuple):
    """The inverse of one damped matrix, and what it took.

    `inverse` is None where the matrix is not finite or nothing worked: keep the one you have. `method` is the method
    that was used in the end ("cholesky", "cholesky/fp64", "cholesky/fp64/cpu", …, "none"), `damping` what was really
    added to the diagonal, `retries` how many attempts failed before.
    """

    inverse: Tensor | None
    method: str
    damping: float
    retries: int


class _Attempt(NamedTuple):
    method: str
    dtype: torch.dtype
    device: torch.device
    raised: float  # times the damping asked for

    def name(self, dtype: torch.dtype, device: torch.device) -> str:
        double = "/fp64" if self.dtype != dtype else ""
        moved = "/cpu" if self.device != device else ""
        return self.method + double + moved


def inverses(
    matrices: Sequence[Tensor],
    dampings: Sequence[Damping],
    how: str = "auto",
    *,
    out_dtype: torch.dtype | None = None,
    newton_schulz_up_to: int = 0,
) -> list[Solved]:
    """Inverts each symmetric positive semi-definite matrix plus its damping times the identity.

    One batched call for all matrices of a shape and device, and one wait of the host for each such call. A matrix whose
    factorisation fails is tried again alone: with ten times the damping (five times), in double precision, on the CPU.

    Args:
        matrices: n x n, of which the lower triangle is read, or n for a diagonal one; half precision is computed in
            single.
        dampings: one for each; numbers, or tensors of one element.
        how: one of METHODS; "auto" is Cholesky, but for matrices of a GPU up to `newton_schulz_up_to`.
        out_dtype: of the inverses; that of the matrix unless given.
        newton_schulz_up_to: the largest n at which Newton-Schulz was measured to be faster (Hardware says so).

    Raises:
        OptimError: an argument makes no sense. Never because of what is in a matrix.
    """
    _check_matrices(matrices)
    _check_dampings(dampings, len(matrices))
    if how not in METHODS:
        raise OptimError(f"how={how!r} is no solver: give one of {', '.join(METHODS)}")
    found: dict[int, Solved] = {}
    for places in _alike(matrices):
        first = matrices[places[0]]
        method = _method(how, first, newton_schulz_up_to)
        with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
            damping = _vector([dampings[place] for place in places], first.device)
            solved = _solve([matrices[place] for place in places], damping, method, out_dtype or first.dtype)
        found.update(zip(places, solved, strict=True))
    return [found[place] for place in range(len(matrices))]


def _check_matrices(matrices: Sequence[Tensor]) -> None:
    for place, matrix in enumerate(matrices):
        shape = tuple(matrix.shape)
        if len(shape) not in (1, 2) or shape[0] != shape[-1]:
            raise OptimError(f"matrices[{place}] has shape {shape}: give square matrices, or vectors for diagonal ones")
        if not matrix.is_floating_point():
            raise OptimError(f"matrices[{place}] is of {matrix.dtype}: convert it to a real floating-point type")


def _check_dampings(dampings: Sequence[Damping], count: int) -> None:
    if len(dampings) != count:
        raise OptimError(f"dampings has {len(dampings)} values for {count} matrices: give one for each")
    for place, damping in enumerate(dampings):
        if isinstance(damping, Tensor):
            if damping.numel() != 1:
                raise OptimError(f"dampings[{place}] has shape {tuple(damping.shape)}: give one number")
        elif damping < 0:
            raise OptimError(f"dampings[{place}] is {damping}: give 0 or more")


def _alike(matrices: Sequence[Tensor]) -> list[list[int]]:
    """The places of matrices that can be computed together."""
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        groups[(matrix.shape, matrix.device, matrix.dtype)].append(place)
    return list(groups.values())


def _method(how: str, matrix: Tensor, newton_schulz_up_to: int) -> str:
    if matrix.dim() == 1:
        return "diagonal"
    if how != "auto":
        return how
    return "newton-schulz" if matrix.is_cuda and len(matrix) <= newton_schulz_up_to else "cholesky"


def _vector(dampings: Sequence[Damping], device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    if not any(isinstance(damping, Tensor) for damping in dampings):
        return torch.tensor(dampings, dtype=torch.float64).to(device, _double(device), non_blocking=True)
    each = [torch.as_tensor(damping, dtype=_double(device), device=device) for damping in dampings]
    return torch.stack([damping.detach().reshape(()) for damping in each])


def _double(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no double precision


def _solve(matrices: list[Tensor], damping: Tensor, method: str, out_dtype: torch.dtype) -> list[Solved]:
    """Of matrices of one shape: all at first, then the failed ones, attempt by attempt."""
    home, given = matrices[0].device, matrices[0].dtype
    dtype = given if given in (torch.float32, torch.float64) else torch.float32
    solved: dict[int, Solved] = {}
    asked: dict[int, float] = {}  # the damping that retries start from
    left = list(range(len(matrices)))
    for number, attempt in enumerate(_attempts(method, dtype, home)):
        failed: list[int] = []
        for chunk in _chunks(left, matrices[0].shape, attempt.dtype):
            if number == 0:
                wanted = damping[chunk[0] : chunk[-1] + 1]
            else:
                wanted = _vector([asked[place] * attempt.raised for place in chunk], attempt.device)
            results, report = _try([matrices[place] for place in chunk], wanted, attempt, out_dtype)
            for at, (place, (good, finite, used, mean)) in enumerate(zip(chunk, report, strict=True)):
                if number == 0:
                    asked[place] = _least_damping(used, mean, attempt.dtype)
                solved[place] = Solved(None, "none", used, number)
                if good and results is not None:
                    inverse = results[at].to(home, copy=True)  # no view: it would keep the whole batch alive
                    solved[place] = Solved(inverse, attempt.name(dtype, home), used, number)
                elif finite:
                    failed.append(place)
        if not (left := failed):
            break
    return [solved[place] for place in range(len(matrices))]


def _attempts(method: str, dtype: torch.dtype, home: torch.device) -> list[_Attempt]:
    sure = "diagonal" if method == "diagonal" else "cholesky"
    attempts = [_Attempt(method, dtype, home, 1.0)]
    # The damping of every later attempt is at least rounding against the matrix, so that 0 can be raised, too.
    attempts += [_Attempt(sure, dtype, home, 1.0)] if method not in (sure, "diagonal") else []
    attempts += [_Attempt(sure, dtype, home, 10.0**power) for power in range(1, _RAISES + 1)]
    cpu = torch.device("cpu")
    for device in dict.fromkeys((home, cpu)):
        if (torch.float64, device) != (dtype, home) and (device == cpu or _double(device) == torch.float64):
            attempts += [_Attempt(sure, torch.float64, device, raised) for raised in (1.0, 10.0**_RAISES)]
    return attempts


def _least_damping(asked: float, mean: float, dtype: torch.dtype) -> float:
    rounding = torch.finfo(dtype).eps
    return max(asked, rounding * mean) or rounding


def _chunks(places: list[int], shape: torch.Size, dtype: torch.dtype) -> Iterator[list[int]]:
    each = max(1, math.prod(shape) * dtype.itemsize * _WORKING_COPIES)
    length = max(1, CHUNK_BYTES // each)
    for begin in range(0, len(places), length):
        yield places[begin : begin + length]


def _try(
    matrices: list[Tensor], damping: Tensor, attempt: _Attempt, out_dtype: torch.dtype
) -> tuple[Tensor | None, list[tuple[bool, bool, float, float]]]:
    """Inverses, and of each matrix: whether it was solved, whether it is finite, its damping, its diagonal's mean."""
    try:
        stack = torch.stack([matrix.to(attempt.device, attempt.dtype) for matrix in matrices])
        finite = stack.isfinite().flatten(1).all(1) & damping.isfinite()
        diagonal = stack if stack.dim() == 2 else stack.diagonal(dim1=-2, dim2=-1)
        mean = diagonal.sum(-1) / max(1, diagonal.shape[-1])
        diagonal.add_(damping.to(attempt.dtype)[:, None])  # in place: the stack is ours
        with exactly(attempt.device):
            results, good = _COMPUTE[attempt.method](_without(stack, ~finite), damping.to(attempt.dtype))
        results = results.to(out_dtype)
        good &= finite & results.isfinite().flatten(1).all(1)  # too large for its type is no inverse either
        told = torch.stack([part.to(damping.dtype) for part in (good, finite, damping, mean)], 1)
        return results, [(bool(row[0]), bool(row[1]), row[2], row[3]) for row in told.tolist()]
    except _FAILURES:
        return None, [(False, True, used, 0.0) for used in damping.tolist()]


def _without(stack: Tensor, bad: Tensor) -> Tensor:
    """Bad matrices become the identity: a library may raise or hang over what is not a number."""
    if stack.dim() == 2:
        return torch.where(bad[:, None], torch.ones_like(stack), stack)
    return torch.where(bad[:, None, None], _identity(stack), stack)


def _identity(stack: Tensor) -> Tensor:
    return torch.eye(stack.shape[-1], dtype=stack.dtype, device=stack.device)


def _symmetric(stack: Tensor) -> Tensor:
    return (stack + stack.mT).mul_(0.5)


# Each takes matrices that are damped already, and the damping; it returns inverses and which of them hold.


def _diagonal(stack: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    return stack.reciprocal(), (stack > 0).all(1)


def _cholesky(stack: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    factors, info = torch.linalg.cholesky_ex(stack)
    good = info == 0
    return _symmetric(_of_triangles(_without(factors, ~good))), good


def _of_triangles(factors: Tensor) -> Tensor:
    """The inverses of what these lower triangles are the roots of."""
    if not factors.is_cuda:
        return torch.cholesky_inverse(factors)
    turned = torch.linalg.solve_triangular(factors, _identity(factors).expand_as(factors), upper=False)
    return torch.bmm(turned.mT, turned)  # two to three times as fast there


def _newton_schulz(stack: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    identity = _identity(stack)
    bound = stack.abs().sum(-1).amax(-1)  # no eigenvalue is larger
    found = identity / bound[:, None, None]
    for _ in range(NEWTON_SCHULZ_STEPS - 1):
        found = torch.baddbmm(found, found, stack @ found, beta=2, alpha=-1)
    product = stack @ found
    good = torch.linalg.matrix_norm(identity - product) <= _NEWTON_SCHULZ_RESIDUAL
    return _symmetric(torch.baddbmm(found, found, product, beta=2, alpha=-1)), good


def _eigen(stack: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(stack)
    values = torch.maximum(values, damping[:, None])  # below it there is rounding only
    return _symmetric((vectors / values[:, None, :]) @ vectors.mT), (values > 0).all(1)


_COMPUTE = {"diagonal": _diagonal, "cholesky": _cholesky, "newton-schulz": _newton_schulz, "eigen": _eigen}


# ---- large dimensions ------------------------------------------------------------------------------------------------


def block_sizes(n: int, largest: int | None) -> list[int]:
    """Sizes of near-equal blocks, none above `largest`, that make up n."""
    if largest is not None and largest < 1:
        raise OptimError(f"largest={largest} leaves no block: give 1 or more, or None for whole matrices")
    count = 1 if largest is None else max(1, -(-n // largest))
    size, more = divmod(n, count)
    return [size + 1] * more + [size] * (count - more)


# ---- in the background -----------------------------------------------------------------------------------------------


class _Flight(NamedTuple):
    future: Future[tuple[list[Solved], Any]]
    step: int


class Background(AbstractContextManager["Background"]):
    """Computes inverses beside the training, which goes on with those it has.

    One thread does the work, for matrices of a GPU on a stream of its own: a thread, too, since the host has to look
    whether a factorisation failed. Without `lag`, `ready` answers as soon as a result is there, which differs from run
    to run and from rank to rank. With `lag`, it answers exactly that many steps after `submit`, waiting if it must, so
    that runs repeat themselves and all ranks switch at the same step.
    """

    def __init__(self, *, lag: int | None = None) -> None:
        if lag is not None and lag < 0:
            raise OptimError(f"lag={lag} is no number of steps: give 0 or more, or None to take results as they come")
        self._lag = lag
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="diamond-solver")
        self._flying: dict[Hashable, _Flight] = {}
        self._streams: dict[torch.device, Any] = {}

    def submit(
        self,
        key: Hashable,
        matrices: Sequence[Tensor],
        dampings: Sequence[Damping],
        *,
        step: int = 0,
        copy: bool = True,
        **options: Any,
    ) -> bool:
        """Starts with copies of what it is given, or (without `copy`) with that itself: then nobody else may change it.

        `options` are those of `inverses`.

        Returns:
            False, and nothing is started, as long as the last result of this key has not been taken.
        """
        if self._pool is None:
            raise OptimError("this Background is closed: make another")
        if key in self._flying:
            return False
        if len({matrix.device for matrix in matrices}) > 1:
            raise OptimError("matrices are of several devices: submit those of each under a key of their own")
        copies = [matrix.detach().clone() if copy else matrix for matrix in matrices]
        kept = [damping.detach().clone() if isinstance(damping, Tensor) else damping for damping in dampings]
        stream = copied = None
        for device in {matrix.device for matrix in copies if matrix.is_cuda}:
            stream = self._streams[device] = self._streams.get(device) or _cuda.Stream(device)
            copied = torch.cuda.current_stream(device).record_event()
        future = self._pool.submit(_solve_aside, copies, kept, options, stream, copied)
        self._flying[key] = _Flight(future, step)
        return True

    def ready(self, key: Hashable, *, step: int = 0) -> list[Solved] | None:
        """The result, once; None while there is none. Without a lag it never waits.

        Raises:
            Exception: whatever the computation raised.
        """
        flight = self._flying.get(key)
        if flight is None:
            return None
        due = flight.future.done() if self._lag is None else step >= flight.step + self._lag
        return self.wait(key) if due else None

    def wait(self, key: Hashable) -> list[Solved]:
        """The result, whenever it comes."""
        flight = self._flying.pop(key, None)
        if flight is None:
            raise OptimError(f"nothing is under way for {key!r}: submit it first")
        solved, done = flight.future.result()
        if done is not None:
            for inverse in (one.inverse for one in solved if one.inverse is not None and one.inverse.is_cuda):
                current = torch.cuda.current_stream(inverse.device)
                current.wait_event(done)
                inverse.record_stream(current)
        return solved

    def close(self) -> None:
        """Waits for what is being computed, drops the rest. Safe to repeat."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None
        self._flying.clear()

    def __exit__(self, *error: object) -> None:
        self.close()


def _solve_aside(
    copies: list[Tensor], dampings: list[Damping], options: dict[str, Any], stream: Any, copied: Any
) -> tuple[list[Solved], Any]:
    if stream is None:
        return inverses(copies, dampings, **options), None
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        stream.wait_event(copied)
        solved = inverses(copies, dampings, **options)
        for tensor in [*copies, *(damping for damping in dampings if isinstance(damping, Tensor))]:
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return solved, stream.record_event()
