"""Sealing: values that must come back (secrets, keys of webhooks) are in the database only as AES-256-GCM ciphertext.

The keys are apart from the database, so that neither a copy of it nor a backup gives anything away. They come from the
environment (DIAMOND_SECRET_KEY), else from a file that only the server's account can read. Of several keys the first
seals and all open, so that keys can be changed while the server runs. What a sealed text is about (whose, and under
which name) is part of the seal: a text moved to another row does not open there.

Must not know what is sealed, nor where it is kept; `resealing` does.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diamond.core.errors import InstallationProblem
from diamond.core.rundir import write_atomic

if TYPE_CHECKING:
    from diamond.server.services.context import Context

KEY_BYTES = 32
FILE_NAME = "secret.keys"
_NONCE_BYTES = 12
_VERSION = "v1"
_HEAD = """\
# Keys that Diamond seals secrets with. Keep a copy, apart from backups: without it, secrets cannot be opened.
# The first one seals; the others only open what was sealed before. Change them with `diamond secret rotate-key`.
"""


@dataclass(frozen=True)
class Key:
    raw: bytes = field(repr=False)

    @property
    def id(self) -> str:
        """Tells keys apart; leads back to none."""
        return hashlib.sha256(b"diamond sealing key\0" + self.raw).hexdigest()[:12]

    @property
    def text(self) -> str:
        return base64.b64encode(self.raw).decode()


def new_key() -> Key:
    return Key(os.urandom(KEY_BYTES))


class Keys:
    """Where the keys are. Thread-safe; a file that changed is read again, also when another process changed it."""

    def __init__(self, file: Path, given: str = "") -> None:
        """`given`: keys by commas, from the environment; the file is not looked at then."""
        self.file = file
        self.is_given = bool(given)
        self._lock = threading.Lock()
        self._keys: tuple[Key, ...] = parse_keys(given.replace(",", "\n"), "DIAMOND_SECRET_KEY") if given else ()
        self._stamp: tuple[int, int, int] | None = None

    def all(self, *, make: bool = False) -> tuple[Key, ...]:
        """The keys, the one that seals first; `make`: and a first one if there is none yet.

        Raises:
            InstallationProblem: the file cannot be used, or others could read it.
        """
        if self.is_given:
            return self._keys
        with self._lock:
            try:
                self._read()
            except FileNotFoundError:
                if not make:
                    return ()
                self._make_first()
                self._read()
            return self._keys

    def changed_at(self) -> float:
        """When the file was last written, by any process; 0 where there is none to write."""
        try:
            return 0.0 if self.is_given else self.file.stat().st_mtime
        except OSError:
            return 0.0

    def replace(self, keys: tuple[Key, ...]) -> None:
        """Have these from now on, in all processes. Raises InstallationProblem when the environment gives them."""
        if self.is_given:
            raise InstallationProblem(
                "the keys come from DIAMOND_SECRET_KEY, which only you can change",
                hint="put a new key in front of the old one, separated by a comma, restart the server, and try again",
                field="secret_key",
            )
        with self._lock:
            write_atomic(self.file, _file_text(keys))
            self._read()

    def _make_first(self) -> None:
        """Of several processes at once, one's key stays."""
        self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        beside = self.file.with_name(f".{self.file.name}.{os.getpid()}.{threading.get_ident()}.first")
        write_atomic(beside, _file_text((new_key(),)))
        try:
            os.link(beside, self.file)
        except FileExistsError:
            pass
        except OSError as error:
            raise InstallationProblem(f"{self.file}: {error.strerror}", field="secret_key_file") from error
        finally:
            beside.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            fd = os.open(self.file, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise InstallationProblem(f"{self.file}: {error.strerror}", field="secret_key_file") from error
        with os.fdopen(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
                raise InstallationProblem(
                    f"{self.file} holds the keys of all secrets, and others can read or change it",
                    hint=f"make it yours alone: chmod 600 {self.file}; if others may have read it, change the keys "
                    "afterwards: diamond secret rotate-key",
                    field="secret_key_file",
                )
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp != self._stamp:
                self._keys = parse_keys(file.read(64 * 1024).decode(errors="replace"), str(self.file))
                self._stamp = stamp


def _file_text(keys: tuple[Key, ...]) -> bytes:
    return (_HEAD + "".join(f"{key.text}\n" for key in keys)).encode()


def parse_keys(text: str, where: str) -> tuple[Key, ...]:
    """A key a line, 32 bytes in base64. Raises InstallationProblem, which shows none of it."""
    keys: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        try:
            raw = base64.b64decode(word, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != KEY_BYTES:
            raise InstallationProblem(
                f"{where}: key {number} is not {KEY_BYTES} bytes in base64",
                hint=f"make one with: openssl rand -base64 {KEY_BYTES}",
                field="secret_key",
            )
        keys.setdefault(Key(raw).id, Key(raw))
    if not keys:
        raise InstallationProblem(
            f"{where} holds no key",
            hint="put back the file that was here, from your copy; without it, secrets cannot be opened",
            field="secret_key",
        )
    return tuple(keys.values())


def seal(ctx: Context, value: bytes, *about: str) -> str:
    """`value`, encrypted, for the row that `about` names; the same words open it.

    Raises:
        InstallationProblem: there is no usable key.
    """
    return seal_with(ctx.keys.all(make=True)[0], value, about)


def unseal(ctx: Context, sealed: str, *about: str) -> bytes:
    """What was sealed about this.

    Raises:
        InstallationProblem: the key is gone, or it was sealed for something else, or it was changed.
    """
    return unseal_with(ctx.keys.all(), sealed, about)


def key_id_of(sealed: str) -> str:
    """Of the key that a text was sealed with."""
    return [*sealed.split(":", 2), "", ""][1]


def seal_with(key: Key, value: bytes, about: tuple[str, ...]) -> str:
    # Here, so that commands that seal nothing do not load a cryptography library.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    nonce = os.urandom(_NONCE_BYTES)
    text = AESGCM(key.raw).encrypt(nonce, value, _bound(key.id, about))
    return f"{_VERSION}:{key.id}:{base64.b64encode(nonce + text).decode()}"


def unseal_with(keys: tuple[Key, ...], sealed: str, about: tuple[str, ...]) -> bytes:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    version, key_id, body = [*sealed.split(":", 2), "", ""][:3]
    key = next((one for one in keys if one.id == key_id), None)
    if version != _VERSION or key is None:
        raise InstallationProblem(
            f"{_shown(about)} was sealed with key {key_id[:12] or '?'}, which this server does not have",
            hint="put that key back (server/secret.keys or DIAMOND_SECRET_KEY; it is not part of backups), or set the "
            "value anew",
        )
    try:
        raw = base64.b64decode(body, validate=True)
        return AESGCM(key.raw).decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], _bound(key_id, about))
    except (InvalidTag, ValueError) as error:
        raise InstallationProblem(
            f"{_shown(about)} does not open: it was changed, or belongs elsewhere",
            hint="set the value anew; if you did not change the database by hand, somebody else did",
        ) from error


def _bound(key_id: str, about: tuple[str, ...]) -> bytes:
    return json.dumps([_VERSION, key_id, *about]).encode()


def _shown(about: tuple[str, ...]) -> str:
    return " ".join(about[:1] + about[-1:])
