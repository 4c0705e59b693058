"""What tasks of others than the endpoint's owner may name, where they run in containers: nothing that would take them
out of one, or the account's own folders into it. Pure but for links.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from diamond.agent.asked import plain_name
from diamond.agent.patterns import is_under
from diamond.agent.private import leads_in
from diamond.core.ids import is_id
from diamond.core.wire import JobOrder

if TYPE_CHECKING:
    from diamond.agent.policy import Policy

# Options of sbatch that only say when, where and how much. Others, and those of a site's plug-ins, can change what runs
# on the node outside of the image (--container, --container-mounts, --bb) or read files (--nodefile).
HARMLESS_EXTRA = frozenset(
    """acctg-freq begin cluster-constraint comment contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu deadline
    delay-boot distribution extra-node-info gpu-bind gpu-freq gpus-per-socket gres-flags hint hold kill-on-invalid-dep
    licenses mail-type mail-user mcs-label mem-bind mincpus network nice no-kill ntasks-per-core ntasks-per-gpu
    ntasks-per-socket ntasks-per-tres oom-kill-step overcommit oversubscribe prefer priority profile resources segment
    sockets-per-node spread-job switches thread-spec threads-per-core time-min tmp tres-bind tres-per-task use-min-nodes
    wait-all-nodes wckey""".split()  # noqa: SIM905
)
_IN_OWN_STORE = ("podman", "docker")
_ARCHIVES = ("oci-archive:", "docker-archive:")


def broken(policy: Policy, order: JobOrder, image_root: str, agent_home: Path) -> Iterator[str]:
    """What is wrong with an order of somebody else, each as a sentence without `policy.toml: ` before it."""
    if not policy.containers_only:
        return  # on the host there is nothing to keep apart, which its owner has said is wanted
    user = plain_name(order.user or "unknown")
    for path, what in _paths(order):
        if why := _trouble(path, policy, image_root, agent_home):
            yield f"containers_only = true, and the task of user {user} names {path[:200]} {what}, {why}"
    for field_name, names in (("nodelist", order.spec.slurm.nodelist), ("exclude", order.spec.slurm.exclude)):
        if "/" in (names or ""):  # the name of a file, which sbatch reads as this account and quotes from
            yield f"containers_only = true, and slurm.{field_name} of a task of user {user} names a file"
    if policy.allowed_extra is None:
        for option in order.spec.slurm.extra:
            name = option.removeprefix("--").partition("=")[0]
            if name not in HARMLESS_EXTRA:
                yield (
                    f"containers_only = true, and --{name} in slurm.extra may lead out of the container of a task of "
                    f"user {user} (allowed_extra can allow it)"
                )


def _paths(order: JobOrder) -> Iterator[tuple[str, str]]:
    """Paths of this machine whose contents the container would hold."""
    work, image = order.work, order.image
    if image is not None and image.kind not in _IN_OWN_STORE:
        yield image.path, "as its image"
    if work is None:
        return
    base = work.recipe.base if work.action == "build" and work.recipe is not None else ""
    for word in _ARCHIVES:
        base = base.removeprefix(word)
    for path, what in ((base, "as its base"), (work.base_path, "as its base"), (work.source_path, "as its source")):
        if path.startswith("/"):
            yield path, what


def _trouble(path: str, policy: Policy, image_root: str, agent_home: Path) -> str:
    if _is_in_store(path, image_root):
        return ""
    if leads_in(path, agent_home):
        return "which would show it files of this account"
    if policy.path_roots is not None and is_under(path, policy.path_roots):
        return ""
    if os.path.isdir(path):  # `/` is one
        return "which is a folder that neither Diamond made nor path_roots holds"
    return ""


def _is_in_store(path: str, image_root: str) -> bool:
    """Whether it is an image that this agent put into its store; where that one then leads is the agent's doing."""
    root, _, rest = path.rpartition("/store/")
    image_id, _, name = rest.partition("/")
    is_ours = image_root and root and os.path.realpath(root) == os.path.realpath(image_root)
    return bool(is_ours and is_id(image_id, "img") and name and "/" not in name and name not in (".", ".."))
