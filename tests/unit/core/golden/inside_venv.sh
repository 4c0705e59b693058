#!/usr/bin/env bash
# Starts a program in the image of this job. Generated; your commands are in run.sh and setup.sh beside it.
#   inside.sh run | setup     the file of that name
#   inside.sh -- PROGRAM ...  any other
run_dir=/scratch/me/jobs/job_01
image=/images/image

if [[ ! -x $image/bin/python ]]; then
  printf 'diamond: %s has no bin/python that this node (%s) can run\n' "$image" "${HOSTNAME:-?}" >&2
  exit 127
fi
unset PYTHONHOME PYTHONPATH PYTHONUSERBASE PYTHONSTARTUP
export VIRTUAL_ENV=$image DIAMOND_IMAGE_ROOT=$image/root PATH=$image/bin:$PATH
exec /bin/sh "$run_dir/enter.sh" "$@"
