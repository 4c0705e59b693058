"""HTTP routes: thin over services. They parse, authorise, call, and write down the answer."""

from diamond.server.api import agent, blobs, bundles, endpoints, events, health, logs, metrics, outputs, tasks

ROUTERS = (
    tasks.router,
    logs.router,
    metrics.router,
    outputs.router,
    events.router,
    endpoints.router,
    bundles.router,
    blobs.router,
    agent.router,
    health.router,
)
