"""Curves from plain output: what a script that knows nothing of Diamond prints, as records of metrics.

Owns the field `curves` of a task and its small language: ``Epoch {epoch}/* loss: {train/loss} acc {acc}%``. Literal
text; ``{name}`` is a number that becomes a point of that curve; ``{step}`` and ``{epoch}`` say where it stands;
``*`` is anything, as little as possible; a blank is any white space. No regular expressions: one of a user's could
take for ever in the agent. Whatever the pattern and the line, matching takes time in proportion to the line.

Pure: knows no files. The agent feeds a `Reader` (`diamond.agent.plain_curves`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from diamond.core.curve_words import NUMBER, Words, number
from diamond.core.errors import InvalidInput, TooLarge

MAX_CURVE_PATTERNS = 20
MAX_PATTERN_CHARS = 200
MAX_LINE_BYTES = 64 * 1024  # what is longer is no line of a log, and is passed over
BAR_POINTS_PER_S = 4.0
_FIRST_CREDIT, _MOST_CREDIT = 40.0, 400.0
_MAX_NAME = 64
_NAME = re.compile(r"[A-Za-z0-9_./-]+")
_PLACES = ("step", "epoch")
_EXAMPLE = "e.g. Epoch {epoch}/* loss: {loss}"
_OFF, _AUTO = ("off", "none", "false"), ("auto", "on", "true")
_ANSI = re.compile(rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[@-Z\\^_=>78])")
_BACK = re.compile(rb"[\r\x08]+")
_MAX_STATES = 1000  # of one line, at once
_RANK = re.compile(rb"\[([0-9]{1,7})\] ?")


def parse_curves(raw: object) -> tuple[str, ...] | None:
    """None: well-known shapes are recognised; empty: no curves from the output; else patterns."""
    if isinstance(raw, bool):
        return None if raw else ()
    if isinstance(raw, str):
        word = raw.strip().lower()
        if word in _OFF + _AUTO:
            return None if word in _AUTO else ()
        raw = [raw]
    if not isinstance(raw, list | tuple):
        raise ValueError(f"must be false, or a list of patterns ({_EXAMPLE})")
    if len(raw) > MAX_CURVE_PATTERNS:
        raise TooLarge(
            f"has {len(raw)} patterns; at most {MAX_CURVE_PATTERNS} are allowed", hint="leave out those you need least"
        )
    found = []
    for place, item in enumerate(raw):
        try:
            found.append(Pattern.parse(item).text)
        except InvalidInput as error:
            raise type(error)(f"pattern {place + 1} {error.message}", hint=error.hint) from error
    return tuple(found)


@dataclass(frozen=True)
class Pattern:
    """One pattern. `segments` are what stands between two ``*``: each is looked for behind the one before."""

    text: str
    names: tuple[str, ...]
    segments: tuple[re.Pattern[str], ...]
    literals: tuple[str, ...]  # all that a line must hold, in order, to be worth a closer look

    @staticmethod
    def parse(raw: object) -> Pattern:
        """Raises InvalidInput: what is wrong, and how to write it."""
        if not isinstance(raw, str):
            raise InvalidInput(f"must be text, not {type(raw).__name__}", hint=f"put quotes around it, {_EXAMPLE}")
        if len(raw) > MAX_PATTERN_CHARS:
            raise TooLarge(
                f"is {len(raw)} characters long; at most {MAX_PATTERN_CHARS} are allowed",
                hint="a part of the line is enough, and * stands for what is between",
            )
        text = " ".join(raw.split())
        if not text.isprintable():
            raise InvalidInput("has control characters in it", hint="write one line of plain text")
        parts = _parts(text)
        names = tuple(name for kind, name in parts if kind == "number")
        _check(text, parts, names)
        segments, literals, current, group = [], [], "", 0
        for place, (kind, value) in enumerate([*parts, ("any", "")]):
            if kind == "any":
                if current:
                    segments.append(re.compile(current))
                current, group = "", 0
            elif kind == "text":
                current += re.escape(value)
                literals.append(value)
            else:
                # Where nothing fixed stands before it, a number begins where one can begin, not in a word or number.
                starts = "" if place and parts[place - 1][0] == "text" else r"(?<![0-9A-Za-z_.])"
                group += 1
                current += rf"{starts}(?=({NUMBER}))(?:\{group})"  # in brackets: a digit may stand behind it
        return Pattern(text, names, tuple(segments), tuple(literals))

    def match(self, line: str) -> dict[str, int | float | str] | None:
        """Numbers by name; None when the line (blanks collapsed) is none of these."""
        at = 0
        for literal in self.literals:
            at = line.find(literal, at)
            if at < 0:
                return None
            at += len(literal)
        at, values = 0, list[str]()
        for segment in self.segments:
            found = segment.search(line, at)
            if found is None:
                return None
            values += found.groups()
            at = found.end()
        return dict(zip(self.names, map(number, values), strict=True))


def _parts(text: str) -> list[tuple[str, str]]:
    """The pattern in pieces: ("text", …), ("number", name), ("any", ""). Doubled signs stand for themselves."""
    parts: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        sign, kind, value, size = text[at], "text", text[at], 1
        if sign in "{}*" and text[at : at + 2] == sign * 2:
            size = 2
        elif sign == "*":
            kind, value = "any", ""
        elif sign == "}":
            raise InvalidInput("has a } without a {", hint="write }} for the sign itself")
        elif sign == "{":
            end = text.find("}", at)
            if end < 0:
                raise InvalidInput("has a { without a }", hint="close it, as in {loss}; write {{ for the sign itself")
            kind, value, size = "number", text[at + 1 : end], end + 1 - at
        if kind == "text" and parts and parts[-1][0] == "text":
            parts[-1] = ("text", parts[-1][1] + value)
        elif kind != "any" or not parts or parts[-1][0] != "any":
            parts.append((kind, value))
        at += size
    return parts


def _check(text: str, parts: Sequence[tuple[str, str]], names: Sequence[str]) -> None:
    for name in names:
        shown = name[:40]
        if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
            raise InvalidInput(
                f"names a curve {shown!r}",
                hint=f"a name has letters, digits and _ / . - and at most {_MAX_NAME} of them, as in {{train/loss}}",
            )
        if name == "t":
            raise InvalidInput("names a curve 't', which is the time of a point", hint="choose another name")
        if names.count(name) > 1:
            raise InvalidInput(f"has {{{shown}}} twice", hint="give each number its own name; * passes one over")
    if not names:
        raise InvalidInput(
            f"has no number in it: {text[:60]!r}", hint=f"put a name in braces where it stands, {_EXAMPLE}"
        )
    if any(one[0] == two[0] == "number" for one, two in pairwise(parts)):
        raise InvalidInput(
            "has two numbers with nothing between them", hint="write the text that stands there, or a blank"
        )
    for (kind, value), (other, after) in pairwise(parts):
        if kind == "text" and other == "number" and value[-1].isdigit():
            raise InvalidInput(f"has a digit right before {{{after[:40]}}}", hint="write a blank or * between them")
    if not any(kind == "text" and value.strip() for kind, value in parts):
        raise InvalidInput(
            f"would match every line with a number in it: {text[:60]!r}", hint=f"add the words beside it, {_EXAMPLE}"
        )


Record = dict[str, Any]


class Reader:
    """Makes records of a log, fed to it piece by piece: the same ones, however it is cut.

    A line of a progress bar, which repaints itself behind carriage returns, counts as it stood last; while it is being
    painted, up to `BAR_POINTS_PER_S` of its states count as well.
    """

    def __init__(self, patterns: Sequence[str] | None, *, ranked: bool = False) -> None:
        """`patterns` as in a task's `curves`. `ranked`: lines carry ``[rank] ``, and only those of rank 0 count."""
        self._patterns = None if patterns is None else [Pattern.parse(text) for text in patterns]
        self._has_place = any(name in _PLACES for one in self._patterns or () for name in one.names)
        self._ranked = ranked
        self._words = Words()
        self._rest = b""
        self._skipping = False  # inside a line that is too long
        self._fed_at: float | None = None
        self._credit = _FIRST_CREDIT  # how many states of bars may count now
        self._place: int | float = 0
        self._counts = [0] * len(self._patterns or ())
        self._matched = [False] * len(self._patterns or ())
        self._last_of_bar: Record = {}

    @property
    def num_unread(self) -> int:
        """Bytes of what was fed that wait for the rest of their line."""
        return len(self._rest)

    def feed(self, data: bytes, now: float, *, is_last: bool = False) -> list[Record]:
        """The records of what this completes, with the time `now`. `is_last`: no more comes, so all is complete."""
        pieces = (self._rest + data).split(b"\n")
        self._rest = b"" if is_last else pieces.pop()
        found: list[Record] = []
        if self._fed_at is not None:
            self._credit = min(_MOST_CREDIT, self._credit + BAR_POINTS_PER_S * max(0.0, now - self._fed_at))
        self._fed_at = now
        for line in pieces:
            if self._skipping:
                self._skipping = False
                continue
            *states, last = _states(line)
            found += self._bar(states, now)
            if last.strip():
                self._take(last, now, found, of_bar=bool(states))
        if self._rest and not self._skipping:
            end = max(self._rest.rfind(b"\r"), self._rest.rfind(b"\b")) + 1
            # A return at the very end may belong to the end of the line.
            if 0 < end < len(self._rest):
                states = _states(self._rest[:end])
                self._rest = self._rest[end:]
                found += self._bar(states, now)
        if len(self._rest) > MAX_LINE_BYTES:
            self._skipping = True
        if self._skipping:
            self._rest = b""
        return found

    def _bar(self, states: list[bytes], now: float) -> list[Record]:
        if not states or self._credit < 1:
            return []
        every = -(-len(states) // int(self._credit))
        found: list[Record] = []
        for state in states[::-1][::every][::-1]:
            self._take(state, now, found, of_bar=True)
        self._credit -= len(found)
        return found

    def _take(self, raw: bytes, now: float, found: list[Record], *, of_bar: bool) -> None:
        if len(raw) > MAX_LINE_BYTES:
            return
        if b"\x1b" in raw:
            raw = _ANSI.sub(b"", raw)
        if self._ranked:
            rank = _RANK.match(raw)
            if rank is None or int(rank[1]) != 0:
                return
            raw = raw[rank.end() :]
        line = raw.decode(errors="replace")
        indent = " " if line[:1].isspace() else ""
        line = " ".join(line.split())
        made = self._words.read(indent + line) if self._patterns is None else self._match(line)
        if made is None:
            return
        step, values = made
        if self._last_of_bar == {"step": step, **values}:
            return  # a bar paints its last state once more when it ends
        self._last_of_bar = {"step": step, **values} if of_bar else {}
        found.append({"step": step, "t": round(now, 3), **values})

    def _match(self, line: str) -> tuple[float, Record] | None:
        values: Record = {}
        first = -1
        for place, pattern in enumerate(self._patterns or ()):
            one = pattern.match(line)
            if one is not None:
                first = place if first < 0 else first
                self._matched[place] = True
                values = {**one, **values}
        for name in reversed(_PLACES):  # the step wins
            at = values.pop(name, None)
            if isinstance(at, int | float):
                self._place = at
        if not values:
            return None
        if self._has_place:
            return self._place, values
        self._counts[first] += 1
        return self._counts[first] - 1, values

    def unmatched(self) -> list[str]:
        """The patterns that no line has matched so far."""
        return [pattern.text for pattern, has in zip(self._patterns or (), self._matched, strict=True) if not has]

    def pass_over(self) -> None:
        """Lines come that are not read: whether a pattern would have matched one of them nobody knows."""
        self._matched = [True] * len(self._matched)

    # Across a restart

    def renewed(self) -> Reader:
        """One of the same kind that has read nothing."""
        patterns = None if self._patterns is None else [pattern.text for pattern in self._patterns]
        return Reader(patterns, ranked=self._ranked)

    def state(self) -> dict[str, Any]:
        """All that another reader needs to go on behind the last whole line, as JSON values."""
        return {
            "words": asdict(self._words),
            "skipping": self._skipping,
            "fed_at": self._fed_at,
            "credit": self._credit,
            "place": self._place,
            "counts": list(self._counts),
            "matched": list(self._matched),
            "last_of_bar": dict(self._last_of_bar),
        }

    def restore(self, raw: Mapping[str, Any], *, as_next: bool = False) -> None:
        """Go on where another one was; `as_next`: with the output of the next job of a chain.

        Values are taken as far as they make sense: the job could write them, too.
        """
        words = raw.get("words")
        usual = Words()
        for name, value in (words if isinstance(words, Mapping) else {}).items():
            if _fits(value, getattr(usual, name, "")) or (
                name in ("epoch", "step", "base_epoch") and _is_number(value)
            ):
                setattr(self._words, name, value)
        self._words.in_trace = self._words.in_trace and not as_next
        if _is_number(raw.get("place")):
            self._place = raw["place"]
        counts = raw.get("counts")
        if isinstance(counts, list) and len(counts) == len(self._counts) and all(map(_is_number, counts)):
            self._counts = [int(count) for count in counts]
        matched = raw.get("matched")
        if isinstance(matched, list) and len(matched) == len(self._matched):
            self._matched = [one is True for one in matched]
        elif raw:  # an older agent's, which kept none
            self.pass_over()
        if as_next:
            return
        self._skipping = raw.get("skipping") is True
        if _is_number(raw.get("fed_at")):
            self._fed_at = raw["fed_at"]
        if _is_number(raw.get("credit")):
            self._credit = min(_MOST_CREDIT, raw["credit"])
        if isinstance(raw.get("last_of_bar"), dict):
            self._last_of_bar = raw["last_of_bar"]


def _states(line: bytes) -> list[bytes]:
    """What a line showed one after the other; never empty."""
    if b"\r" not in line and b"\b" not in line:
        return [line]
    line = _BACK.sub(b"\r", line[-4 * MAX_LINE_BYTES :])
    return [state for state in line.rsplit(b"\r", _MAX_STATES) if state.strip()] or [b""]


def _is_number(raw: object) -> bool:
    return isinstance(raw, int | float) and not isinstance(raw, bool) and abs(raw) < 2**63


def _fits(raw: object, usual: object) -> bool:
    if isinstance(usual, bool):
        return isinstance(raw, bool)
    if isinstance(usual, list):
        return isinstance(raw, list) and len(raw) <= 64 and all(isinstance(one, str) for one in raw)
    return isinstance(usual, int | float) and _is_number(raw)
