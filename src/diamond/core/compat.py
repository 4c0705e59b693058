"""What the standard library of Python 3.10 lacks and the agent needs.

The package as a whole wants 3.11, but a login node often has nothing newer than 3.10, and the agent must run there.
`core`, `planner`, `agent` and `train` take these names from here and from nowhere else.
"""

from __future__ import annotations

import hashlib
import sys
from typing import BinaryIO

if sys.version_info >= (3, 11):  # noqa: UP036 - the agent runs on 3.10, see above
    import tomllib
    from enum import StrEnum
else:
    from enum import Enum

    # The one-file agent carries the standard library's own reader, since 3.10 has none (see `diamond.core.onefile`).
    from diamond.core import _tomllib as tomllib

    class StrEnum(str, Enum):  # noqa: UP042
        """Members are their values, also in f-strings, which show the member's name for other string enums."""

        __str__ = str.__str__
        __format__ = str.__format__


_CHUNK_BYTES = 1024 * 1024


def sha256_of(file: BinaryIO) -> str:
    """The digest of all that is left to read of a file, in hex."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


__all__ = ["StrEnum", "sha256_of", "tomllib"]
