"""`make pictures`: the few pictures of pages that the README and the docs show, in docs/pictures.

Everything in them happened: a miniature Slurm site is started (testing/minihpc), an agent enrolled on it, the neural
operator of examples/burgers_fno trained there. Names and paths are such as a stranger may see. Run it after pages have
changed, and look at each picture before it is committed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from diamond.core.quotas import Limits  # noqa: E402
from diamond.sdk.client import Client  # noqa: E402
from scripts.small_png import shrink  # noqa: E402
from testing import people  # noqa: E402
from testing.browser import Visitor, running_chromium  # noqa: E402
from testing.cluster import BINDS, SOURCE_INSIDE, Cluster  # noqa: E402
from testing.minihpc import Site  # noqa: E402
from testing.minihpc.inside import ACCOUNTS, Account  # noqa: E402
from testing.minihpc.slurm_conf import Node, Partition  # noqa: E402
from testing.waiting import eventually  # noqa: E402
from testing.web_images import another_agent  # noqa: E402

NAME = "cluster-a"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES_INSIDE = "/opt/packages"
WIDTH = 1280
CHARTS = ("loss", "lr")
COMPARED = (256, 512, 1024)  # solutions to learn from
EXAMPLE = ROOT / "examples" / "burgers_fno"
MANY = 150 * 1024  # bytes; a picture above that is looked at again before it goes into a document
NODES = tuple(
    Node(name=f"gpu{n:02}", cpus=64, memory_mib=524_288, gpu_type="a100", num_gpus=4, features=("a100", "nvlink"))
    for n in range(1, 5)
) + tuple(Node(name=f"cpu{n:02}", cpus=128, memory_mib=262_144, features=("milan",)) for n in range(1, 3))


def main() -> int:
    parser = argparse.ArgumentParser(description="The pictures of the README and the docs.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--only", default="", help="a part of the names wanted, such as task")
    chosen = parser.parse_args()
    folder = chosen.folder
    folder.mkdir(parents=True, exist_ok=True)
    # The agent's account is to be seen in paths and beside the host's name.
    ACCOUNTS.setdefault("alice", Account("alice", 1002))
    with tempfile.TemporaryDirectory(prefix="diamond-pictures-") as work, running_chromium() as chromium:
        binds = {**BINDS, PACKAGES_INSIDE: _packages()}
        with Site(NAME, nodes=NODES, partitions=_partitions(), binds=binds, pythons=[PYTHON]) as site:
            _give_python(site)
            home = f"/home/alice/.diamond/agents/{NAME}"
            with (
                Cluster(site, Path(work), home=home, name=NAME, account="alice") as cluster,
                another_agent(cluster.service, "workstation"),
                cluster.service.client() as client,
            ):
                return _take(chromium, cluster, _use(client, cluster), folder, chosen.only)


def _packages() -> Path:
    import torch

    return Path(torch.__file__).parents[1]


def _partitions() -> tuple[Partition, ...]:
    gpus = tuple(node.name for node in NODES if node.num_gpus)
    cpus = tuple(node.name for node in NODES if not node.num_gpus)
    return (
        Partition(name="gpu", nodes=gpus, options={"Default": "YES", "MaxTime": "1-00:00:00"}),
        Partition(name="gpu-long", nodes=gpus[:2], options={"MaxTime": "7-00:00:00", "MaxNodes": "2"}),
        Partition(name="cpu", nodes=cpus, options={"MaxTime": "2-00:00:00"}),
        Partition(name="debug", nodes=gpus[:1], options={"MaxTime": "00:30:00", "MaxNodes": "1"}),
    )


def _give_python(site: Site) -> None:
    """What `module load pytorch` would do elsewhere: a `python` that has PyTorch and Diamond."""
    text = f'#!/bin/sh\nPYTHONPATH={SOURCE_INSIDE}:{PACKAGES_INSIDE} exec python{PYTHON} "$@"\n'
    site.write("/usr/local/bin/python", text, user="root", mode=0o755)


# -- what alice did ----------------------------------------------------------------------------------------------------


def _fno(name: str, samples: int = 0, epochs: int = 30, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "project": "pde",
        "workdir": str(EXAMPLE),
        "resources": {"infra": NAME, "accelerators": "A100:1", "cpus": 8, "memory": "32+"},
        "envs": {"TRAIN_SAMPLES": str(samples), "EPOCHS": str(epochs)},
        "run": "python train.py",
        "outputs": ["model.pt", "result.json", "prediction.svg"],
        "max_duration": "4h",
        **more,
    }


def _use(client: Client, cluster: Cluster) -> dict[str, str]:
    """Tasks by their names: some that ended, one that runs, one that waits; an image, a project, colleagues."""
    tasks: dict[str, str] = {}
    admin = people.ClientConfig.load(cluster.service.home)
    assert admin is not None
    for name in ("bob", "carol"):
        people.invite(admin, name)
    client.projects.create("pde", title="PDE surrogates")
    client.projects.set_member("pde", "bob", "member")
    client.projects.share_endpoint("pde", NAME)
    client.quotas.set("user", "alice", Limits(gpu_hours=500))
    made = client.images.build({"name": "pde-tools", "base": "host", "test": "python -c 'import venv'"}, endpoint=NAME)
    client.images.wait(made.image.id, timeout_s=300)
    data = "python -c 'import burgers, torch; torch.save(burgers.dataset(4096, 0), \"burgers.pt\")'"
    cores = {"infra": NAME, "cpus": 16, "memory": "32+"}
    for spec in (
        _fno("burgers-data", run=data, outputs=["burgers.pt"], envs={}, resources=cores),
        *(_fno(f"burgers-n{samples}", samples) for samples in COMPARED),
    ):
        task = client.tasks.create(spec)
        tasks[task.name] = task.id
        done = client.tasks.wait(task.id, timeout_s=600)
        assert done.state == "SUCCEEDED", b"".join(client.tasks.logs(task.id)).decode()
        print(f"{task.name} ended", flush=True)
    whole = {"infra": NAME, "accelerators": "A100:4"}
    for spec in (_fno("burgers-n2048", 2048, 400), _fno("burgers-large", 65536, 400, num_nodes=4, resources=whole)):
        task = client.tasks.create(spec)
        tasks[task.name] = task.id
    eventually(
        lambda: b"epoch  24/" in b"".join(client.tasks.logs(tasks["burgers-n2048"])),
        within_s=600, every_s=2, what="the long run has something to show",
    )  # fmt: skip
    return tasks


# -- the pictures ------------------------------------------------------------------------------------------------------


class Scene(NamedTuple):
    """How a page is brought before the camera.

    Attributes:
        height: of the window. Where it is low, a page is as long as what it shows.
        until: the picture ends below this element; "" takes the whole page, and None what is in the window.
    """

    name: str
    go: Callable[[Visitor], object]
    height: int = 500
    until: str | None = ""
    dark: bool = False


def _take(chromium: Any, cluster: Cluster, tasks: dict[str, str], folder: Path, only: str = "") -> int:
    compared = "&".join(f"task={tasks[f'burgers-n{samples}']}" for samples in COMPARED)
    scenes = (
        Scene("dashboard", _at("/dashboard")),
        Scene("dashboard-dark", _at("/dashboard"), dark=True),
        Scene("tasks", _table),
        # 481: at three quarters of it (log.css) the log shows whole lines.
        Scene("task", _with_curves(f"/tasks/{tasks['burgers-n2048']}"), height=481, until="[data-curves]"),
        Scene("compare", _with_curves(f"/compare?{compared}", is_log=True), until="[data-curves]"),
        Scene("composer", _compose, height=1018, until=None),
        Scene("image-review", _review, until="section[aria-labelledby=warn-title]"),
        Scene("endpoint", _at(f"/endpoints/{NAME}"), until="[role=region][aria-labelledby=queue-title]"),
    )
    complaints: list[str] = []
    for scene in (scene for scene in scenes if only in scene.name):
        visitor = Visitor(chromium, cluster.service.url, dark=scene.dark, width=WIDTH, height=scene.height)
        visitor.sign_in("alice", people.PASSWORD)
        scene.go(visitor)
        visitor.page.wait_for_timeout(2500)  # curves, logs and YAML come after the page
        path = folder / f"{scene.name}.png"
        visitor.page.screenshot(path=path, full_page=scene.until is not None, clip=_clip(visitor, scene.until))
        shrink(path)
        size = path.stat().st_size
        print(f"{path}  {size / 1024:.0f} KiB", flush=True)
        complaints += [f"{scene.name}: {text}" for text in visitor.complaints]
        complaints += [f"{scene.name}: {size / 1024:.0f} KiB"] if size > MANY else []
        visitor.context.close()
    for line in complaints:
        print(f"complaint: {line}", file=sys.stderr)
    return 1 if complaints else 0


def _clip(visitor: Visitor, until: str | None) -> dict[str, float] | None:
    if not until:
        return None
    box = visitor.page.locator(until).bounding_box()
    assert box is not None, f"{until} is not on {visitor.page.url}"
    scrolled = visitor.page.evaluate("window.scrollY")
    return {"x": 0, "y": 0, "width": WIDTH, "height": box["y"] + box["height"] + scrolled + 16}


def _at(path: str) -> Callable[[Visitor], object]:
    return lambda visitor: visitor.page.goto(path)


def _table(visitor: Visitor) -> None:
    """Columns that have room beside each other in a picture of this width."""
    visitor.page.goto("/tasks")
    visitor.page.locator("#columns > summary").click()
    for title in ("Owner", "Log Path"):
        visitor.page.locator("#columns").get_by_label(title).uncheck()
    visitor.press("Show these")
    visitor.page.get_by_role("columnheader", name="Owner").wait_for(state="detached")


def _with_curves(path: str, *, is_log: bool = False) -> Callable[[Visitor], object]:
    """A page whose charts are those that say something."""

    def go(visitor: Visitor) -> None:
        visitor.page.goto(path)
        choice = visitor.page.locator(".choose")
        choice.locator("summary").click()
        for each in choice.locator("li").all():
            if each.inner_text().strip() not in CHARTS:
                each.get_by_role("checkbox").uncheck()
        choice.locator("summary").click()
        if is_log:
            visitor.page.get_by_label("Logarithmic y").check()
        visitor.page.mouse.move(0, 0)
        visitor.page.evaluate("window.scrollTo(0, 0)")

    return go


def _compose(visitor: Visitor) -> None:
    page = visitor.page
    page.goto("/compose")
    page.get_by_label("Task type").select_option(label="Distributed training")
    page.get_by_label("Endpoint").select_option(value=NAME)
    page.locator("select[name=partition]").select_option(value="gpu")
    page.get_by_label("Project").select_option(value="pde")
    page.get_by_label("GPU type").select_option(index=1)
    visitor.fill(Task_name="burgers-large", Number_of_nodes="2", Processes_per_node="4", GPUs_per_node="4")
    visitor.fill(CPUs_per_node="32", Memory_per_node="128", Walltime="12h", Longest_in_all="2d")
    visitor.fill(Command="python train.py\n", Dataset="/scratch/alice/burgers")
    visitor.fill(Variables="EPOCHS=400\nTRAIN_SAMPLES=65536", Outputs="model.pt\nresult.json")
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")


def _review(visitor: Visitor) -> None:
    page = visitor.page
    page.goto("/image-builder")
    visitor.press("New image")
    page.get_by_role("radio", name=NAME).check()
    visitor.press("Next")
    visitor.fill(Image_name="pde-torch")
    page.get_by_role("radio", name="PyTorch").check()
    visitor.press("Next")
    visitor.fill(Python_packages="neuraloperator==1.0.2\nh5py\neinops", System_packages="git\nlibhdf5-dev")
    visitor.press("Next")
    visitor.fill(Environment_variables="OMP_NUM_THREADS=8")
    visitor.press("Next")
    visitor.fill(Validation_command='python -c "import torch, neuralop, h5py"')
    visitor.press("Next")
    page.get_by_role("heading", name="What is built").wait_for()


if __name__ == "__main__":
    sys.exit(main())
