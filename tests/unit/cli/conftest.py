"""A client for commands about images that answers what a test wants, and images for it to speak of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from diamond.cli import image_build, image_files, images, main
from diamond.core.images import BuildFailure, Image, ImageFacts, Replica, ReplicaState, StageRecord
from diamond.core.recipes import Recipe
from diamond.core.states import TaskState
from diamond.core.tasks import Task

DIGEST = "sha256:" + "ab" * 32
FACTS = ImageFacts(
    image_id="img_000000001",
    recipe_digest=DIGEST,
    builder="apptainer",
    builder_version="1.4.0",
    architecture="x86_64",
    digest=DIGEST,
    size_bytes=3 * 1024**3,
    path="/scratch/images/store/img_000000001/image.sif",
    seconds=75.0,
    stages=(
        StageRecord(name="base", title="base image", state="kept"),
        StageRecord(name="pip", title="Python packages"),
    ),
    num_packages=120,
    python="3.12.3",
    os="debian 13",
)
READY = Replica(endpoint="hpc", state=ReplicaState.READY, task_id="tsk_000000001", facts=FACTS, created_at=1.0)
FAILURE = BuildFailure(
    stage="pip",
    message="There is no package no-such-thing.",
    line="pip: no-such-thing==1",
    excerpt="ERROR: No matching distribution\x1b[2J found\n",
    hint="check the spelling",
)
BUILDING = Replica(endpoint="hpc", state=ReplicaState.BUILDING, task_id="tsk_000000001", created_at=1.0)
FAILED = replace(BUILDING, state=ReplicaState.FAILED, failure=FAILURE)


def image(*replicas: Replica, **more: Any) -> Image:
    known: dict[str, Any] = {"id": "img_000000001", "name": "climate", "owner": "ana", "recipe_digest": DIGEST}
    recipe = Recipe.parse({"base": "python:3.12-slim", "pip": ["six"], "envs": {"A": "1"}, "build": "a\nb\n"})
    return Image(**{**known, "replicas": replicas, "recipe": recipe, **more})


def task(state: TaskState = TaskState.SUCCEEDED, **more: Any) -> Task:
    return Task(**{"id": "tsk_000000001", "name": "build climate", "state": state, "endpoint": "hpc", **more})


class Fake:
    """`client.images` and `client.tasks`: each call is kept, and answered with what the test gave."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answer = self._answers[name]

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return answer(*args, **options) if callable(answer) else answer

        return call

    def asked(self, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return next((args, options) for called, args, options in self.calls if called == name)


Given = Callable[..., Fake]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    def give(tasks: dict[str, Any] | None = None, **answers: Any) -> Fake:
        fake = Fake(**answers)
        client = SimpleNamespace(images=fake, tasks=Fake(**(tasks or {})))

        @contextmanager
        def connect(**options: object) -> Iterator[Any]:
            yield client

        for module in (images, image_build, image_files):
            monkeypatch.setattr(module, "connect", connect)
        return fake

    return give


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main(["image", *arguments])
    return int(caught.value.code or 0)
