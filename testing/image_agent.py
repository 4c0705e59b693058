"""An endpoint whose agent does what a test says about images, over the real protocol: for tests of the service."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from diamond.core.codec import encode
from diamond.core.endpoints import EndpointFacts
from diamond.core.images import (
    FACTS_FILE,
    FAILURE_FILE,
    LOCK_FILE,
    PAYLOAD_FILE,
    BuildFailure,
    ImageFacts,
    Lock,
    Package,
    StageRecord,
)
from diamond.core.reasons import Reason
from diamond.core.states import JobState
from diamond.core.tasks import Output
from diamond.core.wire import Hello, JobOrder, JobReport, Report, StreamChunk
from diamond.server.services import agents, endpoints, planning
from diamond.server.services.context import Context
from testing.proven import prove
from testing.uploads import upload

FACTS = EndpointFacts(
    scheduler="local",
    nodes=1,
    cpus_per_node=8,
    mem_bytes_per_node=8 * 1024**3,
    hostname="",
    architecture="x86_64",
    builders=("apptainer", "venv"),
    builds="any",
    image_root="/images",
    allows_others=True,
)
LOCK = Lock(packages=(Package(kind="pip", name="numpy", version="2.3.4"),), python="3.13.5", os="debian 13")


class ImageAgent:
    """Speaks for one endpoint, at which something has run before (`is_new`: nothing has). Nothing happens until a test
    says so."""

    def __init__(self, ctx: Context, user_id: str, name: str, *, is_new: bool = False, **facts: Any) -> None:
        self.ctx, self.name = ctx, name
        self.id = endpoints.create(ctx, user_id, name)[0].id
        if not is_new:
            prove(ctx, self.id)
        self.facts = replace(FACTS, hostname=f"{name}.example", **facts)
        self.hello()

    def hello(self) -> None:
        agents.hello(self.ctx, self.id, Hello(facts=self.facts), f"agt_{self.name}")

    def orders(self) -> list[JobOrder]:
        return list(agents.desired(self.ctx, self.id, self.ctx.epoch, 0, f"agt_{self.name}").orders)

    def order(self) -> JobOrder:
        (found,) = self.orders()
        return found

    def tell(self, job_id: str, state: JobState, *, log: bytes = b"", **fields: Any) -> None:
        report = Report(
            epoch=self.ctx.epoch,
            jobs=(JobReport(job_id=job_id, state=state, **fields),),
            streams=(StreamChunk.of(job_id, "log", 0, log),) if log else (),
        )
        agents.report(self.ctx, self.id, report, f"agt_{self.name}")

    def store(self, files: dict[str, bytes]) -> tuple[Output, ...]:
        """Outputs, uploaded."""
        made = []
        for path, data in files.items():
            sha256 = upload(self.ctx, self.id, data).removeprefix("sha256:")
            made.append(Output(path=path, size_bytes=len(data), sha256=sha256, stored=True))
        return tuple(made)

    def plan(self) -> None:
        """What the server does when it is woken; one conclusion may lead to the next."""
        for _ in range(3):
            planning.run_due(self.ctx)

    def image_facts(self, order: JobOrder, **fields: Any) -> ImageFacts:
        work = order.work
        assert work is not None
        known = ImageFacts(
            image_id=work.image_id,
            recipe_digest=work.recipe.digest if work.recipe else "",
            builder=work.builder,
            architecture=self.facts.architecture,
            digest=work.digest or "sha256:" + hashlib.sha256(f"{self.name} {order.job_id}".encode()).hexdigest(),
            size_bytes=1000,
            path=f"/images/store/{work.image_id}/image.sif",
            seconds=12.0,
            stages=(StageRecord(name="base", title="base image", seconds=12.0, key="0" * 32),),
        )
        return replace(known, **fields)

    def finish(self, order: JobOrder | None = None, **fields: Any) -> JobOrder:
        """Do what the order says, well."""
        order = order or self.order()
        assert order.work is not None
        files = {
            FACTS_FILE: json.dumps(encode(self.image_facts(order, **fields))).encode(),
            LOCK_FILE: json.dumps(encode(order.work.lock or LOCK)).encode(),
        }
        if order.work.action == "export":
            files[PAYLOAD_FILE] = f"payload of {order.work.image_id}".encode()
        if order.work.action in ("remove", "prune"):
            files = {}
        self.end(order, self.store(files))
        return order

    def end(self, order: JobOrder, outputs: tuple[Output, ...]) -> None:
        done = {"reason": Reason.COMPLETED, "exit_code": 0, "outputs": outputs}
        self.tell(order.job_id, JobState.SUCCEEDED, **done)
        self.plan()

    def fail(self, order: JobOrder | None = None, failure: BuildFailure | None = None, **fields: Any) -> JobOrder:
        order = order or self.order()
        files = {FAILURE_FILE: json.dumps(encode(failure)).encode()} if failure else {}
        said = {"reason": Reason.EXIT_NONZERO, "exit_code": 1, **fields}
        self.tell(order.job_id, JobState.FAILED, outputs=self.store(files), **said)
        self.plan()
        return order
