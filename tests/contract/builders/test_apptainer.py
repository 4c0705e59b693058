"""What only containers do, on the one builder that most clusters have: system packages, bases of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diamond.agent.builders.inputs import write_inputs
from diamond.agent.builders.steps import write_steps
from diamond.core import onefile
from diamond.core.definitions import INSIDE
from diamond.core.images import DEFINITION_FILE, ImageWork, Lock, Package
from testing.builders import Job, SiteBench
from testing.images import base_folder, ca_file
from testing.minihpc import Site
from testing.minihpc.fixtures import require_apptainer
from testing.proxy import Proxy
from testing.registry import Registry, SavedImage

ENVS = {"PATH": "/opt/of the base:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "FROM_BASE": "it's there"}


@pytest.fixture(scope="module")
def bench(build_site: tuple[Site, Proxy]) -> Iterator[SiteBench]:
    site, proxy = build_site
    require_apptainer(site.facts)
    # An account to which nobody has granted anything: no range of user numbers, no fakeroot.
    site.run(["sh", "-c", "sed -i /user1/d /etc/subuid /etc/subgid; rm -f /usr/bin/fakeroot*"], user="root")
    running = SiteBench(site, proxy, "apptainer", "image.sif")
    yield running
    running.close()


@pytest.fixture(scope="module")
def tools(bench: SiteBench) -> Job:
    """System packages, among them one that gives files to groups of its own, and no Python any more."""
    return bench.build(
        bench.recipe(
            system=["tree", "openssh-client"],
            build="apt-get -q -y purge python3-pip python3-venv python3\napt-get -q -y autoremove\n"
            "install -o 42 -g 42 -m 4000 /bin/true /opt/odd\nmkdir -m 000 /opt/closed\ntouch /opt/closed/file\n",
            labels={"purpose": "tools"},
            test="tree --version\nssh -V\n! command -v python3\n",
        )
    )


def test_system_packages_as_an_ordinary_account(bench: SiteBench, tools: Job) -> None:
    assert {"tree", "openssh-client"} <= tools.lock.of_kind("deb").keys()
    assert tools.lock.python == ""
    assert "kept" not in tools.states.values()
    assert bench.inside(tools.facts, "stat", "-c", "%a", "/opt/odd").strip() == "4400"  # its owner may read it


def test_the_image_serves_without_diamond(bench: SiteBench, tools: Job) -> None:
    said = bench.site.run(["apptainer", "inspect", "--labels", tools.facts.path]).stdout
    assert "purpose: tools" in said
    said = bench.site.run(["apptainer", "inspect", "--deffile", tools.facts.path]).stdout
    assert "openssh-client" in said
    assert said.strip() == (tools.folder / DEFINITION_FILE).read_text().strip()
    assert "tree v" in bench.site.run(["apptainer", "exec", tools.facts.path, "tree", "--version"]).stdout


def test_a_base_without_python_gets_one(bench: SiteBench, tools: Job) -> None:
    job = bench.build(
        bench.recipe(base="image:tools", pip=["six==1.16.0"], test="python3 -c 'import six'\ntree --version\n"),
        base_path=tools.facts.path,
        base_digest=tools.facts.digest,
    )
    assert job.lock.python
    assert job.lock.of_kind("pip")["six"] == "1.16.0"


def test_a_sif_file_is_a_base_and_a_changed_one_another(bench: SiteBench, tools: Job) -> None:
    path = f"{bench.folder}/base.sif"
    bench.site.run(["cp", tools.facts.path, path])
    recipe = bench.recipe(base=path, build="sleep 1; tree --version\n")
    first = bench.build(recipe)
    assert bench.build(recipe).states["commands"] == "kept"
    bench.site.run(["touch", path])
    assert bench.build(recipe).states["commands"] == "done"
    assert first.lock.of_kind("deb") == tools.lock.of_kind("deb")


@pytest.fixture(scope="module")
def saved() -> SavedImage:
    return SavedImage(base_folder(), ENVS)


@pytest.mark.parametrize("form", ["docker-archive:", "oci-archive:", ""])
def test_a_saved_image_is_a_base_with_its_variables(
    bench: SiteBench, saved: SavedImage, tmp_path: Path, form: str
) -> None:
    write = saved.write_oci_archive if form == "oci-archive:" else saved.write_docker_archive
    write(tmp_path / "saved.tar")
    path = f"{bench.folder}/saved{len(form)}.tar"
    bench.site.put(tmp_path / "saved.tar", path)
    job = bench.build(bench.recipe(base=f"{form}{path}", envs={"OWN": "1"}, test='test -n "$FROM_BASE"\n'))
    said = bench.inside(job.facts, "/bin/sh", "-c", 'printf "%s|%s|%s" "$FROM_BASE" "$OWN" "$PATH"')
    assert said.startswith(f"{ENVS['FROM_BASE']}|1|{ENVS['PATH']}")  # Apptainer adds folders at the end
    assert bench.build(bench.recipe(base=f"{form}{path}")).states["base"] == "kept"


def test_a_base_comes_from_a_registry(bench: SiteBench, saved: SavedImage, tmp_path: Path) -> None:
    with Registry(bench.site.server_address, tmp_path / "registry", saved) as registry:
        both = tmp_path / "both.pem"
        both.write_text(registry.ca.read_text() + ca_file().read_text())
        trust = f"{bench.folder}/both.pem"
        bench.site.put(both, trust)
        recipe = bench.recipe(base=f"docker://{registry.reference}", build='echo "$FROM_BASE $(id -u)" > /said\n')
        refused = bench.run(bench.order(recipe))
        assert refused.code == 1
        assert refused.failure.stage == "base"
        assert "certificate" in refused.log
        job = bench.run(bench.order(recipe), env={"SSL_CERT_FILE": trust})
    assert job.code == 0, job.log
    assert bench.inside(job.facts, "cat", "/said").strip() == f"{ENVS['FROM_BASE']} 0"
    assert bench.inside(job.facts, "/bin/sh", "-c", 'printf %s "$PATH"').startswith(ENVS["PATH"])
    # Its layer is kept: with the registry gone, the next image still builds.
    again = bench.build(bench.recipe(base=recipe.base, build="true\n"))
    assert again.states["base"] == "kept"


def test_the_definition_builds_without_diamond(bench: SiteBench, tmp_path: Path) -> None:
    recipe = bench.recipe(envs={"A": "it's"}, build="echo $A > /made\n", labels={"purpose": "alone"})
    definition = (bench.build(recipe).folder / DEFINITION_FILE).read_text()
    write_inputs(tmp_path / "inputs", recipe, ImageWork(action="build", image_id="img_00000000"), tmp_path)
    write_steps(tmp_path / "steps", {}, inside=INSIDE, sandbox=True)
    (tmp_path / "image.def").write_text(definition)
    (tmp_path / "steps" / "steps.sh").rename(tmp_path / "steps.sh")
    where = f"/scratch/alone-{bench.folder[-6:]}"
    bench.site.put(tmp_path, where)
    bench.site.run(["apptainer", "build", "image.sif", "image.def"], cwd=where, timeout=240)
    argv = ["apptainer", "exec", "--cleanenv", "image.sif", "sh", "-c", 'cat /made; echo "$A"']
    assert bench.site.run(argv, cwd=where).stdout == "it's\nit's\n"
    assert "purpose: alone" in bench.site.run(["apptainer", "inspect", "image.sif"], cwd=where).stdout


def test_the_one_file_agent_builds_too(bench: SiteBench, tmp_path: Path) -> None:
    (tmp_path / "diamond-agent.pyz").write_bytes(onefile.build())
    library = f"{bench.folder}/diamond-agent.pyz"
    bench.site.put(tmp_path / "diamond-agent.pyz", library)
    recipe = bench.recipe(system=["tree"], test="tree --version\n")
    job = bench.run(bench.order(recipe, fresh=True), env={"PYTHONPATH": library})
    assert job.code == 0, job.log


def test_system_packages_of_a_lock(bench: SiteBench, tools: Job) -> None:
    wanted = tools.lock.of_kind("deb")["tree"]
    pins = Lock(packages=(Package(kind="deb", name="tree", version=wanted),))
    assert bench.build(bench.recipe(system=["tree"]), pins=pins).lock.of_kind("deb")["tree"] == wanted
    pins = Lock(packages=(Package(kind="deb", name="tree", version="0.0.1-1"),))
    job = bench.run(bench.order(bench.recipe(system=["tree"]), pins=pins))
    assert job.code == 1
    assert job.failure.stage == "system"
    assert "tree" in job.failure.line


def test_a_base_that_is_not_there(bench: SiteBench) -> None:
    job = bench.run(bench.order(bench.recipe(base="/opt/bases/nowhere.sif")))
    assert job.code == 1
    assert job.failure.stage == "base"
    assert "/opt/bases/nowhere.sif" in job.failure.message


def test_an_image_of_another_account_is_used_where_it_is(bench: SiteBench, tools: Job) -> None:
    mine = f"{bench.folder}/user2"
    bench.site.run(["mkdir", "-p", mine])
    source = bench.site.path(tools.facts.path)
    source.chmod(0o644)
    work = bench.order(
        action="link", image_id="img_linked000", source_path=tools.facts.path, digest=tools.facts.digest,
        facts=tools.facts, lock=tools.lock,
    )  # fmt: skip
    job = bench.run(work, root=f"{mine}/images")
    assert job.code == 0, job.log
    assert job.facts.path == f"{mine}/images/store/img_linked000/image.sif"
    assert job.facts.digest == tools.facts.digest and job.facts.size_bytes == tools.facts.size_bytes
    assert "tree v" in bench.inside(job.facts, "tree", "--version", root=f"{mine}/images")
    assert bench.site.path(job.facts.path).is_symlink()
    source.chmod(0o666)  # now anybody could put another in its place after it was checked
    copied = bench.run(replace(work, image_id="img_linked002"), root=f"{mine}/images")
    source.chmod(0o644)
    assert copied.code == 0, copied.log
    assert copied.facts.digest == tools.facts.digest
    assert not bench.site.path(copied.facts.path).is_symlink()
    assert "tree v" in bench.inside(copied.facts, "tree", "--version", root=f"{mine}/images")
    other = bench.run(bench.order(action="link", image_id="img_linked001", source_path=tools.facts.path,
                                  digest="sha256:" + "0" * 64, facts=tools.facts), root=f"{mine}/images")  # fmt: skip
    assert other.code == 1
    assert "not the image it should be" in other.failure.message


def test_large_temporary_files_go_where_the_machine_wants_them(bench: SiteBench) -> None:
    place = f"/scratch/tmp-{bench.folder[-6:]}"
    bench.site.run(["mkdir", "-p", place])
    run_dir = bench.prepare(bench.order(bench.recipe(build="sleep 2\n")))
    job = bench.result(run_dir, bench.begin(run_dir, {"TMPDIR": place}))
    assert job.code == 0, job.log
    assert f"{place}/diamond-builds-1000/" in job.log
    assert bench.site.run(["ls", f"{place}/diamond-builds-1000"]).stdout == ""
    assert bench.site.run(["sh", "-c", "ls /tmp/diamond-builds-1000 || true"]).stdout == ""


@pytest.fixture
def small_disk(bench: SiteBench) -> Iterator[Callable[[str], str]]:
    """Mounts a disk of a given size for the images; its path. Plain, so that builds work on it too."""
    mounted = []

    def mount(size: str) -> str:
        path = f"/scratch/disk-{size}-{bench.folder[-6:]}"
        options = f"size={size},uid=1000,gid=1000,mode=755"
        bench.site.run(["mkdir", "-p", path], user="root")
        bench.site.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], user="root")
        mounted.append(path)
        return path

    yield mount
    for path in mounted:
        bench.site.run(["umount", path], user="root")


def test_a_disk_that_is_too_small_is_said_at_once(bench: SiteBench, small_disk: Callable[[str], str]) -> None:
    job = bench.run(bench.order(bench.recipe()), root=small_disk("500m"))
    assert job.code == 1
    assert job.failure.code == "disk_full"
    assert job.states == {}


def test_a_disk_that_fills_up_leaves_no_half_image(bench: SiteBench, small_disk: Callable[[str], str]) -> None:
    root = small_disk("1200m")
    recipe = bench.recipe(build="head -c 3G /dev/urandom > /large\n")
    job = bench.run(bench.order(recipe), root=root)
    assert job.code == 1
    assert job.failure.stage == "commands"
    assert job.failure.code == "disk_full", job.failure
    for part in ("store", "tmp"):
        assert list(bench.outside(f"{root}/{part}").glob("[!.]*")) == []
    again = bench.run(bench.order(bench.recipe(build="echo small > /large\n")), root=root)
    assert again.code == 0, again.log
    assert bench.inside(again.facts, "cat", "/large", root=root).strip() == "small"
