"""The Job Composer: a form and the text of a task file side by side, a dry run, and the launch.

Every button sends the whole page; whatever is wrong with it, it comes back with everything that was on it.
"""

from __future__ import annotations

import hashlib
import json
import secrets as chance
from dataclasses import dataclass, field
from typing import Any

from fastapi import Depends
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diamond.core.bundles import BundleFile
from diamond.core.durations import format_duration
from diamond.core.errors import DiamondError, InvalidInput, TooLarge
from diamond.core.fields import MAX_NAME
from diamond.core.sbatch.importing import Note, import_sbatch
from diamond.core.tasks import TaskSpec
from diamond.server.auth import SAFE_METHODS
from diamond.server.services import tasks, templates, uploads
from diamond.server.services.context import Context
from diamond.server.services.identity import Identity
from diamond.server.web import composing, offering
from diamond.server.web.composing import Sheet
from diamond.server.web.forms import Fields, Form, Visitor
from diamond.server.web.pages import PART_HEADER, ctx_of, page_router, sentence, settings_of, show, to
from diamond.server.web.uploads import MAX_FILES, MAX_FILES_BYTES, files_of, large_form
from diamond.texts import tasktext

router = page_router()
SCRIPT_HEADER = "Diamond-Script"  # our script asks, and wants to be told where to go on
_MOST_SHOWN = 200
_MOST_TEMPLATES = 6  # the newest; the rest is in the gallery
_DROP = "drop:"
# Or Back to an answer of this page, a dry run without scripts, would be the browser's error. Signing out clears it.
_FOR_BACK = {"Cache-Control": "private, max-age=900"}
LARGE = [Depends(large_form)]


@dataclass(kw_only=True)
class Desk:
    """What the page shows beside the sheet."""

    sheet: Sheet
    plan: dict[str, Any] | None = None
    notes: tuple[Note, ...] = ()
    notice: str = ""
    problem: DiamondError | None = None
    errors: dict[str, DiamondError] = field(default_factory=dict)
    text_error: DiamondError | None = None
    template: Form = field(default_factory=dict)  # what was typed to save it as a template
    status: int = 200

    def blame(self, error: DiamondError) -> None:
        """Show an error where it belongs: beside its field, beside the text, or at the top."""
        self.status = error.status
        name = composing.field_of(error) if isinstance(error, InvalidInput) else ""
        if name:
            self.errors[name] = error
        elif f"({composing.TEXT_NAME}, line" in error.message or error.message.startswith(composing.TEXT_NAME):
            self.text_error = error
        else:
            self.problem = error

    def blame_also(self, problems: list[InvalidInput]) -> None:
        """What else is wrong, beside its field, so that nobody is told of one mistake at a time."""
        for error in problems:
            if name := composing.field_of(error):
                self.errors.setdefault(name, error)


@router.api_route("/compose", methods=["GET", "HEAD"])
def compose_page(request: Request, who: Visitor) -> Response:
    """An empty page, or one that begins with a task (`from`) or a template (`template`)."""
    assert who.user_id is not None
    asked = request.query_params
    ctx = ctx_of(request)
    if task_id := asked.get("from", ""):
        spec = tasks.get(ctx, who.user_id, task_id).spec
        assert spec is not None
        return _show(request, who, Desk(sheet=Sheet.of_fields(tasktext.fields_of(spec))))
    if ref := asked.get("template", ""):
        return _show(request, who, Desk(sheet=Sheet.of_text(templates.get(ctx, who.user_id, ref).text)))
    place = asked.get("endpoint", "")[:100]
    image = asked.get("image", "")[:200]
    pool = asked.get("pool", "").strip()[:MAX_NAME]
    resources = {key: value for key, value in (("infra", place), ("image_id", image)) if value}
    fields = {key: value for key, value in (("pool", pool), ("resources", resources)) if value}
    return _show(request, who, Desk(sheet=Sheet.of_fields(fields)))


@router.post("/compose", dependencies=LARGE)
def compose(request: Request, who: Visitor, form: Fields) -> Response:
    """What each button does; see templates/compose.html."""
    assert who.user_id is not None
    ctx = ctx_of(request)
    desk = Desk(sheet=_sheet(form))
    action = form.get("do", "plan")
    try:
        if action in ("plan", "launch", "save") and form.get("type") == composing.TEMPLATE:
            raise InvalidInput(
                "no template is chosen yet",
                hint="use one of those below, or choose another task type to go on with what you typed",
                field="type",
            )
        _take_files(request, who.user_id, form, desk)
        if action == "form":
            desk.sheet.take_form()
        elif action == "text":
            desk.sheet.take_text()
        elif action == "plan":
            desk.plan = _plan(ctx, who.user_id, desk.sheet.settle())
        elif action == "launch":
            return _launch(request, who.user_id, form, desk.sheet.settle())
        elif action == "save":
            desk.template = form
            return _save(ctx, who.user_id, form, desk.sheet.settle())
    except DiamondError as error:
        if action == "save" and error.field in ("name", "description", "visibility") and not _of_task(error, desk):
            desk.errors[f"template_{error.field}"] = error
            desk.status = error.status
        else:
            desk.blame(error)
            if isinstance(error, InvalidInput) and action in ("plan", "launch", "save") and "type" not in desk.errors:
                desk.blame_also(desk.sheet.problems())
        desk.template = form if action == "save" else {}
    return _show(request, who, desk)


@router.post("/compose/sync", dependencies=LARGE)
def sync(request: Request, who: Visitor, form: Fields) -> Response:
    """For our script: the other side of what was typed, or what is wrong with it. Writes nothing."""
    desk = Desk(sheet=_sheet(form))
    in_step = False
    try:
        if form.get("side") == "text":
            desk.sheet.take_text()
        else:
            desk.sheet.take_form()
        in_step = True
        raw = composing.read(desk.sheet.text)
        for wrong in composing.wrong_in(raw if raw.get("run") else {**raw, "run": "true"}):
            name = composing.field_of(wrong)
            if name:
                desk.errors.setdefault(name, wrong)
            else:
                desk.problem = desk.problem or wrong
    except DiamondError as error:
        desk.blame(error)
        desk.blame_also([each for each in desk.sheet.problems() if each.field != "run"])
    said = {name: _said(error) for name, error in desk.errors.items()}
    general = desk.text_error or desk.problem
    return JSONResponse(
        {
            "values": desk.sheet.values,
            "text": desk.sheet.text,
            "base": desk.sheet.base,
            "errors": said,
            "in_step": in_step,  # whether the other side could be written
            "text_error": _said(general) if general else "",
        },
        headers={"Cache-Control": "no-store"},
    )


@router.api_route("/compose/import", methods=["GET", "HEAD"])
def import_page(request: Request, who: Visitor) -> Response:
    return show(request, "compose_import.html", who=who, script="")


@router.post("/compose/import", dependencies=LARGE)
def import_script(request: Request, who: Visitor, form: Fields) -> Response:
    """A batch script, pasted or as a file, as a task on the composer's page."""
    text = form.get("script", "")
    sent = [file for file in files_of(request) if file.field == "file"]
    name = ""
    try:
        data = text.encode()
        if sent and not text.strip():
            data, name = sent[0].read(), sent[0].name.rsplit("/", 1)[-1].rpartition(".")[0]
        task = import_sbatch(data, name=name, workdir=None)
    except DiamondError as error:
        shown = type(error)(error.message, hint=error.hint, field="script")
        return show(request, "compose_import.html", who=who, status=error.status, script=text, errors={"script": shown})
    desk = Desk(sheet=Sheet.of_fields(task.fields), notes=task.to_check)
    desk.notice = "The script is imported. Check what is noted below, then try a dry run."
    return _show(request, who, desk)


def _said(error: DiamondError) -> str:
    return f"{sentence(error.message)} {sentence(error.hint)}".strip().replace("`", "")


def _sheet(form: Form) -> Sheet:
    values = {name: form[name] for name in composing.FIELDS if name in form}
    return Sheet(values=values, text=form.get("yaml", ""), base=form.get("base", ""))


def _of_task(error: DiamondError, desk: Desk) -> bool:
    """Whether an error about a `name` is about the task's; templates have one too."""
    if error.field != "name":
        return False
    try:
        TaskSpec.parse(desk.sheet.settle())
    except DiamondError as again:
        return again.field == "name"
    return False


def _take_files(request: Request, user_id: str, form: Form, desk: Desk) -> None:
    """Put files that came along into the work directory, and take out those that were ticked."""
    sent = [file for file in files_of(request) if file.field == "files"]
    drop = [name.removeprefix(_DROP) for name in form if name.startswith(_DROP)]
    if not sent and not drop:
        return
    size = sum(file.size for file in sent)
    if len(sent) > MAX_FILES or size > MAX_FILES_BYTES:
        raise TooLarge(
            f"{len(sent)} files of {size} bytes were chosen; at most {MAX_FILES} files of {MAX_FILES_BYTES} bytes "
            "altogether can be sent from a page",
            hint="`diamond launch` sends folders of any size; nothing else on this page is lost",
            field="workdir",
        )
    folder = form.get("folder", "").strip().strip("/")
    add = {f"{folder}/{file.name}" if folder else file.name: file.read() for file in sent}
    ref = desk.sheet.values.get("workdir", "").strip()
    desk.sheet.values["workdir"] = uploads.change(ctx_of(request), user_id, ref, add, drop, field="workdir")
    count = len(sent) or len(drop)
    desk.notice = f"{count} file{'s' if count != 1 else ''} {'uploaded' if sent else 'taken out'}."
    if desk.sheet.text.strip() == desk.sheet.base.strip():
        desk.sheet.take_form()


def _plan(ctx: Context, user_id: str, raw: dict[str, Any]) -> dict[str, Any]:
    tasks.checked_spec(ctx, user_id, raw)
    plan = tasks.plan(ctx, user_id, raw)
    spec = TaskSpec.parse(raw)
    seconds = spec.max_duration or plan["time_limit_s"]
    nodes, gpus = spec.num_nodes, spec.num_nodes * spec.resources.gpus
    cost = "unknown: neither the task nor the endpoint limits its time"
    if spec.pool is not None:
        cost = "none beside the pool's own nodes, which it shares with other tasks"
    elif seconds:
        cost = f"at most {_hours(nodes * seconds, 'node-hour')}"
        cost += f" and {_hours(gpus * seconds, 'GPU-hour')}" if gpus else ""
        cost += f" ({nodes} node{'s' if nodes > 1 else ''} for {format_duration(seconds)})"
    return {
        **plan,
        "cost": cost,
        "start": "as soon as the pool has room for it"
        if spec.pool is not None
        else offering.start_words(ctx, user_id, plan["endpoint"]),
        "standing": offering.standing(ctx, user_id, spec.project or ""),
    }


def _hours(seconds: float, unit: str) -> str:
    number = f"{seconds / 3600:.2f}".rstrip("0").rstrip(".")
    return f"{number} {unit}{'' if number == '1' else 's'}"


def _launch(request: Request, user_id: str, form: Form, raw: dict[str, Any]) -> Response:
    """Sent twice from the same page, the same spec is launched once."""
    mark = hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()[:32]
    page = form.get("key", "")[:60]
    key = f"page-{page}-{mark}" if page.isascii() and page.isalnum() else None
    task, _ = tasks.create(ctx_of(request), user_id, raw, key)
    return _go(request, f"/tasks/{task.id}")


def _save(ctx: Context, user_id: str, form: Form, raw: dict[str, Any]) -> Response:
    made = templates.create(
        ctx,
        user_id,
        form.get("template_name", ""),
        raw,
        description=form.get("template_description", ""),
        visibility=form.get("template_visibility", "") or None,
        project=form.get("project", "").strip() or None,
    )
    return to(f"/templates/{made.id}?done=saved")


def _go(request: Request, path: str) -> Response:
    if SCRIPT_HEADER in request.headers:
        return JSONResponse({"to": path}, headers={"Cache-Control": "no-store"})
    return to(path)


def _show(request: Request, who: Identity, desk: Desk) -> Response:
    assert who.user_id is not None
    ctx = ctx_of(request)
    is_answer = request.method not in SAFE_METHODS and PART_HEADER not in request.headers
    values = {name: desk.sheet.values.get(name, "") for name in composing.FIELDS}
    files: tuple[BundleFile, ...] = uploads.contents(ctx, who.user_id, values["workdir"].strip())
    multi_user = settings_of(request).multi_user
    if not multi_user and "project" in desk.errors:  # where there is one user, the page has no such field
        desk.problem = desk.errors.pop("project")
    saved, _, num_saved = templates.list_templates(ctx, who.user_id, limit=_MOST_TEMPLATES)
    return show(
        request,
        "compose.html",
        who=who,
        status=desk.status,
        headers=_FOR_BACK if is_answer else None,
        v=values,
        text=desk.sheet.text,
        base=desk.sheet.base,
        offers=offering.offers(ctx, who.user_id, values, multi_user=multi_user),
        plan=desk.plan,
        notes=desk.notes,
        notice=desk.notice,
        problem=desk.problem,
        errors=desk.errors,
        text_error=desk.text_error,
        typed=desk.template,
        files=files[:_MOST_SHOWN],
        num_files=len(files),
        files_bytes=sum(item.size_bytes for item in files),
        max_files=MAX_FILES,
        max_files_bytes=MAX_FILES_BYTES,
        key=chance.token_hex(16),
        offered=[*saved, *templates.built_in()],
        num_saved=num_saved,
    )
