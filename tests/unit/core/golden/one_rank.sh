#!/usr/bin/env bash
# Diamond job job_01. Generated; your commands are in run.sh and setup.sh beside it.

# A trap that does something is reset in children, so programs get the signal and this shell outlives them. First of
# all, since a warning may come at any moment.
warned=
trap : HUP INT TERM USR2
trap 'warned=1' USR1
cd -- /scratch/me/jobs/job_01 || exit 73

# A run directory starts once. Whoever makes this file first runs; a second submission of the same job
# (after a crash between submitting and noting it) ends here without having done anything.
{ read -r stat < "/proc/$$/stat"; read -r boot < /proc/sys/kernel/random/boot_id; } 2>/dev/null
fields=(0 ${stat##*) })
set -o noclobber
{ printf '%s %s %s\n' "$$" "${fields[20]:-0}" "${boot:-none}" > started; } 2>/dev/null || exit 75
set +o noclobber

began=${EPOCHREALTIME:-$(date +%s)} more=false

# Room for the exit status was laid down beforehand; writing over it works on a full disk too.
finish() {
  local ended=${EPOCHREALTIME:-$(date +%s)}
  printf '{"phase":"%s","exit_code":%d,"started_at":%s,"ended_at":%s,"more":%s,"warned":%d,"host":"%s"}' \
    "$1" "$2" "${began/,/.}" "${ended/,/.}" "$more" "${warned:-0}" "${HOSTNAME//[^A-Za-z0-9._-]/}" 1<> exit.tmp
  mv -f exit.tmp exit.json
  exit "$2"
}

# Your variables are set in a subshell, so that none of them (PATH, a name used above) can harm this script.
DIAMOND_BASH=$BASH
enter() {
  export DIAMOND_RUN_DIR=$PWD DIAMOND_METRICS_FILE=$PWD/metrics.jsonl DIAMOND_TRAIN_FILE=$PWD/train.jsonl
  cd work || exit 73
  while IFS= read -r -d '' DIAMOND_PAIR; do export "$DIAMOND_PAIR"; done < "$DIAMOND_RUN_DIR/env"
}

# What this shell itself says of programs that are killed is noise in your log.
exec 3>&2 2> /dev/null
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 12000))
export WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=0
(enter; exec "$DIAMOND_BASH" "$DIAMOND_RUN_DIR/run.sh") 2>&3 3>&-
finish run $?
