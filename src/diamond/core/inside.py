"""How a program gets into the image of its task: the texts of inside.sh, enter.sh and env.sh. Pure, golden-tested.

Two shells share the work. `inside.sh` (bash, outside) is started instead of the user's script: it finds the container
runtime, binds what there is to bind on this node, turns on the GPUs and starts `enter.sh` (POSIX sh) in the image,
which sets the variables and becomes the user's program. Who wins, from weak to strong: the image's own variables, those
the node has and programs need (SLURM_*, CUDA_VISIBLE_DEVICES, proxies), the recipe's, the task's, Diamond's (ranks).

Variables of the node cross in two variables of safe characters, never in a command line: a proxy's address may hold a
password, and every user of a node can read command lines. What a task sets stays in its run directory.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from diamond.core.endpoints import FileSystem
from diamond.core.errors import InvalidInput
from diamond.core.images import ENV_IN_IMAGE, ImageUse
from diamond.core.rundir import RunDir
from diamond.core.scripts import NO_RUN_DIR
from diamond.core.views import LIBRARY, PLACES_OF_GUEST, SETTINGS_OF_GUEST, View, bash_of

MARK = "DIAMOND_IMAGE"  # set inside an image and nowhere else: which one it is
# A container's runtime reads these characters of a path as its own.
_TROUBLE = re.compile(r'[:,"\\\x00-\x1f\x7f]')
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@:-]{0,500}")
_KINDS_WITH_PATHS = ("apptainer", "charliecloud", "venv")


def check_use(use: ImageUse, run_dir: str) -> None:
    """Raises InvalidInput when no runtime could be told of such an image, or of a run directory there."""
    if use.kind in ("podman", "docker"):
        if not _NAME.fullmatch(use.path):
            raise InvalidInput(f"{use.path[:80]!r} is not the name of an image", field="image.path")
    elif use.kind not in _KINDS_WITH_PATHS:
        raise InvalidInput(f"{use.kind[:40]!r} is not a way to enter images that this agent knows", field="image.kind")
    elif not use.path.startswith("/") or _TROUBLE.search(use.path) or ".." in use.path.split("/"):
        raise InvalidInput(f"{use.path[:200]!r} is not the plain absolute path of an image", field="image.path")
    if use.kind != "venv" and _TROUBLE.search(run_dir):
        raise InvalidInput(
            f"jobs run in {run_dir[:200]!r}, a path no container runtime can be told of",
            hint="move the agent's home to a path without ':', ',', quotes and backslashes",
        )


def env_script(envs: Mapping[str, str]) -> str:
    """`export` lines for any POSIX sh, values byte for byte."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in envs.items())


_HEAD = """\
#!/usr/bin/env bash
# Starts a program in the image of this job. Generated; your commands are in run.sh and setup.sh beside it.
#   inside.sh run | setup     the file of that name
#   inside.sh -- PROGRAM ...  any other
run_dir={run_dir}
image={image}
"""

_HAND_OVER = r"""
# What programs need of this node's environment crosses as `export` lines, in characters that no runtime changes.
given= fixed=
pack() {
  local text=${!1} b=\\
  text=${text//"$b"/"${b}0134"}
  text=${text//\'/"${b}0047${b}0134${b}0047${b}0047"}
  text=${text//\"/"${b}0042"}
  text=${text//\$/"${b}0044"}
  text=${text//\`/"${b}0140"}
  text=${text//$'\n'/"${b}0012"}
  text=${text//$'\r'/"${b}0015"}
  text=${text//$'\t'/"${b}0011"}
  packed="export $1=${b}0047$text${b}0047${b}0012"
}
for name in $(compgen -e); do
  case $name in
    DIAMOND_*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT)
      pack "$name"; fixed+=$packed ;;
    SLURM_*|SLURMD_*|PMI*|OMPI_*|UCX_*|NCCL_*|RCCL_*|FI_*|MPICH_*|OMP_*|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|\
    NVIDIA_*|ROCR_*|HIP_*|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|PYTHONUNBUFFERED|TERM|TZ|HOME|USER|LOGNAME|\
    SCRATCH|PSCRATCH|WORK|PROJECT|http_proxy|https_proxy|ftp_proxy|all_proxy|no_proxy|\
    HTTP_PROXY|HTTPS_PROXY|FTP_PROXY|ALL_PROXY|NO_PROXY)
      pack "$name"; given+=$packed ;;
    TMPDIR)
      if [[ -d $TMPDIR ]]; then pack "$name"; given+=$packed; fi ;;
  esac
done
"""

_FIND = r"""
find_program() {{ program=$(command -v {first}{others}); }}
{load}if ! find_program; then
  printf 'diamond: this node (%s) has no %s\n' "${{HOSTNAME:-?}}" {first} >&2
  exit {not_found}
fi
"""

_LOAD = r"""find_program || {{
  if ! type module; then
    for init in "${{LMOD_PKG:-/usr/share/lmod/lmod}}/init/bash" "${{MODULESHOME:-/usr/share/modules}}/init/bash"; do
      if [[ -r $init ]]; then . "$init"; break; fi
    done
  fi
  for name in {modules}; do module load "$name"; done
}} > /dev/null 2>&1
"""

# An empty list of devices means that the job has none.
_GPUS = """
flags=()
if [[ -e /dev/nvidiactl && -n ${{CUDA_VISIBLE_DEVICES-all}} ]]; then flags+=({nvidia}); fi
if [[ -e /dev/kfd ]]; then flags+=({amd}); fi
"""

# Where the image is mounted by a process of the user's own, a signal to the whole job would take the image away from
# under a program that is saving its state. Wrapped, that process ends when the program does.
_APPTAINER = """\
for path in "${mounts[@]}"; do flags+=(--bind "$path"); done
shield=$run_dir/shield
if [[ -x $shield/squashfuse_ll ]] && PATH=%s type -P squashfuse_ll; then
  PATH=$shield:$PATH
fi > /dev/null
prefix=APPTAINERENV
if [[ $program == */singularity ]]; then prefix=SINGULARITYENV; fi
@guest@export "${prefix}_DIAMOND_GIVEN=$given" "${prefix}_DIAMOND_FIXED=$fixed"
exec "$program" --quiet exec --cleanenv --pwd "$run_dir/work" "${flags[@]}" "$image" \\
  /bin/sh "$run_dir/enter.sh" "$@"
"""

# By itself it shows the home, the current folder, /tmp, what the site names and what variables of this node ask for.
# With numbers of its own for processes, no other of this account can be looked into (/proc/*/root) or ended.
_APPTAINER_GUEST = """\
for name in $(compgen -v APPTAINER) $(compgen -v SINGULARITY); do
  case $name in *_CACHEDIR|*_TMPDIR|*_CONFIGDIR) ;; *) unset "$name" ;; esac
done
flags+=(--pid --no-home --no-mount home,cwd,tmp,hostfs,bind-paths)
if [[ -e /etc/hosts ]]; then flags+=(--bind /etc/hosts:/etc/hosts:ro); fi
if (( EUID == 0 )); then flags+=(--no-privs); fi
"""

# It passes the whole environment on, so that is emptied first. Places to bind to are made in a layer in memory. A file
# of variables is read out here, so it has to be the image's own.
_CHARLIECLOUD = """\
flags=(--write-fake@flags@)
for path in "${mounts[@]}"; do flags+=("--bind=${path%:ro}"); done
if [[ -f $image/ch/environment && ! -L $image/ch && ! -L $image/ch/environment ]]; then
  flags+=(--env-no-expand "--set-env=$image/ch/environment")
fi
@guest@for name in $(compgen -e); do
  case $name in HOME|USER|LOGNAME) ;; *) unset "$name" 2> /dev/null ;; esac
done
export PATH=%s
export DIAMOND_GIVEN=$given DIAMOND_FIXED=$fixed
exec @alone@"$program" "${flags[@]}" "$image" -- /bin/sh "$run_dir/enter.sh" "$@"
"""

# It has no numbers of its own for processes, and without them a program could end, or where it is privileged look into,
# every other one of this account.
_CHARLIECLOUD_GUEST = """\
if ! alone=$(PATH=$PATH:%s; type -P unshare); then
  printf 'diamond: this node (%%s) has no unshare, which keeps tasks of others apart\\n' "${{HOSTNAME:-?}}" >&2
  exit {not_found}
fi
"""
_ALONE = '"$alone" --user --map-current-user --pid --fork --kill-child --mount-proc '

_ENGINE = """\
flags+=(--rm --interactive --network=host --ipc=host --pull=never --log-driver=none --security-opt=label=disable)
{user}
if [[ -t 0 && -t 1 ]]; then flags+=(--tty); fi
for path in "${{mounts[@]}}"; do flags+=("--volume=$path"); done
export DIAMOND_RUN_DIR=$run_dir DIAMOND_GIVEN=$given DIAMOND_FIXED=$fixed
exec "$program" run "${{flags[@]}}" --env=DIAMOND_RUN_DIR --env=DIAMOND_GIVEN --env=DIAMOND_FIXED \\
  "--workdir=$run_dir/work" --entrypoint=/bin/sh "$image" "$run_dir/enter.sh" "$@"
"""
_ENGINE_GUEST = "\nflags+=(--security-opt=no-new-privileges)"

# No container: everything this node has stays visible, with the environment's own programs first.
_VENV = """
if [[ ! -x $image/bin/python ]]; then
  printf 'diamond: %s has no bin/python that this node (%s) can run\\n' "$image" "${{HOSTNAME:-?}}" >&2
  exit {not_found}
fi
unset PYTHONHOME PYTHONPATH PYTHONUSERBASE PYTHONSTARTUP
export VIRTUAL_ENV=$image DIAMOND_IMAGE_ROOT=$image/root PATH=$image/bin:$PATH
exec /bin/sh "$run_dir/enter.sh" "$@"
"""

_NOT_FOUND = 127

# The runtime starts it with an empty environment.
_STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHIELD_NAME = "squashfuse_ll"
SHIELD = f"""\
#!/bin/bash
# Keeps signals that are meant for the job's program from the process that keeps its image mounted.
trap '' HUP INT TERM USR1 USR2
PATH={_STANDARD_PATH}
exec {SHIELD_NAME} "$@"
"""


# Folders of / that belong to an operating system: an image has its own.
_SYSTEM = frozenset(
    {
        "bin",
        "boot",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "libx32",
        "media",
        "opt",
        "proc",
        "root",
        "run",
        "sbin",
        "srv",
    }
    | {"sys", "tmp", "usr", "var"}
)


def shown(places: Iterable[FileSystem]) -> tuple[str, ...]:
    """What programs in containers should see of an endpoint's file systems.

    Of a user's folder on scratch, all of scratch, where colleagues' data lies beside it: who may read what there is the
    file system's business, as outside. The folder itself comes too, for owners whose rules let nothing more be seen.
    """
    found: dict[str, None] = {}
    for place in places:
        top = place.path.lstrip("/").partition("/")[0]
        if place.role in ("scratch", "project") and top and top not in _SYSTEM:
            found[f"/{top}"] = None
        found[place.path] = None
    return tuple(found)


def inside_script(
    use: ImageUse,
    *,
    run_dir: str,
    binds: Sequence[str] = (),
    modules: Sequence[str] = (),
    library: str = "",
    view: View = View(),
) -> str:
    """The text of inside.sh.

    Args:
        run_dir: absolute, on the endpoint.
        binds: further paths that programs should see, where they exist.
        modules: environment modules that bring the runtime, should the node not have it.
        library: see `ScriptPlan.library`.
        view: whose program it is.

    Raises:
        InvalidInput: see `check_use`.
    """
    check_use(use, run_dir)
    head = _HEAD.format(run_dir=shlex.quote(run_dir), image=shlex.quote(use.path))
    if use.kind == "venv":
        return head + _VENV.format(not_found=_NOT_FOUND)
    shows = bash_of(view, binds=binds, library=library, no_run_dir=NO_RUN_DIR)
    hands = SETTINGS_OF_GUEST + _HAND_OVER + PLACES_OF_GUEST if view.is_guest else _HAND_OVER
    load = _LOAD.format(modules=" ".join(map(shlex.quote, modules))) if modules else ""
    first = {"charliecloud": "ch-run"}.get(use.kind, use.kind)
    others = " || command -v singularity" if use.kind == "apptainer" else ""
    text = head + shows + hands + _FIND.format(first=first, others=others, load=load, not_found=_NOT_FOUND)
    if use.kind == "charliecloud":
        return text + _charliecloud(view)
    nvidia, amd = {
        "apptainer": ("--nv", "--rocm"),
        "podman": ("--device=nvidia.com/gpu=all", "--device=/dev/kfd --device=/dev/dri --group-add=keep-groups"),
        "docker": ("--gpus=all", "--device=/dev/kfd --device=/dev/dri"),
    }[use.kind]
    text += _GPUS.format(nvidia=nvidia, amd=amd)
    if use.kind == "apptainer":
        guest = _APPTAINER_GUEST if view.is_guest else ""
        return text + _APPTAINER.replace("%s", _STANDARD_PATH).replace("@guest@", guest)
    user = {
        # Root of this machine is root of the container anyway; anybody else stays who they are.
        "podman": "flags+=(--http-proxy=false); if (( EUID )); then flags+=(--userns=keep-id); fi",
        "docker": 'flags+=("--user=$(id -u):$(id -g)")',
    }[use.kind]
    return text + _ENGINE.format(user=user + (_ENGINE_GUEST if view.is_guest else ""))


def _charliecloud(view: View) -> str:
    text = _CHARLIECLOUD.replace("%s", _STANDARD_PATH)
    guest = _CHARLIECLOUD_GUEST.replace("%s", _STANDARD_PATH, 1).replace("%%", "%").format(not_found=_NOT_FOUND)
    text = text.replace("@guest@", guest if view.is_guest else "").replace("@alone@", _ALONE if view.is_guest else "")
    return text.replace("@flags@", " --private-tmp" if view.is_guest else "")


# No name of ours but DIAMOND_*, which no task can set, and no unquoted word: variables of the task are set by now.
_ENTER = """\
# Runs in the image: sets the variables, then becomes the program. Generated.
eval "$(printf '%b' "${{DIAMOND_GIVEN:-}}")"

# Packages in the home directory are of the system's Python, not of the image's; and a locale of the node need not exist
# here. The image may say otherwise.
export PYTHONNOUSERSITE=1
case ${{LANG:-C}} in C|POSIX) export LANG=C.UTF-8 ;; esac
if [ -r {image_env} ]; then . {image_env}; fi
. {env}
{secrets}{library}eval "$(printf '%b' "${{DIAMOND_FIXED:-}}")"
unset DIAMOND_GIVEN DIAMOND_FIXED
# Where the runtime puts the GPU driver's libraries, which a task that sets LD_LIBRARY_PATH needs as well.
if [ -d /.singularity.d/libs ]; then
  case ":${{LD_LIBRARY_PATH:-}}:" in
    *:/.singularity.d/libs:*) ;;
    *) export LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}}/.singularity.d/libs" ;;
  esac
fi
export {mark}={name}
cd {work} || exit {no_run_dir}

if [ "$1" = -- ]; then
  shift
elif command -v bash > /dev/null 2>&1; then
  if [ "$1" = run ]; then set -- bash {run}; else set -- bash -e {setup}; fi
elif [ "$1" = run ]; then
  if [ "${{RANK:-0}}" = 0 ]; then echo "diamond: the image has no bash; your commands are run by its sh" >&2; fi
  set -- sh {run}
else
  set -- sh -e {setup}
fi
"""

_SECRETS = """\
if [ ! -r {secrets} ]; then
  echo "diamond: the secrets of this job are gone; launch its task again" >&2
  exit {no_run_dir}
fi
. {secrets}
"""

_LIBRARY = """\
export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{library}
"""

_BECOME = """\
exec "$@"
"""

# Apptainer passes every signal it gets on to the first process inside. Signals of Diamond go to every process of a job,
# so the program has had it already; and a warning would end one that does not expect it. This shell takes them.
_ABSORB = """\
trap : HUP INT TERM USR1 USR2
exec 3>&2 2> /dev/null
"$@" 2>&3 3>&-
exit "$?"
"""

# A container with processes of its own, which are in no group or session of the job: the signals come here alone, and
# are passed on. USR1 is a warning: only to those who catch it.
_FORWARD = """\
warn() {
  for DIAMOND_PROCESS in /proc/[0-9]*; do
    while IFS=' \t' read -r DIAMOND_KEY DIAMOND_VALUE; do
      if [ "$DIAMOND_KEY" = SigCgt: ] && [ "$DIAMOND_PROCESS" != "/proc/$$" ] &&
        [ "$((0x${DIAMOND_VALUE#?????????????} & 0x200))" -ne 0 ]; then kill -USR1 "${DIAMOND_PROCESS#/proc/}"; fi
    done < "$DIAMOND_PROCESS/status"
  done
}
exec 3>&2 2> /dev/null
trap : HUP USR2
trap 'kill -INT -1' INT
trap 'kill -TERM -1' TERM
trap warn USR1
"$@" <&0 2>&3 3>&- &
DIAMOND_CHILD=$!
while wait "$DIAMOND_CHILD"; DIAMOND_CODE=$?; kill -0 "$DIAMOND_CHILD"; do :; done
exit "$DIAMOND_CODE"
"""
_LAST = {"apptainer": _ABSORB, "podman": _FORWARD, "docker": _FORWARD}


def enter_script(use: ImageUse, *, run_dir: str, library: str = "", secrets: bool = False, view: View = View()) -> str:
    """The text of enter.sh.

    Args:
        library: see `ScriptPlan.library`.
        secrets: see `ScriptPlan.secrets`.
        view: whose program it is.
    """
    files = RunDir(Path(run_dir))
    if library and view.is_guest and use.kind != "venv":
        library = f"{run_dir}/{LIBRARY}"
    image_env = f"{use.path}{ENV_IN_IMAGE}" if use.kind == "venv" else ENV_IN_IMAGE
    text = _ENTER.format(
        image_env=shlex.quote(image_env),
        env=shlex.quote(str(files.env_script)),
        library=_LIBRARY.format(library=shlex.quote(library)) if library else "",
        secrets=_SECRETS.format(secrets=shlex.quote(str(files.secrets_script)), no_run_dir=NO_RUN_DIR)
        if secrets
        else "",
        mark=MARK,
        name=shlex.quote(use.image_id or use.path),
        work=shlex.quote(str(files.work)),
        setup=shlex.quote(str(files.setup)),
        run=shlex.quote(str(files.run)),
        no_run_dir=NO_RUN_DIR,
    )
    last = _LAST.get(use.kind, _BECOME)
    if view.is_guest and use.kind == "charliecloud":
        last = _ABSORB  # it would be process 1, to which signals mean nothing
    return text + last
