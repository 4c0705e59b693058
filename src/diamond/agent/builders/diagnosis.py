"""Why a build failed: the last lines of its output turned into one sentence, the line of the recipe, and a way out.

Pure. What the programs print is in `symptoms.py`; here is how a log is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from diamond.agent.builders.inspect import normal_name
from diamond.agent.builders.runner import FAILED_LINE
from diamond.agent.builders.symptoms import TABLE, Symptom
from diamond.core.containerfiles import full_reference
from diamond.core.images import BuildFailure
from diamond.core.recipes import STAGE_TITLES, Recipe

MAX_EXCERPT_LINES = 14
MAX_LINE_CHARS = 400

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PASSWORD = re.compile(r"(://[^/\s:@]*):[^@\s/]+@")
# Lines that matter in a log nobody has a rule for.
_ALARMING = re.compile(r"^\s*(E|ERROR|FATAL|fatal|error|Error|Err:\d+)\b|\b(error|fatal|failed|Traceback)\b.*:|Error: ")
_WHICH_WHEEL = re.compile(
    r"(?:building wheel for|build wheels for|^╰─>|failed to build) '?([A-Za-z0-9][\w.-]*)", re.M | re.I
)
_WANTED_BY = re.compile(r"\(from (?:-r \S+|([A-Za-z0-9][\w.-]*))")
_HOST = re.compile(
    r"(?:resolv(?:e|ing)(?: host| proxy)?:? '?|lookup |host='|connect(?:ion)? to )([a-z0-9-]+(?:\.[a-z0-9-]+)+)"
    r"|https?://(?:[^@/\s]*@)?([a-z0-9-]+(?:\.[a-z0-9-]+)+)",
    re.I,
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]*")

__all__ = ["TABLE", "diagnose"]


def diagnose(stage: str, recipe: Recipe, tail: str, builder: str, where: str) -> BuildFailure:
    """What to tell the user of a stage that failed.

    Args:
        stage: its name, see `recipes.STAGE_TITLES`.
        tail: the last lines of the failing program's output.
        where: "login" or "batch".
    """
    text = _readable(tail)
    for code, symptom in TABLE.items():
        if found := symptom.find(text, stage):
            groups = found[-1].groupdict()
            what = (groups.get("what") or "").strip().rstrip(".,;")
            line = _recipe_line(stage, recipe, text, what, groups.get("line") or "")
            return BuildFailure(
                stage=stage,
                code=code,
                message=_sentence(symptom.message.replace("{host}", _host(text)), what or _from_line(line), recipe),
                line=line,
                excerpt=_excerpt(text, [match.start() for match in found], symptom),
                hint=_sentence(_hint(symptom, builder, where), what or "it", recipe),
            )
    return BuildFailure(
        stage=stage,
        code="",
        message=f"the step {STAGE_TITLES.get(stage, stage)!r} failed",
        line=_recipe_line(stage, recipe, text, "", ""),
        excerpt=_excerpt(text, [], None),
        hint="the whole log says more: diamond image logs",
    )


def _hint(symptom: Symptom, builder: str, where: str) -> str:
    return symptom.instead.get(builder) or symptom.instead.get(where) or symptom.hint


def _sentence(template: str, what: str, recipe: Recipe) -> str:
    # Plain replacement, since package names and paths may hold braces.
    text = template.replace("{base}", recipe.base).replace("{registry}", _registry(recipe)).replace("{what}", what)
    return text.rstrip().removesuffix(":")


def _registry(recipe: Recipe) -> str:
    """The host that the base comes from."""
    return full_reference(recipe.base.removeprefix("docker://")).partition("/")[0]


def _host(text: str) -> str:
    """The host that could not be reached, as far as the programs said; the last one they named."""
    found = [match[1] or match[2] for match in _HOST.finditer(text)]
    return found[-1] if found else "a package index or registry"


def _from_line(line: str) -> str:
    return line.partition(": ")[2]


def _readable(tail: str) -> str:
    """Without colours, without what progress bars drew over, without passwords of proxies and indexes."""
    lines = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in _ANSI.sub("", tail).split("\n"))
    return _PASSWORD.sub(r"\1:***@", "\n".join(lines))


def _recipe_line(stage: str, recipe: Recipe, text: str, what: str, number: str) -> str:
    """The line of the recipe that it was about; empty when that cannot be told."""
    if stage == "base":
        return f"base: {recipe.base}"
    if stage in ("commands", "test"):
        label, script = ("build", recipe.build or "") if stage == "commands" else ("test", recipe.test or "")
        return _script_line(label, script, text, number)
    entries: tuple[str, ...] = getattr(recipe, stage, ())
    if stage not in ("system", "conda", "pip") or not entries:
        return ""
    names = {_package_name(entry, stage): entry for entry in reversed(entries)}
    for candidate in _candidates(text, what):
        if (entry := names.get(_package_name(candidate, stage))) is not None:
            return f"{stage}: {entry}"
    return f"{stage}: {entries[0]}" if len(entries) == 1 else ""


def _candidates(text: str, what: str) -> Iterator[str]:
    """Names of packages it may be about, the likeliest first."""
    yield what
    yield from re.split(r"[\s,'\"]+", what)
    yield from (match[1] for match in _WHICH_WHEEL.finditer(text))
    yield from (match[1] for match in reversed(list(_WANTED_BY.finditer(text))) if match[1])


def _package_name(entry: str, stage: str) -> str:
    found = _NAME.match(entry)
    name = found[0] if found else ""
    return normal_name(name) if stage == "pip" else name


def _script_line(label: str, script: str, text: str, number: str) -> str:
    lines = script.split("\n")
    said = [match for match in FAILED_LINE.finditer(text) if match["label"] == label]
    if said and not number:
        number = said[-1]["number"]
        if number == "?" and (command := said[-1]["command"]):
            # bash tells no line for `exit`: it is known when the text has that command once.
            same = [index for index, line in enumerate(lines, 1) if command in line]
            number = str(same[0]) if len(same) == 1 else ""
    if number.isdigit() and 0 < int(number) <= len(lines):
        return f"{label} line {number}: {lines[int(number) - 1].strip()[:MAX_LINE_CHARS]}"
    return f"{label}: {script.strip()[:MAX_LINE_CHARS]}" if script.strip() and "\n" not in script.strip() else ""


def _excerpt(text: str, starts: Iterable[int], symptom: Symptom | None) -> str:
    """The lines that match, what belongs to them, and the errors around; in order, gaps shown."""
    lines = text.split("\n")
    chosen: dict[int, None] = {}
    for start in starts:
        number = text.count("\n", 0, start)
        # A pattern may begin with the white space of the line before.
        number += next((skip for skip, line in enumerate(lines[number:]) if line.strip()), 0)
        before, after = (symptom.before, symptom.after) if symptom else (0, 0)
        for index in range(number, min(number + 1 + after, len(lines))):
            chosen[index] = None
        above = [index for index in range(number - 1, -1, -1) if lines[index].strip()]
        chosen.update(dict.fromkeys(above[:before]))
    alarming = [index for index, line in enumerate(lines) if _ALARMING.search(line)]
    if not chosen and not alarming:
        alarming = [index for index, line in enumerate(lines) if line.strip()]
    for index in reversed(alarming):
        chosen[index] = None
    return _joined(lines, list(chosen)[:MAX_EXCERPT_LINES])


def _joined(lines: list[str], numbers: list[int]) -> str:
    shown: list[str] = []
    seen: set[str] = set()
    last = -1
    for number in sorted(numbers):
        line = lines[number]
        if not line.strip() or line in seen:
            continue
        if shown and number != last + 1:
            shown.append("…")
        # The cause stands at the end of a long line as often as at its beginning.
        half = MAX_LINE_CHARS // 2
        shown.append(line if len(line) <= MAX_LINE_CHARS else f"{line[:half]} … {line[-half:]}")
        seen.add(line)
        last = number
    return "\n".join(shown)
