"""The audit log as it is shown, exported and checked. Whoever holds an export can check it without a server.

Every entry holds the hash of the one before, so an entry that was changed, left out or put in breaks the chain from
there on. What a chain cannot show by itself is that its end was cut off, or that all of it was written anew: for that,
keep an `AuditHead` somewhere else and give it to the check.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diamond.core.codec import decode
from diamond.core.errors import InvalidInput

FIRST = "0" * 64  # what the first entry has for a previous hash
FORMAT = 1
_HASHED = ("seq", "at", "action", "user_id", "user", "via", "address", "object", "data", "previous")
_HEAD = re.compile(r"(\d{1,18}):([0-9a-f]{64})")


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """What somebody did.

    Attributes:
        user: as they were called then; "diamond" where the server acted by itself.
        via: id of the token or session they used.
        object: id of what they did it to.
        previous, hash: the links of the chain.
    """

    seq: int
    at: float
    action: str
    user_id: str | None = None
    user: str = ""
    via: str = ""
    address: str = ""
    object: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    previous: str = ""
    hash: str = ""


@dataclass(frozen=True, kw_only=True)
class AuditHead:
    """The end of the log at some time. Kept elsewhere, it proves later that nothing up to there was changed."""

    seq: int
    hash: str
    at: float | None = None  # of that entry; None: there is none yet

    def __str__(self) -> str:
        return f"{self.seq}:{self.hash}"


@dataclass(frozen=True, kw_only=True)
class AuditVerdict:
    """What a check of the log found.

    Attributes:
        entries: how many are as they were written, from the first checked one on.
        seq, hash: the last of those.
        broken: number of the first entry that is not as it was written, or is missing.
        problem: what is wrong, in words; empty when nothing is.
    """

    ok: bool
    entries: int
    seq: int
    hash: str
    broken: int | None = None
    problem: str = ""


def parse_head(text: str, field: str = "head") -> AuditHead:
    """``SEQ:HASH``, as `diamond audit head` and the server's log write it."""
    found = _HEAD.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(
            f"{text[:90]!r} is not SEQ:HASH", hint="write it as `diamond audit head` gave it", field=field
        )
    return AuditHead(seq=int(found[1]), hash=found[2])


def hash_of(fields: Mapping[str, Any]) -> str:
    """The hash an entry with these fields must have."""
    hashed = {name: fields[name] for name in _HASHED}
    hashed["at"] = float(hashed["at"])  # 1.0 must not become another number on its way through JSON
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Chain:
    """Checks entries one by one, in order. After a break nothing more is looked at."""

    def __init__(self, *, previous: str = FIRST, seq: int = 0, head: AuditHead | None = None) -> None:
        """
        Args:
            previous, seq: of the entry before the first; left out: from the beginning.
            head: that the log had once, and must still have.
        """
        self.entries = 0
        self.seq, self.hash = seq, previous
        self.broken: int | None = None
        self.problem = ""
        self._head = head
        self._start = seq
        if head is not None and head.seq == seq and head.hash != previous:
            self._fail(seq, f"entry {seq} is not the one the given head names")

    def add(self, fields: Mapping[str, Any]) -> bool:
        """Whether this entry follows the last one, and everything before did."""
        if self.broken is not None:
            return False
        seq = self.seq + 1
        found = fields.get("seq")
        if found != seq:
            self._fail(seq, f"entry {seq} is missing: {found!r:.30} stands in its place")
        elif fields.get("previous") != self.hash:
            self._fail(seq, f"entry {seq} does not follow the one before it: one of the two is not the original")
        elif not _is_whole(fields) or fields.get("hash") != hash_of(fields):
            self._fail(seq, f"entry {seq} was changed")
        elif self._head is not None and self._head.seq == seq and self._head.hash != fields["hash"]:
            self._fail(seq, f"entry {seq} is not the one the given head names: the log was written anew")
        else:
            self.seq, self.hash = seq, str(fields["hash"])
            self.entries += 1
        return self.broken is None

    def end(self, expected_seq: int | None = None) -> AuditVerdict:
        """The verdict, once there are no more. `expected_seq`: the number the last one must have."""
        wanted = max(expected_seq or 0, self._head.seq if self._head else 0)
        if self.broken is None and self.seq < wanted:
            self._fail(self.seq + 1, f"the log ends at entry {self.seq}; it once had {wanted}: its end was cut off")
        elif self.broken is None and self._head is not None and self._head.seq < self._start:
            self._fail(
                self._head.seq, f"the given head is entry {self._head.seq}, and these begin with {self._start + 1}"
            )
        elif self.broken is None and expected_seq is not None and self.seq > expected_seq:
            self._fail(expected_seq + 1, f"there are entries after {expected_seq}, which should be the last")
        return AuditVerdict(
            ok=self.broken is None,
            entries=self.entries,
            seq=self.seq,
            hash=self.hash,
            broken=self.broken,
            problem=self.problem,
        )

    def _fail(self, seq: int, problem: str) -> None:
        self.broken, self.problem = seq, problem


def _is_whole(fields: Mapping[str, Any]) -> bool:
    at = fields.get("at")
    return all(name in fields for name in _HASHED) and isinstance(at, int | float) and not isinstance(at, bool)


def verify_export(lines: Iterable[bytes | str], head: AuditHead | None = None) -> AuditVerdict:
    """Check an export (JSON lines: a line about itself, the entries, a line about the end) without any server.

    Raises:
        InvalidInput: it is not an export, or of a later format.
    """
    rows = iter(lines)
    about = _line(next(rows, b""), 1)
    if about.get("format") != FORMAT or about.get("kind") != "diamond-audit":
        raise InvalidInput(
            "this is not an export of an audit log, or one of a later version",
            hint="`diamond audit export` writes them",
            field="FILE",
        )
    before = decode(AuditHead, about.get("after"), path="after")
    chain = Chain(previous=before.hash, seq=before.seq, head=head)
    last: AuditHead | None = None
    for number, line in enumerate(rows, start=2):
        if not line.strip():
            continue
        fields = _line(line, number)
        if last is not None:
            raise InvalidInput(f"line {number} stands after the end", hint="export it again", field="FILE")
        if fields.get("kind") == "end":
            last = decode(AuditHead, fields.get("head"), path="head")
        else:
            chain.add(fields)
    verdict = chain.end(last.seq if last else None)
    if verdict.ok and last is None:
        problem = f"the file ends at entry {verdict.seq} without a line that says so: it was cut off"
    elif verdict.ok and last is not None and last.hash != verdict.hash:
        problem = f"entry {verdict.seq} is not the one the file says it ends with"
    else:
        return verdict
    return AuditVerdict(
        ok=False, entries=verdict.entries, seq=verdict.seq, hash=verdict.hash, broken=verdict.seq + 1, problem=problem
    )


def _line(raw: bytes | str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidInput(
            f"line {number} is not JSON", hint="give the file that `diamond audit export` wrote", field="FILE"
        )
    return found
