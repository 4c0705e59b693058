"""Hosts of batch systems that Diamond cannot submit to, told by the programs on PATH and by variables."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from diamond.agent.schedulers import foreign
from diamond.agent.schedulers.choice import choose
from diamond.agent.schedulers.pooled_local import local_with_pools
from diamond.agent.schedulers.pooled_slurm import slurm_with_pools
from diamond.cli.agent import about_this_machine
from diamond.core.errors import InstallationProblem

SLURM = ("sbatch", "squeue", "scancel", "scontrol")
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts programs into a folder that is on PATH, which holds nothing else. By name; what they print may be given."""
    for name in foreign.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")

    def put(*names: str, folder: str = "bin", says: str = "") -> Path:
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        for name in names:
            (place / name).write_text(f"#!/bin/sh\n{says}\n")
            (place / name).chmod(0o755)
        if str(place) not in (before := [part for part in os.environ["PATH"].split(":") if part]):
            monkeypatch.setenv("PATH", ":".join([*before, str(place)]))
        return place

    return put


@pytest.mark.parametrize(
    ("name", "programs"),
    [
        ("PBS", ["qsub", "qstat", "pbsnodes"]),
        ("Grid Engine", ["qsub", "qconf", "qhost", "qstat"]),
        ("LSF", ["bsub", "bjobs", "bqueues"]),
        ("HTCondor", ["condor_submit", "condor_q", "condor_status"]),
        ("OAR", ["oarsub", "oarstat", "oarnodes"]),
    ],
)
def test_programs_that_come_together(tmp_path: Path, install: Install, name: str, programs: list[str]) -> None:
    place = install(*programs[:-1] if name != "Grid Engine" else programs[:2])
    assert choose(None, tmp_path) is local_with_pools, "one is missing"
    install(*programs)
    for asked in (None, "auto"):
        with pytest.raises(InstallationProblem) as caught:
            choose(asked, tmp_path)
        assert f"a cluster of {name} ({place}/{programs[0]}, " in caught.value.message
        assert "--scheduler local" in caught.value.hint
    assert name in about_this_machine() and "run on this machine itself" in about_this_machine()
    assert choose("local", tmp_path) is local_with_pools
    (tmp_path / "agent.json").write_text('{"scheduler": "local"}')
    assert choose(None, tmp_path) is local_with_pools, "said once, and kept"


@pytest.mark.parametrize(
    ("name", "program", "variable"),
    [
        ("PBS", "qsub", "PBS_CONF_FILE"),
        ("Grid Engine", "qsub", "SGE_ROOT"),
        ("LSF", "bsub", "LSF_ENVDIR"),
        ("HTCondor", "condor_submit", "CONDOR_CONFIG"),
        ("Flux", "flux", "FLUX_URI"),
    ],
)
def test_a_program_and_a_variable(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch, name: str, program: str, variable: str
) -> None:
    monkeypatch.setenv(variable, "/opt/site")
    assert choose(None, tmp_path) is local_with_pools, "a variable by itself may be left over"
    install(program)
    with pytest.raises(InstallationProblem, match=rf"{name} \(.*{program}, .*{variable} is set"):
        choose(None, tmp_path)
    monkeypatch.setenv(variable, "")
    assert choose(None, tmp_path) is local_with_pools, "so may a program"


def test_flux_is_asked_which_it_is(tmp_path: Path, install: Install) -> None:
    install("flux", says="echo flux version 2.4.0")  # of Kubernetes
    assert choose(None, tmp_path) is local_with_pools and about_this_machine() == ""
    install("flux", says="echo 'commands: 0.66.0'; echo 'libflux-core: 0.66.0'")
    with pytest.raises(InstallationProblem, match=r"cluster of Flux \("):
        choose(None, tmp_path)


def test_slurms_own_stand_ins_are_slurms(tmp_path: Path, install: Install) -> None:
    install(*SLURM, "qsub", "qstat", "pbsnodes")
    assert choose(None, tmp_path) is slurm_with_pools
    install("scontrol", says="echo 'could not establish a configuration source' >&2; exit 1")  # and of no cluster
    assert choose(None, tmp_path) is local_with_pools
    install("qsub", "qstat", "pbsnodes", folder="pbs")
    assert choose(None, tmp_path) is local_with_pools, "the first on PATH is what anybody would run"


def test_slurm_beside_another_system_is_what_jobs_go_to(tmp_path: Path, install: Install) -> None:
    install("condor_submit", "condor_q", "condor_status")
    install(*SLURM, folder="slurm")
    assert choose(None, tmp_path) is slurm_with_pools
