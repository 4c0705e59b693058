"""What a container sees of the account that runs it, as bash text for inside.sh. Pure, golden-tested.

A task of the account's owner sees the home, and in place of the agent's own folders (token, policy, journal, other
jobs) empty ones, in which only its own run directory lies. A task of anybody else sees nothing of the account: in place
of its run directory stands `view`, a folder with those of its files that the program needs. What runs outside of the
image (job.sh, inside.sh, launch.py) is not among them, so that no program in there can change what runs out here.

The reasons, and what stays visible, are in docs/adr/0010.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

VIEW = "view"  # below the run directory of a guest's job
LIBRARY = "diamond.pyz"  # in the view: a copy of the one-file agent, whose library a guest may use and spoil
# What a guest's program is shown of its run directory, each under its own name. The first are files.
SHOWN_FILES = (
    *("enter.sh", "env.sh", "run.sh", "setup.sh", "secrets.sh"),
    *("metrics.jsonl", "train.jsonl"),
)
SHOWN_FOLDERS = ("secret-files",)
HOME = "home"  # a guest's, in the view


@dataclass(frozen=True, kw_only=True)
class View:
    """Whose program a container holds, and what of the account is none of its business.

    Attributes:
        is_guest: it is of somebody else than the owner of the account.
        home: of the account, as the agent knows it; a node may set HOME otherwise, and then both are kept from guests.
        hidden: folders of the agent's own, which no container sees.
    """

    is_guest: bool = False
    home: str = ""
    hidden: tuple[str, ...] = ()


# Nothing that is not on this node, nothing twice, and nothing over the place where the image keeps its variables.
_BIND = r"""
binds=()
bind() {
  local other
  if [[ $1 == /opt ]]; then
    for other in /opt/*; do [[ $other == /opt/diamond ]] || bind "$other"; done
    return
  fi
  [[ $1 == /?* && $1 != *[:,\"\\]* && $1 != *[[:cntrl:]]* && -e $1 ]] || return
  for other in "${binds[@]}"; do [[ $1 != "$other" && $1 != "$other"/* ]] || return; done
  binds+=("$1")
}
real() { PATH=$PATH:/usr/bin:/bin readlink -f -- "$1" 2> /dev/null; }
"""

_OF_OWNER = r"""
for path in "$HOME" /tmp "$TMPDIR" "$PMIX_SERVER_TMPDIR"@binds@; do bind "$path"; done

# The folders of the agent itself, by whatever name they can be reached in there, are empty but for what is this job's.
hidden=(@hidden@)
here=$(real "$run_dir") work=$(real "$run_dir/work")
own=("$here")
if [[ $work != "$here"/* ]]; then own+=("$work"); fi
@library@is_below() { [[ -n $2 && ( $1 == "$2" || $2 == / || $1 == "$2"/* ) ]]; }
mounts=() kept=()
for path in "${binds[@]}"; do
  whole=$(real "$path")
  for folder in "${hidden[@]}"; do
    if is_below "$whole" "$(real "$folder")"; then continue 2; fi
  done
  kept+=("$path")
  mounts+=("$path:$path")
done
hide() {
  local mask=$1 folder=$2 at=$3 path place
  mounts+=("$mask:$at:ro")
  for path in "${own[@]}"; do
    [[ $path == "$folder"/* ]] || continue
    place=$mask${path#"$folder"}
    if [[ -d $path ]]; then
      mkdir -p "$place"
      mounts+=("$path:$at${path#"$folder"}")
    elif [[ ! -e $place ]]; then  # a copy: not every runtime can show a file for reading alone
      mkdir -p "${place%/*}" && cp "$path" "$place.$$" && mv "$place.$$" "$place"
    fi
  done
}
number=0
for folder in "${hidden[@]}"; do
  folder=$(real "$folder")
  [[ $folder == /?* && -d $folder ]] || continue
  if [[ $folder == *[:,\"\\]* ]]; then
    printf 'diamond: no container runtime can be told to hide %s\n' "$folder" >&2
    exit @no_run_dir@
  fi
  mask=$run_dir/masks/$((number++))
  mkdir -p "$mask"
  hide "$mask" "$folder" "$folder"
  for path in "${kept[@]}"; do
    whole=$(real "$path")
    if [[ $whole == / ]]; then whole=; fi
    if [[ $whole != "$path" && $folder == "$whole"/* ]]; then hide "$mask" "$folder" "$path${folder#"$whole"}"; fi
  done
done
# What none of all that brought, and the name by which the job knows its folder.
named=
for path in "${kept[@]}"; do if is_below "$run_dir" "$path"; then named=1; fi; done
for path in "${own[@]}"; do
  for folder in "${hidden[@]}" "${kept[@]}"; do
    if is_below "$path" "$(real "$folder")"; then continue 2; fi
  done
  if [[ -d $path ]]; then way=; else way=:ro; fi
  mounts+=("$path:$path$way")
done
if [[ $here != "$run_dir" && -z $named ]]; then
  mounts+=("$here:$run_dir")
  if [[ -L $run_dir/work ]]; then
    link=$(readlink "$run_dir/work")
    mounts+=("$work:${run_dir%/*}/${link#../}")
  fi
fi
"""

_LIBRARY_OF_OWNER = """\
library=$(real {library})
if [[ -n $library ]]; then own+=("$library"); fi
"""

_OF_GUEST = r"""
# Of the account whose agent this is, its guests see nothing but what its owner named, and that not if it would lead
# into its home or into the folders of the agent.
hidden=(@hidden@)
closed=("${hidden[@]}" "$HOME"@home@)
leads_in() {
  local path up
  for path in "${closed[@]}"; do
    up=$(real "$path")
    while [[ $up == /* ]]; do
      if [[ $1 -ef $up ]]; then return; fi
      if [[ $up == / ]]; then break; fi
      up=${up%/*} up=${up:-/}
    done
  done
  for path in "${hidden[@]}"; do
    up=$1
    while [[ $up == /?* ]]; do
      if [[ $up -ef $path ]]; then return; fi
      up=${up%/*}
    done
  done
  return 1
}
for path in@binds@; do bind "$path"; done
mounts=("$run_dir/view:$run_dir")
for name in @shown@; do
  if [[ -e $run_dir/$name ]]; then mounts+=("$run_dir/$name:$run_dir/$name"); fi
done
work=$run_dir/work
if [[ -L $work ]]; then
  link=$(PATH=$PATH:/usr/bin:/bin readlink "$work")
  work=${run_dir%/*}/${link#../}
fi
mounts+=("$work:$work")
# /tmp of a node is every job's: agents of keys, terminals and browsers of this account listen in there.
tmp=$run_dir/tmp/${HOSTNAME:-node}
if [[ $TMPDIR == /?* && $TMPDIR != /tmp && $TMPDIR != /var/tmp && $TMPDIR != *[:,\"\\]* && -d $TMPDIR ]] &&
  ! leads_in "$(real "$TMPDIR")"; then tmp=$TMPDIR/diamond-${run_dir##*/}; fi
PATH=$PATH:/usr/bin:/bin mkdir -p -m 700 "$tmp"
if [[ ! -d $tmp || -L $tmp || ! -O $tmp ]]; then
  printf 'diamond: %s cannot be a folder of this job\n' "$tmp" >&2
  exit @no_run_dir@
fi
mounts+=("$tmp:/tmp" "$tmp:/var/tmp")
case $PMIX_SERVER_TMPDIR in /tmp/*|/var/tmp/*) ;; *) bind "$PMIX_SERVER_TMPDIR" ;; esac
for path in "${binds[@]}"; do
  whole=$(real "$path")
  if [[ $whole != /?* ]] || leads_in "$whole"; then
    printf 'diamond: %s is not shown to this task: it would lead into the account that runs it\n' "$path" >&2
  else
    mounts+=("$path:$path")
  fi
done
"""

# After what crosses was collected: later lines win.
SETTINGS_OF_GUEST = r"""
# Set by the node for its account: keys, and folders that are not there in the container.
unset SLURM_JWT SCRATCH PSCRATCH WORK PROJECT
"""
PLACES_OF_GUEST = r"""
at_home=$HOME at_tmp=$TMPDIR on=$DIAMOND_CONTINUE_FILE
HOME=$run_dir/home; pack HOME; given+=$packed; HOME=$at_home
TMPDIR=/tmp; pack TMPDIR; given+=$packed; TMPDIR=$at_tmp
if [[ -n $on ]]; then
  DIAMOND_CONTINUE_FILE=$run_dir/continue; pack DIAMOND_CONTINUE_FILE; fixed+=$packed; DIAMOND_CONTINUE_FILE=$on
fi
"""


def bash_of(view: View, *, binds: Sequence[str], library: str, no_run_dir: int) -> str:
    """Sets `mounts`: what is shown, as ``from:to`` and ``from:to:ro``, outer folders before inner ones.

    Args:
        binds: further paths to show, where they exist.
        library: a file to show, if it is not a guest's program, who has a copy; empty: none.
        no_run_dir: exit status where there is no folder for temporary files.
    """
    hidden = " ".join(map(shlex.quote, outermost(view.hidden)))
    names = "".join(f" {shlex.quote(path)}" for path in binds)
    if not view.is_guest:
        brought = _LIBRARY_OF_OWNER.format(library=shlex.quote(library)) if library else ""
        text = _OF_OWNER.replace("@library@", brought).replace("@no_run_dir@", str(no_run_dir))
    else:
        text = _OF_GUEST.replace("@no_run_dir@", str(no_run_dir))
        text = text.replace("@home@", f" {shlex.quote(view.home)}" if view.home else "")
        text = text.replace("@shown@", " ".join((*SHOWN_FILES, *SHOWN_FOLDERS)))
    return _BIND + text.replace("@hidden@", hidden).replace("@binds@", names)


def outermost(folders: Sequence[str]) -> tuple[str, ...]:
    """Without those that lie in another of them."""
    distinct = dict.fromkeys(folders)
    return tuple(
        folder
        for folder in distinct
        if not any(PurePath(other) in PurePath(folder).parents for other in distinct if other != folder)
    )
