"""The shell file that does a stage's work inside an image: system packages, conda, pip, files and commands, envs.

    sh steps.sh STAGE INPUTS          # STAGE as in recipes.Stage.name, or "pack"; INPUTS as in BuildContext.inputs

It is the same for every builder with a container, so that the same recipe means the same everywhere. The text is a
constant: what people wrote is read from the files in INPUTS, line by line. POSIX sh, since a base may have no bash.
A file `network.sh` beside it is read first: settings of the endpoint that only the build may see.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from diamond.agent.builders.base import FILE_ENVS, BuildProblem

STEPS_FILE = "steps.sh"
NETWORK_FILE = "network.sh"
APT_FILE = "apt.conf"

# A build is thrown away when the machine fails: nothing in it has to reach the disk early.
APT = 'Acquire::Languages "none";\nDPkg::Options { "--force-unsafe-io"; };\n'
# apt drops root's rights for downloads, which fails where the build has no other account to become.
APT_ALONE = 'APT::Sandbox::User "root";\n'

STEPS = r"""# sh steps.sh STAGE INPUTS
set -eu
stage=$1
inputs=$2
umask 022
cd /

say() { printf 'diamond: %s\n' "$*"; }
fail() { printf 'diamond: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

here=${0%/*}
if [ -f "$here/network.sh" ]; then . "$here/network.sh"; fi
if [ -f "$here/apt.conf" ]; then export APT_CONFIG="$here/apt.conf"; fi
export HOME=/root PYTHONNOUSERSITE=1
export PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
export PIP_BREAK_SYSTEM_PACKAGES=1  # this image is ours alone: there is no administrator to protect it from pip

# The base may itself be an image of Diamond, with variables of its own; conda's Python comes before the system's.
if [ -f /opt/diamond/env.sh ]; then . /opt/diamond/env.sh; fi
if [ -d /opt/conda/bin ]; then export PATH="/opt/conda/bin:$PATH"; fi

# Not all of these tools know `--`: what begins like an option is no name, wherever it came from.
plain() { case $1 in -* | '') fail "$1 is not the name of a package or channel" ;; esac; }

# Packages of the distribution. A version is written name=1.2; rpm's tools want name-1.2.
install() {
  if have apt-get; then
    export DEBIAN_FRONTEND=noninteractive
    # Without Error-Mode apt takes a mirror that cannot be reached for one without the package.
    apt-get -q -o APT::Update::Error-Mode=any update
    apt-get -q -y -o Dpkg::Use-Pty=0 -o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold \
      install --no-install-recommends --allow-downgrades -- "$@"
    apt-get clean
    rm -rf /var/lib/apt/lists/*
  elif have apk; then
    apk add --no-cache -- "$@"
  else
    count=$#
    while [ "$count" -gt 0 ]; do
      case $1 in *=*) set -- "$@" "${1%%=*}-${1#*=}" ;; *) set -- "$@" "$1" ;; esac
      shift
      count=$((count - 1))
    done
    if have dnf; then
      dnf -y --setopt=install_weak_deps=False install "$@"
      dnf clean all
    elif have microdnf; then
      microdnf -y --setopt=install_weak_deps=0 install "$@"
      microdnf clean all
    elif have yum; then
      yum -y install "$@"
      yum clean all
    elif have zypper; then
      zypper --non-interactive install --no-recommends "$@"
      zypper clean --all
    else
      fail "the base has no package manager that is known here (apt-get, apk, dnf, microdnf, yum, zypper)"
    fi
  fi
}

# The default Python, with pip; what is missing comes from the distribution.
find_python() {
  for python in /opt/conda/bin/python python3 python; do
    if have "$python"; then return; fi
  done
  say "the base has no Python: installing the distribution's"
  if have apk; then install python3 py3-pip; else install python3 python3-pip; fi
  python=python3
}
find_pip() {
  find_python
  if "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1; then return; fi
  say "the base has no pip: installing the distribution's"
  if have apk; then install py3-pip; else install python3-pip; fi
  "$python" -m pip --version >/dev/null 2>&1 || fail "$python of the base has no pip, and none fits it"
}

find_conda() {
  for conda in micromamba mamba conda /opt/conda/bin/mamba /opt/conda/bin/conda; do
    if have "$conda"; then return; fi
  done
  fail "the base has no conda: take one with micromamba, mamba or conda, such as docker://mambaorg/micromamba"
}

# What is below the folder $1 (of the one we are in) goes to the same place below /. One by one: copying whole folders
# would change folders that are there, and stumble over links to folders.
put() {
  for name in "$1"/* "$1"/.[!.]* "$1"/..?*; do
    if [ -d "$name" ] && [ ! -L "$name" ]; then
      mkdir -p "/$name"
      (put "$name")
    elif [ -e "$name" ] || [ -L "$name" ]; then
      rm -f "/$name"
      cp -P "$name" "/$name"
      if [ ! -L "$name" ]; then chmod u=rwX,go=rX "/$name"; fi
    fi
  done
}

case $stage in
system)
  set --
  while IFS= read -r line || [ -n "$line" ]; do
    plain "$line"
    set -- "$@" "$line"
  done <"$inputs/system.txt"
  install "$@"
  ;;
conda)
  find_conda
  export MAMBA_ROOT_PREFIX="${MAMBA_ROOT_PREFIX:-/opt/conda}"
  if [ -d /opt/conda/conda-meta ]; then set -- install; else set -- create; fi
  set -- "$@" --yes --prefix /opt/conda --override-channels
  while IFS= read -r line || [ -n "$line" ]; do
    plain "$line"
    set -- "$@" --channel "$line"
  done <"$inputs/channels.txt"
  while IFS= read -r line || [ -n "$line" ]; do
    plain "$line"
    set -- "$@" "$line"
  done <"$inputs/conda.txt"
  "$conda" "$@"
  "$conda" clean --all --yes >/dev/null 2>&1 || true
  ;;
pip)
  find_pip
  set -- install --requirement "$inputs/requirements.txt"
  if [ -s "$inputs/constraints.txt" ]; then set -- "$@" --constraint "$inputs/constraints.txt"; fi
  "$python" -m pip "$@"
  ;;
commands)
  cd "$inputs/files"
  put .
  cd /
  . "$inputs/env.sh"
  if [ -s "$inputs/commands.sh" ]; then sh "$inputs/runner.sh" "$inputs/commands.sh" build; fi
  ;;
pack)
  # Added to what the base brought: its variables come first, so that the recipe's hold.
  mkdir -p /opt/diamond
  new=/opt/diamond/env.sh.new
  : >"$new"
  if [ -f /opt/diamond/env.sh ]; then cat /opt/diamond/env.sh >"$new"; fi
  if [ -s "$inputs/conda.txt" ]; then printf '%s\n' 'export PATH="/opt/conda/bin:$PATH"' >>"$new"; fi
  cat "$inputs/env.sh" >>"$new"
  chmod 644 "$new"
  mv -f "$new" /opt/diamond/env.sh
  ;;
*) fail "there is no stage $stage" ;;
esac
"""


def write_steps(folder: Path, network: Mapping[str, str], *, inside: str, sandbox: bool) -> None:
    """Put the steps and what they need of the endpoint into `folder`, which the build sees at `inside`, read-only.

    Args:
        network: see NETWORK_ENVS. Files they name are copied here, and the variable changed to where they are inside.
        sandbox: the build has only one account, so apt must not look for another.
    """
    folder.mkdir()
    (folder / STEPS_FILE).write_text(STEPS)
    (folder / APT_FILE).write_text(APT + (APT_ALONE if sandbox else ""))
    values = dict(network)
    for name in FILE_ENVS:
        if value := values.get(name):
            if not Path(value).is_file():
                raise BuildProblem(
                    f"{name} of this endpoint names {value}, and there is no such file",
                    hint="correct or unset the variable where the agent is started",
                    code="network",
                )
            shutil.copyfile(value, folder / f"{name}.crt")
            values[name] = f"{inside}/{name}.crt"
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(values.items())]
    (folder / NETWORK_FILE).write_text("".join(lines))
    (folder / NETWORK_FILE).chmod(0o600)  # an index's address may carry a password
