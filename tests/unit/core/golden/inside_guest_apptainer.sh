#!/usr/bin/env bash
# Starts a program in the image of this job. Generated; your commands are in run.sh and setup.sh beside it.
#   inside.sh run | setup     the file of that name
#   inside.sh -- PROGRAM ...  any other
run_dir=/scratch/me/jobs/job_01
image='/a b/it'"'"'s $(here)/image.sif'

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

# Of the account whose agent this is, its guests see nothing but what its owner named, and that not if it would lead
# into its home or into the folders of the agent.
hidden=(/scratch/me '/home/it'"'"'s/.diamond/agents')
closed=("${hidden[@]}" "$HOME" '/home/it'"'"'s')
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
for path in /data; do bind "$path"; done
mounts=("$run_dir/view:$run_dir")
for name in enter.sh env.sh run.sh setup.sh secrets.sh metrics.jsonl train.jsonl secret-files; do
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
  exit 73
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

# Set by the node for its account: keys, and folders that are not there in the container.
unset SLURM_JWT SCRATCH PSCRATCH WORK PROJECT

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

at_home=$HOME at_tmp=$TMPDIR on=$DIAMOND_CONTINUE_FILE
HOME=$run_dir/home; pack HOME; given+=$packed; HOME=$at_home
TMPDIR=/tmp; pack TMPDIR; given+=$packed; TMPDIR=$at_tmp
if [[ -n $on ]]; then
  DIAMOND_CONTINUE_FILE=$run_dir/continue; pack DIAMOND_CONTINUE_FILE; fixed+=$packed; DIAMOND_CONTINUE_FILE=$on
fi

find_program() { program=$(command -v apptainer || command -v singularity); }
if ! find_program; then
  printf 'diamond: this node (%s) has no %s\n' "${HOSTNAME:-?}" apptainer >&2
  exit 127
fi

flags=()
if [[ -e /dev/nvidiactl && -n ${CUDA_VISIBLE_DEVICES-all} ]]; then flags+=(--nv); fi
if [[ -e /dev/kfd ]]; then flags+=(--rocm); fi
for path in "${mounts[@]}"; do flags+=(--bind "$path"); done
shield=$run_dir/shield
if [[ -x $shield/squashfuse_ll ]] && PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin type -P squashfuse_ll; then
  PATH=$shield:$PATH
fi > /dev/null
prefix=APPTAINERENV
if [[ $program == */singularity ]]; then prefix=SINGULARITYENV; fi
for name in $(compgen -v APPTAINER) $(compgen -v SINGULARITY); do
  case $name in *_CACHEDIR|*_TMPDIR|*_CONFIGDIR) ;; *) unset "$name" ;; esac
done
flags+=(--pid --no-home --no-mount home,cwd,tmp,hostfs,bind-paths)
if [[ -e /etc/hosts ]]; then flags+=(--bind /etc/hosts:/etc/hosts:ro); fi
if (( EUID == 0 )); then flags+=(--no-privs); fi
export "${prefix}_DIAMOND_GIVEN=$given" "${prefix}_DIAMOND_FIXED=$fixed"
exec "$program" --quiet exec --cleanenv --pwd "$run_dir/work" "${flags[@]}" "$image" \
  /bin/sh "$run_dir/enter.sh" "$@"
