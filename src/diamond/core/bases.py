"""Suggested bases: images that fit a kind of GPU, for people who do not know which to take. Data in bases.json.

A suggestion is only ever a shorthand: `resolve` turns it into the pinned address that the recipe keeps, so a later
version of this list changes no image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files

from diamond.core.codec import decode
from diamond.core.errors import InvalidInput

PREFIX = "suggested:"
_KEY = re.compile(r"[a-z0-9-]{1,40}")


@dataclass(frozen=True, kw_only=True)
class BaseSource:
    """The page of its publisher, and when its tag was last found named in public recipes."""

    url: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Base:
    """One suggestion; several share a key, for different GPUs.

    Attributes:
        reference: what a recipe's `base` becomes.
        vendor: of its GPUs: "nvidia", "amd", "intel"; empty: it is for no GPU in particular.
        gpus: models it is made for, as endpoints name them; a letter may follow ("MI250" is also the MI250X).
        architectures: of the processors, as uname -m has it.
    """

    key: str
    title: str
    reference: str
    vendor: str = ""
    gpus: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    note: str = ""
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"{self.key!r} is not a key")
        if not re.fullmatch(r"docker://[a-z0-9./_-]+:[A-Za-z0-9._-]+", self.reference) or self.reference.endswith(
            ":latest"
        ):
            raise ValueError(f"{self.reference!r} is not a pinned address")

    def fits(self, model: str) -> bool:
        return any(_is_model(name, model) for name in self.gpus)


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """`too_old` are models that nothing here runs on any more."""

    about: str
    sources: dict[str, BaseSource]
    bases: tuple[Base, ...]
    too_old: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for base in self.bases:
            if not base.sources or not set(base.sources) <= set(self.sources):
                raise ValueError(f"{base.title} has no source")


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """Read through the import system, so that it works from inside a zip file as well."""
    text = files("diamond.core").joinpath("bases.json").read_text(encoding="utf-8")
    return decode(Catalogue, json.loads(text), strict=True)


def suggest(gpu_models: Iterable[str]) -> list[Base]:
    """One base of each kind that can run on these GPUs, in the list's order.

    Models that the list does not know say nothing; with none known, the commonest of each kind is suggested.
    """
    models = list(gpu_models)
    keys = dict.fromkeys(base.key for base in catalogue().bases)
    return [base for key in keys if (base := _best(key, models)) is not None]


def resolve(base: str, gpu_models: Iterable[str]) -> str:
    """What `suggested:KEY` stands for on these GPUs; any other base as it is.

    Raises:
        InvalidInput: there is no such suggestion, or none for these GPUs.
    """
    if not base.startswith(PREFIX):
        return base
    key, models = base.removeprefix(PREFIX), list(gpu_models)
    keys = list(dict.fromkeys(one.key for one in catalogue().bases))
    if key not in keys:
        raise InvalidInput(
            f"there is no suggested base {key!r}",
            hint=f"there are {', '.join(PREFIX + one for one in keys)}",
            field="base",
        )
    found = _best(key, models)
    if found is None:
        raise InvalidInput(
            f"no suggested base {key!r} runs on {', '.join(sorted(models))}",
            hint="name a base of your own, e.g. docker://python:3.12-slim, or choose an endpoint with other GPUs",
            field="base",
        )
    return found.reference


def _best(key: str, models: list[str]) -> Base | None:
    """The first that runs on all of these GPUs, else the first that runs on most; None when it runs on none."""
    ours = [base for base in catalogue().bases if base.key == key]
    general = [base for base in ours if not base.gpus]
    known = [model for model in models if _is_known(model)]
    if general or not known:
        return (general or ours)[0]
    counts = [sum(base.fits(model) for model in known) for base in ours]
    return ours[counts.index(max(counts))] if max(counts) else None


def _is_known(model: str) -> bool:
    return any(base.fits(model) for base in catalogue().bases) or any(
        _is_model(name, model) for name in catalogue().too_old
    )


def _is_model(name: str, model: str) -> bool:
    """Whether a model as a scheduler or driver spells it ("nvidia_a100-sxm4-80gb") is this one ("A100")."""
    parts = [re.escape(part) for part in name.upper().split("-")]
    return re.search(rf"(?<![A-Z0-9]){'[ _-]?'.join(parts)}(?!\d)", model.upper()) is not None
