"""A service that looks used: tasks that ran, failed, wait and run; people, projects, secrets, rules. All of it really
happened on it, but for images by the hundred: those are rows."""

from __future__ import annotations

import os
import sys

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.codec import encode
from diamond.core.ids import new_id
from diamond.core.images import BuildFailure, ImageFacts, ReplicaState
from diamond.core.recipes import Recipe
from diamond.server.store.identity_models import ProjectRow
from diamond.server.store.models import EndpointRow, ImageRow, ReplicaRow
from testing import people
from testing.service import Service

# A training loop as far as pages can tell: a loss that falls, an accuracy that rises, a line now and then.
_TRAIN = """
cat > train.py <<'PYTHON'
import math, os, random, sys, time
from diamond.train import log
random.seed(int(os.environ["SEED"]))
rate, epochs, pause = float(os.environ["RATE"]), int(os.environ["EPOCHS"]), float(os.environ["PAUSE"])
for step in range(epochs):
    loss = 2.3 * math.exp(-rate * step) + 0.12 + random.gauss(0, 0.02)
    log(step=step, loss=loss, accuracy=1 - 0.9 * math.exp(-rate * step) + random.gauss(0, 0.005))
    if step % 10 == 0:
        print(f"epoch {step:4d}  loss {loss:.4f}", flush=True)
    time.sleep(pause)
print("done")
PYTHON
exec "$PYTHON" train.py
"""


def train(
    name: str, *, seed: int = 1, rate: float = 0.03, epochs: int = 200, pause_s: float = 0.0
) -> dict[str, object]:
    return {
        "name": name,
        "run": _TRAIN,
        "envs": {
            "SEED": str(seed), "RATE": str(rate), "EPOCHS": str(epochs), "PAUSE": str(pause_s),
            "PYTHON": sys.executable,
        },
        "resources": {"infra": "local"},
    }  # fmt: skip


def fill_tasks(service: Service) -> list[str]:
    """Tasks in every state that one machine can bring about; the ids of those that ended, best first."""
    with service.client() as client:
        ended = [
            client.tasks.create(train(f"unet-rate-{rate}", seed=seed, rate=rate)).id
            for seed, rate in enumerate((0.01, 0.03, 0.08))
        ]
        failed = client.tasks.create(
            {"name": "segment-lungs", "run": "echo 'reading /data/lungs'; echo 'no such file' >&2; exit 3"}
        )
        odd = client.tasks.create({"name": "<b>naïve</b> שלום", "run": "echo '<script>alert(1)</script>'"})
        for task_id in (*ended, failed.id, odd.id):
            client.tasks.wait(task_id, timeout_s=180)
        client.tasks.create(train("burgers-fno", seed=7, rate=0.02, epochs=100_000, pause_s=0.2))
        whole = {"infra": "local", "cpus": os.cpu_count() or 1}
        client.tasks.create({"name": "waits-for-its-turn", "run": "true", "resources": whole})
        stopped = client.tasks.create({"name": "stopped-early", "run": "sleep 600"})
        client.tasks.cancel(stopped.id)
        client.secrets.set("HF_TOKEN", "not a real one", project=None)
        client.projects.create("climate", title="Surrogates for climate models")
        client.tokens.create("night runs", scopes=["read", "launch"])
        client.notices.create("webhook", "https://hooks.example.org/diamond", ["image.failed", "endpoint.offline"])
    return ended


def fill_people(service: Service) -> None:
    """Colleagues, an invitation, limits; and entries in the audit log about all of it."""
    admin = people.ClientConfig.load(service.home)
    assert admin is not None
    for name in ("bob", "carol", "dave"):
        people.invite(admin, name)
    with service.client() as client:
        client.accounts.change(full_name="Alice Example", email="alice@example.org")
        client.projects.create("climate", title="Surrogates for climate models")
        for name, role in (("bob", "member"), ("carol", "viewer")):
            client.projects.set_member("climate", name, role)
        client.accounts.set_admin("carol")
        client.accounts.disable("dave")
        client.accounts.invite(name="erin", email="erin@example.org", project="climate")


def fill_images(service: Service, count: int = 300) -> None:
    """Images of the first endpoint's owner, of all ages, sizes and states. Building them would take a day."""
    engine = sa.create_engine(f"sqlite:///{service.home.server / 'diamond.db'}")
    with Session(engine) as session, session.begin():
        place = session.scalars(sa.select(EndpointRow).order_by(EndpointRow.id)).first()
        assert place is not None, "images are somewhere"
        home = session.scalars(sa.select(ProjectRow.id).where(ProjectRow.personal_of == place.owner_id)).one_or_none()
        for number in range(count):
            image, replica = _image(number, place, home)
            session.add(image)
            session.flush()
            session.add(replica)
    engine.dispose()


_KINDS = ("pytorch", "jax", "openfoam", "segment", "surrogate")
_STATES = (*[ReplicaState.READY] * 8, ReplicaState.FAILED, ReplicaState.GONE)


def _image(number: int, place: EndpointRow, project_id: str | None) -> tuple[ImageRow, ReplicaRow]:
    kind, state, at = _KINDS[number % len(_KINDS)], _STATES[number // 5 % len(_STATES)], 1.75e9 + number * 40_000.0
    image = ImageRow(
        id=new_id("img"), owner_id=place.owner_id, name=f"{kind}-{number:03d}", visibility="private", labels={},
        recipe=encode(Recipe(base="host", pip=(f"{kind}==1.{number}",))), recipe_digest=f"sha256:{number:064x}",
        created_at=at, project_id=project_id,
    )  # fmt: skip
    facts = ImageFacts(
        image_id=image.id, recipe_digest=image.recipe_digest, builder="venv", architecture="x86_64",
        digest=f"sha256:{number:064x}", size_bytes=(1 + number % 37) * 163 * 2**20, path=f"/images/{image.id}",
        built_at=at, seconds=30.0 + number, num_packages=12 + number % 200, python=f"3.{10 + number % 4}.2",
    )  # fmt: skip
    failure = BuildFailure(stage="Python packages", message=f"there is no {kind}==1.{number}")
    is_made = state is ReplicaState.READY
    return image, ReplicaRow(
        id=new_id("rep"), image_id=image.id, endpoint_id=place.id, state=state.value, origin="built",
        facts=encode(facts) if is_made else None, failure=encode(failure) if state is ReplicaState.FAILED else None,
        digest=facts.digest if is_made else "", size_bytes=facts.size_bytes if is_made else 0, created_at=at,
        settled_at=at + facts.seconds, ready_at=at + facts.seconds if is_made else None,
    )  # fmt: skip
