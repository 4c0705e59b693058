"""The part of job scripts that passes a warning on to a program of one process. See `diamond.core.scripts`."""

from __future__ import annotations

# The default action of the signal would end a program that does not expect it.
# Until it listens, it is not told: it is asked again, as it may have just begun.
WARN = """\
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
"""
