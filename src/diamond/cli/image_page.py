"""An image in the terminal: what it is, where it lies, how it came to be, and how to use it. Everything is cleaned."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from diamond.cli import render
from diamond.cli.session import program, say
from diamond.core.bundles import is_bundle_ref
from diamond.core.codec import encode
from diamond.core.images import BuildFailure, Image, ImageFacts, Replica, ReplicaState
from diamond.core.recipes import Recipe

if TYPE_CHECKING:
    from diamond.core.image_views import BuildProgress, ImagePlan
    from diamond.core.tasks import Task

SHORT = 12
_ORIGINS = {
    "built": "built there",
    "copied": "copied there",
    "linked": "used where it lies",
    "rebuilt": "rebuilt there from a lock",
    "imported": "imported",
}
_EXCERPT_LINES = 15


def full_name(image: Image) -> str:
    """As this user names it: another's with its owner."""
    return image.name if image.is_mine else f"{image.owner}/{image.name}"


def replica_at(image: Image, endpoint: str) -> Replica | None:
    return next((one for one in image.replicas if one.endpoint == endpoint), None)


def best(image: Image) -> Replica | None:
    """The result to speak of where only one can be: a ready one, else the newest."""
    order = [ReplicaState.READY, ReplicaState.BUILDING, ReplicaState.FAILED, ReplicaState.GONE]
    ranked = sorted(image.replicas, key=lambda one: (order.index(one.state), -one.created_at))
    return ranked[0] if ranked else None


def short_digest(digest: str) -> str:
    kind, _, value = digest.partition(":")
    return f"{kind}:{value[:SHORT]}" if value else ""


def say_ready(image: Image, replica: Replica, *, cached: bool = False, renamed: bool = False) -> None:
    """The end of a build that went well: what there is now, and how to use it. `renamed`: it has another name."""
    facts = replica.facts
    name = render.clean(full_name(image))
    head = render.paint("READY", render.STATE_COLOURS["READY"] + ";1", sys.stderr)
    how = ", unchanged since it was built" if cached else ""
    say("")
    say(f"{head} {name} at {render.clean(replica.endpoint)}{how}")
    if renamed:
        say(f"  this recipe is already there as {name}; --name gives it another name")
    if facts is not None:
        rows = [
            ("digest", facts.digest),
            ("size", render.size(facts.size_bytes) if facts.size_bytes else ""),
            ("time", _time(facts) if replica.origin in ("built", "rebuilt") and not cached else ""),
            (
                "builder",
                f"{facts.builder} {facts.builder_version}".strip()
                + (f", {facts.architecture}" if facts.architecture else ""),
            ),
            ("holds", _holds(facts.num_packages, facts.python, facts.os)),
            ("path", facts.path),
        ]
        for label, value in rows:
            if value:
                say(f"  {label:<8} {render.clean(value)}")
    say(f"  use it:  resources: {{image_id: {name}}}   in a task file, or: {program()} launch TASK.YAML --image {name}")


def _time(facts: ImageFacts) -> str:
    kept = sum(stage.state == "kept" for stage in facts.stages)
    steps = render.count(len(facts.stages), "step")
    return seconds(facts.seconds) + (f", {kept} of {steps} kept from earlier builds" if kept else "")


def seconds(value: float) -> str:
    """A length of time that may be short: ``0.2 s``, ``17 s``, ``2m 05s``."""
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s" if value < 60 else render.format_duration(value)


def _holds(packages: int, python: str, system: str) -> str:
    parts = [system, f"Python {python}" if python else "", render.count(packages, "package") if packages else ""]
    return ", ".join(part for part in parts if part)


def say_failed(image: Image, replica: Replica | None, task: Task) -> None:
    """The end of a build that did not: which stage, which line, what the log says, and what to do."""
    name = render.clean(full_name(image))
    word = "CANCELLED" if task.state == "CANCELLED" else "FAILED"
    head = render.paint(word, render.STATE_COLOURS[word] + ";1", sys.stderr)
    where = f" at {render.clean(replica.endpoint)}" if replica else ""
    say("")
    say(f"{head} {name}{where}")
    if replica is not None and replica.failure is not None and replica.failure.message:
        for line in failure_lines(replica.failure):
            say(f"  {line}")
    else:
        detail = (replica.detail if replica else "") or task.detail or task.sentence
        if detail:
            say(f"  {render.clean(detail)}")
    at = f" --infra {render.clean(replica.endpoint)}" if replica else ""
    say(f"  the whole log: {program()} image logs {name}{at}")


def failure_lines(failure: BuildFailure) -> list[str]:
    stage = f"stage {render.clean(failure.stage)}: " if failure.stage else ""  # none: it ended before the first
    lines = [stage + render.clean(failure.message)]
    if failure.line:
        lines.append(f"line: {render.clean(failure.line)}")
    excerpt = render.clean_block(failure.excerpt).rstrip("\n").split("\n") if failure.excerpt.strip() else []
    lines += [f"  | {line}".rstrip() for line in excerpt[-_EXCERPT_LINES:]]
    if failure.hint:
        lines.append(f"hint: {render.clean(failure.hint)}")
    return lines


def print_page(image: Image, progress: Mapping[str, BuildProgress] | None = None) -> None:
    """`progress`: how far it is at those endpoints where it is being made."""
    print(f"{render.state_word(str(image.state))} {render.paint(render.clean(full_name(image)), '1')}  {image.id}")
    rows = [
        ("owner", image.owner),
        ("visible", _VISIBLE.get(str(image.visibility), "")),
        ("created", f"{render.clock(image.created_at)} ({render.ago(image.created_at)})"),
        ("recipe", image.recipe_digest),
        ("labels", ", ".join(f"{key}={value}" for key, value in image.labels.items())),
        ("used by", ", ".join(image.used_by)),
    ]
    _pairs(rows)
    for replica in image.replicas:
        _replica(replica, (progress or {}).get(replica.endpoint))
    if image.recipe is not None:
        _section("recipe")
        for line in recipe_lines(image.recipe):
            print(f"  {line}")


_VISIBLE = {"private": "to its owner alone", "project": "to its owner's project", "public": "to every user here"}


def _replica(replica: Replica, progress: BuildProgress | None) -> None:
    print()
    origin = render.clean(_ORIGINS.get(replica.origin, replica.origin)) if replica.facts else "begun"
    when = render.ago(replica.created_at) + (f", used {render.ago(replica.used_at)}" if replica.used_at else "")
    head = render.paint(f"at {render.clean(replica.endpoint)}", "1")
    print(f"{head}  {render.state_word(str(replica.state))}  {origin} {when}")
    if replica.detail:
        print(f"  {render.clean(replica.detail)}")
    facts = replica.facts
    if facts is not None:
        spent = f", in {seconds(facts.seconds)}" if facts.seconds else ""
        _pairs(
            [
                ("digest", facts.digest),
                ("size", render.size(facts.size_bytes) if facts.size_bytes else ""),
                ("builder", f"{facts.builder} {facts.builder_version}".strip() + spent),
                ("for", facts.architecture),
                ("holds", _holds(facts.num_packages, facts.python, facts.os)),
                ("path", facts.path),
                ("made by", replica.task_id),
            ]
        )
        for stage in facts.stages:
            took = "kept" if stage.state == "kept" else seconds(stage.seconds)
            print(f"    {render.clean(stage.title):<26} {took}")
    elif replica.task_id:
        _pairs([("made by", replica.task_id)])
    if facts is None and progress is not None:
        _progress(progress)
    for line in failure_lines(replica.failure) if replica.failure and replica.failure.message else ():
        print(f"  {line}")


def _progress(progress: BuildProgress) -> None:
    """Stages of a build that runs: those behind it with their times, the one it is in, and what is still to come."""
    if not progress.stages:
        print(f"    {render.clean(progress.detail or progress.task_state or 'waiting')}")
        return
    for stage in progress.stages:
        took = {"kept": "kept", "done": seconds(stage.seconds)}.get(stage.state, stage.state)
        print(f"    {render.clean(stage.title):<26} {render.clean(took)}")
    if (left := progress.total - len(progress.stages)) > 0:
        print(f"    {render.count(left, 'step')} to come")


def print_plan(plan: ImagePlan, recipe: Recipe) -> None:
    """A dry run for people: the long parts first, so that where and why stand at the end."""
    if plan.definition:
        _section(f"what {plan.builder} is given")
        for line in render.clean_block(plan.definition).rstrip("\n").split("\n"):
            print(f"  {line}".rstrip())
    _section("recipe")
    shown = Recipe.parse({**encode(plan.recipe), "files": recipe.files})  # the paths as the person wrote them
    for line in recipe_lines(shown):
        print(f"  {line}")
    if plan.stages:
        _section("steps")
        for stage in plan.stages:
            note = "  kept from an earlier build" if stage.state == "kept" else ""
            print(f"  {render.clean(stage.title)}{note}")
    _section("where")
    print(f"  {render.clean(plan.endpoint) if plan.endpoint else 'nowhere at present'}")
    if plan.endpoint and plan.where:
        place = {"login": "directly, not as a batch job", "batch": "as a batch job"}.get(plan.where, plan.where)
        print(f"  - with {render.clean(plan.builder)}, {place}")
    for sentence in plan.why:
        # Which partition would take it is good to know, but not where this build goes.
        unused = plan.where == "login" and sentence.startswith("partition ")
        print(f"  - {'for --where batch: ' if unused else ''}{render.clean(sentence)}")
    if plan.cached:
        print(f"  - it is there already ({plan.image_id}): nothing would be built")
    elif plan.expected_s is not None:
        print(f"  - builds there took {render.format_duration(plan.expected_s)} as a rule")
    for name, why in plan.others.items():
        print(f"  - not {render.clean(name)}: {render.clean(why)}")


def recipe_lines(recipe: Recipe) -> list[str]:
    """A recipe in the form of its file, without what is as by default."""
    usual: Mapping[str, Any] = encode(Recipe(base=recipe.base))
    lines: list[str] = []
    for key, value in encode(recipe).items():
        if key != "base" and (value is None or value == usual.get(key)):
            continue
        if key == "time_limit":
            lines.append(f"{key}: {render.written_duration(value)}")
        elif isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {render.clean(name)}: {_value(key, item)}" for name, item in value.items()]
        elif isinstance(value, list):
            lines.append(f"{key}:")
            lines += [f"  - {render.clean(item)}" for item in value]
        elif "\n" in str(value):
            lines.append(f"{key}: |")
            lines += [f"  {line}".rstrip() for line in render.clean_block(value).rstrip("\n").split("\n")]
        else:
            lines.append(f"{key}: {render.clean(value)}")
    return lines


def _value(key: str, value: object) -> str:
    if key == "files" and is_bundle_ref(str(value)):
        return f"uploaded, {short_digest(str(value).removeprefix('bundle:'))}…"
    return render.clean(value)


def _section(title: str) -> None:
    print(render.paint(render.clean(title).capitalize(), "1"))


def _pairs(rows: list[tuple[str, str]]) -> None:
    given = [(name, value) for name, value in rows if value]
    width = max((len(name) for name, _ in given), default=0)
    for name, value in given:
        print(f"  {name:<{width}}  {render.clean(value)}")
