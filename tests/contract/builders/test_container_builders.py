"""What builders of containers do beyond the contract: system packages, bases of every kind, Containerfiles."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from diamond.agent.builders.inputs import write_inputs
from diamond.agent.builders.steps import write_steps
from diamond.core.containerfiles import STEPS
from diamond.core.images import DEFINITION_FILE, ImageWork
from testing.builders import BuilderBench, SiteBench
from testing.images import base_folder, ca_file
from testing.podman import PodmanBench
from testing.registry import Registry, SavedImage

pytestmark = pytest.mark.parametrize("bench", ["charliecloud", "podman"], indirect=True)
ENVS = {"PATH": "/opt/of the base:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "FROM_BASE": "it's $HOME"}


@pytest.fixture(scope="module")
def saved() -> SavedImage:
    return SavedImage(base_folder(), ENVS)


@pytest.fixture
def registry(bench: BuilderBench, saved: SavedImage, tmp_path: Path) -> Iterator[Registry]:
    host = bench.site.server_address if isinstance(bench, SiteBench) else "127.0.0.1"
    with Registry(host, tmp_path / "registry", saved) as running:
        yield running


def put(bench: BuilderBench, source: Path, name: str) -> str:
    """A file or folder where the builder can read it; its path there."""
    inside = f"{bench.folder}/{name}"
    if isinstance(bench, SiteBench):
        bench.site.put(source, inside)
    else:
        (shutil.copytree if source.is_dir() else shutil.copy)(source, inside)
    return inside


def test_system_packages_are_installed_by_an_ordinary_account(bench: BuilderBench) -> None:
    # cron gives a program to a group that its own installation makes: what needs more than one account to be real.
    job = bench.build(bench.recipe(system=["hello", "cron"], build="hello\ntest -x /usr/bin/crontab\n"))
    packages = job.lock.of_kind("deb")
    assert packages["hello"] and packages["cron"]
    assert bench.inside(job.facts, "hello").strip() == "Hello, world!"
    again = bench.build(bench.recipe(system=["hello", "cron"], build="hello --version\n"))
    assert again.states["system"] == "kept"


def test_commands_may_install_packages_themselves(bench: BuilderBench) -> None:
    commands = "apt-get update\napt-get install -y --no-install-recommends hello\n"
    job = bench.build(bench.recipe(build=commands))
    assert bench.inside(job.facts, "hello").strip() == "Hello, world!"


def test_a_system_package_that_does_not_exist_is_named(bench: BuilderBench) -> None:
    job = bench.run(bench.order(bench.recipe(system=["hello", "no-such-package-here"])))
    assert job.code == 1
    assert job.failure.stage == "system"
    assert "no-such-package-here" in job.failure.line


def test_a_base_comes_from_a_registry(bench: BuilderBench, registry: Registry, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(registry.ca.read_text() + ca_file().read_text())
    trust = put(bench, both, "both.pem")
    recipe = bench.recipe(base=f"docker://{registry.reference}", build='echo "$FROM_BASE" > /said; id -u >> /said\n')
    env = dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT"), trust)
    job = bench.run(bench.order(recipe), env=env)
    assert job.code == 0, (job.failure, job.log)
    assert bench.inside(job.facts, "cat", "/said").splitlines() == [ENVS["FROM_BASE"], "0"]
    said = bench.inside(job.facts, "/bin/sh", "-c", 'printf "%s|%s" "$FROM_BASE" "$PATH"')
    assert said == f"{ENVS['FROM_BASE']}|{ENVS['PATH']}"


def test_a_registry_that_is_not_trusted_is_refused(bench: BuilderBench, registry: Registry) -> None:
    job = bench.run(bench.order(bench.recipe(base=f"docker://{registry.reference}")))
    assert job.code == 1
    assert job.failure.stage == "base"
    assert "certificate" in job.log


@pytest.mark.parametrize("form", ["docker-archive:", "oci-archive:", ""])
def test_a_base_is_an_archive(bench: BuilderBench, saved: SavedImage, tmp_path: Path, form: str) -> None:
    write = saved.write_oci_archive if form == "oci-archive:" else saved.write_docker_archive
    write(tmp_path / "saved.tar")
    path = put(bench, tmp_path / "saved.tar", f"saved{len(form)}.tar")
    job = bench.build(bench.recipe(base=f"{form}{path}"))
    said = bench.inside(job.facts, "/bin/sh", "-c", 'printf "%s|%s" "$FROM_BASE" "$PATH"')
    assert said == f"{ENVS['FROM_BASE']}|{ENVS['PATH']}"


def test_a_base_is_a_tar_of_a_root_file_system(bench: BuilderBench, saved: SavedImage, tmp_path: Path) -> None:
    (tmp_path / "rootfs.tar").write_bytes(saved.tar)
    job = bench.build(bench.recipe(base=put(bench, tmp_path / "rootfs.tar", "rootfs.tar")))
    assert job.lock.os == "debian 13"


def test_the_definition_builds_without_diamond(bench: BuilderBench, tmp_path: Path) -> None:
    recipe = bench.recipe(envs={"A": "it's"}, build="echo $A > /made\n")
    definition = (bench.build(recipe).folder / DEFINITION_FILE).read_text()
    context = tmp_path / "context"
    context.mkdir()
    write_inputs(context / "inputs", recipe, ImageWork(action="build", image_id="img_00000000"), tmp_path)
    write_steps(context / "steps", {}, inside=STEPS, sandbox=isinstance(bench, SiteBench))
    (context / "Containerfile").write_text(definition)
    if isinstance(bench, SiteBench):
        where = put(bench, context, "context")
        at = ["-s", f"{bench.folder}/ch"]
        bench.site.run(["ch-image", "import", "--no-cache", *at, bench.base, "localhost/diamond-base"], timeout=120)
        build = [
            "ch-image",
            "build",
            "--no-cache",
            "--force",
            *at,
            "-t",
            "again",
            "-f",
            f"{where}/Containerfile",
            where,
        ]
        bench.site.run(build, timeout=120)
        said = bench.site.run(["ch-run", *at, "again", "--", "cat", "/made", "/opt/diamond/env.sh"]).stdout
    else:
        assert isinstance(bench, PodmanBench)
        bench.podman("import", _tar(base_folder(), tmp_path), "localhost/diamond-base")
        contexts = [f"--build-context={name}={context}/{name}" for name in ("inputs", "steps")]
        bench.podman("build", *contexts, "--tag=again", f"--file={context}/Containerfile", str(tmp_path / "context"))
        said = bench.podman("run", "--rm", "again", "cat", "/made", "/opt/diamond/env.sh")
    assert said == "it's\nexport A='it'\"'\"'s'\n"


def _tar(root: Path, folder: Path) -> str:
    (folder / "base.tar").write_bytes(SavedImage(root, {}).tar)
    return str(folder / "base.tar")
