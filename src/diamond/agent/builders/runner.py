"""The shell file that runs a recipe's commands and says which line of them failed.

    sh /path/to/runner.sh /path/to/commands.sh build        # or test.sh and "test"

The user's file is run as it is, by `bash -e`, with nothing added to it: bash reads BASH_ENV first, which here is this
same file and sets two traps. Children of the commands see nothing of it. Where there is no bash, `sh -e` reads the
file, and the line is named if that shell counts lines.
"""

from __future__ import annotations

import re

RUNNER_FILE = "runner.sh"

RUNNER = r"""# Runs the file $1 and, when it fails, says at which line; $2 is what people call it.
if [ -n "${DIAMOND_RUNNER:-}" ]; then
  diamond_label=$DIAMOND_RUNNER
  unset BASH_ENV DIAMOND_RUNNER DIAMOND_RUNNER_FILE
  set -E
  trap 'diamond_line="$LINENO $BASH_COMMAND"' ERR
  trap 'diamond_code=$?
    if [ "$diamond_code" != 0 ]; then
      case "${diamond_line:-}" in *" $BASH_COMMAND") diamond_line=${diamond_line%% *} ;; *) diamond_line="?" ;; esac
      printf "diamond: %s line %s ended with %s: %s\n" "$diamond_label" "$diamond_line" "$diamond_code" \
        "${BASH_COMMAND%%$'"'\\n'"'*}" >&2
    fi' EXIT
elif command -v bash >/dev/null 2>&1; then
  # bash expands BASH_ENV once more: the path itself could hold a dollar sign, the name of a variable cannot.
  DIAMOND_RUNNER=$2 DIAMOND_RUNNER_FILE=$0 BASH_ENV='$DIAMOND_RUNNER_FILE' exec bash -e "$1"
else
  diamond_label=$2
  trap 'diamond_code=$?
    if [ "$diamond_code" != 0 ]; then
      printf "diamond: %s line %s ended with %s\n" "$diamond_label" "${LINENO:-?}" "$diamond_code" >&2
    fi' EXIT
  set -e
  . "$1"
fi
"""

# What the runner says: which text, which line of it ("?" when it cannot tell), exit code, the command as bash read it.
FAILED_LINE = re.compile(
    r"^diamond: (?P<label>[a-z]+) line (?P<number>\d+|\?) ended with (?P<code>\d+)(?:: (?P<command>.*))?$", re.MULTILINE
)
