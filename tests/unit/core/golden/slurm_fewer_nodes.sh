#!/usr/bin/env bash
# Diamond job job_11. Generated; your commands are in run.sh and setup.sh beside it.
#SBATCH --no-kill

# A trap that does something is reset in children, so programs get the signal and this shell outlives them. First of
# all, since a warning may come at any moment.
warned=
trap : HUP INT TERM USR2
trap 'warned=1' USR1
cd -- /scratch/me/jobs/job_11 || exit 73

if [[ ${SLURM_RESTART_COUNT:-0} -gt 0 ]]; then rm -f started exit.json over warning out-of-time; fi

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
  if [[ $1 == run && ( $2 -eq 85 || -e continue || ( -n $warned && $2 -ne 0 ) ) ]]; then more=true; fi
  printf '{"phase":"%s","exit_code":%d,"started_at":%s,"ended_at":%s,"more":%s,"warned":%d,"host":"%s"}' \
    "$1" "$2" "${began/,/.}" "${ended/,/.}" "$more" "${warned:-0}" "${HOSTNAME//[^A-Za-z0-9._-]/}" 1<> exit.tmp
  mv -f exit.tmp exit.json
  if [[ $more == false ]]; then : > over; fi
  exit "$2"
}

# Your variables are set in a subshell, so that none of them (PATH, a name used above) can harm this script.
DIAMOND_BASH=$BASH
enter() {
  export DIAMOND_RUN_DIR=$PWD DIAMOND_METRICS_FILE=$PWD/metrics.jsonl DIAMOND_TRAIN_FILE=$PWD/train.jsonl DIAMOND_CONTINUE_FILE=$PWD/continue DIAMOND_RESUMED=0
  cd work || exit 73
  while IFS= read -r -d '' DIAMOND_PAIR; do export "$DIAMOND_PAIR"; done < "$DIAMOND_RUN_DIR/env"
}

# What this shell itself says of programs that are killed is noise in your log.
exec 3>&2 2> /dev/null
DIAMOND_PYTHON=$(command -v python3 || command -v python3)
DIAMOND_SRUN=$(command -v srun)
export MASTER_ADDR=${HOSTNAME:-$(hostname)} MASTER_PORT=$((20000 + RANDOM % 12000))
read -r DIAMOND_LAUNCH_KEY < /proc/sys/kernel/random/uuid
export DIAMOND_LAUNCH_KEY
# Each node has a step of its own: one for all counts as failed when a node is lost, and srun may wait for it for ever.
DIAMOND_NODES=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
export DIAMOND_NODE DIAMOND_FIRST_NODE=${DIAMOND_NODES[0]} DIAMOND_PATH=$PATH
# When the first node is lost, nobody is left who ends the job: Slurm would keep the others until its time is over.
DIAMOND_STEP='trap : HUP INT TERM USR1 USR2
"$@"; code=$?
PATH=$DIAMOND_PATH
until [[ $code -eq 0 || $code -eq 85 || $DIAMOND_NODE -eq 0 || -e $DIAMOND_RUN_DIR/exit.node0.json ]]; do
  sleep 5
  left=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) && left=($(scontrol show hostnames "$left")) || continue
  if [[ " ${left[*]} " != *" $DIAMOND_FIRST_NODE "* ]]; then
    printf "{\"reason\":\"NODE_FAIL\",\"detail\":\"the first node of the job went down (%s)\",\"at\":%d}" \
      "$DIAMOND_FIRST_NODE" "$(date +%s)" > "$DIAMOND_RUN_DIR/kill.json"
    scancel "$SLURM_JOB_ID"
  fi
done
exit "$code"'
steps=()
for ((DIAMOND_NODE = 0; DIAMOND_NODE < 3; DIAMOND_NODE++)); do
(enter
 exec "$DIAMOND_SRUN" --nodes=1 --ntasks=1 --nodelist="${DIAMOND_NODES[DIAMOND_NODE]}" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 --export=ALL \
   "$DIAMOND_BASH" -c "$DIAMOND_STEP" step "$DIAMOND_PYTHON" "$DIAMOND_RUN_DIR/launch.py" --ranks 4 --nodes 3 --warning-file "$DIAMOND_RUN_DIR/warning" --node-rank "$DIAMOND_NODE" --min-nodes 2 -- \
   "$DIAMOND_BASH" "$DIAMOND_RUN_DIR/run.sh") 2>&3 3>&- &
steps+=($!)
done
child=${steps[0]}
trap 'warned=1; : > warning' USR1
# Warned before there was anybody to tell: once the program had time to say that it listens.
if [[ -n $warned ]]; then (sleep 2; warned=1; : > warning) & fi
while wait "$child"; code=$?; kill -0 "$child"; do :; done
wait "$child"; again=$?
# How it ended the first node knows; the others end with it, but for those that are lost.
for ((waited = 0; waited < 150; waited++)); do kill -0 "${steps[@]:1}" || break; sleep 0.2; done
kill "${steps[@]:1}"
finish run "$((again == 127 || again < 0 ? code : again))"
