"""HTTP routes: thin over services. They parse, authorise, call, and write down the answer."""

from diamond.server.api import (
    agent,
    blobs,
    bundles,
    endpoints,
    enrolment,
    events,
    health,
    image_drafts,
    images,
    logs,
    metrics,
    outputs,
    shells,
    tasks,
)

ROUTERS = (
    tasks.router,
    logs.router,
    shells.router,
    metrics.router,
    outputs.router,
    events.router,
    endpoints.router,
    enrolment.router,
    image_drafts.router,
    images.router,
    bundles.router,
    blobs.router,
    agent.router,
    shells.agent_router,
    health.router,
)
