"""Drafts of recipes seen from a client: a recipe described step by step, kept at the server between steps."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from diamond.core.codec import decode, encode
from diamond.core.image_views import Build, ImageDraft
from diamond.core.recipes import Recipe
from diamond.sdk.transport import API, Transport


class Drafts:
    """Reached as `Client.images.drafts`. The steps and their contents are those of `diamond.core.image_views`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, recipe: Recipe | Mapping[str, Any] | None = None) -> ImageDraft:
        """A draft: empty, or with the fields of a recipe."""
        body = {"recipe": None if recipe is None else encode(recipe)}
        return decode(ImageDraft, self._transport.json("POST", f"{API}/image-drafts", body=body))

    def list(self) -> builtins.list[ImageDraft]:
        """Your drafts, the last changed first."""
        answer = self._transport.json("GET", f"{API}/image-drafts")
        return [decode(ImageDraft, raw) for raw in answer["drafts"]]

    def get(self, draft_id: str) -> ImageDraft:
        """A draft; once every step is right, with what a build of it would do. Raises NotFound."""
        return decode(ImageDraft, self._transport.json("GET", _path(draft_id)))

    def save(self, draft_id: str, step: str, contents: Mapping[str, Any], *, version: int) -> ImageDraft:
        """Put contents into a step. They are kept even when they are wrong; the step's errors say so.

        Args:
            version: of the draft this change was made from.

        Raises:
            Conflict: somebody changed the draft since.
        """
        body = {"version": version, "contents": dict(contents)}
        raw = self._transport.json("PUT", f"{_path(draft_id)}/{quote(step, safe='')}", body=body)
        return decode(ImageDraft, raw)

    def submit(self, draft_id: str, *, version: int) -> Build:
        """Build what the draft describes.

        Raises:
            InvalidInput: a step is not right yet; names it.
            Conflict: somebody changed the draft since `version`.
        """
        raw = self._transport.json("POST", f"{_path(draft_id)}/submit", body={"version": version})
        return decode(Build, raw)

    def remove(self, draft_id: str) -> None:
        """Throw a draft away. Harmless when it is gone already."""
        self._transport.request("DELETE", _path(draft_id), repeatable=True)


def _path(draft_id: str) -> str:
    return f"{API}/image-drafts/{quote(draft_id, safe='')}"
