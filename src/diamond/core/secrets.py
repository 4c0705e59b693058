"""Secrets: values that tasks use by name. What a name may be, how a task asks for one, and how one travels to its job.

No value is ever part of a spec, an order or an answer to a user: it is given to the server once, and leaves it only for
an endpoint that is about to run a job which names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.fields import check_env_name

SECRET_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
MAX_VALUE_BYTES = 64 * 1024  # Linux refuses to start a program with one variable over 128 KiB
MAX_SECRETS = 32  # of a task
MIN_MASKED_BYTES = 4  # shorter ones occur in any text by chance


@dataclass(frozen=True, kw_only=True)
class SecretUse:
    """What a variable of a task holds: a secret's value, or with `file` the path of a file that holds it."""

    secret: str
    file: bool = False


@dataclass(frozen=True, kw_only=True)
class Secret:
    """A secret as lists show it: everything but its value. `project` is empty for a user's own."""

    name: str
    project: str = ""
    created_by: str = ""
    created_at: float = 0.0
    updated_at: float = 0.0
    used_at: float | None = None  # when a job last got it


@dataclass(frozen=True, kw_only=True)
class JobSecret:
    """A variable of a job. `version` changes with the value, and says nothing about it."""

    variable: str
    value: str
    file: bool = False
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class JobSecrets:
    """Server -> agent. GET /api/v1/agent/jobs/{job_id}/secrets"""

    job_id: str
    secrets: tuple[JobSecret, ...] = ()


def check_secret_name(raw: object, field: str = "name") -> str:
    if not isinstance(raw, str) or not SECRET_NAME.fullmatch(raw):
        raise InvalidInput(
            f"{str(raw)[:80]!r} is not a name for a secret",
            hint="use letters, digits, - and _, not starting with a digit; at most 64",
            field=field,
        )
    return raw


def check_value(raw: object, field: str = "value") -> str:
    """Raises InvalidInput, with nothing of the value in its text."""
    if not isinstance(raw, str):
        raise InvalidInput("must be text", field=field)
    if not raw:
        raise InvalidInput("must not be empty", hint="to do away with a secret: diamond secret rm NAME", field=field)
    if "\x00" in raw:
        raise InvalidInput(
            "must not contain NUL characters", hint="no variable can hold one; encode it, e.g. in base64", field=field
        )
    try:
        size = len(raw.encode())
    except UnicodeEncodeError:
        raise InvalidInput("must be valid Unicode text", field=field) from None
    if size > MAX_VALUE_BYTES:
        raise TooLarge(f"is {size} bytes long; at most {MAX_VALUE_BYTES} are allowed", field=field)
    return raw


def is_maskable(value: str) -> bool:
    """Whether it is long enough to be hidden in logs."""
    return len(value.encode()) >= MIN_MASKED_BYTES


def parse_secrets(raw: object) -> dict[str, SecretUse]:
    """``[HF_TOKEN]``, ``{HF_TOKEN: my-token}`` or ``{NETRC: {secret: netrc, file: true}}``, by variable."""
    if isinstance(raw, str):
        raw = [raw]
    if isinstance(raw, list | tuple):
        given: dict[object, object] = {}
        for item in raw:
            if not isinstance(item, str):
                raise InvalidInput("must be names of secrets", hint="e.g. secrets: [HF_TOKEN]")
            if item in given:
                raise InvalidInput(f"{item[:80]!r} is named twice")
            given[item] = item
    elif isinstance(raw, Mapping):
        given = dict(raw)
    else:
        raise ValueError("must be a list of names, or a mapping of VARIABLE: name")
    if len(given) > MAX_SECRETS:
        raise TooLarge(f"has {len(given)} entries; at most {MAX_SECRETS} are allowed")
    uses: dict[str, SecretUse] = {}
    for variable, use in given.items():
        try:
            check_env_name(variable)
        except InvalidInput as error:
            hint = "give the variable a name of its own: secrets: {VARIABLE: name}"
            named = isinstance(variable, str) and SECRET_NAME.fullmatch(variable) and use == variable
            raise InvalidInput(error.message, hint=hint if named and "-" in str(variable) else error.hint) from error
        uses[str(variable)] = _use(str(variable), use)
    return uses


def _use(variable: str, raw: object) -> SecretUse:
    if isinstance(raw, Mapping):
        unknown = [str(key) for key in raw if key not in ("secret", "file")]
        if unknown:
            raise InvalidInput(
                f"unknown field {unknown[0][:80]!r}", hint="valid fields here: secret, file", field=variable
            )
        is_file = raw.get("file", False)
        if not isinstance(is_file, bool):
            raise InvalidInput("must be true or false", field=f"{variable}.file")
        return SecretUse(secret=check_secret_name(raw.get("secret", variable), f"{variable}.secret"), file=is_file)
    return SecretUse(secret=check_secret_name(variable if raw is None else raw, variable))
