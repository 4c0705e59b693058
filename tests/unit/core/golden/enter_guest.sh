# Runs in the image: sets the variables, then becomes the program. Generated.
eval "$(printf '%b' "${DIAMOND_GIVEN:-}")"

# Packages in the home directory are of the system's Python, not of the image's; and a locale of the node need not exist
# here. The image may say otherwise.
export PYTHONNOUSERSITE=1
case ${LANG:-C} in C|POSIX) export LANG=C.UTF-8 ;; esac
if [ -r /opt/diamond/env.sh ]; then . /opt/diamond/env.sh; fi
. /scratch/me/jobs/job_01/env.sh
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}"/scratch/me/jobs/job_01/diamond.pyz
eval "$(printf '%b' "${DIAMOND_FIXED:-}")"
unset DIAMOND_GIVEN DIAMOND_FIXED
# Where the runtime puts the GPU driver's libraries, which a task that sets LD_LIBRARY_PATH needs as well.
if [ -d /.singularity.d/libs ]; then
  case ":${LD_LIBRARY_PATH:-}:" in
    *:/.singularity.d/libs:*) ;;
    *) export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/.singularity.d/libs" ;;
  esac
fi
export DIAMOND_IMAGE=img_00000002
cd /scratch/me/jobs/job_01/work || exit 73

if [ "$1" = -- ]; then
  shift
elif command -v bash > /dev/null 2>&1; then
  if [ "$1" = run ]; then set -- bash /scratch/me/jobs/job_01/run.sh; else set -- bash -e /scratch/me/jobs/job_01/setup.sh; fi
elif [ "$1" = run ]; then
  if [ "${RANK:-0}" = 0 ]; then echo "diamond: the image has no bash; your commands are run by its sh" >&2; fi
  set -- sh /scratch/me/jobs/job_01/run.sh
else
  set -- sh -e /scratch/me/jobs/job_01/setup.sh
fi
trap : HUP INT TERM USR1 USR2
exec 3>&2 2> /dev/null
"$@" 2>&3 3>&-
exit "$?"
