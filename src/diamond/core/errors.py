"""Every error Diamond raises on purpose, in one tree, with one table to HTTP status.

    DiamondError
    ├── InvalidInput            what the user wrote cannot be accepted; names the field
    │   ├── TooLarge
    │   ├── QuotaExceeded       more than an administrator lets this user or project have
    │   └── DigestMismatch      uploaded bytes are not what their digest says
    ├── NotFound
    ├── Conflict
    │   └── IdempotencyMismatch the key was used before with another request
    ├── Unauthenticated
    ├── Forbidden
    ├── Unavailable             could not be done now; the same call may work later
    │   ├── StorageFull
    │   ├── RateLimited         asked too often; later is soon enough
    │   ├── TooSlow             a request's body did not arrive in time
    │   └── ServerUnreachable   client side: no answer from the server
    ├── PolicyRefused           the endpoint's own policy file says no
    ├── InstallationProblem     this installation cannot do it until something is mended
    └── ProtocolError           a message between agent and server made no sense

A failed *task* is not an error of Diamond: see `diamond.core.reasons`.
"""

from __future__ import annotations

from typing import Any, ClassVar


class DiamondError(Exception):
    """Something Diamond can explain.

    Attributes:
        code: stable machine-readable name, part of the API.
        message: what happened, to which object.
        hint: what to do next; may be empty.
        field: dotted path of the offending field in what the user wrote, if there is one.
        transient: whether repeating the same call later can succeed.
        retry_after_s: when, where the server knows; travels as the Retry-After header.
    """

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    transient: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "", field: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field
        self.retry_after_s: float | None = None

    def __str__(self) -> str:
        text = f"{self.field}: {self.message}" if self.field else self.message
        return f"{text}\n  hint: {self.hint}" if self.hint else text

    def to_json(self) -> dict[str, Any]:
        """The body of an error answer, the same for every route."""
        return {
            "error": {
                "code": self.code,
                "message": self.message,
                "hint": self.hint,
                "field": self.field,
                "transient": self.transient,
            }
        }


class InvalidInput(DiamondError):
    code = "invalid_input"
    status = 422


class TooLarge(InvalidInput):
    code = "too_large"
    status = 413


class QuotaExceeded(InvalidInput):
    code = "quota_exceeded"
    status = 403


class DigestMismatch(InvalidInput):
    code = "digest_mismatch"
    status = 422


class NotFound(DiamondError):
    code = "not_found"
    status = 404


class Conflict(DiamondError):
    code = "conflict"
    status = 409


class IdempotencyMismatch(Conflict):
    code = "idempotency_mismatch"


class Unauthenticated(DiamondError):
    code = "unauthenticated"
    status = 401


class Forbidden(DiamondError):
    code = "forbidden"
    status = 403


class Unavailable(DiamondError):
    code = "unavailable"
    status = 503
    transient = True


class StorageFull(Unavailable):
    code = "storage_full"
    status = 507


class RateLimited(Unavailable):
    code = "rate_limited"
    status = 429


class TooSlow(Unavailable):
    code = "too_slow"
    status = 408


class ServerUnreachable(Unavailable):
    code = "server_unreachable"


class PolicyRefused(DiamondError):
    code = "policy_refused"
    status = 403


class InstallationProblem(DiamondError):
    code = "installation_problem"
    status = 500


class ProtocolError(DiamondError):
    code = "protocol_error"
    status = 400


def all_errors() -> list[type[DiamondError]]:
    """Every class of the tree, root first."""
    found: list[type[DiamondError]] = [DiamondError]
    for cls in found:
        found.extend(sub for sub in cls.__subclasses__() if sub not in found)
    return found


def error_from_json(body: Any) -> DiamondError:
    """Rebuild the error an API answer carries, so that SDK users catch the same classes."""
    detail = body.get("error") if isinstance(body, dict) else None
    if not isinstance(detail, dict):
        return DiamondError(f"the server gave an answer that is not Diamond's: {str(body)[:200]!r}")
    by_code = {cls.code: cls for cls in all_errors()}
    cls = by_code.get(str(detail.get("code")), DiamondError)
    return cls(str(detail.get("message", "")), hint=str(detail.get("hint", "")), field=str(detail.get("field", "")))
