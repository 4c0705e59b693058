"""How the tests are dealt out to the processes of a parallel run (pytest-xdist)."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadFileScheduling

# What must not run beside itself: Podman locks its storage, so one process waits for another's whole build.
_TOGETHER = {"tests/contract/builders/": "podman", "tests/integration/test_image_entering.py": "podman"}
# Whole clusters and containers: what takes minutes begins first, and short files fill the gaps at the end.
_LONGEST = "tests/integration/test_training_at_site.py"  # a chain of jobs of a minute each, which mostly waits
_LONG = ("tests/integration/", "tests/contract/builders/", "tests/contract/schedulers/", "tests/api/", "tests/web/")


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    """A file is one process's, so that a cluster started for it is started once; some files stay together."""

    def __init__(self, config: Any, log: Any) -> None:
        config.option.loadscopereorder = False  # the order is `longest_first`'s
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((name for path, name in _TOGETHER.items() if file.startswith(path)), file)


def longest_first(nodeid: str) -> int:
    """A key to sort by."""
    if nodeid.startswith(_LONGEST):
        return 0
    return 1 if nodeid.startswith(_LONG) else 2
