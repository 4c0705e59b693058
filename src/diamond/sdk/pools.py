"""Pools seen from a client: nodes that are held, inside of which tasks get the share they can use."""

from __future__ import annotations

import builtins
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput
from diamond.core.pool_records import PoolRecord
from diamond.core.pools import Pool, PoolSpec
from diamond.core.projects import PROJECT_ENV, parse_project
from diamond.sdk.transport import API, Transport


class Pools:
    """Reached as `Client.pools`. A pool is named by its id or name: your own of that name before others'."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, *, closed: bool = False) -> builtins.list[Pool]:
        """Yours and those of your projects, by name; without nodes, tasks and decisions.

        Args:
            closed: also closed ones; then the newest 200, newest first.
        """
        answer = self._transport.json("GET", f"{API}/pools", params={"closed": "true" if closed else None})
        return [decode(Pool, raw) for raw in answer["pools"]]

    def get(self, pool: str) -> Pool:
        """One with its nodes (`pilots`), its tasks and the newest decisions.

        Raises:
            NotFound: there is none that you see.
        """
        return decode(Pool, self._transport.json("GET", _path(pool)))

    def create(self, spec: PoolSpec | Mapping[str, Any]) -> Pool:
        """Hold nodes of an endpoint, and run inside what names the pool. The first are asked for at once.

        Example:
            >>> diamond.pools.create({"name": "gpus", "endpoint": "hpc", "nodes": "2..8", "accelerators": "A100:4"})
            >>> diamond.tasks.create({"run": "python train.py", "pool": "gpus"})

        A spec without a project is in that of DIAMOND_PROJECT, as a task would be.

        Raises:
            InvalidInput: the spec cannot be accepted, or not at that endpoint; names the field.
            Conflict: one of yours has that name already.
        """
        wanted = _in_project(spec if isinstance(spec, PoolSpec) else PoolSpec.parse(spec))
        return decode(Pool, self._transport.json("POST", f"{API}/pools", body=encode(wanted)))

    def change(
        self,
        pool: str,
        changes: Mapping[str, Any] | None = None,
        *,
        nodes: str | int | None = None,
        walltime: str | int | None = None,
        idle: str | int | None = None,
    ) -> Pool:
        """Change what is given. May be repeated. Pilots that run keep the walltime they have.

        Args:
            changes: the same as keywords, as a mapping: ``{"nodes": "2..8"}``.
            nodes: "2..8", or one number.
            walltime, idle: seconds, or as "4h".

        Raises:
            Forbidden: you may use it, not change it.
            InvalidInput: names the field; also where one is given twice.
        """
        given = {"nodes": nodes, "walltime": walltime, "idle": idle}
        body = _merged(changes, {name: value for name, value in given.items() if value is not None})
        return decode(Pool, self._transport.json("PATCH", _path(pool), body=body, repeatable=True))

    def close(self, pool: str) -> Pool:
        """Let its nodes go once its tasks have saved their state. May be repeated.

        Raises:
            NotFound: there is none that you see.
            Forbidden: you may use it, not close it.
        """
        return decode(Pool, self._transport.json("DELETE", _path(pool), repeatable=True))

    def record(self, pool: str) -> PoolRecord:
        """What went on in it until now, for `diamond simulate`: times and sizes, without names and code.

        Raises:
            NotFound: there is none that you see.
            Forbidden: neither it nor its project is yours; it tells of everybody's tasks.
        """
        return decode(PoolRecord, self._transport.json("GET", f"{_path(pool)}/record"))


def _merged(changes: Mapping[str, Any] | None, given: dict[str, Any]) -> dict[str, Any]:
    """What is to be changed, each field once. Which fields there are, the server says."""
    if changes is not None and not isinstance(changes, Mapping):
        raise InvalidInput(
            f"must be a mapping of fields, not {type(changes).__name__}",
            hint='for example change(pool, {"nodes": "2..8"}), or change(pool, nodes="2..8")',
            field="changes",
        )
    found = dict(changes or {})
    if twice := sorted(set(found) & set(given)):
        raise InvalidInput("is given twice", hint="give it in the mapping or as a keyword", field=twice[0])
    return found | given


def _in_project(spec: PoolSpec) -> PoolSpec:
    name = os.environ.get(PROJECT_ENV, "").strip()
    if spec.project is not None or not name:
        return spec
    try:
        return replace(spec, project=parse_project(name))
    except ValueError as error:
        raise InvalidInput(str(error), hint="mend or unset it", field=PROJECT_ENV) from error


def _path(pool: str) -> str:
    quoted = quote(pool, safe="")
    # A name of dots alone would be taken for a folder above.
    return f"{API}/pools/{quoted if quoted.strip('.') else quoted.replace('.', '%2E')}"
