"""Packages that are not there or do not fit: pip's, the distribution's, conda's."""

from __future__ import annotations

from diamond.agent.builders.symptoms.symptom import Symptom

_PIP = ("pip", "commands", "conda")

SYMPTOMS: dict[str, Symptom] = {
    # pip.
    "hash_mismatch": Symptom(
        patterns=(r"do not match the hashes", r"hash sum mismatch", r"(bad|wrong) (checksum|digest)|checksum mismatch"),
        message="what was downloaded is not what its digest says",
        hint="try again; if it stays so, the package was changed after it was pinned, or a cache on the way is stale",
        after=3,
    ),
    "externally_managed": Symptom(
        patterns=(r"externally-managed-environment",),
        message="the base's Python belongs to its distribution, and pip was called without leave to add to it",
        hint="list the packages under `pip`, or call pip with --break-system-packages: an image holds nothing to break",
    ),
    "python_version": Symptom(
        patterns=(
            # pip names what it left out whatever the reason it stopped: it counts when the version asked for is there.
            r"require a different python version: (?:[^\n]*; )?(?P<version>\S+) Requires-Python [^\n]*\n"
            r"(?:[^\n]*\n)*?[^\n]*satisfies the requirement (?P<what>[^\s=<>~!]+==(?P=version))(?=[\s(])",
            r"require a different python version: [^\n]*\n"
            r"(?:[^\n]*\n)*?[^\n]*satisfies the requirement (?P<what>[^\s=<>~!]+[<>~][^\s(]*)",
            r"package '(?P<what>[^']+)' requires a different python",
            r"requires python ?(?P<what>[<>=~!][\d.,<>=* ]+)",
        ),
        message="{what} does not fit the Python of the base",
        hint="choose a base with another Python, e.g. docker://python:3.12-slim, or another version of the package",
        instead={"venv": "load another Python on the endpoint before the agent starts, or ask for another version"},
        stages=_PIP,
        after=2,
    ),
    "version_conflict": Symptom(
        patterns=(
            r"cannot install (?P<what>.+?) because these package versions have conflicting dependencies",
            r"resolutionimpossible",
            r"package versions have conflicting dependencies",
        ),
        message="these packages cannot be installed together: {what}",
        hint="loosen one of the versions: the lines below say who wants what",
        stages=_PIP,
        after=8,
    ),
    "version_not_found": Symptom(
        # Only when there are versions at all: pip lists them.
        patterns=(r"could not find a version that satisfies the requirement (?P<what>\S+).*\(from versions: (?!none)",),
        message="no version of the package fits {what} on this machine",
        hint="choose one of the versions in the log; some exist only for other Pythons or processors",
        stages=_PIP,
        after=1,
    ),
    "distribution_not_found": Symptom(
        patterns=(
            r"could not find a version that satisfies the requirement (?P<what>[^\s(]+)",
            r"no matching distribution found for (?P<what>\S+)",
        ),
        message="the package index has no {what}",
        hint="check the spelling; names on the index often differ from the name one imports (opencv-python for cv2)",
        stages=_PIP,
        after=1,
    ),
    "invalid_requirement": Symptom(
        patterns=(r"invalid requirement: (?P<what>.+)", r"expected (end or semicolon|package name).*"),
        message="pip cannot read a line: {what}",
        hint="write one package a line, e.g. numpy, numpy==2.3.4 or numpy>=2,<3",
        stages=_PIP,
        after=2,
    ),
    "no_pip": Symptom(
        patterns=(r"no module named (?P<what>pip|ensurepip|venv)\b", r"(?P<what>pip3?|python3?): (command )?not found"),
        message="there is no {what} to install Python packages with",
        hint="add python3 and python3-pip to `system`, or take a base that has them: docker://python:3.12-slim",
        instead={"venv": "load a complete Python on the endpoint (module load python) before the agent starts"},
        stages=_PIP,
    ),
    # The distribution's packages.
    "package_not_found": Symptom(
        patterns=(
            r"unable to locate package (?P<what>\S+)",
            r"package '?(?P<what>[^\s']+)'? has no installation candidate",
            r"unable to find a match: (?P<what>.+)",
            r"no match for argument: (?P<what>\S+)",
            r"no package (matches )?'?(?P<what>[^\s']+)'?( available)?",
            r"^\s*(?P<what>\S+) \(no such package\)",
            r"no provider of '(?P<what>[^']+)' found",
        ),
        message="the base's distribution has no package {what}",
        hint="check the spelling: Debian and Ubuntu say libhdf5-dev where RHEL and Rocky say hdf5-devel",
        stages=("system", "commands"),
    ),
    "package_version": Symptom(
        patterns=(
            r"version '[^']+' for '(?P<what>[^']+)' was not found",
            r"unable to select packages",
            r"breaks: world\[",
        ),
        message="the base's distribution does not have that version of {what}",
        hint="leave the version out: distributions keep only the newest one",
        stages=("system", "commands"),
        after=3,
    ),
    "index_outdated": Symptom(
        patterns=(
            r"(?P<what>\S+) release' (does not have a release file|no longer has a release file)",
            r"release file for (?P<what>\S+) (is expired|is not valid yet)",
            r"failed to download metadata for repo '(?P<what>[^']+)'",
            r"(no_pubkey|is not signed|signatures couldn't be verified)",
        ),
        message="the package lists of the base's distribution cannot be used: it may have reached its end of life",
        hint="take a newer release of the base",
        stages=("system", "commands"),
    ),
    "package_script": Symptom(
        patterns=(
            r"error processing (package|archive) (?P<what>\S+)",
            r"installed (?P<what>\S+) package post-installation script subprocess returned error",
            r"scriptlet failed.*|error in \w+ scriptlet in rpm package (?P<what>\S+)",
        ),
        message="package {what} was fetched, but its own installation failed",
        hint="some packages start services or change system users, which no build as an ordinary user can do: leave it "
        "out if nothing needs it",
        stages=("system", "commands"),
        after=2,
    ),
    "base_lacks": Symptom(
        patterns=(r"^diamond: (?P<what>.*\bhas no (?:conda|pip|package manager)\b.*)",),
        message="{what}",
        hint="choose another base, or leave these packages out",
        stages=("system", "conda", "pip"),
    ),
    "conda_not_found": Symptom(
        patterns=(
            r"packagesnotfounderror",
            r"nothing provides (requested )?(?P<what>\S+)",
            r"(?P<what>\S+) does not exist \(perhaps a typo",
            r"(unsatisfiableerror|could not solve for environment specs|found conflicts)",
        ),
        message="conda finds no set of packages that fits {what}",
        hint="check names and versions, and whether `channels` has all that is needed (conda-forge, bioconda, nvidia)",
        stages=("conda", "commands"),
        after=5,
    ),
}
