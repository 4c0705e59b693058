"""What keeps an agent running: the unit's and the crontab's text, and which way is chosen."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from diamond.agent import background, cron, systemd
from diamond.agent.config import AgentConfig, choose_home
from diamond.core.errors import InstallationProblem, InvalidInput

GOLDEN = Path(__file__).parent / "golden"
HOME = Path('/home/a b\'$(x)%i "q" \\n/.diamond/agents/box')
ARGV = ["/usr/bin/python3", str(HOME / "diamond-agent.pyz"), "run", "--home", str(HOME), "--saved-environment"]


def test_the_unit_is_as_it_should_be() -> None:
    text = systemd.unit_text("box", HOME, ARGV)
    assert text == (GOLDEN / "agent.service").read_text()
    assert systemd.unit_name("box", HOME) == "diamond-agent-box-bffb1f60.service"
    assert systemd.unit_name("box", HOME / "other") != systemd.unit_name("box", HOME)


def test_systemd_itself_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "diamond-agent-box.service"
    unit.write_text(systemd.unit_text("box", tmp_path / "a b'$(x)", ["/bin/sh", "-c", 'echo "$HOME" 100%']))
    try:
        done = subprocess.run(
            ["systemd-analyze", "--user", "verify", str(unit)],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("systemd-analyze is not installed here")
    if "Failed to initialize manager" in done.stderr:
        pytest.skip(f"systemd-analyze cannot verify units here: {done.stderr.strip()[:100]}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_crontab_keeps_everything_that_is_not_ours() -> None:
    theirs = "MAILTO=me\n0 3 * * * backup --all\n# begin Diamond agent of somebody else\n"
    text = cron.with_lines(theirs, HOME, ARGV)
    assert text == (GOLDEN / "crontab").read_text()
    assert cron.with_lines(text, HOME, ARGV) == text
    assert cron.without_lines(text, HOME) == theirs
    assert cron.without_lines(text, Path("/elsewhere")) == text
    assert cron.with_lines("no newline", HOME, ARGV).startswith("no newline\n# begin")
    # Somebody has cut the end mark away: rather too much is kept than too little.
    broken = text.rsplit("# end", 1)[0] + "5 5 * * * theirs\n"
    assert cron.without_lines(broken, HOME) == broken


def test_cron_runs_exactly_the_words_that_were_meant() -> None:
    line = cron.with_lines("", HOME, ARGV).splitlines()[1]
    command = line.removeprefix("@reboot ").removesuffix(" >/dev/null 2>&1")
    assert "%" not in command.replace(r"\%", "")
    assert shlex.split(command.replace(r"\%", "%")) == ARGV
    with pytest.raises(InstallationProblem):
        cron.with_lines("", Path("/a\nb"), ["x", "/a\nb"])
    with pytest.raises(InstallationProblem):
        systemd.quoted("a\nb")


@pytest.mark.parametrize(
    ("no_systemd", "lingers", "no_cron", "chosen"),
    [
        ("", True, "", "systemd"),
        ("", False, "", "cron"),
        ("no bus", False, "", "cron"),
        ("no bus", False, "no crontab", "plain"),
        ("", False, "no crontab", "plain"),
    ],
)
def test_the_first_way_that_outlives_a_logout_is_taken(
    monkeypatch: pytest.MonkeyPatch, no_systemd: str, lingers: bool, no_cron: str, chosen: str
) -> None:
    monkeypatch.setattr(systemd, "problem", lambda: no_systemd)
    monkeypatch.setattr(systemd, "lingers", lambda: lingers)
    monkeypatch.setattr(cron, "problem", lambda: no_cron)
    via, why = background.choose()
    assert via == chosen
    if chosen != "systemd":
        assert (no_systemd or "enable-linger") in why


def test_what_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="auto, systemd, cron, tmux, plain"):
        background.start(tmp_path, via="magic")
    with pytest.raises(InstallationProblem, match="no agent is enrolled"):
        background.start(tmp_path)
    assert background.stop(tmp_path) is False


def test_which_home_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path))
    with pytest.raises(InstallationProblem, match="no agent"):
        choose_home(None, None)
    for name in ("one", "two"):
        (tmp_path / "agents" / name).mkdir(parents=True)
        AgentConfig(server="https://host", name=name).save(tmp_path / "agents" / name)
        if name == "one":
            assert choose_home(None, None) == tmp_path / "agents" / "one"
    with pytest.raises(InvalidInput, match="one, two"):
        choose_home(None, None)
    assert choose_home(None, "two") == tmp_path / "agents" / "two"
    assert choose_home(tmp_path / "x", "two") == tmp_path / "x"
    with pytest.raises(InstallationProblem, match="three"):
        choose_home(None, "three")


def test_the_log_for_people(tmp_path: Path) -> None:
    (tmp_path / "agent.log").write_text('{"at": 0, "level": "error", "message": "no"}\nTraceback\n[1]\n')
    lines = background.log_tail(tmp_path, 10).splitlines()
    assert lines[0].endswith("error   no")
    assert lines[1:] == ["Traceback", "[1]"]
    assert background.log_tail(tmp_path / "none", 10) == ""
