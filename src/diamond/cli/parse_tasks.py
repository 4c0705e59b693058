"""Arguments of the commands about tasks and their results. Parses only; the work is in the modules it imports late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Ref = Annotated[
    str | None,
    typer.Argument(metavar="[TASK]", help="Id, beginning of an id, or name (its newest task). Left out: your newest."),
]
Attempt = Annotated[int | None, typer.Option("--attempt", min=1, help="Which attempt; the newest when left out.")]


def launch(
    file: Annotated[str, typer.Argument(metavar="TASK.YAML", help="Task file; - reads standard input.")],
    env: Annotated[
        list[str] | None,
        typer.Option(
            "--env",
            "-e",
            metavar="K=V",
            help="Set a variable; repeatable. K alone takes the value from your environment.",
        ),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option("--secret", metavar="NAME", help="Give it a secret, as NAME or VARIABLE=NAME; repeatable."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Do not follow the task.")] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open its page in a browser, where there is a desktop.")
    ] = False,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Name of the task.")] = None,
    project: Annotated[
        str | None, typer.Option("--project", help="Project it is in; left out: DIAMOND_PROJECT, else your own.")
    ] = None,
    infra: Annotated[str | None, typer.Option("--infra", help="Endpoint to run on.")] = None,
    pool: Annotated[
        str | None, typer.Option("--pool", help="Pool to run in; left out: as the file says, else none.")
    ] = None,
    num_nodes: Annotated[int | None, typer.Option("--num-nodes", help="Number of nodes.")] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option("--ranks-per-node", help="Processes started on each node.")
    ] = None,
    cpus: Annotated[str | None, typer.Option("--cpus", help="Cores per node, e.g. 4 or 4+.")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="GiB per node, e.g. 32 or 32+.")] = None,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="GPUs per node, e.g. 2 or H100:4; in a pool also a range, H100:1..8.")
    ] = None,
    slots: Annotated[str | None, typer.Option("--slots", help="Slots of a pool of cores, e.g. 2 or 1..4.")] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="Image to run in: NAME, NAME@sha256:…, docker://… or a path there.")
    ] = None,
    max_duration: Annotated[str | None, typer.Option("--max-duration", help="Time limit, e.g. 30m or 2h.")] = None,
    priority: Annotated[int | None, typer.Option("--priority", help="Higher goes first.")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", help="Folder to send along.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="Slurm account to charge.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Slurm quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", "-C", help="Slurm node features.")] = None,
    reservation: Annotated[str | None, typer.Option("--reservation", help="Slurm reservation.")] = None,
    time: Annotated[str | None, typer.Option("--time", "-t", help="Walltime of one job, e.g. 2h or 01:30:00")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run where, and why; launch nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Launch a task and follow it. Ctrl-C stops following, not the task."""
    from diamond.cli import launch as act

    changes = act.Changes(
        name=name,
        project=project,
        pool=pool,
        workdir=workdir,
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        max_duration=max_duration,
        priority=priority,
        infra=infra,
        cpus=cpus,
        memory=memory,
        gpus=gpus,
        slots=slots,
        image_id=image,
        partition=partition,
        account=account,
        qos=qos,
        constraint=constraint,
        reservation=reservation,
        time=time,
        secret=tuple(secret or ()),
    )
    act.launch(file, env or [], changes, detach=detach, dry_run=dry_run, as_json=json, show_page=open_page)


def import_(
    file: Annotated[str, typer.Argument(metavar="SCRIPT", help="Batch script; - reads standard input.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="TASK.YAML", help="File to write; standard output if left out."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    json: Json = False,
) -> None:
    """Turn an sbatch script into a task file. What cannot be kept is said."""
    from diamond.cli import import_sbatch as act

    act.import_sbatch(file, output, force=force, as_json=json)


def ps(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also tasks that have ended.")] = False,
    state: Annotated[
        list[str] | None, typer.Option("--state", "-s", help="Only this state; repeatable, or separated by commas.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Only tasks of this name.")] = None,
    images: Annotated[bool, typer.Option("--images", help="Also those that build and move images.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, newest first.")] = 50,
    project: Annotated[
        str | None, typer.Option("--project", help="Everybody's in this project. [default: DIAMOND_PROJECT]")
    ] = None,
    mine: Annotated[bool, typer.Option("--mine", help="Only your own, whatever DIAMOND_PROJECT says.")] = False,
    owner: Annotated[str | None, typer.Option("--owner", help="Those of this user that you may see.")] = None,
    everybody: Annotated[bool, typer.Option("--everybody", help="Who runs what where. For administrators.")] = False,
    json: Json = False,
) -> None:
    """List tasks."""
    from diamond.cli import tasks as act

    if everybody:
        act.ps_everybody(as_json=json)
        return
    whose = act.Whose(project=project, owner=owner, mine=mine)
    act.ps(everything=all_, states=state or [], name=name, images=images, limit=limit, whose=whose, as_json=json)


def show(task: Ref = None, json: Json = False) -> None:
    """Show one task: how it stands, and why.

    Also its attempts, spec, metrics and outputs.
    """
    from diamond.cli import tasks as act

    act.show(task, as_json=json)


def logs(
    task: Ref = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the task writes, through retries.")] = False,
    attempt: Attempt = None,
    tail: Annotated[int | None, typer.Option("--tail", "-t", min=0, help="Only the last so many lines.")] = None,
    json: Json = False,
) -> None:
    """Show a task's log. Into a file or pipe, its exact bytes."""
    from diamond.cli import logs as act

    act.logs(task, follow=follow, attempt=attempt, tail=tail, as_json=json)


def stop(
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK]...", help="Ids, beginnings of ids, or names.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every task that has not ended.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_admin: Annotated[bool, typer.Option("--as-admin", help="Anybody's, by id. For administrators.")] = False,
    json: Json = False,
) -> None:
    """Stop tasks."""
    from diamond.cli import tasks as act

    if as_admin:
        act.stop_any(tasks or [], as_json=json)
        return
    act.stop(tasks or [], everything=all_, yes=yes, as_json=json)


def rerun(
    tasks: Annotated[list[str], typer.Argument(metavar="TASK...", help="Ids, beginnings of ids, or names.")],
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Name of what is launched; the old one's if left out.")
    ] = None,
    json: Json = False,
) -> None:
    """Launch tasks once more, as they were.

    Their files are those that were uploaded then; secrets have the values of now. Does not follow them.
    """
    from diamond.cli import tasks as act

    act.rerun(tasks, name=name, as_json=json)


def rm(
    tasks: Annotated[list[str], typer.Argument(metavar="TASK...", help="Ids, beginnings of ids, or names.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove tasks that have ended, for good.

    Their logs, curves, history and outputs at the server go. What they used stays counted, and what lies at their
    endpoints stays there.
    """
    from diamond.cli import tasks as act

    act.remove(tasks, yes=yes, as_json=json)


def queue(
    endpoint: Annotated[str | None, typer.Argument(help="Only this endpoint.")] = None, json: Json = False
) -> None:
    """Show what runs and waits, in the order it will be taken."""
    from diamond.cli import endpoints as act

    act.queue(endpoint, as_json=json)


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more.")] = False,
    since: Annotated[int | None, typer.Option("--since", min=0, help="Only events after this number.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest.")] = 50,
    json: Json = False,
) -> None:
    """Show what happened, oldest first."""
    from diamond.cli import events as act

    act.events(follow=follow, since=since, limit=limit, as_json=json)


def outputs(
    task: Ref = None,
    to: Annotated[Path | None, typer.Option("--to", metavar="DIR", help="Fetch them into this folder.")] = None,
    json: Json = False,
) -> None:
    """List a task's output files, or fetch them."""
    from diamond.cli import outputs as act

    act.outputs(task, to=to, as_json=json)


def cp(
    source: Annotated[str, typer.Argument(metavar="TASK:PATH", help="An output: a file, a folder or a pattern.")],
    dest: Annotated[str, typer.Argument(metavar="DEST", help="File or folder on this machine; - is standard output.")],
    json: Json = False,
) -> None:
    """Copy output files of a task to this machine."""
    from diamond.cli import outputs as act

    act.cp(source, dest, as_json=json)


def metrics(
    task: Ref = None,
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="Plot this metric.")] = None,
    attempt: Attempt = None,
    util: Annotated[bool, typer.Option("--util", help="Also what the agent measured (CPU, memory, GPU).")] = False,
    json: Json = False,
) -> None:
    """Show a task's metrics, or plot one of them."""
    from diamond.cli import metrics as act

    act.metrics(task, key, attempt=attempt, util=util, as_json=json)


def register(app: typer.Typer) -> None:
    for command in (launch, ps, show, logs, stop, rerun, rm, queue, events, outputs, cp, metrics):
        app.command()(command)
    app.command("import")(import_)
