"""GET /dashboard: how everything of somebody's stands, what needs them, and what to do next."""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from diamond.server.hosts import base_url
from diamond.server.services import endpoints, overview, quotas
from diamond.server.services.overview import Progress
from diamond.server.web import activity, endpoint_facts
from diamond.server.web.forms import Visitor
from diamond.server.web.pages import ctx_of, page_router, settings_of, show

router = page_router()
_MAX_CARDS = 8


class Step(NamedTuple):
    """One of the first steps: what it is, why, and where it is done."""

    title: str
    text: str
    path: str
    action: str
    done: bool


@router.api_route("/dashboard", methods=["GET", "HEAD"])
def dashboard(request: Request, who: Visitor) -> Response:
    ctx = ctx_of(request)
    assert who.user_id is not None
    places = endpoints.list_endpoints(ctx, who.user_id)
    standing = quotas.list_quotas(ctx, who.user_id)
    multi_user = settings_of(request).multi_user
    done = overview.progress(ctx, who.user_id, places, invites=multi_user and who.is_admin)
    return show(
        request,
        "dashboard.html",
        who=who,
        counts=overview.counts(ctx, who.user_id),
        concerns=[activity.line_of_concern(one) for one in overview.concerns(ctx, who.user_id, places, standing)],
        recent=[activity.line_of(one) for one in overview.recent(ctx, who.user_id)],
        endpoints=[endpoint_facts.card_of(one) for one in places[:_MAX_CARDS]],
        more_endpoints=max(0, len(places) - _MAX_CARDS),
        quota=standing[0],
        steps=[] if done.is_done else _steps(done),
        url=base_url(request),
    )


def _steps(done: Progress) -> list[Step]:
    found = [
        Step(
            "Connect an endpoint",
            "A cluster, or any machine of yours, where tasks shall run. You paste one line there.",
            "/endpoints/new",
            "Add an endpoint",
            done.connected,
        ),
        Step(
            "Run a first task",
            "Any command will do: fill in a form, or take a template that runs as it is.",
            "/compose",
            "Compose a task",
            done.ran,
        ),
        Step(
            "Build an image",
            "The software your tasks need, made once and used again, in six steps.",
            "/image-builder",
            "Build an image",
            done.built,
        ),
    ]
    if done.invited is not None:
        found.append(
            Step(
                "Invite somebody",
                "People you work with get an account of their own, and share what you choose to.",
                "/users",
                "Invite people",
                done.invited,
            )
        )
    return found
