"""Recipe files: what they become, which lists of packages they may name, and that errors say where."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.recipes import Recipe
from diamond.sdk import recipefile, requirements, taskfile


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def load(folder: Path, text: str) -> Recipe:
    (folder / "image.yaml").write_text(text)
    return recipefile.load(folder / "image.yaml").recipe()


def refused(folder: Path, text: str) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        load(folder, text)
    return caught.value


def test_every_field_arrives(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        "name: climate\nbase: python:3.12-slim\nsystem: [git, libhdf5-dev]\nconda: numpy\nchannels: [bioconda]\n"
        'pip:\n  - torch==2.9\n  - six  # why\nconstraints: urllib3<3\nenvs: {V: 1.10, Q: "a\'b"}\n'
        "labels: {version: 2.0}\nfiles: {/opt/x: ./x}\nbuild: |\n  make\n  cat <<E\n  ok\n  E\n"
        "test: python -c 1\nbuilder: venv\nwhere: login\ntime_limit: 30m\n",
    )
    assert found.base == "docker://python:3.12-slim"
    assert found.system == ("git", "libhdf5-dev")
    assert (found.conda, found.channels) == (("numpy",), ("bioconda",))
    assert found.pip == ("torch==2.9", "six")
    assert found.constraints == ("urllib3<3",)
    assert found.envs == {"V": "1.10", "Q": "a'b"}
    assert found.labels == {"version": "2.0"}
    assert found.files == {"/opt/x": str(tmp_path / "x")}
    assert found.build == "make\ncat <<E\nok\nE\n"
    assert (found.builder, found.where, found.time_limit) == ("venv", "login", 1800)


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"base: host\nfiles: {/opt/a: a}\n")))
    assert recipefile.load("-").recipe().files == {"/opt/a": str(tmp_path / "a")}


@pytest.mark.parametrize(
    ("text", "field", "line", "hint"),
    [
        ("base: host\nsystm: [git]\n", "systm", 2, "did you mean 'system'"),
        ("base: host\nrequirement: r.txt\n", "requirement", 2, "did you mean 'requirements'"),
        ("base: host\nzzz: 1\n", "zzz", 2, "requirements, pyproject, extras, environment"),
        ("base: hots\n", "base", 1, "did you mean host"),
        ("base: host\npip: six idna\n", "pip", 2, "one package a line"),
        ("base: host\npip: [six==1.0 idna]\n", "pip", 2, "one package a line"),
        ("base: host\npip: 'six, idna'\n", "pip", 2, "one package a line"),
        ("from: host\n", "from", 1, "`base`"),
        ("base: host\napt: [git]\n", "apt", 2, "`system`"),
        ("base: host\nbuild: [a, b]\n", "build", 2, "one command per line"),
        ("base: host\nenvs: [A=1]\n", "envs", 2, "NAME: value"),
        ("base: host\npip: 3\n", "pip", 2, ""),
        ("base: host\npip: [--pre]\n", "pip", 2, ""),
        ("base: host\nextras: [a]\n", "extras", 2, "pyproject"),
        ("base: host\nrequirements: 3\n", "requirements", 2, ""),
        ("base: host\nfiles:\n  ../x: y\n", "files", 2, ""),
        ("pip: [six]\n", "base", 1, ""),
        ("base: 'a b'\n", "base", 1, "docker://"),
        ("base: host\nname: ../x\n", "name", 2, ""),
    ],
)
def test_errors_name_field_and_line(tmp_path: Path, text: str, field: str, line: int, hint: str) -> None:
    error = refused(tmp_path, text)
    assert error.field.startswith(field)
    assert f"image.yaml, line {line}," in error.message
    assert hint in error.hint


REQUIREMENTS = """\
# comment
numpy>=2  # why
torch==2.9.0 ; python_version >= "3.10" and platform_machine == 'x86_64'
scipy \\
  >=1.14
-r more/other.txt
--constraint=limits.txt
git+https://example.org/tool@v1#egg=tool
pandas==2.3 --hash=sha256:aaaa \\
    --hash=sha256:bbbb
"""


def test_requirements_are_followed(tmp_path: Path) -> None:
    write(
        tmp_path,
        req_dot_txt=REQUIREMENTS,
        more__other_dot_txt="six\n-c ../deep.txt\n-rlast.txt\n",
        more__last_dot_txt="attrs",
        limits_dot_txt="urllib3<3\n-r deep.txt\n",
        deep_dot_txt="idna<4\n",
    )
    found = load(tmp_path, "base: host\npip: [first]\nrequirements: req.txt\n")
    assert found.pip == (
        "first",
        "numpy>=2",
        """torch==2.9.0 ; python_version >= "3.10" and platform_machine == 'x86_64'""",
        "scipy   >=1.14",
        "six",
        "attrs",
        "git+https://example.org/tool@v1#egg=tool",
        "pandas==2.3 --hash=sha256:aaaa     --hash=sha256:bbbb",
    )
    assert found.constraints == ("idna<4", "urllib3<3")  # each once, from whichever file


@pytest.mark.parametrize(
    ("line", "part", "hint"),
    [
        ("--index-url https://example.org", "--index-url is an option of pip", "setting of the endpoint"),
        ("--extra-index-url=https://example.org", "--extra-index-url", "setting of the endpoint"),
        ("-e .", "-e is an option", "`files`"),
        ("--editable=./x", "--editable", "`files`"),
        ("numpy --global-option=x", "--global-option", "lists packages"),
        ("numpy --config-settings a=b ; python_version > '3'", "--config-settings", ""),
        ("--no-binary :all:", "--no-binary", "`build`"),
        ("./local", "is a path", "`files`"),
        ("file:///x.whl", "is a path", "`files`"),
        ("pkg @ https://${TOKEN}@example.org/x", "variable", "endpoint's own settings"),
        ("-r none.txt", "no such file", ""),
        ("-r req.txt", "names itself", "remove"),
    ],
)
def test_lines_that_cannot_be_taken(tmp_path: Path, line: str, part: str, hint: str) -> None:
    (tmp_path / "req.txt").write_text(f"six\n\n{line}\n")
    error = refused(tmp_path, "base: host\nrequirements: req.txt\n")
    assert part in error.message
    assert hint in error.hint
    assert error.field == "requirements"
    assert "image.yaml, line 2" in error.message
    if "file" not in part and "itself" not in part:
        assert "req.txt, line 3" in error.message


def test_files_that_name_each_other_for_ever(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"r{number}.txt").write_text(f"-r r{number + 1}.txt\n")
    (tmp_path / "r60.txt").write_text("six\n")
    with pytest.raises(TooLarge, match="name each other"):
        requirements.read_requirements(tmp_path / "r0.txt")
    (tmp_path / "many.txt").write_text("\n".join(f"p{number}" for number in range(2001)))
    with pytest.raises(TooLarge, match="more than 2000 packages"):
        requirements.read_requirements(tmp_path / "many.txt")


PYPROJECT = """\
[project]
name = "My.Tool"
dependencies = ["numpy>=2", 'tomli ; python_version < "3.11"']
[project.optional-dependencies]
train = ["torch"]
Eval_Tools = ["scipy"]
all = ["my-tool[train, eval-tools]", "six"]
"""


def test_pyproject_with_extras_that_contain_others(tmp_path: Path) -> None:
    write(tmp_path, pyproject_dot_toml=PYPROJECT)
    found = load(tmp_path, "base: host\npyproject: pyproject.toml\n")
    assert found.pip == ("numpy>=2", 'tomli ; python_version < "3.11"')
    assert found.name == "My.Tool"
    found = load(tmp_path, "base: host\nname: mine\npyproject: pyproject.toml\nextras: all\n")
    assert found.pip[2:] == ("six", "torch", "scipy")
    assert found.name == "mine"
    error = refused(tmp_path, "base: host\npyproject: pyproject.toml\nextras: [nope]\n")
    assert error.field == "extras"
    assert "train, Eval_Tools, all" in error.hint


@pytest.mark.parametrize(
    ("text", "part", "hint"),
    [
        ("[tool.poetry.dependencies]\nnumpy = '*'\n", "no [project] table", "poetry export"),
        ("[build-system]\n", "no [project] table", "project.dependencies"),
        ("[project]\nname='x'\ndynamic=['dependencies']\n", "when the project is built", "`requirements`"),
        ("[project\n", "not TOML", ""),
        ("[project]\ndependencies = 'numpy'\n", "must be a list", ""),
        ("[project]\ndependencies = ['-e .']\n", "project.dependencies[0]", "`files`"),
    ],
)
def test_projects_that_cannot_be_read(tmp_path: Path, text: str, part: str, hint: str) -> None:
    write(tmp_path, pyproject_dot_toml=text)
    error = refused(tmp_path, "base: host\npyproject: pyproject.toml\n")
    assert part in error.message
    assert hint in error.hint


def test_conda_environment(tmp_path: Path) -> None:
    write(
        tmp_path,
        environment_dot_yml="name: climate\nchannels: [conda-forge, nodefaults, bioconda]\nprefix: /x\n"
        "dependencies:\n  - python=3.12\n  - numpy>=2\n  - pip\n  - pip: [six, -r more.txt]\n"
        "variables: {A: 1.10, B: old}\n",
        more_dot_txt="attrs\n",
    )
    found = load(tmp_path, "base: host\nenvironment: environment.yml\nenvs: {B: mine}\nconda: [zlib]\n")
    assert found.conda == ("zlib", "python=3.12", "numpy>=2")
    assert found.channels == ("conda-forge", "bioconda")
    assert found.pip == ("six", "attrs")
    assert found.envs == {"A": "1.10", "B": "mine"}
    assert found.name == "climate"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("dependencies: numpy\n", "must be a list"),
        ("dependencies: [{conda: [x]}]\n", "`pip:`"),
        ("dependencies: [{pip: [--pre]}]\n", "--pre is an option"),
        ("dependences: [numpy]\n", "unknown field"),
        ("variables: [A]\n", "mapping"),
        ("", "is empty"),
    ],
)
def test_environments_that_cannot_be_read(tmp_path: Path, text: str, part: str) -> None:
    write(tmp_path, environment_dot_yml=text)
    error = refused(tmp_path, "base: host\nenvironment: environment.yml\n")
    assert part in error.message
    assert error.field == "environment" or error.field.startswith("dependen") or error.field == "variables"
    assert "environment.yml" in error.message


def test_a_folder_and_a_list_by_itself(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has no recipe"):
        recipefile.load(tmp_path)
    write(tmp_path, requirements_dot_txt="six\n", pyproject_dot_toml=PYPROJECT)
    assert recipefile.load(tmp_path).raw == {"pip": ["six"]}
    assert recipefile.load(tmp_path / "requirements.txt").raw == {"pip": ["six"]}
    assert recipefile.load(tmp_path / "pyproject.toml").raw["name"] == "My.Tool"
    write(tmp_path, environment_dot_yml="dependencies: [numpy]\n")
    assert recipefile.load(tmp_path).raw == {"pip": ["six"], "conda": ["numpy"]}
    write(tmp_path, image_dot_yaml="base: host\n")
    assert recipefile.load(tmp_path).raw == {"base": "host"}
    with pytest.raises(InvalidInput, match="no such file"):
        recipefile.load(tmp_path / "none.yaml")


def test_what_the_command_line_adds(tmp_path: Path) -> None:
    raw = recipefile.changed(
        {"base": "host", "pip": "six\nattrs", "envs": {"A": "1", "B": "2"}},
        name="n", base="python:3.12", pip=["numpy"], system=["git"], envs={"B": "3"},
    )  # fmt: skip
    found = Recipe.parse(raw)
    assert found.pip == ("six", "attrs", "numpy")
    assert found.system == ("git",)
    assert found.envs == {"A": "1", "B": "3"}
    assert (found.name, found.base) == ("n", "docker://python:3.12")


def test_a_recipe_inside_a_task_file(tmp_path: Path) -> None:
    write(tmp_path, requirements_dot_txt="six\n", sub__task_dot_yaml="")
    path = tmp_path / "sub" / "task.yaml"
    path.write_text(
        "run: python train.py\nimage:\n  base: host\n  requirements: ../requirements.txt\n  envs: {V: 1.10}\n"
        "  files: {/opt/x: x}\n"
    )
    image = taskfile.load(path).raw["image"]
    files = {"/opt/x": str(tmp_path / "sub/x")}
    assert image == {"base": "host", "pip": ["six"], "envs": {"V": "1.10"}, "files": files}
    path.write_text("run: a\nimage:\n  base: host\n  requirements: none.txt\n")
    with pytest.raises(InvalidInput) as caught:
        taskfile.load(path)
    assert caught.value.field == "image.requirements"
    assert "task.yaml, line 4" in caught.value.message
    path.write_text("run: a\nimage: docker://x\n")
    with pytest.raises(InvalidInput) as caught:
        taskfile.load(path)
    assert "image_id" in caught.value.hint


EXAMPLES = Path(__file__).parents[3] / "examples" / "images"


def test_the_examples_are_right() -> None:
    recipes = [path for path in sorted(EXAMPLES.glob("*.yaml")) if path.name != "task.yaml"]
    names = [recipefile.load(path).recipe().name for path in recipes]
    assert names == ["climate", "torch-env-lightning", "python-tools", "torch-env"]
    task = taskfile.load(EXAMPLES / "task.yaml").spec()
    assert task.image is not None and task.image.pip == ("numpy",)
    for path in recipes:
        for source in recipefile.load(path).recipe().files.values():
            assert Path(source).is_file()


@pytest.mark.parametrize(
    "line",
    [
        "six >= 1.0 , < 3", "six[a, b] == 1.*", "six [a] (>=1)", "six ; python_version < '3.9' and os_name == 'a b'",
        "six @ https://example.org/six.whl", "six==1 --hash=sha256:ab --hash sha256:cd", "git+https://example.org/a#egg=b",
    ],
)  # fmt: skip
def test_blanks_inside_one_requirement_are_fine(line: str) -> None:
    assert Recipe.parse({"base": "host", "pip": [line]}).pip == (line,)


def test_names_near_host_that_are_images() -> None:
    assert Recipe.parse({"base": "ghost"}).base == "docker://ghost"
    assert Recipe.parse({"base": "docker://hots"}).base == "docker://hots"
    assert Recipe.parse({"base": "hots:1"}).base == "docker://hots:1"
