"""Drafts: a recipe described in six steps, each checked on its own, kept between visits.

What a person wrote is kept even when it is wrong, with what is wrong about it. A change names the version it was made
from; of two people (or windows) that change one draft, the later is told.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from diamond.core.bundles import digest_of_ref, is_bundle_ref
from diamond.core.codec import encode
from diamond.core.errors import Conflict, DiamondError, InvalidInput, NotFound, TooLarge
from diamond.core.ids import is_id, new_id
from diamond.core.image_views import DRAFT_STEPS, Build, DraftStep, FieldError, ImageDraft, ImagePlan
from diamond.core.recipes import Recipe
from diamond.server.services import bundles, form_keys, image_builds, snapshots
from diamond.server.services.context import Context
from diamond.server.services.image_ways import where_for
from diamond.server.store.models import ImageDraftRow

# The fields of a recipe that each step holds; the first also has the endpoint.
STEP_FIELDS: dict[str, tuple[str, ...]] = {
    "endpoint": ("builder", "where", "time_limit"),
    "base": ("name", "base", "labels"),
    "dependencies": ("system", "conda", "channels", "pip", "constraints", "files"),
    "envs": ("envs",),
    "commands": ("build", "test"),
    "review": (),
}
_STAND_IN = "docker://scratch"  # so that one step can be checked while the base is not chosen yet
_MAX_BYTES = 4 * 1024 * 1024
_MAX_DRAFTS = 200
_MADE_ALREADY = "the draft is in the list of yours"


def create(ctx: Context, user_id: str, raw_recipe: object = None, *, once: str = "") -> ImageDraft:
    """A new draft: empty, or begun with an existing recipe.

    Args:
        once: key of the form that asks. Raises Conflict if that made one already.
    """
    steps: dict[str, Any] = {}
    if raw_recipe is not None:
        known = encode(Recipe.parse(raw_recipe))
        plain = encode(Recipe(base=_STAND_IN))
        for step, fields in STEP_FIELDS.items():
            kept = {name: known[name] for name in fields if name == "base" or known[name] != plain[name]}
            if kept:
                steps[step] = kept
    now = ctx.clock()
    with ctx.db.write() as session:
        form_keys.check(session, user_id, once, _MADE_ALREADY)
        mine = sa.select(sa.func.count()).select_from(ImageDraftRow).where(ImageDraftRow.owner_id == user_id)
        if session.execute(mine).scalar_one() >= _MAX_DRAFTS:
            raise TooLarge(f"you have {_MAX_DRAFTS} drafts already", hint="remove those you do not need")
        row = ImageDraftRow(id=new_id("dra"), owner_id=user_id, steps=steps, version=1, created_at=now, updated_at=now)
        session.add(row)
        session.flush()
        form_keys.note(session, user_id, once, row.id, now, _MADE_ALREADY)
        return _view(ctx, session, row)


def list_drafts(ctx: Context, user_id: str) -> list[ImageDraft]:
    with ctx.db.read() as session:
        rows = session.scalars(
            sa.select(ImageDraftRow)
            .where(ImageDraftRow.owner_id == user_id)
            .order_by(ImageDraftRow.updated_at.desc(), ImageDraftRow.id.desc())
        ).all()
        return [_view(ctx, session, row) for row in rows]


def get(ctx: Context, user_id: str, draft_id: str) -> ImageDraft:
    """A draft; once every step is right, with what a build of it would do."""
    with ctx.db.read() as session:
        row = _find(session, user_id, draft_id)
        draft = _view(ctx, session, row)
    if any(step.errors for step in draft.steps) or not all(s.done for s in draft.steps if s.name != "review"):
        return draft
    plan, errors = _review(ctx, user_id, row)
    steps = tuple(
        DraftStep(name=s.name, contents=s.contents, errors=errors, done=plan is not None) if s.name == "review" else s
        for s in draft.steps
    )
    return ImageDraft(**{**draft.__dict__, "steps": steps, "plan": plan})


def _review(ctx: Context, user_id: str, row: ImageDraftRow) -> tuple[ImagePlan | None, tuple[FieldError, ...]]:
    try:
        return image_builds.plan(ctx, user_id, recipe_of(row), endpoint=_endpoint(row)), ()
    except DiamondError as error:
        return None, (_error(error),)


def save(ctx: Context, user_id: str, draft_id: str, step: str, contents: Any, *, version: int) -> ImageDraft:
    """Put contents into a step; what is wrong with them is in the answer.

    Raises:
        Conflict: the draft was changed since `version`.
        InvalidInput: there is no such step, or the contents are no fields of it.
    """
    fields = _fields(step)
    if not isinstance(contents, dict):
        raise InvalidInput("must be a mapping of fields", field="contents")
    if unknown := sorted(set(contents) - set(fields)):
        raise InvalidInput(
            f"step {step} has no field {unknown[0][:60]!r}",
            hint=f"fields: {', '.join(fields) or 'none'}",
            field=f"contents.{unknown[0][:60]}",
        )
    try:
        size = len(json.dumps(contents, allow_nan=False))
    except ValueError:
        raise InvalidInput("has a number that is not finite", field="contents") from None
    if size > _MAX_BYTES:
        raise TooLarge(f"is larger than {_MAX_BYTES} bytes", field="contents")
    with ctx.db.write() as session:
        row = _find(session, user_id, draft_id, for_update=True)
        _check_version(row, version)
        row.steps = {**row.steps, step: contents}
        row.version += 1
        row.updated_at = ctx.clock()
        view = _view(ctx, session, row)
    ctx.hub.notify(f"draft:{draft_id}")
    return view


def submit(
    ctx: Context, user_id: str, draft_id: str, *, version: int, idempotency_key: str | None = None
) -> tuple[Build, bool]:
    """Build what the draft describes.

    Raises:
        Conflict: the draft was changed since `version`.
        InvalidInput: a step is not right; its field begins with the step's name.
    """
    with ctx.db.read() as session:
        row = _find(session, user_id, draft_id)
        _check_version(row, version)
        draft = _view(ctx, session, row)
    for step in draft.steps:
        for error in step.errors:
            raise InvalidInput(error.message, hint=error.hint, field=f"{step.name}.{error.field}".rstrip("."))
    made, is_new = image_builds.build(
        ctx, user_id, recipe_of(row), endpoint=_endpoint(row), idempotency_key=idempotency_key
    )
    with ctx.db.write() as session:
        again = _find(session, user_id, draft_id, for_update=True)
        again.image_id = made.image.id
        again.updated_at = ctx.clock()
    return made, is_new


def remove(ctx: Context, user_id: str, draft_id: str) -> None:
    """Harmless when it is gone already."""
    if not is_id(draft_id, "dra"):
        return
    with ctx.db.write() as session:
        mine = (ImageDraftRow.id == draft_id, ImageDraftRow.owner_id == user_id)
        session.execute(sa.delete(ImageDraftRow).where(*mine))


def recipe_of(row: ImageDraftRow) -> dict[str, Any]:
    """The steps together, as the recipe they describe."""
    found: dict[str, Any] = {}
    for step, fields in STEP_FIELDS.items():
        contents = row.steps.get(step, {})
        found |= {name: contents[name] for name in fields if contents.get(name) not in (None, "")}
    return found


def _endpoint(row: ImageDraftRow) -> str | None:
    return row.steps.get("endpoint", {}).get("endpoint") or None


def _fields(step: str) -> tuple[str, ...]:
    if step not in DRAFT_STEPS:
        raise NotFound(f"there is no step {step[:40]!r}", hint=f"steps: {', '.join(DRAFT_STEPS)}", field="step")
    return ("endpoint", *STEP_FIELDS[step]) if step == "endpoint" else STEP_FIELDS[step]


def _find(session: Session, user_id: str, draft_id: str, *, for_update: bool = False) -> ImageDraftRow:
    query = sa.select(ImageDraftRow).where(ImageDraftRow.id == draft_id, ImageDraftRow.owner_id == user_id)
    row = None
    if is_id(draft_id, "dra"):  # anything else may hold what the database refuses
        row = session.scalars(query.with_for_update() if for_update else query).one_or_none()
    if row is None:
        raise NotFound(f"there is no draft {draft_id[:60]!r}", hint="it may have been removed")
    return row


def _check_version(row: ImageDraftRow, version: int) -> None:
    if row.version != version:
        raise Conflict(
            f"the draft was changed meanwhile: it is at version {row.version}, this change was made from {version}",
            hint="load it again, and enter the change once more",
            field="version",
        )


def _view(ctx: Context, session: Session, row: ImageDraftRow) -> ImageDraft:
    steps = []
    for name in DRAFT_STEPS:
        contents = dict(row.steps.get(name, {}))
        errors = _check(ctx, session, row.owner_id, name, contents, started=name in row.steps)
        done = not errors and (name in row.steps or name not in ("base", "review"))
        steps.append(DraftStep(name=name, contents=contents, errors=tuple(errors), done=done))
    return ImageDraft(
        id=row.id,
        version=row.version,
        steps=tuple(steps),
        image_id=row.image_id or "",
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _check(
    ctx: Context, session: Session, user_id: str, step: str, contents: dict[str, Any], *, started: bool
) -> list[FieldError]:
    """What is wrong with a step, each field on its own, so that all of it is shown at once."""
    errors: list[FieldError] = []
    for name in STEP_FIELDS[step]:
        value = contents.get(name)
        if value in (None, ""):
            continue
        try:
            Recipe.parse({"base": _STAND_IN, name: value})
        except DiamondError as error:
            errors.append(_error(error))
    if errors:
        return errors
    if step == "base" and started and not contents.get("base"):
        errors.append(FieldError(field="base", message="is required", hint="choose what the image starts from"))
    if step == "dependencies":
        errors += _unknown_files(ctx, session, user_id, contents.get("files") or {})
    if step == "endpoint" and contents.get("endpoint"):
        errors += _check_endpoint(session, user_id, contents)
    return errors


def _unknown_files(ctx: Context, session: Session, user_id: str, files: dict[str, Any]) -> list[FieldError]:
    errors = []
    for target, ref in files.items():
        where = f"files.{target}"
        if not is_bundle_ref(str(ref)):
            text = f"{str(ref)[:80]!r} is a path on the client's machine, which the server cannot see"
            errors.append(FieldError(field=where, message=text, hint="upload it first"))
            continue
        try:
            bundles.require(ctx, user_id, digest_of_ref(str(ref)), where, session)
        except InvalidInput as error:
            errors.append(_error(error))
    return errors


def _check_endpoint(session: Session, user_id: str, contents: dict[str, Any]) -> list[FieldError]:
    rows = {row.name: row for row in snapshots.for_images(session, user_id)}
    row = rows.get(str(contents["endpoint"]))
    if row is None:
        known = ", ".join(rows) or "none yet"
        text = f"there is no endpoint {str(contents['endpoint'])[:60]!r}"
        return [FieldError(field="endpoint", message=text, hint=f"endpoints: {known}")]
    facts = snapshots.facts_of(row)
    if facts is None:
        return [FieldError(field="endpoint", message="its agent has not connected yet", hint="start it")]
    if facts.builds in ("", "off") or not facts.builders:
        return [FieldError(field="endpoint", message="it builds no images", hint="its policy file may allow it")]
    wanted = contents.get("builder") or "auto"
    if wanted != "auto" and wanted not in facts.builders:
        text = f"{wanted} is not there; builders: {', '.join(facts.builders)}"
        return [FieldError(field="builder", message=text)]
    try:
        where_for(contents.get("where") or "auto", facts)
    except InvalidInput as error:
        return [_error(error)]
    return []


def _error(error: DiamondError) -> FieldError:
    return FieldError(field=error.field, message=error.message, hint=error.hint)
