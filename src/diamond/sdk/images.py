"""Images seen from a client: building them, watching builds, using, sharing and removing what was built.

Export and import are in `diamond.sdk.image_copies`; drafts of recipes in `diamond.sdk.image_drafts`.
"""

from __future__ import annotations

import builtins
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput, NotFound
from diamond.core.image_views import Build, BuildProgress, EndpointImages, ImagePlan
from diamond.core.images import Image, Replica, ReplicaState, StageRecord, parse_stages
from diamond.core.projects import Visibility
from diamond.core.recipes import Recipe
from diamond.core.tasks import Task
from diamond.sdk import uploads
from diamond.sdk.bundles import Bundles
from diamond.sdk.folders import Progress
from diamond.sdk.follow import FollowItem
from diamond.sdk.image_copies import Copies, exportable
from diamond.sdk.image_drafts import Drafts
from diamond.sdk.imagefile import ImageFile
from diamond.sdk.imagefile import read as read_image_file
from diamond.sdk.tasks import Tasks
from diamond.sdk.transport import API, Transport

RecipeLike = Recipe | Mapping[str, Any] | str | os.PathLike[str]
_WATCH_S = 1.0


class Images:
    """Reached as `Client.images`. Wherever an image is asked for: its id, NAME, NAME@sha256:… or OWNER/NAME."""

    def __init__(self, transport: Transport, bundles: Bundles, tasks: Tasks) -> None:
        self._transport = transport
        self._bundles = bundles
        self._tasks = tasks
        self._copies = Copies(transport, bundles, tasks)
        self.drafts = Drafts(transport)

    def read(self, recipe: RecipeLike) -> Recipe:
        """Validate a recipe in any of its forms, without the server; local paths become absolute.

        Args:
            recipe: a Recipe, the same as a dictionary, or the path of a file or folder that has one (see
                `diamond.sdk.recipefile.load`). A dictionary may name lists of packages as a file may.

        Raises:
            InvalidInput: naming the field, and file and line where there are any.
        """
        # Here and not above: listing images needs no YAML.
        from diamond.sdk import recipefile

        if isinstance(recipe, Recipe):
            return recipe
        if isinstance(recipe, str | os.PathLike):
            return recipefile.load(recipe).recipe()
        if not isinstance(recipe, Mapping):
            raise InvalidInput("a recipe is a Recipe, a dictionary or the path of a YAML file")
        return Recipe.parse(recipefile.folded(recipe, Path.cwd()))

    def build(
        self,
        recipe: RecipeLike,
        *,
        endpoint: str | None = None,
        where: str | None = None,
        fresh: bool = False,
        idempotency_key: str | None = None,
        progress: Progress | None = None,
        scan_progress: Progress | None = None,
    ) -> Build:
        """Upload a recipe's files and have it built.

        The same recipe at the same endpoint is built once: a repeated call gives what is there, or is being made.

        Args:
            endpoint: where; None: Diamond chooses.
            where: "login" or "batch", over what the recipe says.
            fresh: build all steps anew, even those whose results were kept.
            idempotency_key: names this request, for repeating it safely. None: a new one is made.
            progress: called with (bytes sent, bytes to send, files sent) during the upload.
            scan_progress: the same while files are read.

        Raises:
            InvalidInput: the recipe or one of its files cannot be accepted; names the field.
        """
        ready = uploads.sent(self._bundles, self.read(recipe), progress, scan_progress)
        body = {"recipe": encode(ready), "endpoint": endpoint, "where": where, "fresh": fresh}
        raw = self._transport.json(
            "POST",
            f"{API}/images",
            body=body,
            headers={"Idempotency-Key": idempotency_key or f"sdk-{secrets.token_hex(16)}"},
            repeatable=True,
        )
        return decode(Build, raw)

    def plan(self, recipe: RecipeLike, *, endpoint: str | None = None, where: str | None = None) -> ImagePlan:
        """What `build` would do: where, with which builder, why, and whether it is there already.

        Nothing is uploaded and nothing is written. Raises InvalidInput as `build` does.
        """
        ready = uploads.named(self._bundles, self.read(recipe))
        body = {"recipe": encode(ready), "endpoint": endpoint, "where": where}
        return decode(ImagePlan, self._transport.json("POST", f"{API}/images/plan", body=body, repeatable=True))

    def get(self, ref: str) -> Image:
        """An image with its recipe, results and the tasks that run in it.

        Raises:
            NotFound: there is none, or none that you may see; the hint has near names.
        """
        # Asked for as a parameter: a name may be that of a route.
        return decode(Image, self._transport.json("GET", f"{API}/images/find", params={"ref": ref}))

    def list(
        self, *, name: str | None = None, endpoint: str | None = None, everything: bool = False
    ) -> Iterator[Image]:
        """Images you may use, newest first, fetching pages as needed.

        Args:
            name: only those of exactly this name.
            endpoint: only those that are there, or being made there.
            everything: also older ones of a name, and those that failed or are gone.
        """
        cursor = None
        while True:
            params = {"name": name, "endpoint": endpoint, "all": everything or None, "limit": 200, "cursor": cursor}
            answer = self._transport.json("GET", f"{API}/images", params=params)
            yield from (decode(Image, raw) for raw in answer["images"])
            cursor = answer.get("next_cursor")
            if cursor is None:
                return

    def wait(self, ref: str, *, endpoint: str | None = None, timeout_s: float | None = None) -> Image:
        """Block until an image is no longer being made, at `endpoint` or anywhere.

        Raises:
            TimeoutError: it is still being made after `timeout_s` seconds; that goes on.
        """
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            image = self.get(ref)
            making = [one for one in image.replicas if one.state is ReplicaState.BUILDING]
            making = [one for one in making if endpoint in (None, one.endpoint)]
            if not making:
                return image
            left = None if ends_at is None else ends_at - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"image {ref} is still being made after {timeout_s:g} s")
            try:
                task = self._tasks.wait(making[0].task_id, timeout_s=left)
            except TimeoutError:
                continue
            if task.state.is_final:  # the image follows within the moment it takes to read what the task left
                time.sleep(_WATCH_S if left is None else min(_WATCH_S, max(0.0, left)))

    def task_id(self, ref: str, *, endpoint: str | None = None) -> str:
        """The task that made (or makes) an image, at `endpoint` or where it was made last.

        Raises:
            NotFound: nothing made it there.
        """
        return _maker(self.get(ref), endpoint).task_id

    def logs(self, ref: str, *, endpoint: str | None = None) -> Iterator[bytes]:
        """The log of its build as far as it is written, in pieces. Does not wait for more."""
        return self._tasks.logs(self.task_id(ref, endpoint=endpoint))

    def follow(self, ref: str, *, endpoint: str | None = None) -> Iterator[FollowItem]:
        """What happens to its build, as it happens; see `Tasks.follow`."""
        return self._tasks.follow(self.task_id(ref, endpoint=endpoint), metrics=False)

    def stages(self, ref: str, *, endpoint: str | None = None) -> tuple[StageRecord, ...]:
        """How far its build is; of a finished one, how long each step took and which were kept from earlier builds."""
        image = self.get(ref)
        maker = _maker(image, endpoint)
        if maker.facts is not None and maker.facts.stages:
            return maker.facts.stages
        return parse_stages(b"".join(self._tasks.logs(maker.task_id)).decode(errors="replace"))

    def progress(self, ref: str, *, endpoint: str | None = None) -> BuildProgress:
        """How far its making is, or how it ended."""
        return decode(
            BuildProgress, self._transport.json("GET", f"{_path(ref)}/progress", params={"endpoint": endpoint})
        )

    def file(self, ref: str, name: str, *, endpoint: str | None = None) -> bytes:
        """What its build found out: "lock.json", "sbom.cdx.json", "definition.txt", "image.json" or "failure.json".

        Raises:
            NotFound: it left no such file.
        """
        return self._copies.file(ref, name, endpoint)

    def share(self, ref: str, visibility: Visibility | str, *, project: str | None = None) -> Image:
        """Say who may use it: "private", "project" (the members of its project) or "public".

        Args:
            project: move it there first.

        Raises:
            Forbidden: it is not yours.
        """
        body = {"visibility": str(visibility)} | ({"project": project} if project else {})
        return decode(Image, self._transport.json("POST", f"{_path(ref)}/share", body=body, repeatable=True))

    def copy(self, ref: str, endpoint: str) -> Build:
        """Bring an image to another endpoint: linked, copied or rebuilt, whichever fits; the answer says why.

        Repeating it is harmless.
        """
        raw = self._transport.json(
            "POST",
            f"{_path(ref)}/copy",
            body={"endpoint": endpoint},
            headers={"Idempotency-Key": f"sdk-{secrets.token_hex(16)}"},
            repeatable=True,
        )
        return decode(Build, raw)

    def export(
        self,
        ref: str,
        path: str | os.PathLike[str],
        *,
        endpoint: str | None = None,
        progress: Progress | None = None,
        on_task: Callable[[Task], None] | None = None,
    ) -> ImageFile:
        """Write an image with all that is known of it to one file, which any installation can import.

        The file appears complete and verified, or not at all; repeating a broken export goes on where it stopped.

        Args:
            path: the file to write; an old one is replaced.
            endpoint: whose result to take; None: any that is ready.
            progress: called with (bytes done, bytes in all, parts done) once the endpoint has handed it over.
            on_task: told of the task by which the endpoint hands it over, before it is waited for.

        Raises:
            NotFound: there is no such image, or it is ready nowhere.
            Conflict: the endpoint could not hand it over.
        """
        image = self.get(ref)
        replica = exportable(image, endpoint)
        task = self._copies.begin_export(image, replica.endpoint)
        if on_task:
            on_task(task)
        return self._copies.finish_export(image, replica, self._tasks.wait(task.id), path, progress)

    def import_(
        self,
        path: str | os.PathLike[str],
        *,
        endpoint: str | None = None,
        name: str | None = None,
        progress: Progress | None = None,
        verify_progress: Progress | None = None,
    ) -> Build:
        """Take in an image that `export` wrote, here or on another installation.

        It is verified before anything is sent; an interrupted upload goes on where it stopped.

        Args:
            endpoint: where to; None: Diamond chooses one that can run it.
            name: another name for it.
            progress: called with (bytes sent, bytes to send, files sent).
            verify_progress: the same while the file is read.

        Raises:
            InvalidInput: it is not such a file, or no endpoint can run it.
            DigestMismatch: it was changed, or damaged on its way.
        """
        found = read_image_file(path)
        return self._copies.bring_in(
            found, endpoint=endpoint, name=name, progress=progress, verify_progress=verify_progress
        )

    def test(self, ref: str, command: str | None = None, *, endpoint: str | None = None) -> Task:
        """Run a command in an image, as a task; None: the recipe's own validation command."""
        body = {"command": command, "endpoint": endpoint}
        return decode(Task, self._transport.json("POST", f"{_path(ref)}/test", body=body))

    def remove(self, ref: str, *, endpoint: str | None = None, force: bool = False) -> dict[str, Any]:
        """Remove an image everywhere, or its result at one endpoint; its files go with it.

        Returns:
            ``{"removed": endpoints, "tasks": ids of the tasks that remove its files there}``.

        Raises:
            Conflict: tasks that have not ended use it, and `force` was not given; names them.
            Forbidden: it is not yours.
        """
        params = {"endpoint": endpoint, "force": force or None}
        return dict(self._transport.json("DELETE", _path(ref), params=params))

    def prune(self, endpoint: str) -> Task:
        """Remove kept steps of builds at an endpoint that no image there needs; a task, whose log says what went."""
        path = f"{API}/endpoints/{quote(endpoint, safe='')}/images/prune"
        return decode(Task, self._transport.json("POST", path, repeatable=True))

    def at(self, endpoint: str) -> EndpointImages:
        """What lies at an endpoint, and how much room it takes."""
        return decode(EndpointImages, self._transport.json("GET", f"{API}/endpoints/{quote(endpoint, safe='')}/images"))

    def bases(self, endpoint: str | None = None) -> builtins.list[dict[str, Any]]:
        """Suggested bases, those for the GPUs of `endpoint` first."""
        answer = self._transport.json("GET", f"{API}/images/bases", params={"endpoint": endpoint})
        return builtins.list(answer["bases"])


def replica_at(image: Image, endpoint: str | None) -> Replica | None:
    """Its result at an endpoint; without one, the best there is: a ready one, else the newest."""
    if endpoint is not None:
        return next((one for one in image.replicas if one.endpoint == endpoint), None)
    order = [ReplicaState.READY, ReplicaState.BUILDING, ReplicaState.FAILED, ReplicaState.GONE]
    ranked = sorted(image.replicas, key=lambda one: (order.index(one.state), -one.created_at))
    return ranked[0] if ranked else None


def _maker(image: Image, endpoint: str | None) -> Replica:
    found = replica_at(image, endpoint) if endpoint else None
    if endpoint is None:
        made = sorted((one for one in image.replicas if one.task_id), key=lambda one: -one.created_at)
        found = made[0] if made else None
    if found is None or not found.task_id:
        there = f" at {endpoint}" if endpoint else ""
        raise NotFound(f"nothing has made image {image.name!r}{there}", hint=f"see: diamond image show {image.name}")
    return found


def _path(ref: str) -> str:
    return f"{API}/images/{quote(ref, safe='')}"


__all__ = ["Build", "Images", "RecipeLike", "replica_at"]
