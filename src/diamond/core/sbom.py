"""The software bill of materials of an image, as CycloneDX 1.6 JSON. Pure: the same image gives the same bytes."""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from typing import Any
from urllib.parse import quote

from diamond import __version__
from diamond.core.images import ImageFacts, Lock, Package
from diamond.core.recipes import Recipe

_NAMESPACE = uuid.UUID("0b6f6c52-7d6e-5b0e-9f0c-6d6f7b1f3a55")  # of serial numbers; any fixed one will do
_TYPES = {"deb": "deb", "rpm": "rpm", "apk": "apk", "pip": "pypi", "conda": "conda"}
_DISTRIBUTION_OF = {"deb": "debian", "rpm": "redhat", "apk": "alpine"}  # where the image does not say


def cyclonedx(facts: ImageFacts, lock: Lock, recipe: Recipe) -> dict[str, Any]:
    """What is in the image: one component for each package, the operating system and Python among them."""
    image = _image(facts, recipe)
    components = [*_platform(lock), *(_component(package, lock, facts) for package in lock.packages)]
    unique = {component["bom-ref"]: component for component in components}
    refs = sorted(unique)
    document: dict[str, Any] = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, f'{facts.image_id} {facts.digest} {facts.built_at}')}",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "tools": {"components": [{"type": "application", "name": "diamond", "version": __version__}]},
            "component": image,
        },
        "components": [unique[ref] for ref in refs],
        "dependencies": [{"ref": image["bom-ref"], "dependsOn": refs}],
    }
    if facts.built_at:
        when = datetime.fromtimestamp(int(facts.built_at), timezone.utc)  # noqa: UP017 - the agent runs on 3.10
        document["metadata"]["timestamp"] = when.strftime("%Y-%m-%dT%H:%M:%SZ")
    return document


def _image(facts: ImageFacts, recipe: Recipe) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "container",
        "bom-ref": f"image:{facts.image_id}",
        "name": recipe.name or facts.image_id,
        "version": facts.digest or facts.recipe_digest,
        "properties": [
            {"name": f"diamond:{name}", "value": value}
            for name, value in (
                ("recipe", facts.recipe_digest),
                ("base", recipe.base),
                ("builder", f"{facts.builder} {facts.builder_version}".strip()),
                ("architecture", facts.architecture),
                *((f"label:{name}", value) for name, value in sorted(recipe.labels.items())),
            )
            if value
        ],
    }
    algorithm, _, value = facts.digest.partition(":")
    if algorithm == "sha256" and value:
        component["hashes"] = [{"alg": "SHA-256", "content": value}]
    return component


def _platform(lock: Lock) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if lock.os:
        name, _, version = lock.os.partition(" ")
        found.append({"type": "operating-system", "bom-ref": f"os:{lock.os}", "name": name})
        if version:
            found[0]["version"] = version
    if lock.python:
        purl = f"pkg:generic/python@{quote(lock.python, safe='')}"
        found.append({"type": "platform", "bom-ref": purl, "name": "python", "version": lock.python, "purl": purl})
    return found


def _component(package: Package, lock: Lock, facts: ImageFacts) -> dict[str, Any]:
    name, version = package.name, package.version
    purl = purl_of(package, lock.os, facts.architecture)
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def purl_of(package: Package, os: str = "", architecture: str = "") -> str:
    """The package's address in the form other tools look vulnerabilities up by (package URL).

    Args:
        os: as in a Lock, "debian 13".
        architecture: as uname -m says; part of a system package's address.
    """
    kind = _TYPES.get(package.kind, "generic")
    name, version = package.name, quote(package.version, safe=".-_~")
    if kind not in _DISTRIBUTION_OF:
        return f"pkg:{kind}/{quote(name, safe='.-_~')}@{version}"
    distribution, _, release = os.partition(" ")
    name, _, foreign = name.partition(":")  # "libc6:i386", a package for other processors
    qualifiers = {
        "arch": foreign or (_debian_architecture(architecture) if kind == "deb" else architecture),
        "distro": f"{distribution}-{release}" if distribution and release else "",
    }
    if kind == "rpm" and ":" in package.version:
        epoch, _, rest = package.version.partition(":")
        version, qualifiers["epoch"] = quote(rest, safe=".-_~"), epoch
    tail = "&".join(f"{key}={quote(value, safe='.-_~')}" for key, value in sorted(qualifiers.items()) if value)
    namespace = quote(distribution or _DISTRIBUTION_OF[kind], safe="")
    return f"pkg:{kind}/{namespace}/{quote(name, safe='.-_~')}@{version}" + (f"?{tail}" if tail else "")


def _debian_architecture(machine: str) -> str:
    return {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64el"}.get(machine, machine)
