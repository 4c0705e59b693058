"""What people write into fields, and the rules it must obey: names, shell text, variables, paths of their machine.

Tasks and recipes share these; see `diamond.core.tasks` and `diamond.core.recipes`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from diamond.core.errors import InvalidInput, TooLarge

MAX_NAME = 128
MAX_SCRIPT_BYTES = 1024 * 1024
MAX_ENV_VALUE_BYTES = 100 * 1024  # Linux refuses to exec with one string over 128 KiB
MAX_ENVS_BYTES = 1024 * 1024
MAX_ENVS = 1000
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_RESERVED_ENV = frozenset(
    {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}
)
# Of Diamond's own, these are for users: how a training starts (docs/training.md).
GLOBAL_BATCH = "DIAMOND_GLOBAL_BATCH"
_SWITCHES = frozenset({"DIAMOND_STANDBYS", GLOBAL_BATCH})
# Bash keeps these for itself: setting one is an error there, or changes what a script means.
_SHELL_ENV = frozenset({"UID", "EUID", "PPID", "BASHOPTS", "SHELLOPTS", "BASH_VERSINFO", "POSIXLY_CORRECT"})
_PATH_ENV = frozenset({"PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "MANPATH"})
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Takes no room: two names that differ in these alone look the same. They come along with what is pasted.
_UNSEEN = re.compile("[\u200b-\u200f\u2060\ufeff]")


def _text(raw: object) -> str:
    if not isinstance(raw, str):
        raise ValueError(f"must be text, not {type(raw).__name__}; put quotes around it")
    return raw


def parse_name(raw: object) -> str:
    """One line that everybody can read and write again. What cannot be seen is left out, as blanks around it are."""
    given = _text(raw).strip()
    name = _UNSEEN.sub("", given).strip()
    if given and not name:
        raise ValueError("has nothing in it that can be seen; give it letters or digits")
    if not name:
        raise ValueError("must not be empty; leave the field out to have one made")
    if len(name) > MAX_NAME:
        raise TooLarge(f"is {len(name)} characters long; at most {MAX_NAME} are allowed")
    if _UNSAFE.search(name):
        raise ValueError("must be one line of printable text, without control characters")
    return name


def parse_script(raw: object) -> str:
    """Shell text, kept byte for byte: it is written to a file and never pasted into another script."""
    script = _text(raw)
    if "\x00" in script:
        raise ValueError("must not contain NUL characters")
    try:
        size = len(script.encode())
    except UnicodeEncodeError as error:
        raise ValueError("must be valid Unicode text") from error
    if size > MAX_SCRIPT_BYTES:
        raise InvalidInput(
            f"is {size} bytes long; at most {MAX_SCRIPT_BYTES} are allowed",
            hint="put the script into the workdir and call it from `run`",
        )
    return script


def parse_run(raw: object) -> str:
    script = parse_script(raw)
    if not script.strip():
        raise ValueError("must not be empty; give the command to run")
    return script


def parse_envs(raw: object) -> dict[str, str]:
    if not isinstance(raw, Mapping):
        raise ValueError("must be a mapping of NAME: value")
    if len(raw) > MAX_ENVS:
        raise TooLarge(f"has {len(raw)} entries; at most {MAX_ENVS} are allowed")
    envs: dict[str, str] = {}
    total = 0
    for name, value in raw.items():
        check_env_name(name)
        envs[name] = _env_value(name, value)
        total += len(name) + len(envs[name].encode())
    if total > MAX_ENVS_BYTES:
        raise TooLarge(
            f"add up to {total} bytes; at most {MAX_ENVS_BYTES} are allowed",
            hint="put large values into a file in the workdir",
        )
    return envs


def check_env_name(name: object) -> None:
    if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
        raise InvalidInput(
            f"{str(name)[:60]!r} is not a variable name",
            hint="use letters, digits and underscores, not starting with a digit",
        )
    if name in _RESERVED_ENV or (name.startswith("DIAMOND_") and name not in _SWITCHES):
        raise InvalidInput(f"{name} is set by Diamond itself", hint="choose another name")
    if name in _SHELL_ENV:
        raise InvalidInput(f"{name} belongs to the shell and cannot be set", hint="choose another name")


def _env_value(name: str, value: object) -> str:
    if value is None:
        raise InvalidInput("has no value", hint=f"give it with --env {name}=VALUE, or write it here", field=name)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidInput("must be text or a number", hint='put quotes around it, e.g. "true"', field=name)
    text = str(value)
    if "\x00" in text:
        raise InvalidInput("must not contain NUL characters", field=name)
    if name in _PATH_ENV and "$" in text:
        raise InvalidInput(
            "variables are not expanded here, so a literal '$' would stand in it",
            hint=f"set it in the command instead: export {name}=/my/folder:${name}",
            field=name,
        )
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput("must be valid Unicode text", field=name) from error
    if size > MAX_ENV_VALUE_BYTES:
        raise TooLarge(
            f"is {size} bytes long; at most {MAX_ENV_VALUE_BYTES} are allowed",
            hint="put it into a file in the workdir",
            field=name,
        )
    return text


def parse_source(raw: object) -> str:
    """A path on the user's machine, or the reference of what was uploaded from there."""
    source = _text(raw)
    if not source.strip() or "\x00" in source or len(source) > 4096:
        raise ValueError("must be a path to a file or folder")
    return source
