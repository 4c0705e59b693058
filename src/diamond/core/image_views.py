"""What the service answers about images beside the images themselves: builds, dry runs, progress, disk use, drafts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diamond.core.images import BuildFailure, Image, Replica, ReplicaState, StageRecord
from diamond.core.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Build:
    """What became of a request to have an image at an endpoint (build, copy, import).

    Attributes:
        task_id: the task that makes it, whose log is the build's; empty when it was there and nobody remembers how.
        cached: it was there already, ready to use.
        how: "cached", "waiting" (somebody makes it just now), "built", "rebuilt", "copied", "linked", "imported".
        why: how it is had, and why so, in sentences.
    """

    image: Image
    replica: Replica
    task_id: str = ""
    cached: bool = False
    how: str = "built"
    why: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """The dry run of a build. `expected_s` is the median of earlier builds there; None when there was none."""

    recipe: Recipe  # as it would be built: a suggested base by its address
    recipe_digest: str
    endpoint: str | None
    builder: str = ""
    where: str = ""
    why: tuple[str, ...] = ()
    others: dict[str, str] = field(default_factory=dict)  # endpoint: what keeps it from building this
    definition: str = ""  # in the builder's own language
    stages: tuple[StageRecord, ...] = ()
    cached: bool = False
    image_id: str = ""  # of the image that would be reused
    expected_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class BuildProgress:
    """How far the making of an image at one endpoint is, or how it ended."""

    image_id: str
    endpoint: str
    state: ReplicaState
    task_id: str = ""
    task_state: str = ""
    stages: tuple[StageRecord, ...] = ()
    number: int = 0  # of the stage that runs, from 1
    total: int = 0  # stages there are
    detail: str = ""
    failure: BuildFailure | None = None


@dataclass(frozen=True, kw_only=True)
class ImageAt:
    """One image at one endpoint, as the list of what lies there shows it."""

    image_id: str
    name: str
    owner: str
    state: ReplicaState
    size_bytes: int = 0
    digest: str = ""
    path: str = ""
    ready_at: float | None = None
    used_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class EndpointImages:
    """What images take up at an endpoint. `image_bytes` and `layer_bytes` are as its agent last said."""

    endpoint: str
    root: str = ""
    image_bytes: int = 0
    layer_bytes: int = 0
    builders: tuple[str, ...] = ()
    builds: str = ""
    images: tuple[ImageAt, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FieldError:
    """Why a field of a draft cannot be accepted."""

    field: str
    message: str
    hint: str = ""


DRAFT_STEPS = ("endpoint", "base", "dependencies", "envs", "commands", "review")


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """One step of a draft: what was entered, and what is wrong with it."""

    name: str
    contents: dict[str, Any] = field(default_factory=dict)
    errors: tuple[FieldError, ...] = ()
    done: bool = False


@dataclass(frozen=True, kw_only=True)
class ImageDraft:
    """A recipe in the making. A change names the `version` it was made from; an older one is refused."""

    id: str
    version: int
    steps: tuple[DraftStep, ...]
    plan: ImagePlan | None = None  # only in the review, once every step is right
    image_id: str = ""  # once it was submitted
    created_at: float = 0.0
    updated_at: float = 0.0
