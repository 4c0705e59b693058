"""Bodies of requests and answers that are not themselves core types. They make the OpenAPI document and the answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diamond.core.bases import Base
from diamond.core.endpoints import Endpoint, QueueEntry
from diamond.core.enrolment import Enrolment
from diamond.core.events import Event
from diamond.core.image_views import ImageDraft
from diamond.core.images import Image, ImageFacts, ImageUse, Lock
from diamond.core.recipes import Recipe
from diamond.core.tasks import Output, Task, TaskSpec


@dataclass(frozen=True, kw_only=True)
class ErrorDetail:
    """`code` is stable; `transient` says whether the same request may work later."""

    code: str
    message: str
    hint: str
    field: str
    transient: bool


@dataclass(frozen=True, kw_only=True)
class ErrorAnswer:
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail


@dataclass(frozen=True, kw_only=True)
class NewTask:
    """Unknown fields of `spec` are refused. Amounts may also be numbers (`cpus: 4`), durations text (`"2h"`)."""

    spec: TaskSpec


@dataclass(frozen=True, kw_only=True)
class PlannedImage:
    """What a task would run in. `how`: "ready", "waiting", "linked", "copied", "rebuilt" or "built" first."""

    name: str
    image_id: str
    how: str
    why: str
    use: ImageUse | None


@dataclass(frozen=True, kw_only=True)
class TaskPlan:
    """What a task would become: where it would run and why, and exactly which files would run there."""

    spec: TaskSpec
    endpoint: str | None
    why: list[str]
    others: dict[str, str]
    script: str
    files: dict[str, str]
    envs: dict[str, str]
    time_limit_s: int | None  # of one job
    partition: str
    jobs: int  # how many jobs, one after the other, it is expected to take
    warnings: list[str]  # limits it comes close to, or will wait for
    image: PlannedImage | None = None


@dataclass(frozen=True, kw_only=True)
class NewTasks:
    """The body of POST /tasks/batch."""

    specs: list[TaskSpec]


@dataclass(frozen=True, kw_only=True)
class TaskChange:
    """`visibility`: "private", "project" (the members of its project) or "public" (everybody with an account here)."""

    visibility: str | None = None
    project: str | None = None


@dataclass(frozen=True, kw_only=True)
class TaskBatch:
    """In the order of the specs."""

    tasks: list[Task]


@dataclass(frozen=True, kw_only=True)
class TaskPage:
    """Newest first, without `spec`, `jobs` and `outputs`. Pass `next_cursor` as `cursor` for the next page."""

    tasks: list[Task]
    next_cursor: str | None
    total: int


@dataclass(frozen=True, kw_only=True)
class EventPage:
    """Pass `cursor` as `since` next time; start over from 0 when `epoch` changes (a backup was restored)."""

    events: list[Event]
    cursor: int
    epoch: str


@dataclass(frozen=True, kw_only=True)
class Series:
    """One key of a job. A number that is not finite is null. `count` is of all that were logged; `thinned`: some of the
    older ones are no longer kept."""

    key: str
    stream: str
    count: int
    last_step: float | None
    last_t: float | None
    last_value: float | None
    thinned: bool


@dataclass(frozen=True, kw_only=True)
class SeriesList:
    """`notes` say what was logged and is in no curve, and why."""

    attempt: int
    series: list[Series]
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class CurveAnswer:
    """`points` are [x, min, max, mean, last]; with `exact`, each is one sample. `gaps` are stretches of samples that
    are no number, as [x of the first, x of the last]. `thinned`: of the older samples, some are no longer kept."""

    attempt: int
    key: str
    x: str
    count: int
    points: list[list[float | None]]
    exact: bool
    non_finite: int
    first_non_finite_x: float | None
    gaps: list[list[float]]
    thinned: bool


@dataclass(frozen=True, kw_only=True)
class OutputList:
    outputs: list[Output]


@dataclass(frozen=True, kw_only=True)
class NewEndpoint:
    """With `token` false no token is made: the agent enrols with the code in the answer and makes its own."""

    name: str
    token: bool = True


@dataclass(frozen=True, kw_only=True)
class CreatedEndpoint:
    """`token` (or the code in `enrolment`) is for the endpoint's agent and is never shown again."""

    endpoint: Endpoint
    token: str
    enrolment: Enrolment | None = None


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """`rotated`: the agent has a new token and the old one is dead. Otherwise it was asked to take one, and will when
    it is heard of again; if it is offline, `enrolment` gives a code that replaces its token instead."""

    rotated: bool
    online: bool
    enrolment: Enrolment | None = None


@dataclass(frozen=True, kw_only=True)
class Revocation:
    revoked: int


@dataclass(frozen=True, kw_only=True)
class Removal:
    """`given_up`: live jobs that are no longer watched."""

    given_up: int


@dataclass(frozen=True, kw_only=True)
class EndpointList:
    endpoints: list[Endpoint]


@dataclass(frozen=True, kw_only=True)
class Queue:
    queue: list[QueueEntry]


@dataclass(frozen=True, kw_only=True)
class MissingBlob:
    """`received` bytes of an unfinished upload are held: go on from there."""

    digest: str
    received: int


@dataclass(frozen=True, kw_only=True)
class BundleAnswer:
    """Use `ref` in a task once `complete`; until then upload what is missing and ask again."""

    ref: str
    digest: str
    missing: list[MissingBlob]
    complete: bool


@dataclass(frozen=True, kw_only=True)
class BlobQuery:
    digests: list[str]


@dataclass(frozen=True, kw_only=True)
class MissingBlobs:
    missing: list[MissingBlob]


@dataclass(frozen=True, kw_only=True)
class UploadState:
    """Bytes held so far; send the rest from `received` on."""

    received: int
    complete: bool


@dataclass(frozen=True, kw_only=True)
class PackStored:
    stored: int


@dataclass(frozen=True, kw_only=True)
class Health:
    status: str
    version: str
    epoch: str


@dataclass(frozen=True, kw_only=True)
class Info:
    """What is about the installation, and not about the one who asks, is null for all but administrators."""

    version: str
    epoch: str
    data_dir: str | None = None
    database: str | None = None
    counts: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class NewImage:
    """Without `endpoint` one is chosen. `where` ("login", "batch") is over what the recipe says; `fresh` builds every
    step anew, as another image of the same name."""

    recipe: Recipe
    endpoint: str | None = None
    where: str | None = None
    fresh: bool = False
    visibility: str | None = None
    project: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImageQuestion:
    """The body of POST /images/plan."""

    recipe: Recipe
    endpoint: str | None = None
    where: str | None = None
    project: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImagePage:
    """Newest first, without `recipe` and `used_by`. Pass `next_cursor` as `cursor` for the next page."""

    images: list[Image]
    next_cursor: str | None
    total: int


@dataclass(frozen=True, kw_only=True)
class ImportedImage:
    """What an export says of its image. `payload` was uploaded: a blob's digest, or the reference of a bundle of it."""

    recipe: Recipe
    facts: ImageFacts
    payload: str
    lock: Lock | None = None
    name: str | None = None
    endpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """`visibility`: "private", "project" (the members of its project) or "public" (everybody with an account here).
    `project`: move it there first."""

    visibility: str | None = None
    project: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImageTarget:
    endpoint: str


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """Whose result to take; any that is ready when left out."""

    endpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImageTest:
    """Without `command`, the recipe's own validation command."""

    command: str | None = None
    endpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class ImageRemoval:
    """Where it was removed, the tasks that tidy up there, and the older image that its name means now, if any."""

    removed: list[str]
    tasks: list[str]
    remains: str = ""


@dataclass(frozen=True, kw_only=True)
class BaseList:
    bases: list[Base]


@dataclass(frozen=True, kw_only=True)
class NewDraft:
    """Empty, or begun with a recipe."""

    recipe: Recipe | None = None


@dataclass(frozen=True, kw_only=True)
class DraftChange:
    """`version`: of the draft this change was made from."""

    version: int
    contents: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DraftVersion:
    version: int


@dataclass(frozen=True, kw_only=True)
class DraftList:
    drafts: list[ImageDraft]
