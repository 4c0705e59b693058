"""Slips people make in task files, and what they meant. Speaks before validation does, where it can say more.

Must not refuse anything that `TaskSpec.parse` accepts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from diamond.core.errors import InvalidInput
from diamond.core.resources import Resources
from diamond.core.tasks import TaskSpec

_TOP = frozenset(field.name for field in dataclasses.fields(TaskSpec))
_RESOURCES = frozenset(field.name for field in dataclasses.fields(Resources))
_GPUS = "GPUs are called accelerators:  resources: {accelerators: gpu:1}  (or e.g. H100:4)"
# What people write who come from SkyPilot, Slurm or container files, and how it is said here.
_MEANT_TOP = {
    **dict.fromkeys(("command", "commands", "cmd", "script"), "the command is given by `run`"),
    **dict.fromkeys(("timeout", "time", "walltime", "time_limit"), "the time limit is max_duration, e.g. 2h"),
    **dict.fromkeys(("retries", "max_retries", "restarts"), "write  retry: {max_retries: 3}"),
    **dict.fromkeys(("gpus", "gpu"), _GPUS),
    **dict.fromkeys(("ntasks", "ranks", "nproc_per_node", "processes"), "processes on a node are ranks_per_node"),
    **dict.fromkeys(("endpoint", "cluster", "cloud"), "name the endpoint in resources:  resources: {infra: NAME}"),
    **dict.fromkeys(("mounts", "files"), "write  file_mounts: {path in the work directory: path here}"),
    **dict.fromkeys(
        ("metrics", "curve", "plots"), "curves of what the program prints: write  curves: ['loss: {loss}']"
    ),
    **dict.fromkeys(("container", "docker"), "name the image in resources:  resources: {image_id: NAME}"),
}
_MEANT_RESOURCES = {
    **dict.fromkeys(("gpus", "gpu"), "GPUs are called accelerators: write e.g.  accelerators: gpu:1  or  H100:4"),
    **dict.fromkeys(("cloud", "region", "zone", "cluster", "endpoint"), "name the endpoint:  infra: NAME"),
    **dict.fromkeys(("mem", "ram"), "write  memory: 32  (GiB)"),
    **dict.fromkeys(("num_nodes", "nodes"), "num_nodes stands beside resources, not inside it"),
}


def check_slips(raw: Mapping[str, Any]) -> None:
    """Raises InvalidInput, naming the field, for a well-known slip."""
    for field in ("run", "setup"):
        value = raw.get(field)
        if isinstance(value, list):
            raise InvalidInput("must be text, not a list", hint="use `|` and one command per line", field=field)
        if isinstance(value, dict):
            raise InvalidInput(
                "must be text, not a mapping",
                hint="use `|` and one command per line; a command with a colon in it needs that too",
                field=field,
            )
    _pairs(raw.get("envs"), "envs", "NAME: value")
    _pairs(raw.get("file_mounts"), "file_mounts", "path in the work directory: path on this machine")
    if isinstance(raw.get("retry"), int):
        hint = f"write  retry: {{max_retries: {int(raw['retry'])}}}"
        raise InvalidInput(f"must be a mapping, not {raw['retry']}", hint=hint, field="retry")
    resources = raw.get("resources")
    if isinstance(resources, list | str):
        kind = "a list" if isinstance(resources, list) else "text"
        hint = "write e.g.  resources: {cpus: 4, memory: 16, infra: local}"
        raise InvalidInput(f"must be a mapping, not {kind}", hint=hint, field="resources")
    if isinstance(raw.get("image"), str):
        hint = "name an image with  resources: {image_id: NAME};  `image` describes one:  image: {base: …, pip: […]}"
        raise InvalidInput("must be a recipe, not text", hint=hint, field="image")
    _unknown(raw, _TOP, _MEANT_TOP, "")
    if isinstance(resources, dict):
        _unknown(resources, _RESOURCES, _MEANT_RESOURCES, "resources")


def _pairs(value: Any, field: str, form: str) -> None:
    if isinstance(value, list):
        hint = f"write {form}, one a line and without dashes"
        raise InvalidInput("must be a mapping, not a list", hint=hint, field=field)


def _unknown(raw: Mapping[str, Any], known: frozenset[str], meant: Mapping[str, str], field: str) -> None:
    for key in raw:
        if key in known:
            continue
        if not field and key in _RESOURCES:
            hint = f"it belongs under resources:  resources: {{{key}: …}}"
        elif field and key in _TOP:
            hint = f"{key} stands beside resources, not inside it"
        else:
            hint = meant.get(key, "")
        if hint:
            raise InvalidInput(f"unknown field {key!r}", hint=hint, field=f"{field}.{key}" if field else key)
