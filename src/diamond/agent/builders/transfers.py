"""What is done with images beside building them: sending, taking in, taking over, removing, and tidying layers."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path

from diamond.agent.builders import choice
from diamond.agent.builders.base import Builder, BuildProblem, CommandFailed
from diamond.agent.builders.borrowing import borrow
from diamond.agent.builders.build import Bench, check_space, context, finish, say
from diamond.agent.builders.inspect import inspect
from diamond.agent.builders.store import measure, write_json
from diamond.core import images
from diamond.core.images import ImageFacts, Lock
from diamond.core.recipes import Recipe


def export(bench: Bench) -> None:
    """Put the image, as one file, among the job's outputs, with what is known of it."""
    store, work = bench.store, bench.work
    facts = store.facts(work.image_id)
    if facts is None:
        raise BuildProblem(
            f"the image {work.name or work.image_id} is not at this endpoint", hint="build it again", code="missing"
        )
    builder = choice.builder(facts.builder)
    image = store.image(work.image_id) / builder.suffix
    digest, size_bytes = measure(image)
    if digest != (work.digest or facts.digest):
        raise BuildProblem(
            f"the image {work.name or work.image_id} at this endpoint is not what was built: its digest is {digest}",
            hint="build it again",
            code="digest",
        )
    write_json(bench.work_dir / images.LOCK_FILE, store.lock(work.image_id) or Lock())
    builder.save(image, bench.work_dir / images.PAYLOAD_FILE, bench.commands)
    write_json(bench.work_dir / images.FACTS_FILE, facts)
    say(f"sent {size_bytes / 1e6:.1f} MB")


def take_in(bench: Bench) -> ImageFacts:
    """The image from a payload in the work directory. It must be the bytes that were promised, and run here."""
    work = bench.work
    payload = bench.work_dir / images.PAYLOAD_FILE
    if not payload.is_file():
        raise BuildProblem("the image did not arrive at the endpoint", hint="copy it again", code="missing")
    builder = _builder(bench)
    check_space(bench, 2 * payload.stat().st_size)
    publish = bench.folder / "publish"
    publish.mkdir()
    image = publish / builder.suffix
    arrived, _ = measure(payload)
    builder.load(payload, image, bench.commands)
    if work.digest and arrived != work.digest and (found := measure(image)[0]) != work.digest:
        raise BuildProblem(
            f"what arrived is not the image that was sent: its digest is {found}, not {work.digest}",
            hint="copy it again",
            code="digest",
        )
    return _settle(bench, builder, image)


def take_over(bench: Bench) -> ImageFacts:
    """Use an image that lies on this file system, if this account may read it: where it is, if nobody else can change
    it there; otherwise a copy, or its owner could put another in its place after it was checked."""
    work = bench.work
    source = Path(work.source_path)
    builder = _builder(bench)
    if not source.is_absolute() or source.name != builder.suffix or builder.suffix == "image.ref":
        raise BuildProblem(f"{source} is not an image that can be shared in place", hint="copy it", code="link")
    (bench.folder / "publish").mkdir()
    image = bench.folder / "publish" / builder.suffix
    try:
        check_space(bench, measure(source, digest=False)[1])
        found, is_copy = borrow(source, image)
    except (OSError, shutil.Error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "not all of it could be copied"
        raise BuildProblem(
            f"{source} cannot be taken over by this account: {why}",
            hint="its owner can make it readable (chmod), or it is copied through the service",
            code="link",
        ) from error
    if found != work.digest:
        raise BuildProblem(
            f"{source} is not the image it should be: its digest is {found}, not {work.digest}",
            hint="copy it through the service",
            code="digest",
        )
    say("copied: others may change it where it lies" if is_copy else f"used where it is: {source}")
    return _settle(bench, builder, image)


def remove(bench: Bench) -> None:
    """Remove an image. One that is not there is as good as removed."""
    store, image_id = bench.store, bench.work.image_id
    facts = store.facts(image_id)
    if facts is not None:
        builder = choice.builder(facts.builder)
        builder.remove(store.image(image_id) / builder.suffix)
    gone = store.remove_image(image_id, bench.folder)
    say(f"image {image_id} {'removed' if gone else 'was not here'}")


def tidy(bench: Bench) -> None:
    """Remove kept layers, but for those that are listed as needed or that a build at work counts on."""
    count = total = 0
    for name, layer, size_bytes in bench.store.remove_layers(bench.work.keep, bench.folder):
        choice.builder(name).remove(layer)
        total += size_bytes
        count += 1
    say(f"removed {count} kept layers, {total / 1e6:.1f} MB")


def _builder(bench: Bench) -> Builder:
    facts = bench.work.facts
    builder = choice.builder(bench.work.builder or (facts.builder if facts else ""))
    if problem := builder.problem():
        raise BuildProblem(problem, code="builder")
    if facts is not None and facts.architecture not in ("", platform.machine()):
        raise BuildProblem(
            f"the image is for {facts.architecture}, and this endpoint is {platform.machine()}",
            hint="build it here from its recipe",
            code="architecture",
        )
    return builder


def _settle(bench: Bench, builder: Builder, image: Path) -> ImageFacts:
    """It is an image of this endpoint when a program runs in it."""
    work = bench.work
    recipe = work.recipe or Recipe(base="host")
    ctx = context(bench, recipe)
    try:
        builder.run(image, ["/bin/sh", "-c", "exit 0"], ctx, quiet=True)
    except CommandFailed as error:
        raise BuildProblem(
            f"the image cannot be used here: {error.tail.strip().splitlines()[-1] if error.tail.strip() else error}",
            hint="build it here from its recipe",
            code="runtime",
        ) from error
    lock = work.lock or inspect(lambda argv: builder.run(image, argv, ctx, quiet=True))
    known = work.facts or ImageFacts(
        image_id=work.image_id, recipe_digest=recipe.digest if work.recipe else "", builder=builder.name,
        architecture=platform.machine(),
    )  # fmt: skip
    facts = finish(bench, builder, image, lock, replace(known, image_id=work.image_id), work.recipe, "")
    say(f"image ready: {facts.size_bytes / 1e6:.1f} MB, {facts.digest}")
    return facts
