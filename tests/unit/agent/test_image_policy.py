"""The rules about images, and what a server that is not to be trusted might send."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.image_policy import canonical
from diamond.agent.policy import Policy
from diamond.agent.policy_files import PolicyFile
from diamond.core.endpoints import EndpointFacts
from diamond.core.errors import InstallationProblem
from diamond.core.images import ImageUse, ImageWork
from diamond.core.recipes import Recipe
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder

ID = "img_00000001"
REF = "bundle:sha256:" + "0" * 64


def order(
    *, image: ImageUse | None = None, work: ImageWork | None = None, time_limit_s: int | None = None, **spec: Any
) -> JobOrder:
    return JobOrder(
        job_id="job_00000001",
        task_id="tsk_00000001",
        task_name="t",
        attempt=1,
        desired=Desired.RUN,
        spec=TaskSpec.parse({"run": "true", **spec}),
        image=image,
        work=work,
        time_limit_s=time_limit_s,
    )


def use(path: str = "/sw/a.sif", kind: str = "apptainer", **more: Any) -> ImageUse:
    return ImageUse(kind=kind, path=path, **more)


def build(base: str = "docker://python:3.12", builder: str = "apptainer", **more: Any) -> ImageWork:
    envs = more.pop("envs", {})
    made: dict[str, Any] = {"action": "build", "image_id": ID, "builder": builder, **more}
    return ImageWork(recipe=Recipe.parse({"base": base, "envs": envs}), **made)


def link(path: str) -> ImageWork:
    return replace(build(), action="link", source_path=path)


def read(tmp_path: Path, text: str) -> PolicyFile:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return PolicyFile(path)


@pytest.mark.parametrize(
    ("rules", "asked", "refusal"),
    [
        ("containers_only = true", order(), "containers_only = true, the task names no image (set resources.image_id)"),
        (
            "containers_only = true",
            order(resources={"image_id": "tools"}),
            "containers_only = true, the task names no image (set resources.image_id)",
        ),
        (
            "containers_only = true",
            order(image=use("/sw/env", "venv")),
            "containers_only = true, and the task's image is a virtual environment, which contains nothing",
        ),
        (
            "containers_only = true",
            order(work=build("host", "venv")),
            "containers_only = true, and a virtual environment is built outside of any",
        ),
        (
            'allowed_builders = ["apptainer"]',
            order(image=use("/sw/a", "charliecloud")),
            "allowed_builders = apptainer, the image is of charliecloud",
        ),
        (
            'allowed_builders = ["apptainer"]',
            order(work=build(builder="podman")),
            "allowed_builders = apptainer, the image is of podman",
        ),
        ('builds = "batch"', order(work=build()), "builds = batch, the build is for login"),
        ('builds = "login"', order(work=build(where="batch")), "builds = login, the build is for batch"),
        ('builds = "off"', order(work=build()), "builds = off, and this is a build"),
        ('builds = "off"', order(work=replace(build(), action="import")), "builds = off, and this is an import"),
        ('builds = "off"', order(work=link("/sw/image.sif")), "builds = off, and this is a link"),
        (
            'builds = "batch"',
            order(work=replace(build(), action="import")),
            "builds = batch, the import is for login",
        ),
        ('builds = "batch"', order(work=link("/sw/image.sif")), "builds = batch, the link is for login"),
        (
            "containers_only = true",
            order(work=replace(build("host", "venv"), action="import")),
            "containers_only = true, and a virtual environment is built outside of any",
        ),
        (
            "containers_only = true",
            order(image=use(), slurm={"modules": ["cuda/12.4", "./work/evil"]}),
            "containers_only = true, and the module ./work/evil is a file (name it as `module avail` does)",
        ),
        (
            'max_build_time = "1h"',
            order(work=build(), time_limit_s=3601),
            "max_build_time = 1h 00m, the build asks for 3601 s",
        ),
        (
            "max_image_bytes = 1024",
            order(work=replace(build(), action="import", size_bytes=1025)),
            "max_image_bytes = 1 KiB, the image has 1025 bytes",
        ),
        (
            'allowed_bases = ["docker://docker.io/library/*"]',
            order(work=build("docker://ghcr.io/x/y")),
            "allowed_bases = docker://docker.io/library/*, the image comes from docker://ghcr.io/x/y",
        ),
        (
            'allowed_bases = ["docker://docker.io/library/*"]',
            order(work=build("docker://evil/python")),
            "allowed_bases = docker://docker.io/library/*, the image comes from docker://docker.io/evil/python",
        ),
        (
            'allowed_bases = ["/sw/*"]',
            order(work=replace(build(), action="import", name="tools")),
            "allowed_bases = /sw/*, the image comes from import:tools",
        ),
        (
            'allowed_bases = ["/sw/*"]',
            order(work=link("/home/other/x.sif")),
            "allowed_bases = /sw/*, the image comes from /home/other/x.sif",
        ),
        (
            'denied_envs = ["LD_*"]',
            order(work=build(envs={"LD_PRELOAD": "x"})),
            "denied_envs names LD_PRELOAD, which the recipe sets",
        ),
        (
            'allowed_envs = ["A"]',
            order(work=build(envs={"B": "x"})),
            "allowed_envs does not name B, which the recipe sets",
        ),
        (
            'allowed_partitions = ["gpu"]',
            order(work=build(where="batch")),
            "allowed_partitions = gpu, the task names none (set slurm.partition)",
        ),
    ],
)
def test_refuses_with_the_rule_its_value_and_what_was_asked(
    tmp_path: Path, rules: str, asked: JobOrder, refusal: str
) -> None:
    assert read(tmp_path, rules).refusal(asked) == f"policy.toml: {refusal}"


@pytest.mark.parametrize(
    ("rules", "asked"),
    [
        ("", order(work=build())),
        ("containers_only = true", order(image=use())),
        ("containers_only = true", order(work=build())),
        ('builds = "off"', order(work=replace(build(), action="export"))),
        ('builds = "off"', order(work=ImageWork(action="remove", image_id=ID))),
        ('builds = "batch"', order(work=ImageWork(action="prune", image_id=""))),
        ('builds = "batch"', order(work=replace(build(where="batch"), action="import"))),
        ("containers_only = true", order(image=use(), slurm={"modules": ["cuda/12.4", "gcc"]})),
        ("", order(image=use(), slurm={"modules": ["/sw/modulefiles/cuda"]})),
        ("", order(work=build(files={"/opt/a": "files/0"}), file_mounts={"files/0": REF, "files/12": REF})),
        ("", order(work=replace(build(), action="import"), file_mounts={"image.payload": REF})),
        ('builds = "batch"', order(work=build(where="batch"))),
        ('allowed_bases = ["docker://docker.io/*", "import:*"]', order(work=build("python:3.12"))),
        ('allowed_bases = ["import:*"]', order(work=replace(build(), action="import", name="tools"))),
        ('allowed_bases = ["image:*"]', order(work=build("image:tools"))),
        ("allowed_bases = []", order(work=ImageWork(action="prune", image_id=""))),
        ('allowed_partitions = ["gpu"]\nallowed_accounts = ["a"]\nmax_walltime = "1h"\nmax_cpus = 0',
         order(work=build(), time_limit_s=7200)),
    ],
)  # fmt: skip
def test_allows_what_keeps_to_the_rules(tmp_path: Path, rules: str, asked: JobOrder) -> None:
    assert read(tmp_path, rules).refusal(asked) == ""


def test_every_path_of_an_order_must_lie_in_a_root(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/out").symlink_to("/etc")
    policy = read(tmp_path, f'path_roots = ["{tmp_path}/data"]')
    store = tmp_path / "images/store" / ID
    assert policy.image_root == tmp_path / "images"
    good = [f"{tmp_path}/data/a.sif", f"{store}/image.sif"]
    bad = [f"{tmp_path}/data/out/a.sif", f"{tmp_path}/data-2/a.sif", "/etc/passwd", f"{tmp_path}/imagesx/a"]
    for path in good:
        assert policy.refusal(order(image=use(path))) == "", path
        assert policy.refusal(order(work=build(path))) == "", path
        assert policy.refusal(order(work=build("image:x", base_path=path))) == "", path
        assert policy.refusal(order(work=replace(build(), action="link", source_path=path))) == "", path
    for path in bad:
        assert "path_roots" in policy.refusal(order(image=use(path))), path
        for base in (path, f"oci-archive:{path}", f"docker-archive:{path}"):
            assert "path_roots" in policy.refusal(order(work=build(base))), base
        assert "path_roots" in policy.refusal(order(work=build("image:x", base_path=path))), path
        for action in ("link", "export"):
            asked = order(work=replace(build(), action=action, source_path=path))
            assert "path_roots" in policy.refusal(asked), path
    assert policy.refusal(order(image=use("localhost/diamond/x", "podman"))) == ""
    elsewhere = read(tmp_path, f'path_roots = []\nimage_root = "{tmp_path}/elsewhere"')
    assert elsewhere.refusal(order(image=use(f"{tmp_path}/elsewhere/store/{ID}/image.sif"))) == ""
    assert "path_roots = none" in elsewhere.refusal(order(image=use(f"{store}/image.sif")))


def test_with_rules_for_bases_one_of_diamonds_own_lies_in_the_store(tmp_path: Path) -> None:
    policy = read(tmp_path, 'allowed_bases = ["image:blessed*"]')

    def said(path: str, builder: str = "apptainer") -> str:
        return policy.refusal(order(work=build("image:blessed", builder, base_path=path)))

    assert said(f"{tmp_path}/images/store/{ID}/image.sif") == said("") == ""
    assert said(f"localhost/diamond/{ID}", "podman") == ""
    for path in (
        "/home/evil/x.sif",
        f"{tmp_path}/images/store/evil/image.sif",
        f"{tmp_path}/images/store/{ID}",
        f"{tmp_path}/images/store/{ID}/image/home/evil",
        f"{tmp_path}/images/tmp/job_00000001/image.sif",
        f"/home/evil/store/{ID}/image.sif",
    ):
        assert said(path) == f"policy.toml: allowed_bases is set, and {path} is not in the store of images"


def test_links_lead_no_image_past_the_rules_for_bases(tmp_path: Path) -> None:
    real, evil, software = tmp_path / "disk7/sw", tmp_path / "evil", tmp_path / "sw"
    for folder in (real, evil / "deep"):
        folder.mkdir(parents=True)
        (folder / "image.sif").touch()
    software.symlink_to(real)  # the owner's own way to name the folder
    (real / "way-out").symlink_to(evil / "deep")
    policy = read(tmp_path, f'allowed_bases = ["{software}/*", "oci-archive:{software}/*"]')
    for path in (f"{software}/image.sif", f"{real}/image.sif"):
        assert policy.refusal(order(work=link(path))) == ""
        assert policy.refusal(order(work=build(path))) == ""
        assert policy.refusal(order(work=build(f"oci-archive:{path}"))) == ""
    assert policy.refusal(order(work=link(f"{software}/way-out/image.sif"))) == (
        f"policy.toml: allowed_bases = {software}/*, oci-archive:{software}/*, "
        f"the image comes from {evil}/deep/image.sif"
    )
    for base in (f"{software}/way-out/image.sif", f"oci-archive:{software}/way-out/image.sif"):
        assert "the image comes from" in policy.refusal(order(work=build(base))), base


def test_binds_lie_in_a_root_unless_the_owner_names_them(tmp_path: Path) -> None:
    found = ("/scratch/me", "/projects/x", "/scratch/me")
    assert Policy().binds(found) == ("/scratch/me", "/projects/x")
    policy = read(tmp_path, 'path_roots = ["/scratch"]\nimage_binds = ["/datasets"]').policy
    assert policy.binds(found) == ("/datasets", "/scratch/me")


@pytest.mark.parametrize(
    "asked",
    [
        order(image=use(image_id="../../etc")),
        order(image=use("/sw/../etc/a.sif")),
        order(image=use("a.sif")),
        order(image=use("/sw/a.sif:/etc")),
        order(image=use("--privileged", "podman")),
        order(image=use(kind="chroot")),
        order(work=replace(build(), image_id="../../../home")),
        order(work=replace(build(), image_id="")),
        order(work=ImageWork(action="remove", image_id="..")),
        order(work=ImageWork(action="remove", image_id="tsk_00000001")),
        order(work=ImageWork(action="prune", image_id="/etc")),
        order(work=ImageWork(action="format", image_id=ID)),
        order(work=replace(build(), where="everywhere")),
        order(work=replace(build(), builder="make")),
        order(work=replace(build(), files={"/opt/a": "../../../etc/shadow"})),
        order(work=replace(build(), files={"/opt/a": "/etc/shadow"})),
        # What it brings would be imported by the agent's own code, or run beside it.
        order(work=build(), file_mounts={"json.py": REF}),
        order(work=build(), file_mounts={"files/0": REF, "sitecustomize.py": REF}),
        order(work=build(), file_mounts={"files/0/json.py": REF}),
        order(work=build(), file_mounts={"files": REF}),
        order(work=build(), file_mounts={"files/\u0661": REF}),
        order(work=build(), workdir=REF),
        order(work=build(), setup="touch x"),
        order(work=build(), envs={"PYTHONPATH": "/home/evil"}),
        order(work=build(where="batch"), slurm={"modules": ["evil"]}),
        order(work=build(where="batch"), slurm={"extra": ["--comment=x"]}),
        order(work=build("image:x", base_path="docker://evil/x")),
        order(work=build("image:x", base_path="../x.sif")),
        order(work=build("image:x", base_path="/sw/../home/evil/x.sif")),
        order(work=build("image:x", "podman", base_path="docker.io/evil/x")),
        order(work=build("image:x", "podman", base_path="/home/evil/image.ref")),
        order(work=build("/sw/good.sif", base_path="/home/evil/x.sif")),
        order(work=link("/sw/../home/evil/image.sif")),
        order(work=link("image.sif")),
    ],
)
def test_what_no_honest_server_sends_is_refused_without_any_rule(tmp_path: Path, asked: JobOrder) -> None:
    said = PolicyFile(tmp_path / "policy.toml").refusal(asked)
    assert said and not said.startswith("policy.toml")


@pytest.mark.parametrize(
    ("base", "whole"),
    [
        ("docker://python:3.12", "docker://docker.io/library/python:3.12"),
        ("docker://me/tools@sha256:00", "docker://docker.io/me/tools@sha256:00"),
        ("docker://docker.io/python", "docker://docker.io/library/python"),
        ("docker://index.docker.io/library/python", "docker://docker.io/library/python"),
        ("docker://ghcr.io/a/b:1", "docker://ghcr.io/a/b:1"),
        ("docker://localhost:5000/a", "docker://localhost:5000/a"),
        ("/sw//images/./a.sif", "/sw/images/a.sif"),
        ("image:tools", "image:tools"),
    ],
)
def test_a_base_is_compared_by_its_whole_name(base: str, whole: str) -> None:
    assert canonical(base) == whole


def test_limits_of_builds(tmp_path: Path) -> None:
    policy = read(tmp_path, 'max_build_time = "2h"\nmax_walltime = "1h"\nmax_image_bytes = "5GiB"').policy
    assert policy.time_limit_s(order(work=build())) == 7200
    assert policy.time_limit_s(order(work=build(where="batch"))) == 3600
    assert policy.time_limit_s(order(work=build(), time_limit_s=60)) == 60
    assert policy.time_limit_s(order()) == 3600
    assert policy.output_limit(order()) == 1024**3
    assert policy.output_limit(order(work=build())) == 5 * 1024**3
    assert Policy().output_limit(order(work=build())) > 10**15


def test_facts_tell_what_may_be_built_here(tmp_path: Path) -> None:
    facts = EndpointFacts(scheduler="slurm", builders=("apptainer", "charliecloud", "venv"))

    def found(rules: str) -> tuple[tuple[str, ...], str]:
        told = read(tmp_path, rules).policy.filter_facts(facts)
        return told.builders, told.builds

    assert found("") == (("apptainer", "charliecloud", "venv"), "any")
    assert found('builds = "off"') == ((), "off"), "nor does it take images in"
    assert found('allowed_builders = ["venv"]\nbuilds = "login"') == (("venv",), "login")
    assert found("containers_only = true") == (("apptainer", "charliecloud"), "any")
    assert found("allowed_builders = []") == ((), "off")
    assert Policy().filter_facts(EndpointFacts(scheduler="local")).builds == ""


@pytest.mark.parametrize(
    "text", ['builds = "sometimes"', 'allowed_builders = ["make"]', 'image_root = "images"', 'image_binds = ["data"]']
)
def test_rules_that_make_no_sense_are_mistakes(tmp_path: Path, text: str) -> None:
    with pytest.raises(InstallationProblem, match=text.split(" ")[0]):
        read(tmp_path, text)
