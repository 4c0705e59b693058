"""What tasks of others may name where they are kept in containers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diamond.agent import private
from diamond.agent.guest_policy import HARMLESS_EXTRA
from diamond.agent.policy_files import PolicyFile
from diamond.core.images import ImageUse, ImageWork
from diamond.core.recipes import Recipe
from diamond.core.sbatch.options import OPTIONS
from diamond.core.slurm import OWN_OPTIONS
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder

RULES = "allow_others = true\ncontainers_only = true\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the account; its agent's is below it. Beside it lies what others may name."""
    home = tmp_path / "home/me"
    (home / ".diamond/agents/x/images/store/img_00000001").mkdir(parents=True)
    (home / ".ssh").mkdir()
    (home / "image.sif").touch()
    (tmp_path / "sw/folder").mkdir(parents=True)
    (tmp_path / "sw/image.sif").touch()
    (tmp_path / "sw/link.sif").symlink_to(home / "image.sif")
    (tmp_path / "sw/way").symlink_to(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DIAMOND_HOME", str(home / ".diamond"))
    return home


def policy(home: Path, text: str = RULES) -> PolicyFile:
    agent = home / ".diamond/agents/x"
    (agent / "policy.toml").write_text(text)
    found = PolicyFile(agent / "policy.toml", centre=home / "none")
    found.asked.told("alice")
    return found


def an_order(user: str = "bob", **more: Any) -> JobOrder:
    spec = TaskSpec.parse({"run": "true", **more.pop("spec", {})})
    order = JobOrder(job_id="job_00000001", task_id="tsk_00000001", task_name="t", attempt=1, desired=Desired.RUN,
                     spec=spec, user=user, image=ImageUse(kind="podman", path="python:3.12"))  # fmt: skip
    return replace(order, **more)


def image(path: object, kind: str = "apptainer") -> dict[str, Any]:
    return {"image": ImageUse(kind=kind, path=str(path))}


def build(base: str, **more: Any) -> dict[str, Any]:
    work = ImageWork(action="build", image_id="img_00000002", builder="apptainer", recipe=Recipe(base=base))
    return {"image": None, "work": replace(work, **more)}


def test_images_that_are_nobodys_business_are_taken(home: Path, tmp_path: Path) -> None:
    found = policy(home)
    store = home / ".diamond/agents/x/images/store/img_00000001/image.sif"
    for more in (
        {},
        image(store),
        image(tmp_path / "sw/image.sif"),
        build("docker://python:3.12"),
        build(str(tmp_path / "sw/image.sif")),
        build("image:x", base_path=str(store)),
    ):
        assert found.refusal(an_order(**more)) == "", more
    roots = policy(home, f'{RULES}path_roots = ["{tmp_path}/sw"]')
    assert roots.refusal(an_order(**image(tmp_path / "sw/folder"))) == ""


PLACES = ["/", "/proc/self/root", "{top}", "{home}", "{home}/.ssh", "{home}/image.sif", "{top}/sw/link.sif"]
PLACES += ["{top}/sw/way", "{home}/.diamond/agents/x", "{home}/.diamond/agents/x/token", "{top}/sw/folder"]
PLACES += ["{home}/.diamond/agents/x/images/store/img_00000001/./../../../../../../.ssh"]


@pytest.mark.parametrize("kind", ["apptainer", "charliecloud"])
@pytest.mark.parametrize("place", PLACES)
def test_no_image_holds_what_is_the_accounts(home: Path, tmp_path: Path, place: str, kind: str) -> None:
    found = policy(home)
    path = place.format(home=home, top=tmp_path)
    asked = [an_order(**image(path, kind)), an_order(**build(path)), an_order(**build(f"oci-archive:{path}"))]
    asked.append(an_order(**build("image:x", base_path=path)))
    asked.append(an_order(image=None, work=ImageWork(action="link", image_id="img_00000002", builder=kind,
                                                     source_path=path)))  # fmt: skip
    for order in asked:
        assert found.refusal(order), order
        # Its owner may, but for a folder as the image, which need not contain anything; and who is let in on the host
        # sees all of it anyway.
        if ".." not in path:
            own = replace(order, user="alice")
            is_folder = order.image is not None and os.path.isdir(path)
            assert ("is a folder that neither" in found.refusal(own)) if is_folder else found.refusal(own) == "", own
    open_host = policy(home, "allow_others = true\nallow_others_on_host = true\n")
    if ".." not in path:
        assert open_host.refusal(asked[0]) == ""


@pytest.mark.parametrize(
    "option",
    ["--container=/bundle", "--container-image=x", "--container-mounts=/home:/home", "--bb=x", "--bbf=/etc/passwd",
     "--nodefile=/etc/passwd", "--propagate", "--stepmgr", "--a-plug-in=x", "--context=x"],
)  # fmt: skip
def test_no_option_of_sbatch_leads_out_of_a_container(home: Path, option: str) -> None:
    order = an_order(spec={"slurm": {"extra": [option]}})
    said = policy(home).refusal(order)
    # Some would take anybody's task out of its container; the others reach no further than the account.
    for_anybody = f"{option} in slurm.extra might get around" in said
    assert for_anybody or f"{option.partition('=')[0]} in slurm.extra may lead out of the container" in said
    assert bool(policy(home).refusal(replace(order, user="alice"))) == for_anybody
    assert for_anybody == option.startswith(("--container", "--bb", "--a-plug-in"))
    name = option.removeprefix("--").partition("=")[0]
    assert policy(home, f'{RULES}allowed_extra = ["{name}"]').refusal(order) == "", "an owner's word counts"
    assert policy(home).refusal(an_order(spec={"slurm": {"extra": ["--comment=x", "--licenses=m:1"]}})) == ""


@pytest.mark.parametrize("name", ["nodelist", "exclude"])
def test_sbatch_reads_no_file_for_a_guest(home: Path, name: str) -> None:
    order = an_order(spec={"slurm": {name: "/home/me/.ssh/id_rsa"}})
    assert f"slurm.{name} of a task of user bob names a file" in policy(home).refusal(order)
    assert policy(home).refusal(an_order(spec={"slurm": {name: "c[1-2]"}})) == ""


def test_harmless_options_are_options() -> None:
    assert set(OPTIONS) >= HARMLESS_EXTRA
    assert not HARMLESS_EXTRA & set(OWN_OPTIONS)


def test_what_is_the_agents_own_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path / "diamond"))
    agents, server = str(tmp_path / "diamond/agents"), str(tmp_path / "diamond/server")
    assert private.own_folders(tmp_path / "diamond/agents/x") == (agents, server)
    assert private.own_folders(Path("/scratch/agent")) == ("/scratch/agent", agents, server)
    assert os.path.isabs(private.account_home())
