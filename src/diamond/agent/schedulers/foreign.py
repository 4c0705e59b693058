"""Recognises the batch systems that Diamond cannot submit to, so that nobody's tasks run on their login nodes unasked.

One program of that name proves nothing: `flux` is also a tool for Kubernetes, and Slurm brings a `qsub` of its own. It
takes a system's main programs together, or one to submit with and a variable that only the system sets.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from diamond.agent import programs

_ASK_S = 10.0


@dataclass(frozen=True, kw_only=True)
class _Signs:
    """Attributes:
    submit: the program that jobs are handed in with.
    beside: those that always come with it.
    variables: what the system's own profile, or a job of it, sets.
    """

    name: str
    submit: str
    beside: tuple[str, ...]
    variables: tuple[str, ...]


# Grid Engine first: it has qsub and qstat as PBS does.
_KNOWN = (
    _Signs(name="Grid Engine", submit="qsub", beside=("qconf", "qhost"), variables=("SGE_ROOT", "SGE_CLUSTER_NAME")),
    _Signs(
        name="PBS", submit="qsub", beside=("qstat", "pbsnodes"),
        variables=("PBS_CONF_FILE", "PBS_EXEC", "PBS_SERVER", "PBS_DEFAULT", "PBS_JOBID"),
    ),
    _Signs(
        name="LSF", submit="bsub", beside=("bjobs", "bqueues"),
        variables=("LSF_ENVDIR", "LSF_SERVERDIR", "LSB_JOBID"),
    ),
    _Signs(
        name="HTCondor", submit="condor_submit", beside=("condor_q", "condor_status"),
        variables=("CONDOR_CONFIG", "_CONDOR_JOB_AD"),
    ),
    _Signs(name="OAR", submit="oarsub", beside=("oarstat", "oarnodes"), variables=("OAR_JOB_ID",)),
)  # fmt: skip
_FLUX_VARIABLES = ("FLUX_URI", "FLUX_JOB_ID")
VARIABLES = (*(name for signs in _KNOWN for name in signs.variables), *_FLUX_VARIABLES)


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A batch system of this machine, and by what it was recognised."""

    name: str
    signs: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.signs)})"


def find(environ: Mapping[str, str] | None = None) -> Foreign | None:
    """The batch system this machine hands jobs to, where it is one of those that are known here; None: none is seen."""
    environ = os.environ if environ is None else environ
    path = environ.get("PATH", os.defpath)
    for signs in _KNOWN:
        submit = shutil.which(signs.submit, path=path)
        if submit is None or _is_slurms(submit):
            continue
        beside = [found for program in signs.beside if (found := shutil.which(program, path=path))]
        variables = [f"{name} is set" for name in signs.variables if environ.get(name)]
        if variables or len(beside) == len(signs.beside):
            return Foreign(name=signs.name, signs=(submit, *beside, *variables))
    return _find_flux(path, environ)


def _is_slurms(program: str) -> bool:
    """Slurm's stand-ins for the programs of PBS and Grid Engine lie beside its own."""
    return os.path.exists(os.path.join(os.path.dirname(program), "sbatch"))


def _find_flux(path: str, environ: Mapping[str, str]) -> Foreign | None:
    program = shutil.which("flux", path=path)
    if program is None:
        return None
    variables = tuple(f"{name} is set" for name in _FLUX_VARIABLES if environ.get(name))
    if not variables and "libflux" not in programs.ask([program, "--version"], timeout_s=_ASK_S).out:
        return None  # Flux CD, which is something else
    return Foreign(name="Flux", signs=(program, *variables))
