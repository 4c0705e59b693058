"""What a person can choose from who builds an image: places, bases for their GPUs, and what to think of beforehand."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from diamond.core import bases
from diamond.core.codec import decode
from diamond.core.endpoints import EndpointUsage
from diamond.core.recipes import Recipe
from diamond.server.services import snapshots
from diamond.server.services.context import Context
from diamond.server.store.models import EndpointRow

_PINNED = re.compile(r"==|@|~=|===")
_LOW_DISK_BYTES = 5 * 1024**3


@dataclass(frozen=True, kw_only=True)
class Place:
    """An endpoint as a place to build at.

    Attributes:
        problem: why nothing can be built there at present; empty when something can.
        builds: "login", "batch", "any" or "off", as its policy file says.
    """

    name: str
    online: bool
    problem: str = ""
    scheduler: str = ""
    builders: tuple[str, ...] = ()
    builder_problems: dict[str, str] = field(default_factory=dict)
    builds: str = ""
    root: str = ""
    architecture: str = ""
    python: str = ""
    gpus: tuple[str, ...] = ()
    disk_free_bytes: int = 0


def places(ctx: Context, user_id: str) -> list[Place]:
    """Where this user may have images, those that can build now first."""
    now = ctx.clock()
    with ctx.db.read() as session:
        rows = snapshots.for_images(session, user_id)
        barred = snapshots.barred(session, user_id, rows)
        found = [_place(row, now, barred[row.id].text if row.id in barred else "") for row in rows]
    return sorted(found, key=lambda place: (bool(place.problem), not place.online, place.name))


def _place(row: EndpointRow, now: float, problem: str) -> Place:
    facts = snapshots.facts_of(row)
    online = snapshots.is_online(row.last_seen_at, now)
    if facts is None:
        return Place(name=row.name, online=online, problem=problem or "its agent has not connected yet")
    if not problem and facts.builds == "off":
        problem = "its policy file allows no builds (builds in policy.toml)"
    elif not problem and not facts.builders:
        problem = "nothing to build with was found there" if facts.builds else "it is still finding out what it has"
    usage = decode(EndpointUsage, row.usage) if row.usage else None
    return Place(
        name=row.name,
        online=online,
        problem=problem,
        scheduler=facts.scheduler,
        builders=facts.builders,
        builder_problems=facts.builder_problems,
        builds=facts.builds,
        root=facts.image_root,
        architecture=facts.architecture,
        python=facts.python,
        gpus=tuple(snapshots.gpu_models([row])),
        disk_free_bytes=usage.disk_free_bytes if usage is not None else 0,
    )


def suggested(models: tuple[str, ...]) -> list[bases.Base]:
    """Bases made for these GPUs."""
    return bases.suggest(models)


def warnings(recipe: Recipe, place: Place | None) -> list[str]:
    """What will not stop a build, and may still be a surprise."""
    found = []
    if place is not None and not place.online:
        found.append(f"{place.name} is offline: the build begins when its agent connects again.")
    if place is not None and 0 < place.disk_free_bytes < _LOW_DISK_BYTES:
        found.append(f"{place.name} has only {place.disk_free_bytes / 1024**3:.1f} GiB of disk left.")
    loose = [line for line in recipe.pip if not _PINNED.search(line.partition(";")[0])]
    if loose and not recipe.constraints:
        some = ", ".join(loose[:3]) + (" …" if len(loose) > 3 else "")
        count = "1 Python package names" if len(loose) == 1 else f"{len(loose)} Python packages name"
        found.append(f"{count} no exact version ({some}): a later build may take another one.")
    tag = recipe.base.rpartition("/")[2].partition(":")[2]
    if recipe.base.startswith("docker://") and tag in ("", "latest") and "@" not in recipe.base:
        found.append(f"{recipe.base} has no fixed tag: what it stands for changes with time.")
    if not recipe.test:
        found.append("There is no validation command: that the image works is found out by its first task.")
    return found
