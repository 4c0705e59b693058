"""Commands about notices: add, ls, set, rm, test."""

from __future__ import annotations

from diamond.cli import render
from diamond.cli.session import EXIT_FAILED, connect, emit, leave, say
from diamond.core.errors import InvalidInput
from diamond.core.notices import Channel, NoticeRule, parse_address, parse_channel, parse_events


def add(channel: str, target: str, *, on: str, as_json: bool) -> None:
    kind, events = parse_channel(channel, "CHANNEL"), parse_events(on, "--on")
    if kind is Channel.EMAIL:
        parse_address(target, "TARGET")
    with connect() as client:
        rule = client.notices.create(kind.value, target, events)
    if as_json:
        emit(rule)
        return
    print(rule.id)
    say(f"You are told of {_events(rule)} at {render.clean(rule.target)}.")
    if rule.key:
        say("Its messages are signed with this key, which is not shown again:")
        print(rule.key)
    say(f"Try it: diamond notify test {rule.id}")


def ls(*, as_json: bool) -> None:
    with connect() as client:
        found = client.notices.list()
    if as_json:
        emit({"rules": found})
        return
    if not found:
        say("You are told of nothing. Begin with: diamond notify add email YOUR@ADDRESS --on failed,succeeded")
        return
    rows = [
        (
            rule.id,
            rule.channel.value,
            render.clean(rule.target),
            _events(rule),
            "paused" if rule.paused_at else "failing" if rule.failures else "ok",
            str(rule.waiting or ""),
            render.ago(rule.delivered_at),
        )
        for rule in found
    ]
    render.print_table(
        ("RULE", "CHANNEL", "TARGET", "EVENTS", "STATE", ">WAITING", "LAST"),
        rows,
        flexible={"TARGET": 16, "EVENTS": 12},
        droppable=("LAST", "WAITING", "CHANNEL"),
        below=[render.clean(rule.last_error) for rule in found],
    )


def _events(rule: NoticeRule) -> str:
    return ", ".join(render.clean(event) for event in rule.events)


def change(rule_id: str, *, on: str | None, paused: bool | None, as_json: bool) -> None:
    if on is None and paused is None:
        raise InvalidInput("nothing to change", hint="give --on EVENTS, --pause or --resume", field="--on")
    events = parse_events(on, "--on") if on is not None else None
    with connect() as client:
        rule = client.notices.change(rule_id, events=events, paused=paused)
    if as_json:
        emit(rule)
        return
    state = "paused" if rule.paused_at else "on"
    say(f"Rule {rule.id} is {state}: {_events(rule)} to {render.clean(rule.target)}.")


def remove(rule_id: str, *, as_json: bool) -> None:
    with connect() as client:
        client.notices.remove(rule_id)
    if as_json:
        emit({"removed": rule_id})
        return
    say(f"Rule {render.clean(rule_id)} is removed.")


def test(rule_id: str, *, as_json: bool) -> None:
    with connect() as client:
        result = client.notices.test(rule_id)
    if as_json:
        emit(result)
    elif result.delivered:
        say("It arrived.")
    else:
        say(f"{render.paint('failed:', '31;1')} {render.clean(result.error)}")
    if not result.delivered:
        leave(EXIT_FAILED)
