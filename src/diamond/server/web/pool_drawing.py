"""What the page of a pool draws: boxes for slots, bands and stacks of slots over time. Pure.

Places are in percent of the picture, so that it is as wide as the page and its words are not stretched. A task is known
by its number and its colour; a colour never stands alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from diamond.core.durations import format_duration
from diamond.core.pools import Pilot
from diamond.server.services.pool_history import History, Stay, Who

_COLOURS = 8
_MOST_BOXES = 64  # of a node; more are drawn as one for each task
_MOST_NODES = 100
_COLUMNS = 600  # what changes within one of these is not told apart
_MOST_SIZES = 6  # of one task, in words
_STEPS_S = (60, 300, 600, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800)
_MOST_TICKS = 6


class Box(NamedTuple):
    text: str
    look: str
    title: str


class NodeLine(NamedTuple):
    """A pilot and its slots; `words` says the same as the boxes. `host`: what people call its node."""

    pilot: Pilot
    host: str
    boxes: list[Box]
    words: str


class Rect(NamedTuple):
    """In percent, from the upper left."""

    x: float
    y: float
    width: float
    height: float
    look: str
    title: str


class Tick(NamedTuple):
    at: float
    words: str


class Band(NamedTuple):
    """A task's slots over time. `words`: the numbers it had, one after the other."""

    who: Who
    look: str
    rects: list[Rect]
    words: str
    is_moving: bool


class Stack(NamedTuple):
    """Everybody's slots over time, over what the pool held."""

    held: list[Rect]
    rects: list[Rect]
    most: int


def look_of(number: int) -> str:
    """Classes of static/pools.css: eight colours, then the same with dots."""
    turn, colour = divmod(number - 1, _COLOURS)
    return f"t{colour}" + (" dots" if turn % 2 else "")


# ---- who has what now ------------------------------------------------------------------------------------------------


def nodes(pilots: Sequence[Pilot], history: History) -> list[NodeLine]:
    live = [stay for stay in history.stays if stay.is_live]
    return [_node(pilot, live, history) for pilot in pilots[:_MOST_NODES]]


def _node(pilot: Pilot, live: list[Stay], history: History) -> NodeLine:
    shares = [
        (stay, sum(node.slots for node in stay.nodes if node.pilot == pilot.job_id))
        for stay in live
        if pilot.job_id and any(node.pilot == pilot.job_id for node in stay.nodes)
    ]
    boxes, words = [], []
    as_one = pilot.slots > _MOST_BOXES
    for stay, slots in shares:
        who = history.tasks[stay.number]
        state = " moving" if stay.is_moving else "" if stay.started_at is not None else " starting"
        said = f"{stay.number}, {who.name}: {_slots(slots)}{',' if state else ''}{state}"
        look = look_of(stay.number) + state
        boxes += [Box(f"{stay.number} ×{slots}", look, said)] if as_one else [Box(str(stay.number), look, said)] * slots
        words.append(said)
    free = max(0, pilot.slots - sum(slots for _, slots in shares))
    boxes += [Box(f"×{free}", "free", "free")] if as_one and free else [Box("", "free", "free")] * free
    words.append(f"{_slots(free)} free")
    return NodeLine(pilot, _short_host(pilot.host), boxes, "; ".join(words))


def _short_host(host: str) -> str:
    """Without the domain, which all nodes have; addresses as they are."""
    name = host.partition(".")[0]
    return host if name.isdecimal() or not name else name


def _slots(number: int) -> str:
    return f"{number} slot{'s' if number != 1 else ''}"


# ---- over time -------------------------------------------------------------------------------------------------------


def bands(history: History) -> list[Band]:
    """One for each task that had slots, the newest first; all to the same scale."""
    most = max((stay.slots for stay in history.stays), default=1)
    by_number: dict[int, list[Stay]] = {}
    for stay in history.stays:
        if stay.started_at is not None:
            by_number.setdefault(stay.number, []).append(stay)
    return [
        _band(history, history.tasks[number], stays, most)
        for number, stays in sorted(by_number.items(), reverse=True)
    ]  # fmt: skip


def _band(history: History, who: Who, stays: list[Stay], most: int) -> Band:
    rects = []
    for stay in stays:
        x, end = _column(history, stay.started_at), _column(history, stay.ended_at)
        high = 100 * stay.slots / most
        rects.append(
            Rect(
                _percent(x),
                round(100 - high, 2),
                _percent(max(1, end - x)),
                round(high, 2),
                look_of(who.number) + (" moving" if stay.is_moving and stay.is_live else ""),
                f"{_slots(stay.slots)} for {_lasted(history, stay)}",
            )
        )
    sizes = [stay.slots for at, stay in enumerate(stays) if not at or stays[at - 1].slots != stay.slots]
    shown = " → ".join(map(str, sizes[-_MOST_SIZES:]))
    words = ("… → " if len(sizes) > _MOST_SIZES else "") + shown + (" slot" if shown == "1" else " slots")
    is_moving = any(stay.is_moving and stay.is_live for stay in stays)
    return Band(who, look_of(who.number), rects, words, is_moving)


def _lasted(history: History, stay: Stay) -> str:
    assert stay.started_at is not None
    ended = stay.ended_at if stay.ended_at is not None else history.now
    return format_duration(max(0.0, ended - stay.started_at))


def stack(history: History) -> Stack:
    """Tasks upon each other, the oldest at the bottom, over what was held."""
    held = _levels((0, _column(history, one.started_at), _column(history, one.ended_at), one.slots)
                   for one in history.holds)  # fmt: skip
    had = _levels(
        (stay.number, _column(history, stay.started_at), _column(history, stay.ended_at), stay.slots)
        for stay in history.stays
        if stay.started_at is not None
    )
    most = max((base + slots for levels in (held, had) for _, _, _, base, slots in levels), default=0) or 1

    def rects(levels: Iterable[_Level], *, titled: bool) -> list[Rect]:
        return [
            Rect(
                _percent(begin),
                round(100 - 100 * (base + slots) / most, 2),
                _percent(end - begin),
                round(100 * slots / most, 2),
                look_of(number) if titled else "held",
                f"{number}, {history.tasks[number].name}: {_slots(slots)}" if titled else f"{_slots(slots)} held",
            )
            for number, begin, end, base, slots in levels
        ]

    return Stack(rects(held, titled=False), rects(had, titled=True), most)


_Level = tuple[int, int, int, int, int]  # whose, from and to which column, upon how many slots, how many


def _levels(spans: Iterable[tuple[int, int, int, int]]) -> list[_Level]:
    """Spans (whose, from, to, slots) put upon each other, in order of whose they are."""
    changes: dict[int, list[tuple[int, int]]] = {}
    for whose, begin, end, slots in spans:
        if end > begin:
            changes.setdefault(begin, []).append((whose, slots))
            changes.setdefault(end, []).append((whose, -slots))
    current: dict[int, int] = {}
    running: dict[int, tuple[int, int, int]] = {}  # since which column, upon how many, how many
    done: list[_Level] = []
    for column in sorted(changes):
        for whose, slots in changes[column]:
            current[whose] = current.get(whose, 0) + slots
        base = 0
        for whose in sorted(current):
            slots = current[whose]
            begun = running.get(whose)
            if begun is not None and begun[1:] != (base, slots):
                done.append((whose, begun[0], column, begun[1], begun[2]))
                begun = None
            if slots and begun is None:
                running[whose] = (column, base, slots)
            elif not slots:
                running.pop(whose, None)
            base += slots
        current = {whose: slots for whose, slots in current.items() if slots}
    return done


def ticks(history: History) -> list[Tick]:
    """Times before now, at round numbers."""
    span = max(1.0, history.now - history.since)
    step = next((one for one in _STEPS_S if span / one <= _MOST_TICKS), _STEPS_S[-1])
    found = [Tick(100.0, "now")]
    ago = step
    while ago <= span * 0.93:
        found.append(Tick(round(100 - 100 * ago / span, 2), f"−{_short(ago)}"))
        ago += step
    return found


def _short(seconds: int) -> str:
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size} {unit if unit != 'm' else 'min'}"
    return f"{seconds} s"


def levels(most: int) -> list[Tick]:
    """Round numbers of slots at the side, from the top."""
    step = next((one for one in (1, 2, 5, 10, 20, 50, 100, 200, 500) if most / one <= 4), most)
    return [Tick(round(100 - 100 * number / most, 2), str(number)) for number in range(0, most + 1, step)]


def _column(history: History, at: float | None) -> int:
    span = max(1.0, history.now - history.since)
    share = ((at if at is not None else history.now) - history.since) / span
    return round(_COLUMNS * min(1.0, max(0.0, share)))


def _percent(column: int) -> float:
    return round(100 * column / _COLUMNS, 2)
