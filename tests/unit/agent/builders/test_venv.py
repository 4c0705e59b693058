"""The venv builder, with real Pythons and real pip; packages are wheels made here, so that no index is needed."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.builders import venv
from diamond.agent.builders.base import BuildContext, BuildProblem, CommandFailed, Commands
from diamond.agent.builders.inspect import inspect
from diamond.agent.builders.runner import RUNNER
from diamond.agent.builders.store import tree_digest
from diamond.agent.builders.venv import VenvBuilder, find_pythons
from diamond.core.images import ImageWork, Lock
from diamond.core.recipes import Recipe, Stage, stages

BUILDER = VenvBuilder()
HOSTILE = {"PLAIN": "a b", "QUOTES": 'it\'s "x" $HOME `id` \\', "LINES": "one\ntwo\n", "WORD": "日本 🜲"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    for version in ("1.0", "2.0"):
        _wheel(folder, "diamond_probe", version)
    return folder


def _wheel(folder: Path, name: str, version: str) -> None:
    """A package with one module and one command, in the form pip installs without building anything."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\ndef main():\n    import sys\n    print(VERSION, sys.prefix)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\nprobe = {name}:main\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text.encode())}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in {**files, f"{info}/RECORD": record + f"{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)


class Bench:
    """Builds as the driver does: every layer under one name, then renamed to another."""

    def __init__(self, folder: Path, wheels: Path, bases: Path) -> None:
        self.folder, self.wheels, self.bases = folder, wheels, bases
        self.made: list[str] = []

    def context(self, recipe: Recipe, *, pins: Lock | None = None, base_path: str = "") -> BuildContext:
        folder = self.folder / f"ctx{len(list(self.folder.iterdir()))}"
        inputs = folder / "inputs"
        (inputs / "files").mkdir(parents=True)
        (folder / "tmp").mkdir()
        exports = "".join(f"export {name}={_quoted(value)}\n" for name, value in recipe.envs.items())
        exact = "".join(f"{name}=={version}\n" for name, version in (pins.of_kind("pip") if pins else {}).items())
        texts = {
            "requirements.txt": "\n".join(recipe.pip), "constraints.txt": exact, "env.sh": exports,
            "commands.sh": recipe.build or "", "test.sh": recipe.test or "", "runner.sh": RUNNER,
        }  # fmt: skip
        for name, text in texts.items():
            (inputs / name).write_bytes(text.encode())
        return BuildContext(
            work=ImageWork(action="build", image_id="img_x", recipe=recipe, base_path=base_path, base_digest="d"),
            recipe=recipe, folder=folder, inputs=inputs, tmp=folder / "tmp", commands=Commands(), pins=pins,
            network={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)},
        )  # fmt: skip

    def build(self, ctx: BuildContext, name: str = "image") -> Path:
        previous: Path | None = None
        for stage in stages(ctx.recipe, builder="venv", base_key=BUILDER.base_key(ctx)):
            kept = (self.bases if stage.name == "base" else self.folder / "layers") / stage.key / "layer"
            if not kept.exists():
                self.made += [stage.name] if stage.name != "base" else []
                made = ctx.folder / stage.key
                made.mkdir()
                BUILDER.make(stage, previous, made / "layer", ctx)
                kept.parent.parent.mkdir(exist_ok=True)
                os.rename(made, kept.parent)
            previous = kept
        assert previous is not None
        target = ctx.folder / "publish" / "image"
        target.parent.mkdir()
        BUILDER.pack(previous, target, ctx)
        os.rename(target.parent, self.folder / name)
        return self.folder / name / "image"


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\"'\"'") + "'"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base layers, which no test changes: making one takes seconds."""
    return tmp_path_factory.mktemp("bases")


@pytest.fixture
def bench(tmp_path: Path, wheels: Path, bases: Path) -> Bench:
    return Bench(tmp_path, wheels, bases)


def _recipe(**fields: Any) -> Recipe:
    return Recipe.parse({"base": "host", **fields})


def test_an_image_holds_packages_files_and_variables_byte_for_byte(bench: Bench) -> None:
    recipe = _recipe(
        pip=["diamond-probe==1.0"],
        envs=HOSTILE,
        build="cat > made.txt <<'EOF'\nit's $HOME\nEOF\nprobe > probe.txt\ntest -f etc/thing.conf\n",
    )
    ctx = bench.context(recipe)
    (ctx.inputs / "files/etc").mkdir()
    (ctx.inputs / "files/etc/thing.conf").write_bytes(b"\x00\xff'\n")
    image = bench.build(ctx)

    assert (image / "root/etc/thing.conf").read_bytes() == b"\x00\xff'\n"
    assert (image / "root/made.txt").read_text() == "it's $HOME\n"
    assert (image / "root/probe.txt").read_text().startswith("1.0 ")
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    env = json.loads(BUILDER.run(image, ["python", "-c", script], ctx, quiet=True))
    assert {name: env[name] for name in HOSTILE} == HOSTILE
    assert env["DIAMOND_IMAGE_ROOT"] == str(image / "root")
    assert "PIP_NO_INDEX" not in env  # settings of the endpoint stay outside the finished image
    assert BUILDER.run(image, ["probe"], ctx, quiet=True).split() == ["1.0", str(image)]
    lock = inspect(lambda argv: BUILDER.run(image, argv, ctx, quiet=True))
    assert lock.of_kind("pip")["diamond-probe"] == "1.0"
    assert lock.python == find_pythons()[0].version
    assert not lock.of_kind("deb")  # the endpoint's packages are not the image's
    assert lock.os


def test_nothing_in_the_image_names_the_folders_it_was_made_in(bench: Bench) -> None:
    ctx = bench.context(_recipe(pip=["diamond-probe"], build="true"))
    image = bench.build(ctx)
    for path in [*(image / "bin").iterdir(), image / "pyvenv.cfg", *image.glob("lib/python3*/site-packages/*.pth")]:
        if path.is_file() and not path.is_symlink():
            assert str(bench.folder).encode() not in path.read_bytes(), path
    moved = bench.folder / "moved $(x) 'here'"
    os.rename(image.parent, moved)
    assert BUILDER.run(moved / "image", ["probe"], ctx, quiet=True).endswith(str(moved / "image"))
    assert BUILDER.run(moved / "image", ["pip", "--version"], ctx, quiet=True).startswith("pip ")
    command = ["bash", "-c", '. "$1" && probe && echo "$DIAMOND_IMAGE_ROOT"', "bash", str(moved / "image/bin/activate")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert shown == [f"2.0 {moved / 'image'}", str(moved / "image/root")]


def test_a_package_installed_from_the_images_own_files_moves_with_it(bench: Bench) -> None:
    """Both ways in which packages are "editable": a path in a .pth file, and a table of paths in a module."""
    build = """
    site=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir -p opt/one opt/two/pkg_two
    echo 'NAME = "one"' > opt/one/mod_one.py
    echo 'NAME = "two"' > opt/two/pkg_two/__init__.py
    echo "$DIAMOND_IMAGE_ROOT/opt/one" > "$site/__editable__.one.pth"
    printf 'MAPPING = {"pkg_two": "%s/opt/two/pkg_two"}\\n' "$DIAMOND_IMAGE_ROOT" > "$site/__editable___two_finder.py"
    """
    ctx = bench.context(_recipe(build=build))
    image = bench.build(ctx)
    script = "import mod_one, __editable___two_finder as f; print(mod_one.__file__, f.MAPPING['pkg_two'])"
    shown = BUILDER.run(image, ["python", "-c", script], ctx, quiet=True).split()
    assert shown == [str(image / "root/opt/one/mod_one.py"), str(image / "root/opt/two/pkg_two")]


def test_a_changed_last_step_installs_nothing_again_and_leaves_the_layer_before_alone(bench: Bench) -> None:
    bench.build(bench.context(_recipe(pip=["diamond-probe"], build="echo one > x")), "first")
    assert bench.made == ["pip", "commands"]
    layers = {path.name: tree_digest(path) for path in (bench.folder / "layers").iterdir()}
    bench.made.clear()
    spoil = "python - <<'EOF'\nimport diamond_probe\nopen(diamond_probe.__file__, 'a').write('VERSION = 3\\n')\nEOF"
    second = bench.context(_recipe(pip=["diamond-probe"], build=f"echo two > x\n{spoil}"))
    image = bench.build(second, "second")
    assert bench.made == ["commands"]
    assert (image / "root/x").read_text() == "two\n"
    assert BUILDER.run(image, ["probe"], second, quiet=True).startswith("3 ")
    assert {name: tree_digest(bench.folder / "layers" / name) for name in layers} == layers
    assert (bench.folder / "first/image/root/x").read_text() == "one\n"
    first = bench.context(_recipe())
    assert BUILDER.run(bench.folder / "first/image", ["probe"], first, quiet=True).startswith("2.0 ")


def test_pinned_versions_are_installed(bench: Bench) -> None:
    ctx = bench.context(_recipe(pip=["diamond-probe==1.0"]))
    image = bench.build(ctx, "old")
    lock = inspect(lambda argv: BUILDER.run(image, argv, ctx, quiet=True))
    again = bench.context(_recipe(pip=["diamond-probe"]), pins=lock)
    rebuilt = bench.build(again, "rebuilt")
    assert inspect(lambda argv: BUILDER.run(rebuilt, argv, again, quiet=True)) == lock


def test_an_image_can_build_on_another_one(bench: Bench) -> None:
    first = bench.build(bench.context(_recipe(pip=["diamond-probe"], envs={"A": "1", "B": "1"})), "first")
    recipe = Recipe.parse({"base": "image:first", "build": "probe > x", "envs": {"B": "2"}})
    ctx = bench.context(recipe, base_path=str(first))
    image = bench.build(ctx, "second")
    assert (image / "root/x").read_text().startswith("2.0 ")
    shown = BUILDER.run(image, ["sh", "-c", 'echo "$A $B $DIAMOND_IMAGE_ROOT"'], ctx, quiet=True)
    assert shown == f"1 2 {image / 'root'}"
    gone = bench.context(recipe, base_path=str(bench.folder / "nowhere"))
    with pytest.raises(BuildProblem, match="is not here"):
        BUILDER.base_key(gone)


def test_the_finished_image_can_be_read_by_all_and_changed_by_nobody(bench: Bench) -> None:
    image = bench.build(bench.context(_recipe(pip=["diamond-probe"], build="install -m 600 /dev/null secret")))
    for path in [image, *image.rglob("*")]:
        if not path.is_symlink():
            assert path.stat().st_mode & 0o777 in (0o444, 0o555), path
    assert os.access(image / "bin/probe", os.X_OK)


def test_a_saved_image_arrives_as_it_was(bench: Bench) -> None:
    ctx = bench.context(_recipe(pip=["diamond-probe"], envs=HOSTILE, build="echo x > y\nln -s y z"))
    image = bench.build(ctx)
    BUILDER.save(image, bench.folder / "payload", ctx.commands)
    BUILDER.load(bench.folder / "payload", bench.folder / "arrived", ctx.commands)
    arrived = bench.folder / "arrived"
    assert BUILDER.run(arrived, ["probe"], ctx, quiet=True).split() == ["2.0", str(arrived)]
    assert os.readlink(arrived / "root/z") == "y"
    assert tree_digest(arrived) == tree_digest(image)
    assert not list(bench.folder.glob("*.unpacking"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"python": "2.7.18"}, "needs Python 2.7"),
        ({"architecture": "vax"}, "is for vax"),
        ({"libc": "glibc 99.1"}, "older"),
    ],
)
def test_an_image_for_another_machine_is_refused(bench: Bench, change: dict[str, str], words: str) -> None:
    ctx = bench.context(_recipe())
    image = bench.build(ctx)
    made = json.loads((image / venv.MADE_WITH).read_text())
    assert made["architecture"] == platform.machine()
    (image / venv.MADE_WITH).unlink()  # it shares its bytes with the layer it came from
    (image / venv.MADE_WITH).write_text(json.dumps({**made, **change}))
    BUILDER.save(image, bench.folder / "payload", ctx.commands)
    with pytest.raises(BuildProblem, match=words) as caught:
        BUILDER.load(bench.folder / "payload", bench.folder / "arrived", ctx.commands)
    assert caught.value.code == "not_portable"
    assert "lock" in caught.value.hint
    assert not (bench.folder / "arrived").exists()


@pytest.mark.parametrize("data", [b"", b"not a tar at all", b"\x1f\x8b\x08\x00broken"])
def test_a_broken_payload_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "payload").write_bytes(data)
    with pytest.raises(BuildProblem, match="does not hold"):
        BUILDER.load(tmp_path / "payload", tmp_path / "arrived", Commands())


@pytest.mark.parametrize("made", ["[1, 2]", "3", '{"python": 3}', "[" * 100_000, '{"python": [], "libc": {}}'])
def test_a_payload_that_says_odd_things_of_itself_is_refused(tmp_path: Path, made: str) -> None:
    with tarfile.open(tmp_path / "payload", "w") as archive:
        entry = tarfile.TarInfo(f"image/{venv.MADE_WITH}")
        entry.size = len(made)
        archive.addfile(entry, io.BytesIO(made.encode()))
    with pytest.raises(BuildProblem, match="does not hold"):
        BUILDER.load(tmp_path / "payload", tmp_path / "arrived", Commands())


def test_a_link_out_of_the_image_keeps_it_from_travelling(bench: Bench) -> None:
    ctx = bench.context(_recipe(build="ln -s /etc/passwd here"))
    image = bench.build(ctx)
    with pytest.raises(BuildProblem, match="root/here is a link to /etc/passwd"):
        BUILDER.save(image, bench.folder / "payload", ctx.commands)


def test_a_failing_command_names_its_line(bench: Bench) -> None:
    ctx = bench.context(_recipe(build="true\n\nfalse\n"))
    with pytest.raises(CommandFailed) as caught:
        bench.build(ctx)
    assert "diamond: build line 3 ended with 1: false" in caught.value.tail


def test_variables_of_the_agents_own_python_do_not_leak_in(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "PYTHONPATH": str(bench.folder),
        "VIRTUAL_ENV": "/x",
        "PIP_TARGET": "/x",
        "PIP_USER": "1",
    }.items():
        monkeypatch.setenv(name, value)
    (bench.folder / "leaked.py").write_text("")
    ctx = bench.context(_recipe(pip=["diamond-probe"]))
    image = bench.build(ctx)
    assert BUILDER.run(image, ["probe"], ctx, quiet=True).split() == ["2.0", str(image)]
    with pytest.raises(CommandFailed, match="ended with 1"):
        BUILDER.run(image, ["python", "-c", "import leaked"], ctx, quiet=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"system": ["git", "gcc", "make", "curl"]}, r"system packages \(git, gcc, make …\)"),
        ({"conda": ["numpy"]}, "conda packages"),
        ({"base": "docker://debian:13"}, "cannot start from docker://debian:13"),
        ({"base": "suggested:pytorch"}, "cannot start from suggested"),
    ],
)
def test_what_only_a_container_can_hold_is_refused_with_the_way_out(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BuildProblem, match=words) as caught:
        BUILDER.check(_recipe(**fields))
    assert "Apptainer" in caught.value.hint
    assert caught.value.code == "needs_container"


def test_the_newest_python_that_can_make_environments_is_taken(tmp_path: Path) -> None:
    found = find_pythons()
    assert found, "this machine has no Python with the venv module"
    assert [python.order for python in found] == sorted((python.order for python in found), reverse=True)
    assert BUILDER.version() == f"Python {found[0].version}"
    assert BUILDER.problem() == ""
    lame = tmp_path / "python3"
    lame.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'raise ImportError(\"no ensurepip\")'\n")
    lame.chmod(0o755)
    assert find_pythons(str(tmp_path)) == ()
    os.symlink(found[0].path, tmp_path / "python3.11")
    assert [python.version for python in find_pythons(f"{tmp_path}:")] in ([], [found[0].version])


def test_without_python_it_says_what_to_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "module load python" in BUILDER.problem()
    assert BUILDER.version() == ""


def test_a_stage_it_has_no_part_in_is_a_problem(bench: Bench) -> None:
    recipe = _recipe(system=["git"])
    ctx = bench.context(recipe)
    (bench.folder / "previous/bin").mkdir(parents=True)
    stage = Stage(name="system", title="", key="k")
    with pytest.raises(BuildProblem, match="system packages"):
        BUILDER.make(stage, bench.folder / "previous", bench.folder / "target", ctx)


def test_the_definition_shows_what_is_done() -> None:
    recipe = _recipe(pip=["numpy==2.3.4"], build="make\nmake install", envs={"A": "secret"}, files={"/etc/x": "./x"})
    shown = BUILDER.definition(recipe, ["base", "pip", "commands", "pack"])
    assert shown == (
        "# A virtual environment on the endpoint's own Python.\n"
        "python3 -m venv IMAGE\n"
        "IMAGE/bin/python -m pip install --requirement requirements.txt\n"
        "#   numpy==2.3.4\n"
        "# /etc/x -> IMAGE/root/etc/x\n"
        "bash -e commands.sh\n"
        "#   make\n"
        "#   make install\n"
        "# variable A\n"
    )


def test_a_file_system_without_hard_links_gets_a_copy(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = bench.folder / "programs"
    programs.mkdir()
    real = shutil.which("cp")
    (programs / "cp").write_text(f'#!/bin/sh\ncase " $* " in *" --link "*) exit 1 ;; esac\nexec {real} "$@"\n')
    (programs / "cp").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    ctx = bench.context(_recipe(pip=["diamond-probe"]))
    image = bench.build(ctx)
    assert (image / "bin/probe").stat().st_nlink == 1
    assert BUILDER.run(image, ["probe"], ctx, quiet=True).startswith("2.0")
