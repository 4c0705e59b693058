"""Routes of projects: who is in them, what they share; and how things change hands."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter
from starlette.responses import Response

from diamond.core.codec import decode, encode
from diamond.core.errors import Conflict, NotFound
from diamond.core.projects import Project, Transferred
from diamond.core.tasks import Task
from diamond.server.api.answers import Json
from diamond.server.api.documents import USER_FAILS, fails, returns, takes
from diamond.server.api.runtime import Administrator, Body, Ctx, Holder, User
from diamond.server.services import endpoint_shares, ownership, projects
from diamond.server.services.identity import Identity
from diamond.server.services.ownership import Giver

router = APIRouter(prefix="/api/v1", tags=["projects"])
_DETAIL = ("spec", "jobs", "outputs")


@dataclass(frozen=True, kw_only=True)
class ProjectList:
    projects: list[Project]


@dataclass(frozen=True, kw_only=True)
class NewProject:
    """`name`: lower-case letters, digits, dots, dashes and underscores, at most 63."""

    name: str
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class ProjectChange:
    title: str


@dataclass(frozen=True, kw_only=True)
class MemberRole:
    """`role`: "owner", "member" or "viewer"."""

    role: str


@dataclass(frozen=True, kw_only=True)
class Done:
    """Nothing more to say."""

    done: bool = True


@dataclass(frozen=True, kw_only=True)
class ProjectRemoval:
    """How many tasks and images went to their owners' own projects."""

    moved: int


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """`to`: the name of a user."""

    to: str


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """How many of each changed hands."""

    tasks: int
    images: int
    templates: int
    endpoints: int
    projects: int


@dataclass(frozen=True, kw_only=True)
class LiveTasks:
    tasks: list[Task]


def _me(identity: Identity) -> str:
    assert identity.user_id is not None  # Holder has looked
    return identity.user_id


def _giver(identity: Identity) -> Giver:
    return Giver(user_id=_me(identity), is_admin=identity.is_admin)


@router.get(
    "/projects",
    summary="List projects",
    description="Those you are in, by name; the first of yours is your own.",
    responses=returns(ProjectList, "The projects.") | USER_FAILS,
)
def list_projects(holder: Holder, ctx: Ctx) -> Response:
    return Json(ProjectList(projects=projects.list_projects(ctx, _me(holder))))


@router.post(
    "/projects",
    status_code=201,
    summary="Make a project",
    description="You are its first owner. Daily work: the scope `launch` is enough; letting people in needs `admin`.",
    responses=returns(Project, "The project.", status=201) | USER_FAILS | fails(Conflict),
    openapi_extra=takes(NewProject),
)
def create_project(user: User, ctx: Ctx, body: Body) -> Response:
    wanted = decode(NewProject, body, strict=True)
    made = projects.create(ctx, user, wanted.name, wanted.title)
    return Json(made, 201, {"Location": f"/api/v1/projects/{made.name}"})


@router.get(
    "/projects/{project}",
    summary="Look at a project",
    description="With its members and the endpoints shared with it.",
    responses=returns(Project, "The project.") | USER_FAILS | fails(NotFound),
)
def get_project(holder: Holder, ctx: Ctx, project: str) -> Response:
    return Json(projects.get(ctx, _me(holder), project))


@router.patch(
    "/projects/{project}",
    summary="Change a project",
    description="Its title. Owners can.",
    responses=returns(Project, "The project as it now is.") | USER_FAILS | fails(NotFound),
    openapi_extra=takes(ProjectChange),
)
def change_project(holder: Holder, ctx: Ctx, project: str, body: Body) -> Response:
    return Json(projects.change(ctx, _me(holder), project, title=decode(ProjectChange, body, strict=True).title))


@router.delete(
    "/projects/{project}",
    summary="Remove a project",
    description="Only without live tasks. What is in it goes to its owners' own projects; its secrets are gone.",
    responses=returns(ProjectRemoval, "It is gone.") | USER_FAILS | fails(NotFound, Conflict),
)
def remove_project(holder: Holder, ctx: Ctx, project: str) -> Response:
    return Json(ProjectRemoval(moved=projects.remove(ctx, _me(holder), project)))


@router.put(
    "/projects/{project}/members/{user}",
    summary="Let somebody in, or change their role",
    description="Owners can. Idempotent. The last owner stays one.",
    responses=returns(Project, "The project as it now is.") | USER_FAILS | fails(NotFound, Conflict),
    openapi_extra=takes(MemberRole),
)
def set_member(holder: Holder, ctx: Ctx, project: str, user: str, body: Body) -> Response:
    role = decode(MemberRole, body, strict=True).role
    return Json(projects.set_member(ctx, _me(holder), project, user, role))


@router.delete(
    "/projects/{project}/members/{user}",
    summary="Put somebody out",
    description="Owners can; everybody can put out themselves. What they have in it stays theirs, and stays in it; "
    "their endpoints are no longer shared with it.",
    responses=returns(Done, "They are out.") | USER_FAILS | fails(NotFound, Conflict),
)
def remove_member(holder: Holder, ctx: Ctx, project: str, user: str) -> Response:
    projects.remove_member(ctx, _me(holder), project, user)
    return Json(Done())


@router.post(
    "/projects/{project}/leave",
    summary="Leave a project",
    description="The same for yourself. Takes no body.",
    responses=returns(Done, "You are out.") | USER_FAILS | fails(NotFound, Conflict),
)
def leave_project(holder: Holder, ctx: Ctx, project: str) -> Response:
    projects.remove_member(ctx, _me(holder), project, holder.name)
    return Json(Done())


@router.put(
    "/projects/{project}/endpoints/{endpoint}",
    summary="Share an endpoint with a project",
    description="By the endpoint's owner, who must be a member. An owner of the project shares it at once; what a "
    "member shares waits in `shares` until an owner approves. Then members may run the project's tasks there, as far "
    "as the endpoint's own policy file lets them (`allow_others`). Idempotent; takes no body.",
    responses=returns(Project, "The project as it now is.") | USER_FAILS | fails(NotFound),
)
def share_endpoint(holder: Holder, ctx: Ctx, project: str, endpoint: str) -> Response:
    return Json(endpoint_shares.share(ctx, _me(holder), project, endpoint))


@router.post(
    "/projects/{project}/endpoints/{endpoint}/approve",
    summary="Approve of an endpoint",
    description="Let the project's tasks go to an endpoint that a member shares. Whoever owns it can read what is "
    "sent there, secrets included. Owners of the project can. `owner`: whose it is, as you saw it; 409 if it is "
    "another's by now. Idempotent; takes no body.",
    responses=returns(Project, "The project as it now is.") | USER_FAILS | fails(NotFound, Conflict),
)
def approve_endpoint(holder: Holder, ctx: Ctx, project: str, endpoint: str, owner: str | None = None) -> Response:
    return Json(endpoint_shares.approve(ctx, _me(holder), project, endpoint, owner=owner))


@router.post(
    "/projects/{project}/endpoints/{endpoint}/decline",
    summary="Decline an endpoint",
    description="Turn down what a member asked for; they are told. Owners of the project can. Takes no body.",
    responses=returns(Project, "The project as it now is.") | USER_FAILS | fails(NotFound, Conflict),
)
def decline_endpoint(holder: Holder, ctx: Ctx, project: str, endpoint: str) -> Response:
    return Json(endpoint_shares.decline(ctx, _me(holder), project, endpoint))


@router.delete(
    "/projects/{project}/endpoints/{endpoint}",
    summary="Share an endpoint no more",
    description="Or withdraw what waits to be approved. By the endpoint's owner, or an owner of the project. Jobs that "
    "run there go on.",
    responses=returns(Project, "The project as it now is.") | USER_FAILS | fails(NotFound),
)
def unshare_endpoint(holder: Holder, ctx: Ctx, project: str, endpoint: str) -> Response:
    return Json(endpoint_shares.unshare(ctx, _me(holder), project, endpoint))


# ---- changing hands ----------------------------------------------------------------------------------------------


_TO = returns(Transferred, "Whose it is now.") | USER_FAILS | fails(NotFound, Conflict)


@router.post(
    "/projects/{project}/transfer",
    summary="Give a project away",
    description="To a member of it, who becomes its owner; you stay a member. Administrators: to anybody.",
    responses=_TO,
    openapi_extra=takes(Transfer),
)
def transfer_project(holder: Holder, ctx: Ctx, project: str, body: Body) -> Response:
    to = decode(Transfer, body, strict=True).to
    return Json(Transferred(owner=ownership.transfer_project(ctx, _giver(holder), project, to)))


@router.post(
    "/tasks/{task_id}/transfer",
    summary="Give a task away",
    description="To a member of its project, once it has ended. Administrators: to anybody.",
    responses=_TO,
    openapi_extra=takes(Transfer),
)
def transfer_task(holder: Holder, ctx: Ctx, task_id: str, body: Body) -> Response:
    to = decode(Transfer, body, strict=True).to
    return Json(Transferred(owner=ownership.transfer_task(ctx, _giver(holder), task_id, to)))


@router.post(
    "/images/{image:path}/transfer",
    summary="Give an image away",
    description="To a member of its project, who finds it as NAME-from-OWNER: what others give must not stand for an "
    "image of one's own. Administrators: to anybody; then it keeps its name, where that is free.",
    responses=_TO,
    openapi_extra=takes(Transfer),
)
def transfer_image(holder: Holder, ctx: Ctx, image: str, body: Body) -> Response:
    to = decode(Transfer, body, strict=True).to
    return Json(ownership.transfer_image(ctx, _giver(holder), image, to))


@router.post(
    "/endpoints/{name}/transfer",
    summary="Give an endpoint away",
    description="To somebody who is in a project with you, while no job is live there. Its agent may no longer speak "
    "until it is enrolled anew. Administrators: to anybody.",
    responses=_TO,
    openapi_extra=takes(Transfer),
)
def transfer_endpoint(holder: Holder, ctx: Ctx, name: str, body: Body) -> Response:
    to = decode(Transfer, body, strict=True).to
    return Json(Transferred(owner=ownership.transfer_endpoint(ctx, _giver(holder), name, to)))


@router.post(
    "/users/{name}/hand-over",
    summary="Give all that somebody has to somebody else",
    description="For administrators, when somebody leaves: tasks, images, endpoints and owned projects. Nothing of "
    "theirs may be live.",
    responses=returns(HandedOver, "How many of each.") | USER_FAILS | fails(NotFound, Conflict),
    openapi_extra=takes(Transfer),
)
def hand_over(_admin: Administrator, ctx: Ctx, name: str, body: Body) -> Response:
    return Json(HandedOver(**ownership.hand_over(ctx, name, decode(Transfer, body, strict=True).to)))


# ---- for administrators ------------------------------------------------------------------------------------------


@router.get(
    "/admin/projects",
    summary="List everybody's projects",
    description="For administrators: those that are not one person's own, by name. Not who or what is in them.",
    responses=returns(ProjectList, "The projects.") | USER_FAILS,
)
def list_all_projects(admin: Administrator, ctx: Ctx) -> Response:
    return Json(ProjectList(projects=projects.list_all(ctx, admin)))


@router.get(
    "/admin/tasks",
    summary="List everybody's live tasks",
    description="For administrators: whose they are, where and since when they run; not what their owners wrote.",
    responses=returns(LiveTasks, "The tasks, newest first, at most 1000.") | USER_FAILS,
)
def live_tasks(_admin: Administrator, ctx: Ctx) -> Response:
    found = [encode(task) for task in ownership.live_tasks(ctx)]
    return Json({"tasks": [{key: value for key, value in task.items() if key not in _DETAIL} for task in found]})


@router.post(
    "/admin/tasks/{task_id}/cancel",
    summary="Stop anybody's task",
    description="For administrators. Idempotent; takes no body.",
    responses=returns(Task, "The task as it now stands.") | USER_FAILS | fails(NotFound),
)
def stop_any_task(_admin: Administrator, ctx: Ctx, task_id: str) -> Response:
    return Json(ownership.stop_any(ctx, task_id))
