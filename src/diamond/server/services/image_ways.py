"""How an image comes to an endpoint, and why so. Decisions over rows that were read; writes nothing, asks nobody.

In this order: it is there; it is being made there; another account's file on the same file system is taken over; a file
is copied through the server; it is built from its recipe, with the exact versions of a result elsewhere where one is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from diamond.core.codec import decode
from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import InvalidInput
from diamond.core.images import ImageFacts, ImageUse, ReplicaState
from diamond.core.recipes import BUILDERS, Recipe
from diamond.server.services.snapshots import facts_of, is_online
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow

RANKS = {"ready": 0, "waiting": 1, "linked": 2, "copied": 3, "rebuilt": 4, "built": 4}
_FOLDERS_AND_FILES = ("apptainer", "charliecloud", "venv")  # podman and docker keep theirs in a store of their own

Results = Sequence[tuple[ReplicaRow, EndpointRow]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How an endpoint gets an image: `how` is a key of RANKS, or empty when there is no way; `why` says why (not)."""

    how: str
    why: str
    builder: str = ""
    source: ReplicaRow | None = None
    source_endpoint: EndpointRow | None = None


def builder_for(recipe: Recipe, facts: EndpointFacts, base_builder: str = "") -> tuple[str, str]:
    """The builder an endpoint would take for a recipe, or an empty text and what is in the way.

    `base_builder`: of the Diamond image it builds on; one kind of image cannot be the base of another.
    """
    if facts.builds in ("", "off"):
        return (
            "",
            "its policy file allows no builds" if facts.builds else "its agent has not said what it can build",
        )
    wanted = [recipe.builder] if recipe.builder != "auto" else [base_builder] if base_builder else list(BUILDERS)
    for name in wanted:
        if name in facts.builders and not _misfit(recipe, name, base_builder):
            return name, ""
    have = ", ".join(facts.builders) or "none"
    if recipe.builder != "auto":
        misfit = _misfit(recipe, recipe.builder, base_builder)
        return "", misfit or f"the recipe asks for {recipe.builder}; builders there: {have}"
    if recipe.base == "host" and (recipe.system or recipe.conda):
        return "", _misfit(recipe, "venv", base_builder)
    absent = [f"{name}: {text[:200]}" for name, text in facts.builder_problems.items() if name in BUILDERS]
    why = f" ({'; '.join(absent)})" if absent else ""
    return "", f"it has no builder for a recipe based on {recipe.base[:60]}; builders there: {have}{why}"


def _misfit(recipe: Recipe, builder: str, base_builder: str) -> str:
    if base_builder and builder != base_builder:
        return f"its base is an image of {base_builder}, on which {builder} cannot build"
    if builder == "venv":
        if recipe.base != "host" and not base_builder:
            return "venv builds on the endpoint's own system only: write `base: host`"
        if recipe.system or recipe.conda:
            return "a virtual environment takes no system or conda packages: give a container base instead of host"
        return ""
    if recipe.base == "host":
        return f"{builder} needs a base such as docker://…; the endpoint's own system is for venv"
    if recipe.base.endswith(".sif") and builder != "apptainer":
        return f"its base is a .sif file, which {builder} does not read"
    return ""


def where_for(wanted: str, facts: EndpointFacts) -> str:
    """Where a build runs: "login" or "batch".

    Raises:
        InvalidInput: the endpoint's policy does not allow what was asked for.
    """
    if wanted == "auto":
        return "batch" if facts.builds == "batch" else "login"
    if facts.builds not in ("any", wanted):
        raise InvalidInput(
            f"the endpoint's policy file lets builds run on {_NODES.get(facts.builds, 'no')} nodes only",
            hint="leave `where` out to have it chosen",
            field="where",
        )
    return wanted


_NODES = {"login": "login", "batch": "compute"}


def way_to(
    image: ImageRow,
    recipe: Recipe,
    here: EndpointRow,
    results: Results,
    now: float,
    *,
    tried: Collection[str] = (),
    base_builder: str = "",
    pinned: str = "",
    lost_base: str = "",
    doubtful: Collection[str] = (),
) -> Way:
    """How `here` gets the image.

    Args:
        results: of the image; with `pinned`, only those with that digest, and what lies here.
        tried: ways that failed just now and are not taken again.
        pinned: the digest it must have. It cannot be built: that would be another.
        lost_base: the image it builds on, where that is not to be found.
        doubtful: ids of results that nothing is taken from.
    """
    facts = facts_of(here)
    for replica, endpoint in results:
        if endpoint.id == here.id and replica.state == ReplicaState.READY:
            return Way(how="ready", why=f"image {image.name} is ready there", source=replica, source_endpoint=endpoint)
        if endpoint.id == here.id and replica.state == ReplicaState.BUILDING:
            return Way(how="waiting", why=f"image {image.name} is just being made there", source=replica)
    if facts is None:
        return Way(how="", why="its agent has not said yet what it has")
    ready = [
        (replica, endpoint, decode(ImageFacts, replica.facts))
        for replica, endpoint in results
        if replica.state == ReplicaState.READY
        and replica.facts
        and endpoint.removed_at is None
        and replica.id not in doubtful
    ]
    if "linked" not in tried:
        for replica, endpoint, made in ready:
            if _same_files(facts, facts_of(endpoint)) and _fits(made, facts) and made.builder in _FOLDERS_AND_FILES:
                why = f"image {image.name} lies at {endpoint.name} on the same machine: it is taken from there"
                return Way(how="linked", why=why, builder=made.builder, source=replica, source_endpoint=endpoint)
    misfits: list[str] = []
    if "copied" not in tried:
        for replica, endpoint, made in ready:
            if not _fits(made, facts):
                misfits.append(_misfit_text(made, endpoint, facts))
            elif not is_online(endpoint.last_seen_at, now):
                misfits.append(f"{endpoint.name}, which has it, is offline")
            else:
                why = f"image {image.name} is copied from {endpoint.name}: {made.builder} and {made.architecture} fit"
                return Way(how="copied", why=why, builder=made.builder, source=replica, source_endpoint=endpoint)
    because = f" ({'; '.join(misfits)})" if misfits else ""
    if pinned:
        why = f"image {image.name} with digest {pinned[:19]} is not there and cannot be copied there"
        return Way(how="", why=why + (because or ", and a new build of it would have another"))
    builder, problem = builder_for(recipe, facts, base_builder)
    if lost_base and not problem:
        problem = f"it builds on image {lost_base}, which is not to be found"
    if problem:
        return Way(how="", why=f"image {image.name} is not there and cannot be built there: {problem}{because}")
    elsewhere = [endpoint.name for _, endpoint in results if endpoint.id != here.id]
    if is_local_base(recipe) and elsewhere:
        why = f"image {image.name} is not there, and its base is a path of {elsewhere[0]}{because}"
        return Way(how="", why=why)
    if ready:
        replica, endpoint, _ = ready[0]
        why = f"image {image.name} is rebuilt with the exact versions that {endpoint.name} has{because}"
        return Way(how="rebuilt", why=why, builder=builder, source=replica, source_endpoint=endpoint)
    return Way(how="built", why=f"image {image.name} is built there from its recipe", builder=builder)


def is_local_base(recipe: Recipe) -> bool:
    """Whether its base is a file of one endpoint."""
    return recipe.base.startswith(("/", "oci-archive:", "docker-archive:"))


def _fits(made: ImageFacts, facts: EndpointFacts) -> bool:
    return made.builder in facts.builders and bool(made.architecture) and made.architecture == facts.architecture


def _misfit_text(made: ImageFacts, endpoint: EndpointRow, facts: EndpointFacts) -> str:
    if made.builder not in facts.builders:
        return f"{endpoint.name}'s is an image of {made.builder}, which is not here"
    return f"{endpoint.name}'s is for {made.architecture or 'an unknown architecture'}, this endpoint is " + (
        facts.architecture or "unknown"
    )


def _same_files(one: EndpointFacts, other: EndpointFacts | None) -> bool:
    """Whether two endpoints may see the same files: nobody knows before it was tried."""
    if other is None:
        return False
    return bool(one.hostname and one.hostname == other.hostname) or bool(one.site and one.site == other.site)


def use_of(image: ImageRow, replica: ReplicaRow) -> ImageUse:
    """What a job is told of a result that is ready."""
    made = decode(ImageFacts, replica.facts or {})
    return ImageUse(
        kind=made.builder,
        path=made.path,
        image_id=image.id,
        name=image.name,
        digest=replica.digest,
        size_bytes=replica.size_bytes,
    )


def use_of_path(path: str, facts: EndpointFacts) -> ImageUse | str:
    """A file or folder of the endpoint that Diamond did not make; or what keeps it from being used."""
    kinds = ["apptainer"] if path.endswith(".sif") else ["apptainer", "charliecloud"]
    runtimes = {name.split()[0] for name in (*facts.runtimes, *facts.builders)}
    for kind in kinds:
        if kind in runtimes:
            return ImageUse(kind=kind, path=path, name=path.rsplit("/", 1)[-1])
    return f"it has no container runtime for {path.rsplit('/', 1)[-1][:60]} ({' or '.join(kinds)})"
