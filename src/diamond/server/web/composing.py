"""The composer's form and the text of a task file: each made from the other, and neither loses what the other has.

Pure. The form knows the fields most people need (`FIELDS`); everything else of a spec stays in the text, and a field
that nobody touched keeps the form in which it is written there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diamond.core.bundles import is_bundle_ref
from diamond.core.errors import Conflict, DiamondError, InvalidInput
from diamond.core.tasks import TaskSpec
from diamond.texts import tasktext

DATASET = "DATASET"  # the variable in which a command finds the path of its data
COMMAND, DISTRIBUTED = "command", "distributed"
TEMPLATE = "template"  # no type of a task: somebody wants to begin with a template, and has not said which
_NO_CURVES = "off"
TEXT_NAME = "YAML"  # what the text is called in messages about a place in it

# Fields of the form, and where each stands in a spec. Those without a place are put together from several.
PLACES: dict[str, tuple[str, ...]] = {
    "name": ("name",),
    "project": ("project",),
    "endpoint": ("resources", "infra"),
    "pool": ("pool",),
    "size": ("resources", "slots"),
    "partition": ("slurm", "partition"),
    "num_nodes": ("num_nodes",),
    "cpus": ("resources", "cpus"),
    "memory": ("resources", "memory"),
    "account": ("slurm", "account"),
    "qos": ("slurm", "qos"),
    "walltime": ("slurm", "time"),
    "total": ("max_duration",),
    "image": ("resources", "image_id"),
    "setup": ("setup",),
    "run": ("run",),
    "retries": ("retry", "max_retries"),
    "priority": ("priority",),
    "workdir": ("workdir",),
}
FIELDS = (*PLACES, "type", "ranks", "gpu_type", "gpus", "dataset", "envs", "secrets", "outputs", "curves")
_NUMBERS = ("num_nodes", "retries", "priority")
_SHOWN_AT = {".".join(place): name for name, place in PLACES.items()} | {
    "ranks_per_node": "ranks",
    "resources.accelerators": "gpus",
    f"envs.{DATASET}": "dataset",
    "envs": "envs",
    "secrets": "secrets",
    "outputs": "outputs",
    "curves": "curves",
    "file_mounts": "workdir",
    "retry": "retries",
}


@dataclass(kw_only=True)
class Sheet:
    """What somebody has on the page: the form, the text, and the text that both agreed on last (`base`)."""

    values: dict[str, str] = field(default_factory=dict)
    text: str = ""
    base: str = ""

    @staticmethod
    def of_text(text: str) -> Sheet:
        return Sheet(values=shown(read(text)), text=text, base=text)

    @staticmethod
    def of_fields(raw: Mapping[str, Any]) -> Sheet:
        text = tasktext.write(raw)
        return Sheet(values=shown(raw), text=text, base=text)

    def settle(self) -> dict[str, Any]:
        """The spec that is meant, with both sides brought in step.

        Raises:
            Conflict: both sides were changed since they agreed, and not to the same.
            InvalidInput: the side that was changed cannot be read.
        """
        raw = read(self.base)
        wanted = merged(raw, self.values)
        form_moved, text_moved = wanted != raw, self.text.strip() != self.base.strip()
        if text_moved:
            written = read(self.text)
            if form_moved and written != wanted:
                raise Conflict(
                    "the form and the YAML were both changed, and say different things",
                    hint="press “Form → YAML” to keep the form, or “YAML → form” to keep the YAML",
                )
            self.take_text()
            return written
        if form_moved:
            self.take_form()
        return wanted

    def problems(self) -> list[InvalidInput]:
        """Everything that is wrong with what `settle` gives; it and who checks that tell of the first alone."""
        found: list[InvalidInput] = []
        try:
            raw = merged(read(self.base), self.values, found)
            if not found and self.text.strip() != self.base.strip():
                raw = read(self.text)
        except DiamondError:
            return found
        return found + wrong_in(raw)

    def take_form(self) -> None:
        """The form is right: write the text anew."""
        self.text = self.base = tasktext.write(merged(read(self.base), self.values))

    def take_text(self) -> None:
        """The text is right: fill the form from it."""
        self.values, self.base = shown(read(self.text)), self.text


def read(text: str) -> dict[str, Any]:
    """The fields of a task file; of an empty one, none. Raises InvalidInput with line and column."""
    return tasktext.read(text, TEXT_NAME).raw if text.strip() else {}


def shown(raw: Mapping[str, Any]) -> dict[str, str]:
    """What the form shows of a spec, however little of it makes sense."""
    values = {name: _as_text(_at(raw, place)) for name, place in PLACES.items()}
    ranks, nodes = raw.get("ranks_per_node", 1), raw.get("num_nodes", 1)
    values["type"] = COMMAND if ranks == 1 and nodes == 1 else DISTRIBUTED
    values["ranks"] = _as_text(ranks)
    kind, count = _gpus(_at(raw, ("resources", "accelerators")))
    values["gpu_type"], values["gpus"] = kind, count
    envs = raw.get("envs")
    pairs = {str(key): _as_text(value) for key, value in envs.items()} if isinstance(envs, Mapping) else {}
    values["dataset"] = pairs.pop(DATASET, "")
    values["envs"] = "\n".join(f"{name}={_quoted(value)}" for name, value in pairs.items())
    values["secrets"] = _secret_lines(raw.get("secrets"))
    outputs = raw.get("outputs") or []
    values["outputs"] = "\n".join(map(_as_text, outputs if isinstance(outputs, list) else [outputs]))
    values["curves"] = _curve_lines(raw.get("curves"))
    return values


def merged(
    raw: Mapping[str, Any], values: Mapping[str, str], wrong: list[InvalidInput] | None = None
) -> dict[str, Any]:
    """The spec with what the form says; fields that say what they did before are left as they are written.

    Args:
        wrong: where lists that cannot be understood are noted; then the rest is done without them.

    Raises:
        InvalidInput: a line of a list cannot be understood; `field` is the form's.
    """
    found: dict[str, Any] = copy.deepcopy(dict(raw))
    before = shown(raw)
    moved = {name for name in FIELDS if name in values and values[name].strip() != before[name].strip()}
    # Scripts are kept to the last blank, which elsewhere means nothing.
    moved |= {name for name in ("run", "setup") if name in values and values[name] != before[name]}
    if values.get("type") == TEMPLATE:  # somebody still chooses: what is on the sheet stays as it is
        moved.discard("type")
    for name in moved & set(PLACES):
        text = values[name] if name in ("run", "setup") else values[name].strip()
        _put(found, PLACES[name], _number(text) if name in _NUMBERS else text)
    if moved & {"type", "ranks"}:
        _put(found, ("ranks_per_node",), _ranks(values))
    if moved & {"gpu_type", "gpus"}:
        _put(found, ("resources", "accelerators"), _accelerators(values))
    for name, is_moved in (("envs", moved & {"envs", "dataset"}), ("secrets", moved & {"secrets"})):
        if is_moved:
            try:
                _put(found, (name,), _envs(values) if name == "envs" else _secrets(values[name]))
            except InvalidInput as error:
                if wrong is None:
                    raise
                wrong.append(error)
    if "outputs" in moved:
        _put(found, ("outputs",), [line.strip() for line in values["outputs"].splitlines() if line.strip()])
    if "curves" in moved:
        _put(found, ("curves",), _curves(values["curves"]))
    return found


def wrong_in(raw: Mapping[str, Any]) -> list[InvalidInput]:
    """All fields of a spec that cannot be right, each with its first error. A spec's own check stops at the first."""
    left = copy.deepcopy(dict(raw))
    found: list[InvalidInput] = []
    while True:
        try:
            TaskSpec.parse(left)
        except InvalidInput as error:
            found.append(error)
            if not _leave_out(left, error.field):
                return found
        else:
            return found


def _leave_out(raw: dict[str, Any], field: str) -> bool:
    """Take what an error is about out of a spec, or the nearest around it; False where nothing is left to take."""
    if field == "run":  # the one that has to be there
        raw["run"] = "true"
        return True
    inside, rest = raw, field
    while True:
        name = next((key for key in sorted(map(str, inside), key=len, reverse=True) if _begins(rest, key)), "")
        if name not in inside:
            return False
        rest = rest[len(name) :].lstrip(".")
        if not rest or not isinstance(inside[name], dict) or not any(_begins(rest, str(key)) for key in inside[name]):
            del inside[name]
            return True
        inside = inside[name]


def _begins(path: str, name: str) -> bool:
    return path == name or (path.startswith(name) and path[len(name)] in ".[")


def field_of(error: DiamondError) -> str:
    """The form's field that an error of a spec is about; empty when the form has none for it."""
    name = error.field
    while name:
        if name in _SHOWN_AT:
            return _SHOWN_AT[name]
        if name in FIELDS:
            return name
        name = name[: name.rindex("[")] if name.endswith("]") else name.rpartition(".")[0]
    return ""


def _at(raw: Mapping[str, Any], place: tuple[str, ...]) -> Any:
    value: Any = raw
    for name in place:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _put(raw: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    """Nothing, or what holds anyway, is left out; an outer mapping goes with its last field."""
    *outer, last = place
    inside: dict[str, Any] = raw
    for name in outer:
        if not isinstance(inside.get(name), dict):
            inside[name] = {}
        inside = inside[name]
    if value in ("", None, [], {}) or (place in _USUAL and value == _USUAL[place]):
        inside.pop(last, None)
    else:
        inside[last] = value
    if outer and not inside:
        raw.pop(outer[0], None)


_USUAL: dict[tuple[str, ...], int] = {
    ("num_nodes",): 1,
    ("ranks_per_node",): 1,
    ("retry", "max_retries"): 0,
    ("priority",): 0,
}


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _number(text: str) -> int | str:
    """What is no number is left for validation, which says what is wanted."""
    plain = text.strip()
    return int(plain) if plain.removeprefix("-").isdecimal() and len(plain) < 10 else plain


def _gpus(raw: Any) -> tuple[str, str]:
    if isinstance(raw, Mapping) and len(raw) == 1:
        ((kind, count),) = raw.items()
    elif isinstance(raw, str) and raw.strip():
        kind, _, count = raw.strip().partition(":")
    else:
        return "", ""
    return ("" if str(kind).lower() == "gpu" else str(kind)), str(count or 1)


def _accelerators(values: Mapping[str, str]) -> str:
    kind, count = values.get("gpu_type", "").strip(), values.get("gpus", "").strip()
    if count == "0" or not (kind or count):
        return ""
    return f"{kind or 'gpu'}:{count or 1}"


def _ranks(values: Mapping[str, str]) -> int | str:
    if values.get("type", COMMAND) == COMMAND:
        return 1
    return _number(values.get("ranks", "") or values.get("gpus", "") or "1")


def _quoted(value: str) -> str:
    """A value that one line can hold is shown as it is; others as JSON writes text."""
    plain = value == value.strip() and not value.startswith('"') and value.isprintable()
    return value if plain else json.dumps(value, ensure_ascii=False)


def _envs(values: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(values.get("envs", "").splitlines(), 1):
        if not line.strip():
            continue
        name, given, value = line.strip().partition("=")
        if not given:
            raise InvalidInput(f"line {number} has no “=”", hint="write NAME=value, one on each line", field="envs")
        if name.strip() in found:
            raise InvalidInput(f"line {number} sets {name.strip()[:60]} again", hint="keep one of them", field="envs")
        found[name.strip()] = _unquoted(value.strip(), number)
    if data := values.get("dataset", "").strip():
        found[DATASET] = data
    return found


def _unquoted(value: str, number: int) -> str:
    if not value.startswith('"'):
        return value
    try:
        text = json.loads(value)
    except ValueError:
        text = None
    if not isinstance(text, str):
        raise InvalidInput(
            f"line {number} begins with a quote and does not end like text",
            hint='close the quotes, and write \\" for one inside; or leave them out',
            field="envs",
        )
    return text


def _secret_lines(raw: Any) -> str:
    if isinstance(raw, str):
        return raw
    if isinstance(raw, list):
        return "\n".join(map(_as_text, raw))
    lines = []
    for variable, use in raw.items() if isinstance(raw, Mapping) else ():
        name = use.get("secret", variable) if isinstance(use, Mapping) else use
        as_file = " (file)" if isinstance(use, Mapping) and use.get("file") else ""
        plain = name in (None, variable) and not as_file
        lines.append(str(variable) if plain else f"{variable}={variable if name is None else name}{as_file}")
    return "\n".join(lines)


def _secrets(text: str) -> Any:
    """Lines `NAME`, `VARIABLE=NAME` or `VARIABLE=NAME (file)`."""
    uses: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        variable, given, name = (part.strip() for part in line.strip().partition("="))
        if variable in uses:
            raise InvalidInput(f"line {number} sets {variable[:60]} again", hint="keep one of them", field="secrets")
        is_file = name.endswith("(file)")
        name = name.removesuffix("(file)").strip()
        uses[variable] = {"secret": name, "file": True} if is_file else name if given else variable
    if all(use == variable for variable, use in uses.items()):
        return list(uses)
    return uses


def _curve_lines(raw: Any) -> str:
    """Patterns, one on each line; one word says that there are to be none."""
    if raw is None or raw is True:
        return ""
    if isinstance(raw, list) and raw:
        return "\n".join(map(_as_text, raw))
    return raw if isinstance(raw, str) else _NO_CURVES


def _curves(text: str) -> list[str] | str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].lower() if len(lines) == 1 and lines[0].lower() == _NO_CURVES else lines


def uploaded(raw: Mapping[str, Any]) -> str:
    """The reference of the files that lie at the server for the work directory; empty when there are none."""
    ref = raw.get("workdir")
    return ref if isinstance(ref, str) and is_bundle_ref(ref) else ""
