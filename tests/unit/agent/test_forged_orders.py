"""Every field of an order that a forged server can fill in: which rule of policy.toml it might get around, and cannot.

A new field fails the first test until somebody has thought about it. What the running agent does with such orders is
in test_malicious_server.py.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.policy import parse_policy
from diamond.core.codec import decode, encode
from diamond.core.compat import tomllib
from diamond.core.errors import DiamondError
from diamond.core.images import ImageUse, ImageWork
from diamond.core.pools import PilotOrder, PoolNode, PoolPlace
from diamond.core.recipes import Recipe
from diamond.core.resources import Resources
from diamond.core.sbatch.options import ALIASES, OPTIONS, SHORT
from diamond.core.slurm import OWN_OPTIONS, SlurmOptions
from diamond.core.states import Desired
from diamond.core.tasks import TaskSpec
from diamond.core.wire import JobOrder

OWNER = "alice"
IMAGE = ImageUse(kind="apptainer", path="/images/env.sif")
# Rules that a field must not get around, with one value of it that would; or, in words, why there is none.
CARRIERS: dict[type, dict[str, str]] = {
    JobOrder: {
        "job_id": "an id, checked before it becomes a path", "task_id": "a word in files of the job alone",
        "task_name": "a word in files of the job alone", "attempt": "a number in the job's variables",
        "desired": "run or cancel", "spec": "see TaskSpec", "time_limit_s": "max_walltime, max_gpu_hours",
        "received": "offsets of streams; a lie loses the liar's own bytes", "partition": "allowed_partitions",
        "gpu_type": "max_gpus", "chained": "whether a next job may come; it is an order of its own",
        "continues": "an id, checked", "after": "queue_ahead", "user": "allow_others, allowed_users",
        "image": "see ImageUse", "work": "see ImageWork", "pilot": "allow_pools", "place": "allow_pools",
    },
    TaskSpec: {
        "name": "a word", "project": "the server's own business", "pool": "the server's own business",
        "workdir": "a bundle's digest, checked", "num_nodes": "max_nodes", "min_nodes": "at most num_nodes",
        "ranks_per_node": "processes within what Slurm granted", "resources": "see Resources",
        "image": "the server's own business: the order says where it is", "envs": "denied_envs, allowed_envs",
        "secrets": "allow_secrets, denied_envs, allowed_envs", "file_mounts": "paths, checked",
        "setup": "containers_only", "run": "containers_only", "outputs": "patterns, looked for inside",
        "curves": "patterns of what is read anyway", "retry": "the server's own business",
        "max_duration": "the order's time_limit_s counts", "priority": "may only be lowered",
        "slurm": "see SlurmOptions",
    },
    SlurmOptions: {
        "partition": "allowed_partitions, denied_partitions", "account": "allowed_accounts, denied_accounts",
        "qos": "allowed_qos", "constraint": "one word to Slurm; no rule is about it",
        "reservation": "one word to Slurm; no rule is about it", "time": "the order's time_limit_s counts",
        "gres": "max_gpus", "nodelist": "path_roots", "exclude": "path_roots", "exclusive": "max_cpus, max_gpus",
        "warning": "seconds of a signal", "modules": "containers_only", "extra": "allowed_extra, containers_only",
    },
    Resources: {
        "infra": "the server's own business", "accelerators": "max_gpus", "cpus": "max_cpus", "memory": "max_memory",
        "image_id": "path_roots", "slots": "of a pool: what its pilots hold",
    },
    ImageUse: {
        "kind": "containers_only, allowed_builders", "path": "containers_only, path_roots",
        "image_id": "an id, checked", "name": "a word", "digest": "compared", "size_bytes": "compared",
    },
    ImageWork: {
        "action": "one of six", "image_id": "an id, checked", "name": "allowed_bases, as import:NAME",
        "recipe": "allowed_bases, denied_envs, allowed_envs", "builder": "allowed_builders", "where": "builds",
        "base_path": "allowed_bases, path_roots", "base_digest": "compared", "pins": "versions of packages",
        "files": "paths, checked", "source_path": "allowed_bases, path_roots", "digest": "compared",
        "size_bytes": "max_image_bytes", "fresh": "a switch", "keep": "names of layers, compared",
        "facts": "what is recorded of an image", "lock": "what is recorded of an image",
    },
    PilotOrder: {
        "pool_id": "a word", "slots": "shares of what Slurm granted", "cpus": "shares of what Slurm granted",
        "has_gpus": "shares of what Slurm granted",
    },
    PoolPlace: {
        "pool_id": "a word", "nodes": "see PoolNode", "cpus": "checked; within the pilot",
        "mem_bytes": "checked; within the pilot", "has_gpus": "within the pilot", "global_batch": "a number",
    },
    PoolNode: {"pilot": "allowed_partitions, allowed_accounts: those of the pilot count", "slots": "checked"},
}  # fmt: skip


def test_every_field_of_an_order_was_thought_about() -> None:
    for kind, said in CARRIERS.items():
        assert said.keys() == {field.name for field in fields(kind)}, kind.__name__


def order(**changes: Any) -> JobOrder:
    spec = changes.pop("spec", {})
    plain = JobOrder(
        job_id="job_00000001", task_id="tsk_00000001", task_name="t", attempt=1, desired=Desired.RUN, user=OWNER,
        spec=TaskSpec.parse({"run": "true", **spec}),
    )  # fmt: skip
    return replace(plain, **changes)


def refusal(rules: str, asked: JobOrder, image_root: str = "/images") -> str:
    return parse_policy(tomllib.loads(rules)).refusal(asked, image_root, OWNER)


OUT_OF_THE_IMAGE = [
    "--container=/evil/bundle", "--container-id=evil", "--bbf=/evil/burst", "--bb=#DW stage_in source=/home",
    # Of plug-ins that sites have (Pyxis, Shifter, Sarus, Enroot), or of srun: nobody here knows what they do.
    "--container-image=evil", "--container-mounts=/:/host", "--container-mount-home", "--container-writable",
    "--image=evil", "--volume=/:/host", "--prolog=/evil", "--task-prolog=/evil", "--epilog=/evil",
    "--task-epilog=/evil", "--bcast=/evil", "--unbuffered", "--singularity-container=evil", "--spank-x=1",
]  # fmt: skip


@pytest.mark.parametrize("option", OUT_OF_THE_IMAGE)
def test_no_option_of_slurm_leads_out_of_the_image(option: str) -> None:
    asked = order(image=IMAGE, spec={"slurm": {"extra": ["--comment=x", option]}})
    said = refusal("containers_only = true", asked)
    assert said.startswith("policy.toml: containers_only = true, which ") and option in said
    assert refusal("containers_only = false", asked) == ""
    for wide in ('["*"]', '["container*", "b*", "comment"]'):  # a pattern says too little of what it lets in
        assert refusal(f"containers_only = true\nallowed_extra = {wide}", asked)
    name = option.removeprefix("--").partition("=")[0]
    assert refusal(f'containers_only = true\nallowed_extra = ["comment", "{name}"]', asked) == ""


def test_options_that_lead_nowhere_are_let_by() -> None:
    extra = ["--comment=x", "--licenses=matlab:1", "--mail-type=END", "--hint=nomultithread"]
    assert refusal("containers_only = true", order(image=IMAGE, spec={"slurm": {"extra": extra}})) == ""


@pytest.mark.parametrize("kind", ["apptainer", "charliecloud"])
@pytest.mark.parametrize("path", ["/", "/etc", "//", "/usr/../", "{images}/store/../../outside", "{outside}"])
def test_no_folder_of_the_machine_is_an_image(tmp_path: Path, kind: str, path: str) -> None:
    """A container of `/` contains nothing."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "images/store/img_00000001/image").mkdir(parents=True)
    named = path.format(images=tmp_path / "images", outside=tmp_path / "outside")
    said = refusal("containers_only = true", order(image=replace(IMAGE, kind=kind, path=named)), f"{tmp_path}/images")
    assert "is a folder that neither is among" in said or "plain absolute path" in said
    for inside in (f"{tmp_path}/images/store/img_00000001/image", "/elsewhere/file.sif"):
        asked = order(image=replace(IMAGE, kind=kind, path=inside))
        assert refusal("containers_only = true", asked, f"{tmp_path}/images") == ""


@pytest.mark.parametrize("gres", ["shard:1", "mps:50", "gpu", "gpu:a100", "gres:gpu:1", "GPU:1", "license,shard"])
@pytest.mark.parametrize("rule", ["max_gpus = 0", "max_gpu_hours = 0"])
def test_no_part_of_a_gpu_is_asked_for_by_another_name(rule: str, gres: str) -> None:
    assert refusal(rule, order(spec={"slurm": {"gres": gres}}, time_limit_s=3600))


WORDS = ("-D/evil", "-N2", ":", "--", "script.sh", "--wrap", "--Wrap=x", "--chdir /evil", "--a\n--wrap=x", "--=x", "")


@pytest.mark.parametrize("text", [*(f"--{name}=x" for name in sorted(OWN_OPTIONS)), *WORDS])
def test_what_diamond_sets_itself_cannot_be_ordered_either(text: str) -> None:
    """Read from the wire by the same rules as from a task file: such an order is none."""
    raw = json.loads(json.dumps(encode(order())))
    raw["spec"]["slurm"] = {"extra": [text]}
    with pytest.raises(DiamondError):
        decode(JobOrder, raw)


def test_no_beginning_of_an_option_means_one_that_diamond_sets() -> None:
    """sbatch takes `--wr` for `--wrap`."""
    raw = json.loads(json.dumps(encode(order())))
    for name in {*OWN_OPTIONS, *ALIASES, *SHORT.values()}:
        for length in range(1, len(name)):
            start = name[:length]
            meant = ALIASES.get(start, start)
            if start in OPTIONS and meant not in OWN_OPTIONS:
                continue
            raw["spec"]["slurm"] = {"extra": [f"--{start}=x"]}
            with pytest.raises(DiamondError):
                decode(JobOrder, raw)


@pytest.mark.parametrize(
    ("rule", "asked"),
    [
        ("path_roots = ['/allowed']", order(spec={"slurm": {"nodelist": "/evil/nodes"}})),
        ("path_roots = ['/allowed']", order(spec={"slurm": {"exclude": "../nodes"}})),
        ("path_roots = ['/allowed']", order(spec={"slurm": {"extra": ["--nodefile=/evil/nodes"]}})),
        ("path_roots = ['/allowed']", order(image=IMAGE, spec={"slurm": {"extra": ["--x=a:/evil"]}})),
        ("path_roots = ['/allowed']", order(image=replace(IMAGE, path="/evil/x.sif"))),
        ("max_gpus = 1", order(gpu_type="a100:8", spec={"resources": {"accelerators": "A100:1"}})),
        ("max_gpus = 1", order(spec={"slurm": {"exclusive": True}})),
        ("max_cpus = 1", order(spec={"slurm": {"extra": ["--mincpus=64"]}})),
        ("allowed_qos = ['normal']", order(spec={"slurm": {"qos": "normal,urgent"}})),
        ("allowed_accounts = ['mine']", order()),
        ("allowed_partitions = ['small']", order()),
        ("containers_only = true", order(image=replace(IMAGE, kind="venv"))),
        ("containers_only = true", order(image=IMAGE, spec={"slurm": {"modules": ["./evil"]}})),
        ("allowed_bases = ['image:*']", order(work=ImageWork(
            action="build", image_id="img_00000001", builder="apptainer", where="login", base_path="/evil/image",
            recipe=Recipe.parse({"base": "image:mine"})))),
    ],
)  # fmt: skip
def test_the_same_in_other_words(rule: str, asked: JobOrder) -> None:
    said = refusal(rule, asked)
    assert rule.partition(" ")[0] in said, said
