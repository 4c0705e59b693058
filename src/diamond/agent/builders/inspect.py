"""What is installed in an image: one script run in it, and its output read into a `Lock`.

The script is for any `sh` with whatever tools the image has; what is missing is left out, never an error. Every line
that counts begins with a mark of ours, because programs may print anything around them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from diamond.core.images import Lock, Package

_MARK = "diamond-lock"

# Runs in the image's default Python, whichever version that is: nothing here is newer than 3.6. The current folder and
# a home directory that happens to be visible are not part of the image.
_PYTHON = r"""
import sys
sys.path = [p for p in sys.path if p]
print("diamond-lock\tpython\t%d.%d.%d" % sys.version_info[:3])
try:
    try:
        from importlib.metadata import distributions
    except ImportError:
        from importlib_metadata import distributions
    found = [(d.metadata["Name"], d.version, d.read_text("INSTALLER")) for d in distributions()]
except ImportError:
    import pkg_resources
    found = [(d.project_name, d.version, None) for d in pkg_resources.working_set]
for name, version, installer in found:
    if name and version and (installer or "").strip() != "conda":
        print("diamond-lock\tpip\t%s\t%s" % (name, version))
"""

# A virtual environment sees the endpoint's own packages, which are no part of it: DIAMOND_IMAGE_ROOT is set in it and
# nowhere else.
_SCRIPT = r"""
exec 2>/dev/null
for file in /etc/os-release /usr/lib/os-release; do
  if [ -r "$file" ]; then
    ( . "$file"; printf 'diamond-lock\tos\t%s\t%s\n' "$ID" "$VERSION_ID" )
    break
  fi
done
if [ -z "${DIAMOND_IMAGE_ROOT:-}" ]; then
  if command -v dpkg-query >/dev/null; then
    printf 'diamond-lock\tdeb-native\t%s\n' "$(dpkg --print-architecture)"
    dpkg-query -W -f='diamond-lock\tdeb\t${Package}\t${Version}\t${Architecture}\t${db:Status-Abbrev}\n'
  fi
  if command -v rpm >/dev/null; then
    rpm -qa --qf 'diamond-lock\trpm\t%{NAME}\t%|EPOCH?{%{EPOCH}:}:{}|%{VERSION}-%{RELEASE}\n'
  fi
  for file in /lib/apk/db/installed /usr/lib/apk/db/installed; do
    if [ -r "$file" ]; then
      while IFS= read -r line; do
        case "$line" in
          P:*) name=${line#P:} ;;
          V:*) printf 'diamond-lock\tapk\t%s\t%s\n' "$name" "${line#V:}" ;;
        esac
      done < "$file"
      break
    fi
  done
fi
for python in python3 python; do
  if command -v "$python" >/dev/null; then
    "$python" -s -c "$1" && break
  fi
done
prefix=$("$python" -c 'import sys; print(sys.prefix)')
for folder in "$CONDA_PREFIX" "$prefix" /opt/conda; do
  if [ -n "$folder" ] && [ -d "$folder/conda-meta" ]; then
    for file in "$folder"/conda-meta/*.json; do
      [ -e "$file" ] && printf 'diamond-lock\tconda\t%s\n' "${file##*/}"
    done
    break
  fi
done
exit 0
"""


def inspect(run: Callable[[Sequence[str]], str]) -> Lock:
    """Ask the image what it holds. `run` runs a program in it and returns all of its output."""
    return read_lock(run(["/bin/sh", "-c", _SCRIPT, "sh", _PYTHON]))


def read_lock(output: str) -> Lock:
    """The lock from the script's output. Pure; lines it does not know are ignored."""
    rows = [line.rstrip("\r").split("\t")[1:] for line in output.split("\n") if line.startswith(f"{_MARK}\t")]
    native = next((row[1] for row in rows if row[0] == "deb-native" and len(row) > 1), "")
    found = {package for package in _packages(rows, native) if package.is_plain}
    return Lock(
        packages=tuple(sorted(found, key=lambda package: (package.kind, package.name, package.version))),
        python=next((row[1] for row in rows if row[0] == "python" and len(row) > 1), ""),
        os=next((" ".join(part for part in row[1:3] if part) for row in rows if row[0] == "os"), ""),
    )


def _packages(rows: Iterable[Sequence[str]], native: str) -> Iterable[Package]:
    seen: set[str] = set()
    for row in rows:
        kind, values = row[0], [value.strip() for value in row[1:]]
        if kind == "deb" and len(values) == 4 and values[3].startswith("ii"):
            foreign = values[2] not in (native, "all")
            yield Package(kind="deb", name=f"{values[0]}:{values[2]}" if foreign else values[0], version=values[1])
        elif kind == "rpm" and len(values) == 2 and values[0] != "gpg-pubkey":
            yield Package(kind="rpm", name=values[0], version=values[1])
        elif kind == "apk" and len(values) == 2 and values[0]:
            yield Package(kind="apk", name=values[0], version=values[1])
        elif kind == "pip" and len(values) == 2:
            name = normal_name(values[0])
            if name not in seen:  # the first on the search path is the one that Python imports
                seen.add(name)
                yield Package(kind="pip", name=name, version=values[1])
        elif kind == "conda" and len(values) == 1:
            # conda names its records NAME-VERSION-BUILD, and neither of the last two can hold a dash.
            parts = values[0].removesuffix(".json").rsplit("-", 2)
            if len(parts) == 3:
                yield Package(kind="conda", name=parts[0], version=parts[1])


def normal_name(name: str) -> str:
    """A Python package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()
