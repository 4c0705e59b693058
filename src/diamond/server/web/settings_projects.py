"""Settings, the tab Projects: those one is in, who else is, what they may do there, and what is shared."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diamond.core.accounts import Invitation
from diamond.core.errors import DiamondError, NotFound
from diamond.core.projects import Role
from diamond.server.services import endpoint_shares, endpoints, invitations, projects, quotas
from diamond.server.services.identity import Identity
from diamond.server.web import inviting
from diamond.server.web.forms import Fields, Form, Visitor, by_field, typed, unless_done
from diamond.server.web.pages import ctx_of, page_router, settings_of, show, to
from diamond.server.web.settings import me, told

router = page_router()
_NOTICES = {
    "created": "The project is made. Let people in.",
    "title": "The title is changed.",
    "member": "Saved: who is in the project, and what they may do.",
    "removed-member": "They are no longer in the project. What they have in it stays theirs, and stays in it.",
    "left": "You left the project.",
    "removed": "The project is removed. What was in it went to its owners' own projects.",
    "shared": "Members can now run tasks of this project there.",
    "asked": "The owners of the project are asked. Tasks go there once one of them approves.",
    "approved": "Approved: members can run tasks of this project there. They are told.",
    "declined": "Declined. Whoever asked is told.",
    "unshared": "Tasks of this project go there no more.",
    "withdrawn": "The invitation is withdrawn: its link works no more.",
}
ROLES = {
    Role.VIEWER: "sees what the project shares",
    Role.MEMBER: "launches in it, uses its endpoints and secrets",
    Role.OWNER: "also changes the project and who is in it",
}


@router.api_route("/settings/projects", methods=["GET", "HEAD"])
def projects_page(request: Request, who: Visitor) -> Response:
    return _list(request, who, notice=told(request, _NOTICES))


def _list(request: Request, who: Identity, *, status: int = 200, form: Form | None = None, **values: Any) -> Response:
    found = projects.list_projects(ctx_of(request), me(who))
    return show(request, "settings_projects.html", who=who, status=status, projects=found, form=typed(form), **values)


@router.post("/settings/projects")
def create_project(request: Request, who: Visitor, form: Fields) -> Response:
    try:
        made = projects.create(ctx_of(request), me(who), form.get("name", "").strip(), form.get("title", ""))
    except DiamondError as error:
        return _list(request, who, status=error.status, form=form, **by_field(error, ("name", "title")))
    return to(f"/settings/projects/{made.name}?done=created")


@router.api_route("/settings/projects/{project}", methods=["GET", "HEAD"])
def project_page(request: Request, who: Visitor, project: str) -> Response:
    return _detail(request, who, project, notice=told(request, _NOTICES))


def _detail(
    request: Request, who: Identity, name: str, *, status: int = 200, form: Form | None = None, **values: Any
) -> Response:
    ctx = ctx_of(request)
    found = projects.get(ctx, me(who), name)
    own = [each.name for each in endpoints.list_endpoints(ctx, me(who)) if each.owner == who.name]
    standing = [] if found.personal else [each for each in quotas.list_quotas(ctx, me(who)) if each.kind == "project"]
    is_owner = found.role is Role.OWNER and not found.personal
    invites = is_owner and settings_of(request).multi_user
    return show(
        request,
        "settings_project.html",
        who=who,
        status=status,
        project=found,
        is_owner=is_owner,
        may_share=found.role in Role.MEMBER.at_least and not found.personal,
        own_endpoints=own,
        unshared={name: name for name in own if name not in {each.endpoint for each in found.shares}},
        approved=[each for each in found.shares if each.approved_at is not None],
        waiting=[each for each in found.shares if each.approved_at is None],
        roles=ROLES,
        role_choices={role: f"{role}: {words}" for role, words in ROLES.items()},
        quota=next((each for each in standing if each.name == found.name), None),
        form=typed(form),
        invites=invites,
        may_invite=who.is_admin or ctx.identity.owners_invite,
        invitations=_invitations(request, who, name) if invites else [],
        sends_mail=inviting.sends_mail(request),
        **{"given": None, "is_invitation": False, **values},
    )


def _invitations(request: Request, who: Identity, project: str) -> list[Invitation]:
    return [each for each in invitations.list_invitations(ctx_of(request), me(who)) if each.project == project]


@router.post("/settings/projects/{project}/title")
def change_title(request: Request, who: Visitor, project: str, form: Fields) -> Response:
    try:
        projects.change(ctx_of(request), me(who), project, title=form.get("title", ""))
    except DiamondError as error:
        return _again(request, who, project, error, form, "title")
    return _to(project, "title")


@router.post("/settings/projects/{project}/members")
def set_member(request: Request, who: Visitor, project: str, form: Fields) -> Response:
    """Lets somebody in, or changes their role: the same to the services."""
    user, role = form.get("user", "").strip(), form.get("role", "")
    try:
        projects.set_member(ctx_of(request), me(who), project, user, role)
    except DiamondError as error:
        return _again(request, who, project, error, form, "user", "role")
    return _to(project, "member")


@router.post("/settings/projects/{project}/members/{user}/remove")
def remove_member(request: Request, who: Visitor, project: str, user: str) -> Response:
    """Owners take anybody out; everybody may leave."""
    try:
        projects.remove_member(ctx_of(request), me(who), project, user)
    except DiamondError as error:
        return _again(request, who, project, error)
    if user == who.name:  # the project is no longer theirs to look at
        return to("/settings/projects?done=left")
    return _to(project, "removed-member")


@router.post("/settings/projects/{project}/invitations")
def invite(request: Request, who: Visitor, project: str, form: Fields) -> Response:
    """Answers with the page itself: the link is shown this once, so there is no address for it."""
    projects.get(ctx_of(request), me(who), project)  # what is not theirs to see does not exist for them
    try:
        given = inviting.invite(request, who, form, project)
    except DiamondError as error:
        shown = by_field(error, inviting.FIELDS)
        again = unless_done(error, form)
        return _detail(request, who, project, status=error.status, form=again, is_invitation=again is not None, **shown)
    return _detail(request, who, project, given=given)


@router.post("/settings/projects/{project}/invitations/{invitation_id}/withdraw")
def withdraw(request: Request, who: Visitor, project: str, invitation_id: str) -> Response:
    projects.get(ctx_of(request), me(who), project)
    if invitation_id not in {each.id for each in _invitations(request, who, project)}:
        raise NotFound("there is no such open invitation", hint="it may have been used or withdrawn: reload the page")
    invitations.withdraw(ctx_of(request), me(who), invitation_id)
    return _to(project, "withdrawn")


@router.post("/settings/projects/{project}/endpoints")
def share_endpoint(request: Request, who: Visitor, project: str, form: Fields) -> Response:
    endpoint = form.get("endpoint", "")
    try:
        found = endpoint_shares.share(ctx_of(request), me(who), project, endpoint)
    except DiamondError as error:
        return _again(request, who, project, error, form, "endpoint")
    return _to(project, "shared" if endpoint in found.endpoints else "asked")


@router.post("/settings/projects/{project}/endpoints/{endpoint}/approve")
def approve_endpoint(request: Request, who: Visitor, project: str, endpoint: str, form: Fields) -> Response:
    """The form says whose the endpoint was when it was shown."""
    try:
        endpoint_shares.approve(ctx_of(request), me(who), project, endpoint, owner=form.get("owner"))
    except DiamondError as error:
        return _again(request, who, project, error)
    return _to(project, "approved")


@router.post("/settings/projects/{project}/endpoints/{endpoint}/decline")
def decline_endpoint(request: Request, who: Visitor, project: str, endpoint: str) -> Response:
    try:
        endpoint_shares.decline(ctx_of(request), me(who), project, endpoint)
    except DiamondError as error:
        return _again(request, who, project, error)
    return _to(project, "declined")


@router.post("/settings/projects/{project}/endpoints/{endpoint}/unshare")
def unshare_endpoint(request: Request, who: Visitor, project: str, endpoint: str) -> Response:
    try:
        endpoint_shares.unshare(ctx_of(request), me(who), project, endpoint)
    except DiamondError as error:
        return _again(request, who, project, error)
    return _to(project, "unshared")


@router.post("/settings/projects/{project}/remove")
def remove_project(request: Request, who: Visitor, project: str) -> Response:
    try:
        projects.remove(ctx_of(request), me(who), project)
    except DiamondError as error:
        return _again(request, who, project, error)
    return to("/settings/projects?done=removed")


def _again(
    request: Request, who: Identity, project: str, error: DiamondError, form: Form | None = None, *fields: str
) -> Response:
    """The project's page with the error; where the project itself is not theirs to see, that error alone."""
    return _detail(request, who, project, status=error.status, form=form, **by_field(error, fields))


def _to(project: str, done: str) -> Response:
    # Only names that the services know come here, and those are letters, digits, dots, dashes and underscores.
    return to(f"/settings/projects/{project}?done={done}")
