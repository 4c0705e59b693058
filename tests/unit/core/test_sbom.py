"""The bill of materials: valid by the official schema, the same bytes every time, addresses other tools understand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from diamond.core.images import ImageFacts, Lock, Package
from diamond.core.recipes import Recipe
from diamond.core.sbom import cyclonedx, purl_of

RECIPE = Recipe.parse({"name": "burgers", "base": "docker://debian:13", "labels": {"team": "ü & <x>"}})
FACTS = ImageFacts(
    image_id="img_0123456789",
    recipe_digest=RECIPE.digest,
    builder="apptainer",
    builder_version="1.4.5",
    architecture="x86_64",
    digest="sha256:" + "ab" * 32,
    built_at=1_790_000_000.25,
)
LOCK = Lock(
    os="debian 13",
    python="3.13.5",
    packages=(
        Package(kind="conda", name="libgcc-ng", version="14.2.0"),
        Package(kind="deb", name="libstdc++6", version="14.2.0-19"),
        Package(kind="deb", name="libc6:i386", version="2.41-12"),
        Package(kind="deb", name="git", version="1:2.47.3-0+deb13u1"),
        Package(kind="pip", name="torch", version="2.9.1+cpu"),
        Package(kind="pip", name="six", version="1.17.0"),
    ),
)


def check(document: dict[str, Any]) -> None:
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document))
    assert problem is None, problem


def test_it_is_valid_by_the_official_schema() -> None:
    check(cyclonedx(FACTS, LOCK, RECIPE))


@pytest.mark.parametrize(
    ("facts", "lock"),
    [
        (ImageFacts(image_id="img_x", recipe_digest="", builder="venv"), Lock()),
        (FACTS, Lock(packages=(LOCK.packages[0], LOCK.packages[0]))),  # found twice, listed once
        (FACTS, Lock(os="arch", packages=(Package(kind="brew", name="what is\tthis/%?#", version="1 2@3"),))),
        (FACTS, Lock(packages=tuple(Package(kind="pip", name=f"p{n}", version="1") for n in range(3000)))),
    ],
)
def test_odd_images_give_valid_documents_too(facts: ImageFacts, lock: Lock) -> None:
    document = cyclonedx(facts, lock, Recipe.parse({"base": "host"}))
    check(document)
    refs = [component["bom-ref"] for component in document["components"]]
    assert len(refs) == len(set(refs))


def test_the_same_image_gives_the_same_bytes_whatever_the_order_of_its_packages() -> None:
    first = json.dumps(cyclonedx(FACTS, LOCK, RECIPE))
    turned = Lock(os=LOCK.os, python=LOCK.python, packages=LOCK.packages[::-1])
    assert json.dumps(cyclonedx(FACTS, turned, RECIPE)) == first
    other = ImageFacts(image_id="img_other", recipe_digest="", builder="venv")
    assert cyclonedx(other, LOCK, RECIPE)["serialNumber"] != cyclonedx(FACTS, LOCK, RECIPE)["serialNumber"]


def test_it_says_what_the_image_is() -> None:
    document = cyclonedx(FACTS, LOCK, RECIPE)
    image = document["metadata"]["component"]
    assert (image["type"], image["name"], image["version"]) == ("container", "burgers", FACTS.digest)
    assert image["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    facts = {item["name"]: item["value"] for item in image["properties"]}
    assert facts["diamond:base"] == "docker://debian:13"
    assert facts["diamond:recipe"] == RECIPE.digest
    assert facts["diamond:label:team"] == "ü & <x>"
    assert document["metadata"]["timestamp"] == "2026-09-21T14:13:20Z"
    assert document["dependencies"] == [
        {"ref": image["bom-ref"], "dependsOn": [component["bom-ref"] for component in document["components"]]}
    ]
    named = {(component["type"], component["name"]): component.get("version") for component in document["components"]}
    assert named["operating-system", "debian"] == "13"
    assert named["platform", "python"] == "3.13.5"
    assert named["library", "six"] == "1.17.0"
    assert len(document["components"]) == len(LOCK.packages) + 2


@pytest.mark.parametrize(
    ("package", "os", "purl"),
    [
        (("pip", "six", "1.17.0"), "debian 13", "pkg:pypi/six@1.17.0"),
        (("pip", "torch", "2.9.1+cpu"), "debian 13", "pkg:pypi/torch@2.9.1%2Bcpu"),
        (("conda", "numpy", "2.3.4"), "debian 13", "pkg:conda/numpy@2.3.4"),
        (
            ("deb", "git", "1:2.47.3-0+deb13u1"),
            "debian 13",
            "pkg:deb/debian/git@1%3A2.47.3-0%2Bdeb13u1?arch=amd64&distro=debian-13",
        ),
        (("deb", "g++", "4"), "ubuntu 24.04", "pkg:deb/ubuntu/g%2B%2B@4?arch=amd64&distro=ubuntu-24.04"),
        (("deb", "libc6:i386", "2"), "debian 13", "pkg:deb/debian/libc6@2?arch=i386&distro=debian-13"),
        (
            ("rpm", "bash", "1:5.2.26-6.el9"),
            "rocky 9.6",
            "pkg:rpm/rocky/bash@5.2.26-6.el9?arch=x86_64&distro=rocky-9.6&epoch=1",
        ),
        (
            ("apk", "musl", "1.2.5-r10"),
            "alpine 3.22.1",
            "pkg:apk/alpine/musl@1.2.5-r10?arch=x86_64&distro=alpine-3.22.1",
        ),
        (("deb", "git", "1"), "", "pkg:deb/debian/git@1?arch=amd64"),
    ],
)
def test_package_urls_are_read_back_by_the_reference_reader(package: tuple[str, str, str], os: str, purl: str) -> None:
    kind, name, version = package
    found = purl_of(Package(kind=kind, name=name, version=version), os, "x86_64")
    assert found == purl
    read = PackageURL.from_string(found)
    assert read.name == name.partition(":")[0]
    assert version.endswith(read.version)
    assert read.to_string() == PackageURL.from_string(read.to_string()).to_string()
