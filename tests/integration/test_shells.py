"""`diamond exec` and `diamond ssh` against a real server, a real agent, and a real terminal."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diamond.core.errors import Conflict, DiamondError, NotFound, PolicyRefused
from diamond.core.home import ClientConfig
from diamond.core.ids import new_id
from diamond.core.tasks import Task
from diamond.sdk.client import Client
from diamond.sdk.shells import ShellSession
from diamond.server.services import tokens
from diamond.server.store.db import Database
from diamond.server.store.models import UserRow
from testing.links import Wire
from testing.service import Service
from testing.terminals import Typing
from testing.waiting import eventually

PATIENCE_S = 5.0
HOSTILE = ["", " ", "$(touch pwned)", "`id`", "a\nb", "'\"\\", "-n", "*", "ünï ☃", "\t\r", "--", "%s", "!!", "; exit 1"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("shells") / "home with space"
    with Service(folder, shell_patience_s=str(PATIENCE_S), shells_per_task="3") as running:
        yield running


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[Client]:
    with service.client() as made:
        yield made


@pytest.fixture(scope="module")
def task(client: Client) -> Task:
    """A task that runs as long as this module."""
    return running(client, {"name": "host", "run": "exec sleep 600", "envs": {"ODD": ODD}})


ODD = "two\nlines 'quoted' \"twice\" $HOME `x` ünï\t end "


def running(client: Client, spec: dict[str, object]) -> Task:
    made = client.tasks.create(spec)
    eventually(lambda: client.tasks.get(made.id).state == "RUNNING", what="the task runs")
    return made


def cli(service: Service, *argv: str, **options: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "diamond.cli", *argv]
    given = {"input": b"", "timeout": 60} | options
    return subprocess.run(command, env=service.env, capture_output=True, check=False, **given)  # type: ignore[call-overload, no-any-return]


def typing(service: Service, *argv: str, rows: int = 24, cols: int = 80) -> Typing:
    env = {**service.env, "TERM": "xterm", "PS1": "ready> "}
    return Typing([sys.executable, "-m", "diamond.cli", *argv], env, rows=rows, cols=cols)


BASH = ("bash", "--norc", "--noprofile", "-i")


def test_streams_and_exit_statuses(service: Service, task: Task) -> None:
    done = cli(service, "exec", task.id, "--", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"out\n", b"err\n")
    assert cli(service, "exec", task.id, "--", "sh", "-c", "kill -9 $$").returncode == 137
    missing = cli(service, "exec", task.id, "--", "no-such-program")
    assert missing.returncode == 127 and b"no-such-program" in missing.stderr
    assert cli(service, "exec", task.id, "--", "/").returncode == 126
    assert cli(service, "exec", task.id, "--", "cat", input=b"hi\n").stdout == b"hi\n"
    # A program that never reads its input does not hold anybody up.
    assert cli(service, "exec", task.id, "--", "true", input=bytes(3_000_000)).returncode == 0
    as_json = json.loads(cli(service, "exec", task.id, "--json", "--", "sh", "-c", "echo x; exit 2").stdout)
    assert (as_json["exit_code"], as_json["stdout"]) == (2, "x\n")
    nothing = cli(service, "exec", task.id)
    assert nothing.returncode == 2 and b"no command" in nothing.stderr


def test_ten_megabytes_of_anything_both_ways(service: Service, client: Client, task: Task, tmp_path: Path) -> None:
    data = os.urandom(10_000_000)
    (tmp_path / "in").write_bytes(data)
    began = time.monotonic()
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("wb") as sink:
        command = [sys.executable, "-m", "diamond.cli", "exec", task.id, "--", "cat"]
        done = subprocess.run(command, env=service.env, stdin=source, stdout=sink, timeout=60, check=False)
    assert done.returncode == 0
    assert hashlib.sha256((tmp_path / "out").read_bytes()).digest() == hashlib.sha256(data).digest()
    print(f"10 MB in and out in {time.monotonic() - began:.2f} s")
    # A reader that has seen enough ends the program, too.
    command = [sys.executable, "-m", "diamond.cli", "exec", task.id, "--", "yes", "endless"]
    endless = subprocess.Popen(command, env=service.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert endless.stdout is not None and endless.stdout.readline() == b"endless\n"
    endless.stdout.close()
    assert endless.wait(15) == 141
    eventually(lambda: client.tasks.exec(task.id, ["pgrep", "-fx", "yes endless"]).exit_code == 1, what="yes is gone")


def test_words_and_variables_arrive_byte_for_byte(service: Service, client: Client, task: Task) -> None:
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    assert json.loads(client.tasks.exec(task.id, ["python3", "-c", show, *HOSTILE]).stdout) == HOSTILE
    done = cli(service, "exec", task.id, "--", "python3", "-c", show, *HOSTILE)
    assert json.loads(done.stdout) == HOSTILE
    with typing(service, "exec", "-t", task.id, "--", "python3", "-c", show, *HOSTILE, cols=500) as person:
        assert person.wait() == 0
        assert json.loads(person.screen[person.screen.index(b"[") :]) == HOSTILE
    job = client.tasks.get(task.id).jobs[-1]
    assert not list(Path(job.run_dir).rglob("pwned"))
    for tty in (False, True):
        with client.tasks.shell(task.id, ["sh", "-c", "stty -opost 2>/dev/null; env -0; pwd"], tty=tty) as session:
            *pairs, where = b"".join(data for _, data in session.output()).split(b"\0")
        found = dict(pair.decode().split("=", 1) for pair in pairs)
        assert found["ODD"] == ODD
        assert (found["DIAMOND_JOB_ID"], found["DIAMOND_RUN_DIR"]) == (job.id, job.run_dir)
        assert found["DIAMOND_METRICS_FILE"] == f"{job.run_dir}/metrics.jsonl"
        assert where.strip().decode() == f"{job.run_dir}/work"
        assert "LC_CTYPE" not in found or "LC_CTYPE" in os.environ
        assert not [name for name in found if "TOKEN" in name and name.startswith("DIAMOND")]


def test_a_person_at_a_terminal(service: Service, task: Task) -> None:
    with typing(service, "exec", task.id, "--", *BASH, rows=33, cols=101) as person:
        before = person.modes()
        person.expect(rb"~\. at the beginning")
        person.expect(rb"[$#>] ")
        person.type(b"stty size; tty; echo $TERM\r")
        person.expect(rb"33 101\r\n/dev/pts/\d+\r\nxterm\r\n")
        person.resize(44, 121)
        person.type(b"sleep 0.3; stty size\r")
        person.expect(rb"44 121\r\n")
        person.type(b"trap 'echo \"size changed\"' WINCH; sleep 30; echo slept $?\r")
        person.expect(rb"slept \$\?.*\n")
        time.sleep(0.3)
        person.type(b"\x03")  # to the program, not to us
        person.expect(rb"[$#>] ")
        person.type(b"echo after $?\r")
        person.expect(rb"after 130\r\n")
        person.type(
            "echo ü☃\x7f~~ok\r".encode()
        )  # erases one character, not one byte; ~ inside a line is nothing special
        person.expect("ü~~ok\r\n".encode())
        person.type(b"exit 5\r")
        assert person.wait() == 5
        assert person.modes() == before


def test_leaving_and_being_ended(service: Service, client: Client, task: Task) -> None:
    """Whatever ends it, the terminal is put back and nothing goes on running."""
    for how in ("escape", "terminate"):
        marker = f"77{len(how)}"
        with typing(service, "exec", task.id, "--", "sleep", marker) as person:
            person.expect(rb"~\. at the beginning")
            raw = eventually(lambda at=person: not int(at.modes()[3]) & 0o2 and at.modes(), what="raw mode")
            eventually(lambda m=marker: _runs(client, task, f"sleep {m}"), what="it runs")
            if how == "escape":
                person.type(b"x\r~.")
                assert person.wait() == 255
            else:
                os.kill(person.pid, signal.SIGTERM)
                assert person.wait() == 143
            assert person.modes() != raw and int(person.modes()[3]) & 0o2  # type: ignore[call-overload]
        eventually(lambda m=marker: not _runs(client, task, f"sleep {m}"), what="nothing is left")
    # Without a terminal, Ctrl-C goes to the program.
    command = [sys.executable, "-m", "diamond.cli", "exec", task.id, "--", "sh", "-c"]
    script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    piped = subprocess.Popen([*command, script], env=service.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert piped.stdout is not None and piped.stdout.readline() == b"ready\n"
    piped.send_signal(signal.SIGINT)
    assert piped.communicate(timeout=15)[0] == b"caught\n" and piped.returncode == 9


def _runs(client: Client, task: Task, line: str) -> bool:
    return client.tasks.exec(task.id, ["pgrep", "-fx", line]).exit_code == 0


def test_several_at_once_but_not_too_many(client: Client, task: Task) -> None:
    with client.tasks.shell(task.id, ["cat"]) as first, client.tasks.shell(task.id, ["cat"], tty=True) as second:
        first.write(b"one")
        second.write(b"two\n")
        assert next(first.output()) == ("stdout", b"one")
        assert next(second.output())[1].startswith(b"two")
        with client.tasks.shell(task.id, ["true"]), pytest.raises(Conflict, match="3 shells open"):
            client.tasks.shell(task.id, ["true"])
    assert client.tasks.exec(task.id, ["true"]).exit_code == 0


def test_only_its_owner(service: Service, client: Client, task: Task) -> None:
    db = Database(f"sqlite:///{service.home.server / 'diamond.db'}")
    with db.write() as session:
        stranger = UserRow(id=new_id("usr"), name="stranger", created_at=time.time())
        session.add(stranger)
        session.flush()
        token = tokens.issue(session, now=time.time(), user_id=stranger.id)
    db.close()
    agent_token = (service.home.agent("local") / "token").read_text().strip()
    with client.tasks.shell(task.id, ["cat"]) as shell, Client(url=service.url, token=token) as other:
        path = f"/shells/{shell.shell.id}"
        with pytest.raises(NotFound):
            other.tasks.exec(task.id, ["id"])
        assert [
            ask(service, token, "GET", path),
            ask(service, token, "GET", f"{path}/output?offset=0&wait_s=0"),
            ask(service, token, "POST", f"{path}/input?offset=0"),
        ] == [404, 404, 404]
        ask(service, token, "DELETE", path)
        shell.write(b"still mine")
        assert next(shell.output())[1] == b"still mine"
        own = ClientConfig.load(service.home)
        assert own is not None
        assert ask(service, own.token, "GET", f"/agent{path}/input?runner=run_12345678") == 403
        assert ask(service, agent_token, "GET", path) == 403


def ask(service: Service, token: str, method: str, path: str) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.request(method, f"{service.url}/api/v1{path}", headers=headers).status_code


def test_who_opened_what_is_on_record_but_no_byte_of_it(client: Client) -> None:
    task = running(client, {"run": "sleep 600"})
    client.tasks.exec(task.id, ["sh", "-c", "cat; echo s3cret-word; exit 4"], stdin=b"s3cret-input")

    def recorded() -> list[Any]:
        found = [event for event in client.events() if event.task_id == task.id]
        return found if found[-1].kind == "shell.closed" else []

    events = eventually(recorded, what="its end is on record")
    opened, closed = [event for event in events if event.kind.startswith("shell.")]
    assert opened.kind == "shell.opened" and opened.data["program"] == "sh" and opened.data["user"]
    assert closed.kind == "shell.closed" and closed.data["exit_code"] == 4
    assert "s3cret" not in json.dumps([event.data for event in events])
    client.tasks.cancel(task.id)


def test_a_task_that_does_not_run(service: Service, client: Client, task: Task) -> None:
    """After those that need `task`: it holds a core, and is stopped here to make room."""
    facts = client.endpoints.get("local").facts
    assert facts is not None
    whole = {"name": "later", "run": "sleep 600", "resources": {"cpus": facts.cpus_per_node}}
    waiting = client.tasks.create(whole)
    refused = cli(service, "exec", "later", "--", "true")
    assert refused.returncode == 1 and b"QUEUED" in refused.stderr and b"--wait" in refused.stderr
    command = [sys.executable, "-m", "diamond.cli", "exec", "later", "--wait", "--", "printenv", "DIAMOND_TASK_NAME"]
    patient = subprocess.Popen(command, env=service.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    time.sleep(1)
    assert patient.poll() is None
    for each in client.tasks.list(states=["RUNNING"]):
        client.tasks.cancel(each.id)
    assert patient.communicate(timeout=30)[0] == b"later\n"
    client.tasks.cancel(waiting.id)
    client.tasks.wait(waiting.id, timeout_s=30)
    ended = cli(service, "exec", waiting.id, "--", "true")
    assert ended.returncode == 1 and b"CANCELLED" in ended.stderr


def test_the_job_ends_and_so_does_its_shell(service: Service, client: Client) -> None:
    task = running(client, {"run": "until [ -e go ]; do sleep 0.1; done"})
    with typing(service, "exec", task.id, "--", *BASH) as person:
        person.expect(rb"[$#>] ")
        person.type(b"touch go; sleep 100\r")
        assert person.wait() >= 128
        assert b"the job has ended" in person.screen
    assert client.tasks.wait(task.id, timeout_s=30).state == "SUCCEEDED"


def test_the_endpoints_owner_may_forbid_shells(service: Service, client: Client) -> None:
    policy = service.home.agent("local") / "policy.toml"
    task = running(client, {"run": "sleep 600"})

    def refused() -> str:
        try:
            return client.tasks.exec(task.id, ["true"]).message
        except PolicyRefused as error:
            return error.hint

    policy.write_text("allow_shells = false\n")
    try:
        eventually(lambda: "allow_shells" in refused(), what="shells are refused, by the rule's name")
        assert "allow_shells" in cli(service, "exec", task.id, "--", "true").stderr.decode()
    finally:
        policy.write_text("")
    eventually(lambda: refused() == "", what="shells are allowed again")
    client.tasks.cancel(task.id)


def test_a_key_is_echoed_at_once(client: Client) -> None:
    task = running(client, {"run": "sleep 600"})
    with client.tasks.shell(task.id, ["cat"], tty=True) as session:
        output = session.output()
        session.write(b"a")
        next(output)
        took = []
        for _ in range(40):
            began = time.monotonic()
            session.write(b"b")
            assert next(output)[1] == b"b"
            took.append(time.monotonic() - began)
    print(f"echo of a key: median {statistics.median(took) * 1000:.1f} ms, worst {max(took) * 1000:.1f} ms")
    assert statistics.median(took) < 0.05
    client.tasks.cancel(task.id)


def test_a_client_that_vanishes_leaves_nothing_running(service: Service, client: Client) -> None:
    task = running(client, {"run": "sleep 600"})
    command = [sys.executable, "-m", "diamond.cli", "exec", task.id, "--", "sleep", "7654"]
    gone = subprocess.Popen(command, env=service.env, stdin=subprocess.DEVNULL)
    eventually(lambda: _runs(client, task, "sleep 7654"), what="it runs")
    gone.kill()
    gone.wait()
    eventually(lambda: not _runs(client, task, "sleep 7654"), within_s=PATIENCE_S + 10, what="it was ended")
    client.tasks.cancel(task.id)


def test_a_program_that_does_not_read_keeps_its_shell(service: Service, client: Client) -> None:
    """Its agent, which waits for it, must not be taken for silent; and must notice when the client goes meanwhile."""
    task = running(client, {"run": "sleep 600"})
    data = bytes(3_000_000)
    late = cli(service, "exec", task.id, "--", "sh", "-c", f"sleep {PATIENCE_S + 4}; wc -c", input=data)
    assert (late.returncode, late.stdout.strip(), late.stderr) == (0, b"3000000", b"")
    with client.tasks.shell(task.id, ["sleep", "8765"]) as shell:
        typist = threading.Thread(target=_type, args=(shell, data), daemon=True)
        typist.start()
        eventually(lambda: _runs(client, task, "sleep 8765"), what="it runs")
        time.sleep(1)
    eventually(lambda: not _runs(client, task, "sleep 8765"), within_s=PATIENCE_S + 10, what="it was ended")
    client.tasks.cancel(task.id)


def _type(shell: ShellSession, data: bytes) -> None:
    with contextlib.suppress(DiamondError):
        shell.write(data)


def test_a_link_that_freezes_or_breaks_loses_and_doubles_nothing(tmp_path: Path) -> None:
    service = Service(tmp_path / "home", shell_patience_s="30")
    service.start_server()
    direct = service.url
    with Wire(service.port) as far, Wire(service.port) as near:
        try:
            service.url = far.url
            service.start_agent()
            service.url = direct
            service.wait_online()
            config = ClientConfig.load(service.home)
            assert config is not None
            with Client(url=near.url, token=config.token) as client:
                task = running(client, {"run": "sleep 600"})
                count = "i=0; while [ $i -lt 250 ]; do i=$((i+1)); echo $i; sleep 0.03; done; cat; exit 3"

                def freeze() -> None:
                    far.freeze()
                    threading.Timer(5.0, far.thaw).start()

                troubles = [(30, freeze), (200, far.cut), (215, near.cut), (230, far.cut), (250, lambda: None)]
                shown = typed = b""
                with client.tasks.shell(task.id, ["bash", "-c", count]) as session:
                    for name, data in session.output():
                        assert name == "stdout"
                        shown += data
                        while troubles and shown.count(b"\n") >= troubles[0][0]:
                            number, make = troubles.pop(0)
                            make()
                            session.write(line := b"typed at %d\n" % number)
                            typed += line
                            if not troubles:
                                session.end_input()
                assert shown == b"".join(b"%d\n" % number for number in range(1, 251)) + typed
                assert session.end.exit_code == 3
        finally:
            service.stop()


def test_agent_and_server_may_go_down(service: Service, client: Client) -> None:
    """Last in this module: whoever is typing is told, and soon."""
    task = running(client, {"run": "sleep 600"})
    # Replaced by another process: told at once.
    with typing(service, "exec", task.id, "--", "sleep", "8001") as person:
        eventually(lambda: _runs(client, task, "sleep 8001"), what="it runs")
        service.kill(service.agent)
        service.start_agent()
        assert person.wait(within_s=PATIENCE_S + 6) == 255
        assert re.search(rb"the agent of endpoint local (was restarted|has been silent)", person.screen)
    # Killed, and nobody takes its place.
    service.wait_online()
    with typing(service, "exec", task.id, "--wait", "--", "sleep", "8002") as person:
        eventually(lambda: _runs(client, task, "sleep 8002"), what="it runs")
        service.kill(service.agent)
        began = time.monotonic()
        assert person.wait(within_s=PATIENCE_S + 10) == 255
        print(f"told {time.monotonic() - began:.1f} s after the agent was killed (patience {PATIENCE_S:g} s)")
        assert b"has been silent for 5s" in person.screen
    service.start_agent()
    service.wait_online()
    eventually(lambda: _runs(client, task, "sleep 600"), within_s=30, what="the next agent runs shells")
    # Stopped on purpose: told by the agent itself.
    with typing(service, "exec", task.id, "--", "sleep", "8003") as person:
        eventually(lambda: _runs(client, task, "sleep 8003"), what="it runs")
        assert service.agent is not None
        service.agent.terminate()
        assert person.wait() >= 128
        assert b"the agent was stopped" in person.screen
        service.agent.wait(20)
    service.start_agent()
    service.wait_online()
    eventually(lambda: _runs(client, task, "sleep 600"), within_s=30, what="the next agent runs shells")
    # The server forgets its shells when it restarts, and what ran in them is ended.
    with typing(service, "exec", task.id, "--", "sleep", "8004") as person:
        eventually(lambda: _runs(client, task, "sleep 8004"), what="it runs")
        service.kill(service.server)
        service.start_server()
        assert person.wait(within_s=20) == 255
        assert b"the server was restarted" in person.screen
    service.wait_online()
    eventually(lambda: not _runs(client, task, "sleep 8004"), within_s=30, what="nothing is left")
    client.tasks.cancel(task.id)
