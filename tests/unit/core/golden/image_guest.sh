#!/usr/bin/env bash
# Diamond job job_02. Generated; your commands are in run.sh and setup.sh beside it.

# A trap that does something is reset in children, so programs get the signal and this shell outlives them. First of
# all, since a warning may come at any moment.
warned=
trap : HUP INT TERM USR2
trap 'warned=1' USR1
cd -- /scratch/me/jobs/job_02 || exit 73

if [[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]]; then rm -f started exit.json over warning out-of-time view/out-of-time; fi

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
  if [[ $1 == run && ( $2 -eq 85 || -e view/continue || ( -n $warned && $2 -ne 0 ) ) ]]; then more=true; fi
  printf '{"phase":"%s","exit_code":%d,"started_at":%s,"ended_at":%s,"more":%s,"warned":%d,"host":"%s"}' \
    "$1" "$2" "${began/,/.}" "${ended/,/.}" "$more" "${warned:-0}" "${HOSTNAME//[^A-Za-z0-9._-]/}" 1<> exit.tmp
  mv -f exit.tmp exit.json
  if [[ $more == false ]]; then : > over; fi
  rm -rf secrets secrets.sh secret-files
  rm -rf tmp
  if [[ $TMPDIR == /?* ]]; then rm -rf "$TMPDIR/diamond-${PWD##*/}"; fi
  exit "$2"
}

# Your variables are set in the image, where your commands run; out here they could harm this script.
DIAMOND_BASH=$BASH
enter() {
  export DIAMOND_RUN_DIR=$PWD DIAMOND_METRICS_FILE=$PWD/metrics.jsonl DIAMOND_TRAIN_FILE=$PWD/train.jsonl DIAMOND_CONTINUE_FILE=$PWD/view/continue DIAMOND_RESUMED=1
  cd work || exit 73
}

# Queued in advance, in case the job before it would not be done in its time. It was.
if [[ -e /scratch/me/jobs/job_01/over ]]; then : > not-needed; finish run 76; fi

# What this shell itself says of programs that are killed is noise in your log.
exec 3>&2 2> /dev/null
# The work directory is as the job before left it, with what setup put there.
if [[ ! -e /scratch/me/jobs/job_01/setup.done ]]; then
  (enter; exec "$DIAMOND_BASH" "$DIAMOND_RUN_DIR/inside.sh" setup) 2>&3 3>&- || finish setup $?
fi
: > setup.done
tell() {
  local process stat fields key value told=1
  for process in /proc/[0-9]*; do
    read -r stat < "$process/stat" || continue
    fields=(${stat##*) })
    [[ ${fields[3]} == "$session" && ${process#/proc/} != "$$" ]] || continue
    while read -r key value; do
      if [[ $key == SigCgt: ]] && (( 0x$value & 0x200 )); then kill -USR1 "${process#/proc/}" && told=0; fi
    done < "$process/status"
  done
  return "$told"
}
warn() {
  warned=1
  tell || { (while sleep 2 && kill -0 "$$" && ! tell; do :; done) 3>&- & }
}
session=${fields[4]}
export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + RANDOM % 12000))
export WORLD_SIZE=1 RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=0
(enter; exec "$DIAMOND_BASH" "$DIAMOND_RUN_DIR/inside.sh" run) 2>&3 3>&- &
child=$!
trap 'warn' USR1
# Warned before there was anybody to tell: once the program had time to say that it listens.
if [[ -n $warned ]]; then (sleep 2; warn) & fi
while wait "$child"; code=$?; kill -0 "$child"; do :; done
wait "$child"; again=$?
finish run "$((again == 127 || again < 0 ? code : again))"
