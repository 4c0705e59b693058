#!/usr/bin/env bash
# Starts a program in the image of this job. Generated; your commands are in run.sh and setup.sh beside it.
#   inside.sh run | setup     the file of that name
#   inside.sh -- PROGRAM ...  any other
run_dir=/scratch/me/jobs/job_01
image=python:3.12

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

for path in "$HOME" /tmp "$TMPDIR" "$PMIX_SERVER_TMPDIR" /data '/it'"'"'s'; do bind "$path"; done

# The folders of the agent itself, by whatever name they can be reached in there, are empty but for what is this job's.
hidden=()
here=$(real "$run_dir") work=$(real "$run_dir/work")
own=("$here")
if [[ $work != "$here"/* ]]; then own+=("$work"); fi
is_below() { [[ -n $2 && ( $1 == "$2" || $2 == / || $1 == "$2"/* ) ]]; }
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
    exit 73
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

find_program() { program=$(command -v docker); }
find_program || {
  if ! type module; then
    for init in "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash" "${MODULESHOME:-/usr/share/modules}/init/bash"; do
      if [[ -r $init ]]; then . "$init"; break; fi
    done
  fi
  for name in cuda 'it'"'"'s'; do module load "$name"; done
} > /dev/null 2>&1
if ! find_program; then
  printf 'diamond: this node (%s) has no %s\n' "${HOSTNAME:-?}" docker >&2
  exit 127
fi

flags=()
if [[ -e /dev/nvidiactl && -n ${CUDA_VISIBLE_DEVICES-all} ]]; then flags+=(--gpus=all); fi
if [[ -e /dev/kfd ]]; then flags+=(--device=/dev/kfd --device=/dev/dri); fi
flags+=(--rm --interactive --network=host --ipc=host --pull=never --log-driver=none --security-opt=label=disable)
flags+=("--user=$(id -u):$(id -g)")
if [[ -t 0 && -t 1 ]]; then flags+=(--tty); fi
for path in "${mounts[@]}"; do flags+=("--volume=$path"); done
export DIAMOND_RUN_DIR=$run_dir DIAMOND_GIVEN=$given DIAMOND_FIXED=$fixed
exec "$program" run "${flags[@]}" --env=DIAMOND_RUN_DIR --env=DIAMOND_GIVEN --env=DIAMOND_FIXED \
  "--workdir=$run_dir/work" --entrypoint=/bin/sh "$image" "$run_dir/enter.sh" "$@"
