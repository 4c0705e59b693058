"""Images on their way out of an installation and into another: export to one file, and import of one.

The order of things is here; the file's format is in `diamond.sdk.imagefile`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from diamond.core.bundles import Manifest, digest_of_ref, is_bundle_ref
from diamond.core.codec import decode, encode
from diamond.core.errors import Conflict, NotFound
from diamond.core.image_views import Build
from diamond.core.images import PAYLOAD_FILE, Image, ImageFacts, Replica, ReplicaState
from diamond.core.recipes import Recipe
from diamond.core.tasks import Task
from diamond.sdk import imagefile
from diamond.sdk.bundles import Bundles
from diamond.sdk.downloads import Source, fill
from diamond.sdk.folders import Progress
from diamond.sdk.imagefile import Contents, Member
from diamond.sdk.tasks import Tasks
from diamond.sdk.transport import API, Transport


class Copies:
    """Export and import; reached as methods of `Client.images`."""

    def __init__(self, transport: Transport, bundles: Bundles, tasks: Tasks) -> None:
        self._transport = transport
        self._bundles = bundles
        self._tasks = tasks

    def begin_export(self, image: Image, endpoint: str | None) -> Task:
        """Have an endpoint hand over an image's file: a task, whose output is that file."""
        raw = self._transport.json("POST", f"{_path(image.id)}/export", body={"endpoint": endpoint}, repeatable=True)
        return decode(Task, raw)

    def finish_export(
        self, image: Image, replica: Replica, task: Task, path: str | os.PathLike[str], progress: Progress | None
    ) -> imagefile.ImageFile:
        """Fetch what the task handed over, and write the export.

        Raises:
            Conflict: the task did not end well.
        """
        if task.state != "SUCCEEDED":
            why = task.detail or task.sentence
            raise Conflict(f"the endpoint did not hand over the image: {why}", hint=f"see: diamond logs {task.id}")
        assert replica.facts is not None and image.recipe is not None
        texts = self._texts(image, replica)
        manifests = self._manifests(image.recipe)
        blobs = {
            item.digest: item.size_bytes
            for manifest in manifests.values()
            for item in manifest.files
            if not item.link_to
        }
        payload = self._payload(task, replica.facts)
        contents = Contents(
            name=image.name,
            recipe=image.recipe,
            facts=replica.facts,
            members=imagefile.members_of(texts, blobs, payload),
            bundles=manifests,
        )
        target = Path(path).expanduser()
        imagefile.write(target, contents, texts, self._fetch, progress)
        return imagefile.read(target)

    def _payload(self, task: Task, facts: ImageFacts) -> Member:
        for item in self._tasks.outputs(task.id):
            if item.path == PAYLOAD_FILE and item.stored:
                name = imagefile.payload_name(facts.builder)
                return Member(name=name, size_bytes=item.size_bytes, sha256=item.sha256.removeprefix("sha256:"))
        raise NotFound(
            "the image's file is not at the server: it was kept on the endpoint",
            hint="it may be larger than the endpoint hands over (max_image_bytes in its policy.toml)",
        )

    def file(self, ref: str, name: str, endpoint: str | None) -> bytes:
        path = f"{_path(ref)}/files/{quote(name, safe='')}"
        return self._transport.request("GET", path, params={"endpoint": endpoint}).content

    def _texts(self, image: Image, replica: Replica) -> dict[str, bytes]:
        """Lock, SBOM and definition, those that whatever made the image left behind."""
        found = {}
        for name in imagefile.TEXT_MEMBERS:
            with contextlib.suppress(NotFound):
                found[name] = self.file(image.id, name, replica.endpoint)
        return found

    def _manifests(self, recipe: Recipe) -> dict[str, Manifest]:
        """What the recipe brings in goes along, so that it can be built elsewhere too."""
        refs = sorted({ref for ref in recipe.files.values() if is_bundle_ref(ref)})
        return {ref: self._bundles.get(digest_of_ref(ref)) for ref in refs}

    def _fetch(self, member: Member, part: Path, base: int, tell: Callable[[int], None]) -> str:
        path = f"{API}/blobs/sha256:{member.sha256}"
        source = Source(path=path, name=member.name, size_bytes=member.size_bytes)
        return fill(self._transport, source, part, tell, base=base)

    def bring_in(
        self,
        found: imagefile.ImageFile,
        *,
        endpoint: str | None,
        name: str | None,
        progress: Progress | None,
        verify_progress: Progress | None,
    ) -> Build:
        imagefile.verify(found, verify_progress)
        for scan in imagefile.file_scans(found).values():
            self._bundles.upload(scan)
        sent = self._bundles.upload(imagefile.payload_scan(found), progress=progress)
        contents = found.contents
        body: Mapping[str, Any] = {
            "name": name or contents.name,
            "endpoint": endpoint,
            "recipe": encode(contents.recipe),
            "facts": encode(contents.facts),
            "lock": encode(found.lock),
            "payload": sent.ref,
        }
        raw = self._transport.json(
            "POST",
            f"{API}/images/import",
            body=body,
            headers={"Idempotency-Key": f"sdk-{secrets.token_hex(16)}"},
            repeatable=True,
        )
        return decode(Build, raw)


def exportable(image: Image, endpoint: str | None) -> Replica:
    """The result to export: the one at `endpoint`, else any that is ready.

    Raises:
        NotFound: it is ready nowhere (there).
    """
    for replica in image.replicas:
        if replica.state is ReplicaState.READY and replica.facts is not None and endpoint in (None, replica.endpoint):
            return replica
    where = f" at {endpoint}" if endpoint else ""
    raise NotFound(f"image {image.name!r} is not ready{where}", hint=f"see: diamond image show {image.name}")


def _path(image_id: str) -> str:
    return f"{API}/images/{quote(image_id, safe='')}"
