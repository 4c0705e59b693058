"""The Image Builder: drafts of images, each described in six steps, and built from the last of them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query
from starlette.requests import Request
from starlette.responses import Response

from diamond.core.codec import encode
from diamond.core.errors import Conflict, DiamondError, InvalidInput, NotFound, TooLarge
from diamond.core.image_views import DraftStep, FieldError, ImageDraft
from diamond.core.recipes import BUILDERS, parse_files
from diamond.server.services import build_places, form_keys, image_drafts, image_files, image_search, images
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.web import image_forms
from diamond.server.web.forms import Fields, Form, Visitor, once_of
from diamond.server.web.image_forms import BY_KEY, BY_PATH, STEPS, Step
from diamond.server.web.pages import ctx_of, page_router, show, to
from diamond.server.web.uploads import MAX_FILES_BYTES, files_of, large_form
from diamond.texts import packages

router = page_router()
_NOTICES = {
    "removed": "The draft is removed.",
    "already": "That was done already. The draft it made is not there any more.",
    "saved": "Saved. The draft stays here until you remove it.",
    "split": "The packages of what you pasted are in the fields below; variables are in step 4.",
}
_MAX_BASES = 200
_LARGE = "bring in large files with the command line: `files` in a recipe for `diamond image build`"
_BUILDERS = [("auto", "The best one there"), *((name, name) for name in BUILDERS)]


def _notice(request: Request) -> str:
    return _NOTICES.get(request.query_params.get("done", ""), "")


@router.api_route("/image-builder", methods=["GET", "HEAD"])
def drafts_page(request: Request, who: Visitor) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    found = image_drafts.list_drafts(ctx, who.user_id)
    rows = [{"draft": each, "next": _first_open(each), **_named(each)} for each in found]
    places = build_places.places(ctx, who.user_id)
    return show(request, "image_builder.html", who=who, rows=rows, machines=places, notice=_notice(request))


@router.post("/image-builder")
def new_draft(request: Request, who: Visitor, form: Fields) -> Response:
    """Empty, or with the recipe of an image (`image`), for an endpoint (`endpoint`)."""
    assert who.user_id is not None
    ctx = ctx_of(request)
    recipe: Any = None
    if wanted := form.get("image", ""):
        image = images.get(ctx, who.user_id, wanted)
        recipe = encode(image.recipe) | {"name": image.name}
    once = once_of(form)
    try:
        draft = image_drafts.create(ctx, who.user_id, recipe, once=once)
    except Conflict:
        made = form_keys.made_by(ctx, who.user_id, once)
        is_there = any(each.id == made for each in image_drafts.list_drafts(ctx, who.user_id))
        return to(f"/image-builder/{made}" if is_there else "/image-builder?done=already")
    if endpoint := form.get("endpoint", ""):
        contents = {**draft.steps[0].contents, "endpoint": endpoint}
        image_drafts.save(ctx, who.user_id, draft.id, "endpoint", contents, version=draft.version)
    start = "dependencies" if recipe is not None else "base" if endpoint else "endpoint"
    return to(f"/image-builder/{draft.id}/{start}")


@router.api_route("/image-builder/{draft_id}", methods=["GET", "HEAD"])
def continue_draft(request: Request, who: Visitor, draft_id: str) -> Response:
    assert who.user_id is not None
    draft = image_drafts.get(ctx_of(request), who.user_id, draft_id)
    return to(f"/image-builder/{draft.id}/{_first_open(draft).path}")


@router.post("/image-builder/{draft_id}/delete")
def remove_draft(request: Request, who: Visitor, draft_id: str) -> Response:
    assert who.user_id is not None
    image_drafts.remove(ctx_of(request), who.user_id, draft_id)
    return to("/image-builder?done=removed")


@router.post("/image-builder/{draft_id}/submit")
def submit(request: Request, who: Visitor, draft_id: str, form: Fields) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    try:
        made, _ = image_drafts.submit(ctx, who.user_id, draft_id, version=_version(form))
    except NotFound:
        raise
    except DiamondError as error:
        shown = error
        if isinstance(error, Conflict):
            hint = "what is below is how it is now; look through it, then build it"
            shown = Conflict("the draft was changed in another window or by somebody else", hint=hint)
        draft = image_drafts.get(ctx, who.user_id, draft_id)
        return _page(request, who, draft, BY_KEY["review"], status=error.status, problem=shown)
    if made.cached:
        return to(f"/images/{made.image.id}?done=cached")
    return to(f"/images/{made.image.id}/log")


@router.api_route("/image-builder/{draft_id}/{step}", methods=["GET", "HEAD"])
def step_page(request: Request, who: Visitor, draft_id: str, step: str, done: Annotated[str, Query()] = "") -> Response:
    assert who.user_id is not None
    here = _step(step)
    draft = image_drafts.get(ctx_of(request), who.user_id, draft_id)
    return _page(request, who, draft, here, notice=_NOTICES.get(done, ""))


@router.post("/image-builder/{draft_id}/{step}", dependencies=[Depends(large_form)])
def save_step(request: Request, who: Visitor, draft_id: str, step: str, form: Fields) -> Response:
    """Keeps what was typed and goes where the button says: `next`, `stay`, `split`, or another step by its name."""
    assert who.user_id is not None
    ctx, here, go = ctx_of(request), _step(step), form.get("go", "next")
    try:
        draft = image_drafts.get(ctx, who.user_id, draft_id)
    except NotFound:
        if "as_new" not in form:
            blank = ImageDraft(id=draft_id, version=0, steps=tuple(DraftStep(name=each.key) for each in STEPS))
            return _page(request, who, blank, here, status=404, form=form, is_gone=True)
        draft = image_drafts.create(ctx, who.user_id)
        draft_id, form = draft.id, form | {"version": str(draft.version)}
    before = _of(draft, here)
    contents, errors = image_forms.contents_of(here.key, form, before.contents)
    envs: dict[str, str] = {}
    if go == "split" and here.key == "dependencies" and not errors:
        try:
            contents, envs = _with_pasted(contents, form.get("paste", ""))
        except InvalidInput as error:
            errors["paste"] = FieldError(field="paste", message=error.message, hint=error.hint)
    if here.key == "dependencies" and not errors:
        try:
            contents = _with_sent(request, who.user_id, contents, form.get("target", "").strip())
        except DiamondError as error:
            errors["target"] = FieldError(field="target", message=error.message, hint=error.hint)
    if errors:
        return _page(request, who, draft, here, status=422, form=form, errors=errors)
    try:
        if contents != before.contents or here.key == "base":
            draft = image_drafts.save(ctx, who.user_id, draft_id, here.key, contents, version=_version(form))
        if envs:
            step_4 = _of(draft, BY_KEY["envs"]).contents
            added = {"envs": {**envs, **(step_4.get("envs") or {})}}
            draft = image_drafts.save(ctx, who.user_id, draft_id, "envs", added, version=draft.version)
    except Conflict:
        draft = image_drafts.get(ctx, who.user_id, draft_id)
        return _page(request, who, draft, here, status=409, form=form, is_late=True)
    except (InvalidInput, TooLarge) as error:
        return _page(request, who, draft, here, status=error.status, form=form, problem=error)
    if go in ("next", "split") and _of(draft, here).errors:
        return _page(request, who, draft, here, status=422)
    if go == "split":
        return to(f"/image-builder/{draft.id}/{here.path}?done=split")
    if go in BY_PATH:
        return to(f"/image-builder/{draft.id}/{go}")
    if go == "stay":
        return to(f"/image-builder/{draft.id}/{here.path}?done=saved")
    return to(f"/image-builder/{draft.id}/{STEPS[min(STEPS.index(here) + 1, len(STEPS) - 1)].path}")


def _with_pasted(contents: dict[str, Any], text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields with the packages of a pasted file below what is there, each once; and the variables it sets."""
    found = packages.split(text, "what you pasted")
    added = dict(contents)
    for name in ("conda", "channels", "pip", "constraints"):
        lines = str(added.get(name, "")).splitlines()
        lines += [line for line in getattr(found, name) if line not in lines]
        if lines:
            added[name] = "\n".join(lines)
    return added, found.envs


def _with_sent(request: Request, user_id: str, contents: dict[str, Any], target: str) -> dict[str, Any]:
    """The fields with a file that came along, to be put at `target` in the image."""
    sent = next((each for each in files_of(request) if each.field == "upload"), None)
    if sent is None and not target:
        return contents
    if sent is None:
        raise InvalidInput("no file was chosen", hint="choose the file that should be there, or leave the path empty")
    if sent.size > MAX_FILES_BYTES:
        raise TooLarge(f"the file has {sent.size} bytes; at most {MAX_FILES_BYTES} are allowed", hint=_LARGE)
    known = contents.get("files") or {}
    path = next(iter(parse_files({target or f"/opt/{sent.name}": "x"})))
    return contents | {"files": {**known, path: image_files.one_file(ctx_of(request), user_id, sent.name, sent.read())}}


def _page(
    request: Request,
    who: Identity,
    draft: ImageDraft,
    here: Step,
    *,
    status: int = 200,
    form: Form | None = None,
    is_late: bool = False,
    is_gone: bool = False,
    **values: Any,
) -> Response:
    """A step with what is in the draft, or with what somebody typed who is told something about it first."""
    ctx = ctx_of(request)
    assert who.user_id is not None
    stored = image_forms.typed_of(here.key, _of(draft, here).contents)
    typed = (
        stored
        if form is None
        else stored | {"paste": ""} | {name: form.get(name, "") for name in (*stored, "paste", "target")}
    )
    if "errors" not in values:
        values["errors"] = image_forms.errors_by_field(() if is_late else _of(draft, here).errors)
    theirs = {name: value for name, value in stored.items() if is_late and value != typed[name].replace("\r\n", "\n")}
    places = build_places.places(ctx, who.user_id)
    wanted = _of(draft, BY_KEY["endpoint"]).contents.get("endpoint", "")
    place = next((each for each in places if each.name == wanted), None)
    number = STEPS.index(here)
    return show(
        request,
        f"image_step_{here.path}.html",
        who=who,
        status=status,
        draft=draft,
        now_at=here,
        number=number + 1,
        before=STEPS[number - 1] if number else None,
        steps=[(step, _of(draft, step)) for step in STEPS],
        typed={"paste": "", "target": "", **typed},
        files=_of(draft, here).contents.get("files") or {},
        theirs=theirs,
        is_late=is_late,
        is_gone=is_gone,
        title=_named(draft)["name"],
        **_choices(ctx, who.user_id, draft, here, places, place),
        **values,
    )


def _choices(
    ctx: Context,
    user_id: str,
    draft: ImageDraft,
    here: Step,
    places: list[build_places.Place],
    place: build_places.Place | None,
) -> dict[str, Any]:
    """What a step offers to choose from."""
    found: dict[str, Any] = {
        "machines": places,
        "place": place,
        "builders": _builders(places, place),
        "drop": image_forms.DROP,
    }
    if here.key == "base":
        ready = image_search.search(ctx, user_id, image_search.Filters(state="READY", sort="name"), size=_MAX_BASES)
        found["bases"] = build_places.suggested(place.gpus if place else ())
        names = [f"image:{each.name if each.is_mine else f'{each.owner}/{each.name}'}" for each in ready.images]
        chosen = str(_of(draft, here).contents.get("base", ""))
        if chosen.startswith("image:") and chosen not in names:
            names.insert(0, chosen)
        found["images"] = [(name, name.removeprefix("image:")) for name in names]
    if here.key == "review":
        found["problems"] = [
            (BY_KEY[step.name], error) for step in draft.steps if step.name != "review" for error in step.errors
        ]
        found["missing"] = [BY_KEY[s.name] for s in draft.steps if not s.done and not s.errors and s.name != "review"]
        plan = draft.plan
        at = next((each for each in places if plan is not None and each.name == plan.endpoint), None)
        found |= {"plan": plan, "at": at, "warnings": build_places.warnings(plan.recipe, at) if plan else []}
    return found


def _builders(places: list[build_places.Place], place: build_places.Place | None) -> list[tuple[str, str]]:
    """Those that the chosen endpoint has (or any, while none is chosen) first; the others say that they are absent."""
    there = {name for each in ([place] if place else places) for name in each.builders}
    lacks = f"not at {place.name}" if place else "at none of your endpoints"
    first, *named = _BUILDERS
    if not there:  # nothing is known of it yet
        return _BUILDERS
    found = [each for each in named if each[0] in there]
    return [first, *found, *((name, f"{name} ({lacks})") for name, _ in named if name not in there)]


def _step(path: str) -> Step:
    if path not in BY_PATH:
        raise NotFound(f"the builder has no step {path[:40]!r}", hint=f"steps: {', '.join(BY_PATH)}")
    return BY_PATH[path]


def _of(draft: ImageDraft, step: Step) -> DraftStep:
    return next(each for each in draft.steps if each.name == step.key)


def _first_open(draft: ImageDraft) -> Step:
    """Where to go on: the first step that is wrong or was not looked at, else the review."""
    for step in STEPS[:-1]:
        state = _of(draft, step)
        if state.errors or not state.done:
            return step
    return STEPS[-1] if _of(draft, BY_KEY["base"]).contents else STEPS[0]


def _named(draft: ImageDraft) -> dict[str, str]:
    base = _of(draft, BY_KEY["base"]).contents
    endpoint = _of(draft, BY_KEY["endpoint"]).contents.get("endpoint", "")
    return {
        "name": str(base.get("name") or "") or "Unnamed image",
        "base": str(base.get("base", "")),
        "at": str(endpoint),
    }


def _version(form: Form) -> int:
    text = form.get("version", "")
    return int(text) if text.isdecimal() and len(text) < 10 else 0
