"""The way into an image: golden texts, and what real shells do with them. Real runtimes: tests/integration."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.image_jobs import make_view
from diamond.core.endpoints import FileSystem
from diamond.core.errors import InvalidInput
from diamond.core.images import ImageUse
from diamond.core.inside import SHIELD, check_use, enter_script, env_script, inside_script, shown
from diamond.core.rundir import RunDir
from diamond.core.views import View, outermost

GOLDEN = Path(__file__).parent / "golden"
RUN_DIR = "/scratch/me/jobs/job_01"
ODD = 'it\'s "x"\n$(touch pwned) `id` \\ \\n \\0101 é 名\t\r 1\n\n'
USES = {
    "apptainer": ImageUse(kind="apptainer", path="/a b/it's $(here)/image.sif", image_id="img_00000001"),
    "charliecloud": ImageUse(kind="charliecloud", path="/images/image", image_id="img_00000002"),
    "podman": ImageUse(kind="podman", path="localhost/diamond/img_00000003", image_id="img_00000003"),
    "docker": ImageUse(kind="docker", path="python:3.12"),
    "venv": ImageUse(kind="venv", path="/images/image", image_id="img_00000004"),
}
HIDDEN = ("/scratch/me", "/scratch/me/agents", "/home/it's/.diamond/agents")
OWNER = View(home="/home/it's", hidden=HIDDEN)
GUEST = View(is_guest=True, home="/home/it's", hidden=HIDDEN)


def texts() -> dict[str, str]:
    found = {
        f"inside_{kind}.sh": inside_script(use, run_dir=RUN_DIR, binds=("/data", "/it's"), modules=("cuda", "it's"))
        for kind, use in USES.items()
    }
    for kind in ("apptainer", "charliecloud", "podman"):
        found[f"inside_guest_{kind}.sh"] = inside_script(
            USES[kind], run_dir=RUN_DIR, binds=("/data",), library="/home/me/it's/agent.pyz", view=GUEST
        )
    found["inside_hidden.sh"] = inside_script(
        USES["apptainer"], run_dir=RUN_DIR, binds=("/data",), library="/home/me/it's/agent.pyz", view=OWNER
    )
    found["enter_guest.sh"] = enter_script(USES["charliecloud"], run_dir=RUN_DIR, library="/a.pyz", view=GUEST)
    for kind in ("apptainer", "podman", "venv"):
        found[f"enter_{kind}.sh"] = enter_script(USES[kind], run_dir=RUN_DIR, library="/home/me/it's/agent.pyz")
    found["enter_secrets.sh"] = enter_script(USES["apptainer"], run_dir=RUN_DIR, secrets=True)
    return found


@pytest.mark.parametrize("name", texts())
def test_text_is_the_golden_one(name: str) -> None:
    # After a wanted change: python tests/unit/core/test_inside.py
    assert texts()[name] == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", texts())
def test_shells_can_read_it(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(texts()[name])
    shells = ["bash"] if name.startswith("inside") else ["dash", "bash"]
    for shell in shells:
        subprocess.run([shell, "-n", str(file)], check=True)


@pytest.mark.parametrize(
    "use",
    [
        ImageUse(kind="apptainer", path="relative.sif"),
        ImageUse(kind="apptainer", path="/a:/etc"),
        ImageUse(kind="charliecloud", path="/a,b"),
        ImageUse(kind="venv", path="/a/../../etc"),
        ImageUse(kind="podman", path="--privileged"),
        ImageUse(kind="docker", path="a b"),
        ImageUse(kind="chroot", path="/a"),
    ],
)
def test_what_no_runtime_can_be_told_of_is_refused(use: ImageUse) -> None:
    with pytest.raises(InvalidInput, match="image"):
        check_use(use, RUN_DIR)


def test_a_run_directory_no_runtime_can_be_told_of_is_refused() -> None:
    with pytest.raises(InvalidInput, match="move the agent's home"):
        inside_script(USES["apptainer"], run_dir="/a:b/job_01")
    inside_script(USES["venv"], run_dir="/a:b/job_01")


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_variables_arrive_byte_for_byte_in_any_shell(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"this machine has no {shell}")
    file = tmp_path / "env.sh"
    file.write_text(env_script({"ODD": ODD, "EMPTY": "", "run_dir": "x", "IFS": "-"}))
    program = 'import json, os; print(json.dumps([os.environ[n] for n in ("ODD", "EMPTY", "run_dir")]))'
    argv = [shell, *(["sh"] if shell == "busybox" else []), "-c", f'. "$1"; "$2" -c \'{program}\'', "sh"]
    done = subprocess.run([*argv, str(file), sys.executable], capture_output=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout) == [ODD, "", "x"]
    assert not (tmp_path / "pwned").exists()


# A virtual environment needs no runtime: it is entered for real here.


SHOW = "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), sys.prefix, dict(os.environ)]))"


@pytest.fixture
def entered(tmp_path: Path) -> RunDir:
    image = tmp_path / "it's an image"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(image)], check=True)
    (image / "opt/diamond").mkdir(parents=True)
    (image / "opt/diamond/env.sh").write_text(env_script({"FROM": "recipe", "OF_RECIPE": ODD, "LANG": "C"}))
    run_dir = RunDir(tmp_path / "jobs $(x)/job_01")
    run_dir.work.mkdir(parents=True)
    use = ImageUse(kind="venv", path=str(image), image_id="img_00000001")
    run_dir.inside.write_text(inside_script(use, run_dir=str(run_dir.path)))
    run_dir.enter.write_text(enter_script(use, run_dir=str(run_dir.path), library="/the/library"))
    run_dir.env_script.write_text(env_script({"FROM": "task", "OF_TASK": ODD, "child": "1", "code": "2"}))
    return run_dir


def start(run_dir: RunDir, *argv: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    plain = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "FROM": "host", "PYTHONPATH": "/wrong", **env}
    return subprocess.run(["bash", str(run_dir.inside), *argv], env=plain, capture_output=True, timeout=60)


def test_image_then_recipe_then_task(entered: RunDir) -> None:
    words = ["", " ", "$(touch pwned)", "a\nb", "'\"\\", "-n", "*"]
    done = start(entered, "--", "python", "-c", SHOW, *words, ON_HOST="yes")
    assert done.returncode == 0, done.stderr
    argv, where, prefix, env = json.loads(done.stdout)
    assert (argv, where) == (words, str(entered.work))
    assert prefix.endswith("it's an image")
    assert (env["FROM"], env["OF_RECIPE"], env["OF_TASK"], env["ON_HOST"]) == ("task", ODD, ODD, "yes")
    assert (env["PYTHONNOUSERSITE"], env["PYTHONPATH"], env["DIAMOND_IMAGE"]) == ("1", "/the/library", "img_00000001")
    assert (env["VIRTUAL_ENV"], env["child"], env["code"], env["LANG"]) == (prefix, "1", "2", "C")
    assert not list(entered.path.parent.rglob("pwned"))


def test_scripts_run_as_they_do_outside(entered: RunDir) -> None:
    entered.run.write_text("false\necho went on\n[[ -n $BASH_VERSION ]] && exit 5\n")
    entered.setup.write_text("echo ready\nfalse\necho went on\n")
    done = start(entered, "run")
    assert (done.returncode, done.stdout, done.stderr) == (5, b"went on\n", b"")
    done = start(entered, "setup")
    assert (done.returncode, done.stdout) == (1, b"ready\n")
    done = start(entered, "--", "no-such-program")
    assert done.returncode == 127 and b"no-such-program" in done.stderr


def test_an_image_without_bash_says_so_once(entered: RunDir, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "cat"):
        os.symlink(f"/bin/{name}", tools / name)
    entered.run.write_text("echo ran ${BASH_VERSION:-without}\n")
    # Of the host only bash itself is needed before that.
    run = ["/bin/bash", str(entered.inside), "run"]
    for rank, said in (("0", b"diamond: the image has no bash; your commands are run by its sh\n"), ("1", b"")):
        done = subprocess.run(run, env={"PATH": str(tools), "RANK": rank}, capture_output=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"ran without\n", said)


def test_an_environment_whose_python_is_gone_says_where(entered: RunDir, tmp_path: Path) -> None:
    (tmp_path / "it's an image/bin/python").unlink()
    done = start(entered, "run", HOSTNAME="c7")
    assert done.returncode == 127
    assert b"it's an image has no bin/python that this node" in done.stderr


# What is said to a runtime, by a program that stands where one would and enters nothing.


STAND_IN = """#!/usr/bin/python3
import json, os, sys
with open(os.environ["HOME"] + "/said.json", "w") as file:
    json.dump([sys.argv, dict(os.environ)], file)
argv = sys.argv[sys.argv.index("/bin/sh"):]
kept = {name.removeprefix("APPTAINERENV_"): value for name, value in os.environ.items()
        if name.startswith("APPTAINERENV_") or name == "PATH"}
os.execve(argv[0], argv, kept)
"""


@pytest.fixture
def told(tmp_path: Path) -> RunDir:
    program = tmp_path / "bin/apptainer"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    (tmp_path / "data").mkdir()
    run_dir = RunDir(tmp_path / "jobs/job_01")
    run_dir.work.mkdir(parents=True)
    binds = (str(tmp_path / "data/not-there"), str(tmp_path / "data"), "/etc/ssl", "/etc/ssl/certs")
    run_dir.inside.write_text(inside_script(USES["apptainer"], run_dir=str(run_dir.path), binds=binds))
    run_dir.enter.write_text(enter_script(USES["apptainer"], run_dir=str(run_dir.path)))
    run_dir.env_script.write_text(env_script({"OMP_NUM_THREADS": "7", "SECRET": "s3cret"}))
    return run_dir


def test_only_what_programs_need_of_the_node_crosses(told: RunDir, tmp_path: Path) -> None:
    env = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "DIAMOND_RUN_DIR": str(told.path),
        "SLURM_JOB_ID": "4711",
        "NCCL_ODD": ODD,
        "http_proxy": "http://me:passw0rd@proxy:3128",
        "OMP_NUM_THREADS": "1",
        "RANK": "3",
        "LD_LIBRARY_PATH": "/opt/of/the/host",
        "SOME_SETTING": "x",
        "LC_ALL": "xx_XX.UTF-8",
    }
    argv = ["bash", str(told.inside), "--", sys.executable, "-c", SHOW]
    done = subprocess.run(argv, env=env, capture_output=True, timeout=60, check=True)
    inside = json.loads(done.stdout)[3]
    expected = {
        name: env[name] for name in ("DIAMOND_RUN_DIR", "SLURM_JOB_ID", "NCCL_ODD", "http_proxy", "RANK", "HOME")
    }
    assert {name: inside.get(name) for name in expected} == expected
    assert (inside["OMP_NUM_THREADS"], inside["SECRET"], inside["LANG"]) == ("7", "s3cret", "C.UTF-8")
    assert not {"SOME_SETTING", "LC_ALL", "DIAMOND_GIVEN", "DIAMOND_FIXED"} & set(inside)
    assert inside.get("LD_LIBRARY_PATH") != "/opt/of/the/host"
    words, outside = json.loads((tmp_path / "said.json").read_text())
    line = " ".join(words)
    assert "passw0rd" not in line and "s3cret" not in line and "4711" not in line
    assert "s3cret" not in str(outside)


def test_binds_are_what_is_there(told: RunDir, tmp_path: Path) -> None:
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path), "TMPDIR": "/var/not-there"}
    subprocess.run(["bash", str(told.inside), "--", "true"], env=env, capture_output=True, timeout=60, check=True)
    words, _ = json.loads((tmp_path / "said.json").read_text())
    bound = [words[at + 1] for at, word in enumerate(words) if word == "--bind"]
    # The home holds the jobs and the data; nothing is bound twice, and nothing that is not there.
    assert bound == [f"{path}:{path}" for path in (tmp_path, "/tmp", "/etc/ssl")]
    assert words[-5:] == [USES["apptainer"].path, "/bin/sh", str(told.enter), "--", "true"]


def mounts_of(tmp_path: Path, run_dir: RunDir, *, binds: tuple[str, ...] = (), **view: Any) -> tuple[list[str], str]:
    """What the stand-in was told to show as a run directory's inside.sh has it, and what was said meanwhile."""
    run_dir.inside.write_text(
        inside_script(USES["apptainer"], run_dir=str(run_dir.path), binds=binds, view=View(**view))
    )
    env = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "HOME": str(tmp_path), "HOSTNAME": "c7"}
    argv = ["bash", str(run_dir.inside), "--", "true"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    words, _ = json.loads((tmp_path / "said.json").read_text())
    return [words[at + 1] for at, word in enumerate(words) if word == "--bind"], done.stderr


def test_the_agents_folders_are_empty_by_every_name(told: RunDir, tmp_path: Path) -> None:
    os.symlink(tmp_path / "jobs", tmp_path / "data/again")
    os.symlink(tmp_path, tmp_path / "bin/everything")
    found, _ = mounts_of(
        tmp_path, told, binds=(str(tmp_path / "jobs"), "/etc/ssl"), hidden=(str(tmp_path / "jobs"), "/not/there")
    )
    mask, jobs = told.path / "masks/0", tmp_path / "jobs"
    assert found[:3] == [f"{tmp_path}:{tmp_path}", "/tmp:/tmp", "/etc/ssl:/etc/ssl"]
    # The second name of the home is within the first, and needs no mask of its own.
    assert found[3:] == [f"{mask}:{jobs}:ro", f"{told.path}:{told.path}"]
    assert [path.relative_to(mask) for path in mask.rglob("*")] == [Path("job_01")], (
        "room for its own, and nothing else"
    )


def test_a_second_name_of_the_home_is_masked_as_well(told: RunDir, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="names-", dir="/var/tmp") as elsewhere:
        other = Path(elsewhere) / "other"
        other.symlink_to(tmp_path)
        found, _ = mounts_of(tmp_path, told, binds=(str(other),), hidden=(str(tmp_path / "jobs"),))
    mask = told.path / "masks/0"
    assert f"{mask}:{tmp_path}/jobs:ro" in found
    assert f"{mask}:{other}/jobs:ro" in found
    assert found.index(f"{mask}:{other}/jobs:ro") > found.index(f"{other}:{other}")


@pytest.mark.parametrize("bad", ["{home}", "{home}/jobs", "{up}", "/", "{link}", "{home}/jobs/job_02"])
def test_guests_are_shown_nothing_that_leads_into_the_account(told: RunDir, tmp_path: Path, bad: str) -> None:
    make_view(told)
    (tmp_path / "jobs/job_02").mkdir()
    with tempfile.TemporaryDirectory(prefix="names-", dir="/var/tmp") as elsewhere:
        link = Path(elsewhere) / "link"
        link.symlink_to(tmp_path)
        path = bad.format(home=tmp_path, up=tmp_path.parent, link=link)
        found, said = mounts_of(
            tmp_path, told, binds=("/etc/ssl", path), is_guest=True, home="/nowhere", hidden=(str(tmp_path / "jobs"),)
        )
    tmp = f"{told.path}/tmp/c7"
    shown = [f"{told.path}/view:{told.path}", f"{told.path}/enter.sh:{told.path}/enter.sh"]
    shown += [f"{told.path}/env.sh:{told.path}/env.sh", f"{told.work}:{told.work}"]
    assert found == [*shown, f"{tmp}:/tmp", f"{tmp}:/var/tmp", "/etc/ssl:/etc/ssl", "/etc/hosts:/etc/hosts:ro"]
    if path != "/":  # which is the name of no folder that could be shown
        assert f"diamond: {path} is not shown to this task" in said


def test_guests_get_no_token_and_no_place_of_the_node(told: RunDir, tmp_path: Path) -> None:
    make_view(told)
    view = View(is_guest=True, home=str(tmp_path), hidden=(str(tmp_path / "jobs"),))
    told.inside.write_text(inside_script(USES["apptainer"], run_dir=str(told.path), view=view))
    env = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "SLURM_JWT": "t0ken",
        "SCRATCH": "/scratch/me",
        "SLURM_JOB_ID": "4711",
        "APPTAINER_BIND": "/home",
        "SINGULARITY_BINDPATH": "/home",
        "APPTAINERENV_LD_PRELOAD": "/x.so",
        "APPTAINER_CACHEDIR": "/cache",
        "DIAMOND_CONTINUE_FILE": f"{told.path}/view/continue",
    }
    argv = ["bash", str(told.inside), "--", sys.executable, "-c", SHOW]
    done = subprocess.run(argv, env=env, capture_output=True, timeout=60, check=True)
    inside = json.loads(done.stdout)[3]
    assert (inside["HOME"], inside["TMPDIR"], inside["SLURM_JOB_ID"]) == (f"{told.path}/home", "/tmp", "4711")
    assert inside["DIAMOND_CONTINUE_FILE"] == f"{told.path}/continue"
    assert not {"SLURM_JWT", "SCRATCH"} & set(inside)
    words, outside = json.loads((tmp_path / "said.json").read_text())
    assert not {"APPTAINER_BIND", "SINGULARITY_BINDPATH", "APPTAINERENV_LD_PRELOAD"} & set(outside)
    assert (outside["HOME"], outside["APPTAINER_CACHEDIR"]) == (str(tmp_path), "/cache"), (
        "the runtime's own things stay"
    )
    assert {"--pid", "--no-home"} < set(words)


def test_outermost_folders() -> None:
    assert outermost(["/a/b", "/a", "/ab", "/a", "/c/d"]) == ("/a", "/ab", "/c/d")


def test_a_node_without_the_runtime_says_so(told: RunDir, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    done = subprocess.run(
        ["/bin/bash", str(told.inside), "run"],
        env={"PATH": str(tools), "HOSTNAME": "c7"},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 127
    assert b"has no apptainer" in done.stderr


def test_the_shield_stands_before_the_real_program(tmp_path: Path) -> None:
    assert SHIELD.startswith("#!/bin/bash\n") and "trap '' HUP INT TERM" in SHIELD
    (tmp_path / "shield").write_text(SHIELD)
    subprocess.run(["bash", "-n", str(tmp_path / "shield")], check=True)


if __name__ == "__main__":
    for name, text in texts().items():
        (GOLDEN / name).write_text(text)


def test_of_scratch_everything_is_shown_and_of_the_system_nothing() -> None:
    places = [
        FileSystem(path="/home/u", role="home"),
        FileSystem(path="/scratch/u", role="scratch"),
        FileSystem(path="/lustre/proj/x", role="project"),
        FileSystem(path="/var/scratch/u", role="scratch"),
        FileSystem(path="/scratch/u/jobs", role="runs"),
    ]
    assert shown(places) == (
        *("/home/u", "/scratch", "/scratch/u", "/lustre", "/lustre/proj/x", "/var/scratch/u", "/scratch/u/jobs"),
    )
