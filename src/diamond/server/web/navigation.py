"""What the side of every page offers, in the order in which people work, and what the documentation says of each.

Help itself stands at the top of every page, at the same spot, and leads to what is said of that place.
"""

from __future__ import annotations

from typing import NamedTuple

from diamond.server.services.identity import Identity


class Place(NamedTuple):
    """`path` is where it begins; pages below it count as being there."""

    title: str
    path: str
    icon: str
    help: str  # the section of the documentation about its pages
    admin: bool = False  # for administrators of an installation with accounts alone


PLACES = (
    Place("Dashboard", "/dashboard", "dashboard", "web#the-front-door-and-the-dashboard"),
    Place("Task Manager", "/tasks", "tasks", "web#task-manager"),
    Place("Job Composer", "/compose", "compose", "web#job-composer"),
    Place("Compare", "/compare", "compare", "web#compare"),
    Place("Endpoints", "/endpoints", "endpoint", "web#endpoints"),
    Place("Pools", "/pools", "pool", "web#pools"),
    Place("Image Builder", "/image-builder", "build", "web#image-builder"),
    Place("Image Manager", "/images", "image", "web#image-manager"),
    Place("Users", "/users", "people", "web#users", admin=True),
    Place("Audit", "/audit", "audit", "web#audit", admin=True),
    Place("Settings", "/settings", "settings", "web#settings"),
)


class Link(NamedTuple):
    title: str
    path: str
    icon: str
    help: str
    here: bool


def links(who: Identity, path: str, *, multi_user: bool) -> list[Link]:
    """What this person may go to, and where they are."""
    return [
        Link(
            title=place.title,
            path=place.path,
            icon=place.icon,
            help=f"/help/{place.help}",
            here=path == place.path or path.startswith(f"{place.path}/"),
        )
        for place in PLACES
        if not place.admin or (who.is_admin and multi_user)
    ]
