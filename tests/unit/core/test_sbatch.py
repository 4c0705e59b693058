"""Batch scripts as tasks: golden files, the words of directives, and that nothing is lost silently."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from diamond.core.durations import parse_duration
from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.sbatch.importing import ImportedTask, import_sbatch
from diamond.core.sbatch.layout import Gpus, hosts, mebibytes, node_range, split_gres, typed_count
from diamond.core.sbatch.options import OPTIONS, SHORT, Takes, read_directives, split_words
from diamond.core.sbatch.values import exports, parse_array, show_time, signal_warning, walltime_s
from diamond.core.slurm import OWN_OPTIONS
from diamond.core.tasks import TaskSpec
from diamond.sdk import taskfile
from diamond.sdk.sbatch import to_yaml

GOLDEN = Path(__file__).parent / "golden" / "sbatch"


def imported(*directives: str, body: str = "srun ./a.out\n", shebang: str = "#!/bin/bash") -> ImportedTask:
    text = "\n".join([shebang, *(f"#SBATCH {one}" for one in directives), body])
    task = import_sbatch(text.encode(), name="job")
    assert read_back(task) == task.spec  # whatever else a test looks at
    return task


def read_back(task: ImportedTask) -> TaskSpec:
    return TaskSpec.parse(taskfile.parse(to_yaml(task, "job.sbatch"), "task.yaml").raw)


def fate(task: ImportedTask, source: str) -> tuple[str, str]:
    (note,) = [note for note in task.notes if note.source == source]
    return note.kind, note.text


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sbatch")), ids=lambda path: path.stem)
def test_task_file_is_the_golden_one(path: Path) -> None:
    # After a wanted change: python tests/unit/core/test_sbatch.py
    task = import_sbatch(path.read_bytes(), name=path.stem)
    assert to_yaml(task, path.name) == path.with_suffix(".yaml").read_text()
    assert read_back(task) == task.spec


# Nothing is lost silently

VALUES = {
    "array": "1-3", "begin": "now+1hour", "clusters": "other", "cpus-per-task": "2", "error": "e.txt", "export": "A=1",
    "gpus": "2", "gpus-per-node": "a100:2", "gpus-per-task": "1", "gres": "gpu:1", "input": "data.txt", "mem": "4G",
    "mem-per-cpu": "1G", "mem-per-gpu": "1G", "nodes": "2", "ntasks": "4", "ntasks-per-node": "2", "signal": "USR1@60",
    "time": "1:00:00", "tres-per-task": "cpu=2",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_of_sbatch_is_kept_or_spoken_of(name: str) -> None:
    text = f"--{name}" if OPTIONS[name] is Takes.NOTHING else f"--{name}={VALUES.get(name, 'x')}"
    task = imported(text)
    kind, said = fate(task, text)
    assert kind in ("kept", "changed", "left out")
    assert said
    assert kind != "kept" or read_back(task) != read_back(imported()), "said to be kept, but nothing differs"


@pytest.mark.parametrize("name", sorted(set(OWN_OPTIONS) & set(OPTIONS)))
def test_what_diamond_decides_itself_is_not_passed_on(name: str) -> None:
    value = VALUES.get(name, "x")
    task = imported(f"--{name}" if OPTIONS[name] is Takes.NOTHING else f"--{name}={value}")
    assert task.spec.slurm.extra == ()


def test_every_short_option_stands_for_a_long_one() -> None:
    assert set(SHORT.values()) <= set(OPTIONS)
    for letter, name in SHORT.items():
        (found,) = read_directives(
            [f"#SBATCH -{letter}" + ("x" if OPTIONS[name] is not Takes.NOTHING else "")]
        ).directives
        assert found.name == name


def test_random_directives_always_make_a_task_and_leave_no_line_out() -> None:
    chance = random.Random(3)
    words = [f"--{name}" for name in OPTIONS] + [f"-{letter}" for letter in SHORT]
    values = [
        "",
        "1",
        "0",
        "4G",
        "a100:2",
        "gpu:a100:2,shard",
        "2-4",
        "'a b'",
        "ü",
        "$(x)",
        "x" * 300,
        "%A",
        "-",
        "#",
        "\\",
    ]
    values += ["1:2:3", "c[1-4]", "/etc/passwd", "ALL,A=1", "999999999999999999999", "\t", "none", "B:TERM@1", ":"]
    for _ in range(1500):
        chosen = [chance.choice(words) + chance.choice(["=", " ", ""]) + chance.choice(values) for _ in range(3)]
        task = imported(*chosen)
        mentioned = {note.line for note in task.notes}
        reading = read_directives(["", *(f"#SBATCH {one}" for one in chosen)])
        assert {one.line for one in reading.directives} <= mentioned, chosen
        assert {odd.line for odd in reading.oddities} <= mentioned, chosen


# How sbatch reads


@pytest.mark.parametrize(
    ("line", "words", "unread"),
    [
        ("-N2 --time=1 # comment", ["-N2", "--time=1"], ""),
        ("--comment='a b' x", ["--comment=a b", "x"], ""),
        ('--comment="a\'b"', ["--comment=a'b"], ""),
        (r"--comment=a\ b\"c", ['--comment=a b"c'], ""),
        (r"'a\'b'", ["a'b"], ""),
        ("--comment='#1'#2 --x", ["--comment=#1"], ""),
        ("a '' b", ["a"], "'' b"),
        ("a \\", ["a"], ""),
        ("\t a\r", ["a"], ""),
        ("#x", [], ""),
    ],
)
def test_words(line: str, words: list[str], unread: str) -> None:
    assert split_words(line) == (words, unread)


@pytest.mark.parametrize("line", ["'a", 'x "y', ":", "-N1 : -N2"])
def test_lines_that_sbatch_refuses(line: str) -> None:
    with pytest.raises(ValueError):
        split_words(line)
    (odd,) = read_directives([f"#SBATCH {line}"]).oddities
    assert "sbatch refuses" in odd.why


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-N2", [("nodes", "2")]),
        ("-N 2", [("nodes", "2")]),
        ("--nodes=2", [("nodes", "2")]),
        ("--nodes 2", [("nodes", "2")]),
        ("--nodes=", [("nodes", "")]),
        ("--tasks-per-node=2", [("ntasks-per-node", "2")]),
        ("--workdir=/x", [("chdir", "/x")]),
        ("--partit=a", [("partition", "a")]),
        ("--exclusive", [("exclusive", None)]),
        ("--exclusive=user", [("exclusive", "user")]),
        ("-HON3", [("hold", None), ("overcommit", None), ("nodes", "3")]),
        ("-k", [("no-kill", None)]),
        ("-koff", [("no-kill", "off")]),
        ("--time -p", [("time", "-p")]),
        ("--site-option a --hold", [("site-option", "a"), ("hold", None)]),
        ("--site-option --hold", [("site-option", None), ("hold", None)]),
    ],
)
def test_options(text: str, expected: list[tuple[str, str | None]]) -> None:
    found = read_directives([f"#SBATCH {text}"])
    assert [(one.name, one.value) for one in found.directives] == expected
    assert found.oddities == []


def test_a_value_may_stand_in_the_next_directive() -> None:
    (found,) = read_directives(["#SBATCH --time", "# between", "#SBATCH 10:00"]).directives
    assert (found.name, found.value, found.line) == ("time", "10:00", 1)


def test_directives_end_at_the_first_command() -> None:
    found = read_directives(["#!/bin/sh", "", "  # x", "#SBATCH -n1", "echo", "#SBATCH -n2"])
    assert [one.value for one in found.directives] == ["1"]
    assert found.first_command == 5
    assert [(odd.line, odd.text) for odd in found.oddities] == [(6, "#SBATCH -n2")]


def test_what_is_commented_out_is_not_spoken_of() -> None:
    task = imported("-n1", body="##SBATCH -n2\n# an #SBATCH line\ntrue\n")
    assert [note.source for note in task.notes if note.source] == ["-n1"]


# What it comes to


def test_the_last_one_counts_and_the_others_are_named() -> None:
    task = imported("-t 10", "--time=20")
    assert task.spec.slurm.time_s == 1200
    assert fate(task, "-t 10") == ("left out", "line 3 says --time=20, and the last one counts")


def test_mail_types_add_up() -> None:
    assert imported("--mail-type=END", "--mail-type=FAIL").spec.slurm.extra == ("--mail-type=END", "--mail-type=FAIL")


@pytest.mark.parametrize(
    ("directives", "nodes", "resources"),
    [
        (["-N2 --ntasks-per-node=4 -c8"], 2, {"cpus": "32"}),
        (["-n16"], 1, {"cpus": "16"}),
        (["-n16 -N3"], 3, {"cpus": "6"}),
        (["-n2 -N4"], 2, {"cpus": "1"}),
        (["-n16 --ntasks-per-node=4 -c2"], 4, {"cpus": "8"}),
        (["-w c[1-3],d1 -n8"], 4, {"cpus": "2"}),
        (["-c4 --mem-per-cpu=2G"], 1, {"cpus": "4", "memory": "8"}),
        (["--mem=1500"], 1, {"memory": "1.464844"}),
        (["--mem=0"], 1, {}),
        (["--gres=gpu"], 1, {"accelerators": "gpu:1"}),
        (["--gres=gpu:a100:4"], 1, {"accelerators": "a100:4"}),
        (["--gpus-per-node=h100:8 --mem-per-gpu=100G"], 1, {"accelerators": "h100:8", "memory": "800"}),
        (["-N2 -G 8"], 2, {"accelerators": "gpu:4"}),
        (["-N2 -n8 --gpus-per-task=a100:1"], 2, {"cpus": "4", "accelerators": "a100:4"}),
        (["--gpus-per-node=4 --ntasks-per-gpu=2 -c3"], 1, {"cpus": "24", "accelerators": "gpu:4"}),
        (["--gpus-per-node=4 --cpus-per-gpu=8"], 1, {"cpus": "32", "accelerators": "gpu:4"}),
        (["--tres-per-task=cpu=4,gres/gpu:a100=1 -n2"], 1, {"cpus": "8", "accelerators": "a100:2"}),
    ],
)
def test_layouts(directives: list[str], nodes: int, resources: dict[str, Any]) -> None:
    spec = imported(*directives).spec
    assert spec.num_nodes == nodes
    assert spec.ranks_per_node == 0
    needs = spec.resources
    found = {"cpus": needs.cpus, "memory": needs.memory, "accelerators": needs.accelerators}
    assert {key: value for key, value in found.items() if value is not None} == resources


def test_gpus_that_accelerators_cannot_name_go_to_gres() -> None:
    assert imported("--gres=gpu:3g.20gb:1,shard:2").spec.slurm.gres == "gpu:3g.20gb:1,shard:2"
    assert imported("--gpus-per-node=a100:1,v100:1").spec.slurm.gres == "gpu:a100:1,gpu:v100:1"


def test_times() -> None:
    limits = {"90": 5400, "10:30": 630, "1:00:00": 3600, "1-12": 129600, "2-3:4": 183840, "1-0:0:5": 86405}
    assert {text: walltime_s(text) for text in limits} == limits
    assert [parse_duration(show_time(seconds)) for seconds in limits.values()] == list(limits.values())
    assert [walltime_s(text) for text in ("UNLIMITED", "infinite", "0", "-1")] == [0, 0, 0, 0]
    assert [walltime_s(text) for text in ("", "x", "1:2:3:4", None, "1h")] == [None] * 5


def test_time_limits_both_the_job_and_the_task() -> None:
    spec = imported("-t 1-12").spec
    assert (spec.slurm.time_s, spec.max_duration) == (129600, 129600)
    assert imported("-t UNLIMITED").spec.max_duration is None


def test_requeue_is_a_retry_for_what_slurm_requeues() -> None:
    retry = imported("--requeue").spec.retry
    assert retry.max_retries == 3
    assert [reason.value for reason in retry.on] == ["NODE_FAIL", "PREEMPTED"]


def test_signals() -> None:
    assert signal_warning("B:USR1@120") == ("USR1", 120)
    assert signal_warning("SIGTERM") == ("TERM", 60)
    assert signal_warning("RB:10@1") == ("10", 1)
    assert signal_warning("USR1@0") is None
    assert signal_warning("x y") is None
    task = imported("--signal=TERM@90")
    assert task.spec.slurm.warning == 90
    assert fate(task, "--signal=TERM@90")[0] == "changed"


def test_exported_variables() -> None:
    found = exports("ALL,A=1,B,C='x,y',D=\"z=1\",E=")
    assert found.values == {"A": "1", "C": "x,y", "D": "z=1", "E": ""}
    assert found.from_shell == ("B",)
    task = imported("--export=A=1,B,RANK=3")
    assert task.spec.envs == {"A": "1"}
    kind, text = fate(task, "--export=A=1,B,RANK=3")
    assert kind == "changed"
    assert "--env B" in text
    assert "RANK" in text


def test_arrays_are_their_first_element_and_a_loop() -> None:
    task = imported("--array=4-10:3,20%2")
    assert task.spec.envs == {
        "SLURM_ARRAY_TASK_ID": "4",
        "SLURM_ARRAY_TASK_MIN": "4",
        "SLURM_ARRAY_TASK_MAX": "20",
        "SLURM_ARRAY_TASK_STEP": "3",
        "SLURM_ARRAY_TASK_COUNT": "4",
    }
    text = fate(task, "--array=4-10:3,20%2")[1]
    assert "for i in {4..10..3} 20; do diamond launch TASK.YAML -d --env SLURM_ARRAY_TASK_ID=$i; done" in text
    assert "%2" in text
    assert [parse_array(bad) for bad in ("", "3-1", "1:0", "a", "1%x", "0-5:0")] == [None] * 6


def test_small_readers() -> None:
    assert [hosts(text) for text in ("c1", "c[1-3,7],d[01-02]x[1-2]", "c[x]", "", "c[1-999999999]")] == [1, 8, 0, 0, 0]
    assert [node_range(text) for text in ("2", "2-4", "1,3", "0", "4-2", "x", "2k")] == [
        (2, 2), (2, 4), (1, 1), None, None, None, (2048, 2048),
    ]  # fmt: skip
    assert [mebibytes(text) for text in ("1", "1K", "2G", "1TB", "x", "1.5G")] == [
        1,
        1 / 1024,
        2048,
        1024**2,
        None,
        None,
    ]
    assert typed_count("a100:2,4") == [Gpus("a100", 2), Gpus("", 4)]
    assert typed_count("a100") == []
    assert split_gres("gpu:2,gres/gpu:v100=1,none,fpga:1") == ([Gpus("", 2), Gpus("v100", 1)], ["fpga:1"])


# The script


def test_a_bash_script_keeps_its_commands_exactly() -> None:
    body = "set -e\n\n  indented\t\n: '#SBATCH'\ncat <<X\n\n   \nX\n"
    run = imported("-n1", body=body).spec.run
    assert run.endswith(body)
    assert run.startswith("#!/bin/bash\n# Added by")
    assert "#SBATCH -n1" not in run


@pytest.mark.parametrize("shebang", ["#!/bin/bash", "#!/usr/bin/env bash", "#! /usr/bin/bash  ", "# nothing"])
def test_plain_bash_goes_into_run_itself(shebang: str) -> None:
    assert "END_OF_SCRIPT" not in imported(shebang=shebang).spec.run


@pytest.mark.parametrize(
    ("shebang", "command"),
    [
        ("#!/bin/bash -l", "/bin/bash -l"),
        ("#!/bin/tcsh", "/bin/tcsh"),
        ("#!/usr/bin/env python3", "/usr/bin/env python3"),
        ("#!/usr/bin/env -S python3 -u", "/usr/bin/env '-S python3 -u'"),
        ("#!/bin/sh\t-e", "/bin/sh -e"),
    ],
)
def test_any_other_interpreter_runs_the_whole_script_from_a_file(shebang: str, command: str) -> None:
    run = imported("-n1", shebang=shebang, body="END_OF_SCRIPT\nx\n").spec.run
    assert run.endswith(f'\nEND_OF_SCRIPT_\nexec {command} "$DIAMOND_RUN_DIR/script"\n')
    assert f"<<'END_OF_SCRIPT_' || exit\n{shebang}\n#SBATCH -n1\nEND_OF_SCRIPT\nx\n" in run


def test_text_in_directives_never_becomes_a_command() -> None:
    task = imported("-J '$(touch x)`y`' -D '$(pwd);x'", body="echo $SLURM_JOB_NAME\n")
    assert task.spec.name == "$(touch x)`y`"
    assert "SLURM_JOB_NAME='$(touch x)`y`'" in task.spec.run
    assert "cd -- '$(pwd);x' || exit" in task.spec.run


def test_the_task_finds_no_ranks_of_diamonds() -> None:
    for directives in ("-N2 -n4", "-n4"):
        spec = imported(directives).spec
        assert spec.ranks_per_node == 0
        assert "SLURM_NTASKS=4" in spec.run


# Files


def test_windows_lines_and_a_mark_are_mended_and_said() -> None:
    task = import_sbatch(b"\xef\xbb\xbf#!/bin/bash\r\n#SBATCH -J x\r\necho\r\n")
    assert task.spec.name == "x"
    assert "\r" not in task.spec.run
    assert sum("sbatch refuses" in note.text for note in task.notes) == 2


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "empty"),
        (b" \n\n", "empty"),
        (b"\x7fELF\x00\x01", "not a text file"),
        (b"#!/bin/bash\n#SBATCH -J \x00\n", "not a text file"),
        (b"#!/bin/bash\n# caf\xe9\n", "line 2: not UTF-8"),
    ],
)
def test_what_is_no_script_is_refused(data: bytes, part: str) -> None:
    with pytest.raises(InvalidInput, match=part):
        import_sbatch(data)


def test_ten_megabytes_are_refused() -> None:
    with pytest.raises(TooLarge):
        import_sbatch(b"#!/bin/bash\n" + b"# x\n" * 2_500_000)


def test_names_that_cannot_be_are_left_out() -> None:
    task = imported("-J 'a\u202eb'")
    assert task.spec.name == "job"
    assert fate(task, "-J a\u202eb")[0] == "left out"
    assert imported("-J 日本").spec.name == "日本"


@pytest.mark.parametrize(
    "text", ["\x1b[1m", "a\u2028b", "\u0085", "tab\there", "émoji 😀", "trailing   ", "  ", "'\"\\", "\ufeff"]
)
def test_any_script_survives_the_task_file(text: str) -> None:
    imported("-n1", body=f"echo {text}\n\n{text}\n\n\n")
    imported(body=f"{text}x", shebang=text)


def test_a_script_without_directives_or_commands_is_spoken_of() -> None:
    notes = " ".join(note.text for note in import_sbatch(b"#!/bin/bash\n").notes)
    assert "no #SBATCH directive" in notes
    assert "no command" in notes


def test_the_notes_in_a_task_file_stay_comments() -> None:
    text = to_yaml(imported("-J 'a\x0bb' --comment='x\u2028y'"), source="evil\nname: x")
    head = text.split("\n\n", 1)[0]
    assert all(line.startswith("#") for line in re.split(r"[\n\r\x0b\x0c\x85\u2028\u2029]", head))


if __name__ == "__main__":
    for script in GOLDEN.glob("*.sbatch"):
        script.with_suffix(".yaml").write_text(
            to_yaml(import_sbatch(script.read_bytes(), name=script.stem), script.name)
        )
