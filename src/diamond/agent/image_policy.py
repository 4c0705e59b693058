"""What policy.toml says of images: which an order may use, build, bring or remove, and where. Pure but for links.

A server that is not to be trusted must not get around the rules: everything an order names is looked at here, before
anything is staged, and ids and paths that no honest server sends are refused with or without rules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from diamond.agent.patterns import is_under, listed, matches
from diamond.core.bundles import check_relative_path
from diamond.core.errors import DiamondError
from diamond.core.ids import is_id
from diamond.core.images import PAYLOAD_FILE, ImageUse, ImageWork
from diamond.core.inside import check_use
from diamond.core.recipes import BUILDERS
from diamond.core.wire import JobOrder

if TYPE_CHECKING:
    from diamond.agent.policy import Policy

IMAGES = "images"  # in the agent's home, where no rule says otherwise
BUILD_PLACES = ("login", "batch", "any", "off")
_ACTIONS = ("build", "export", "import", "link", "remove", "prune")
_IN_OWN_STORE = ("podman", "docker")
_ARCHIVES = ("oci-archive:", "docker-archive:")
_BRING = {"build": "a build", "import": "an import", "link": "a link"}  # what there was no image of before
_OWN_NAME = re.compile(r"localhost/diamond/[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_MOUNT = re.compile(r"files/[0-9]{1,6}", re.ASCII)
_MODULE_FILE = re.compile(r"[/.~]|.*/\.\.?(?:/|$)")


def runs_beside(order: JobOrder) -> bool:
    """Whether it is for the login node, where it takes nothing of the batch scheduler's."""
    return order.work is not None and order.work.where == "login"


def malformed(order: JobOrder) -> str:
    """What no honest server sends, rules or no rules: ids and paths that might lead out of their place."""
    work, image = order.work, order.image
    try:
        if image is not None:
            check_use(image, "/")
            if image.image_id and not is_id(image.image_id, "img"):
                return f"{image.image_id[:80]!r} is not the id of an image"
        if work is None:
            return ""
        for target, inside in work.files.items():
            check_relative_path(inside, target)
    except DiamondError as error:
        return error.message
    if work.action not in _ACTIONS or work.where not in ("login", "batch"):
        return f"no job of images is {work.action[:40]!r} on {work.where[:40]!r}"
    if not is_id(work.image_id, "img") and (work.image_id or work.action != "prune"):
        return f"{work.image_id[:80]!r} is not the id of an image"
    if work.builder not in BUILDERS and work.action not in ("remove", "prune"):
        return f"{work.builder[:40]!r} is no builder"
    return _own_words(order) or _odd_paths(work)


def _own_words(order: JobOrder) -> str:
    """Such a job runs the agent's own code, outside of any container: nothing of the order's may lie in its way."""
    spec = order.spec
    for name, value in (
        ("workdir", spec.workdir),
        ("setup", spec.setup),
        ("envs", spec.envs),
        ("secrets", spec.secrets),
        ("slurm.modules", spec.slurm.modules),
        ("slurm.extra", spec.slurm.extra),
    ):
        if value:
            return f"a job of images has no {name} of its own"
    for target in spec.file_mounts:
        if target != PAYLOAD_FILE and not _MOUNT.fullmatch(target):
            return f"a job of images does not bring {target[:80]!r}"
    return ""


def _odd_paths(work: ImageWork) -> str:
    if work.base_path:
        if work.action != "build" or work.recipe is None or not work.recipe.base_image:
            return "the order names a path for a base that is not one of Diamond's images"
        if work.builder in _IN_OWN_STORE:
            if not _OWN_NAME.fullmatch(work.base_path):
                return f"{work.base_path[:200]!r} is not the name of an image that Diamond made"
        elif not _is_plain(work.base_path):
            return f"{work.base_path[:200]!r} is not the plain absolute path of an image"
    if work.action == "link" and not _is_plain(work.source_path):
        return f"{work.source_path[:200]!r} is not the plain absolute path of an image"
    return ""


def _is_plain(path: str) -> bool:
    return path.startswith("/") and "\0" not in path and ".." not in path.split("/")


def broken(policy: Policy, order: JobOrder, image_root: str) -> Iterator[str]:
    """The rules an order breaks, each as a sentence without `policy.toml: ` before it. It is not `malformed`."""
    if order.work is not None:
        yield from _work(policy, order, order.work, image_root)
    elif order.image is not None:
        yield from _use(policy, order.image, image_root)
        yield from _modules(policy, order)
    elif policy.containers_only:
        yield "containers_only = true, the task names no image (set resources.image_id)"


def _use(policy: Policy, image: ImageUse, image_root: str) -> Iterator[str]:
    if policy.containers_only and image.kind == "venv":
        yield "containers_only = true, and the task's image is a virtual environment, which contains nothing"
    is_named = policy.path_roots is not None and is_under(image.path, policy.path_roots)
    if policy.containers_only and not is_named and _is_bare(image, image_root):
        # Of `/` it is a container in name only.
        yield (
            f"containers_only = true, and {image.path[:200]} is a folder that neither is among this endpoint's images "
            "nor lies in path_roots"
        )
    yield from _allowed_builder(policy, image.kind)
    if image.kind not in _IN_OWN_STORE:
        yield from _path(policy, image.path, "as its image", image_root)


def _is_bare(image: ImageUse, image_root: str) -> bool:
    """Whether it is a folder that no builder of this agent made or looked through."""
    if image.kind not in ("apptainer", "charliecloud"):
        return False
    store = os.path.join(image_root, "store") if image_root else ""
    return os.path.isdir(image.path) and not (store and os.path.normpath(image.path).startswith(f"{store}/"))


def _modules(policy: Policy, order: JobOrder) -> Iterator[str]:
    """They are loaded outside of the image; one given as a file may be any file, also one that came with the task."""
    for name in order.spec.slurm.modules if policy.containers_only else ():
        if _MODULE_FILE.match(name):
            yield f"containers_only = true, and the module {name[:200]} is a file (name it as `module avail` does)"


def _work(policy: Policy, order: JobOrder, work: ImageWork, image_root: str) -> Iterator[str]:
    if work.action in ("remove", "prune"):
        return  # they touch what is in the images root, and nothing else
    if policy.builds == "off":
        if work.action in _BRING:
            yield f"builds = off, and this is {_BRING[work.action]}"
    elif policy.builds not in ("any", work.where):
        yield f"builds = {policy.builds}, the {work.action} is for {work.where}"
    yield from _allowed_builder(policy, work.builder)
    if policy.containers_only and work.builder == "venv":
        yield "containers_only = true, and a virtual environment is built outside of any"
    if work.action == "build":
        yield from _time(policy, order)
    yield from _size(policy, work)
    yield from _sources(policy, work, image_root)


def _allowed_builder(policy: Policy, name: str) -> Iterator[str]:
    allowed = policy.allowed_builders
    if allowed is not None and not matches(name, allowed):
        yield f"allowed_builders = {listed(allowed)}, the image is of {name}"


def _time(policy: Policy, order: JobOrder) -> Iterator[str]:
    limit_s = policy.max_build_time
    if limit_s is not None and order.time_limit_s is not None and order.time_limit_s > limit_s:
        shown = policy.describe()
        yield f"max_build_time = {shown['max_build_time']}, the build asks for {order.time_limit_s} s"


def _size(policy: Policy, work: ImageWork) -> Iterator[str]:
    """Of what comes from elsewhere; a build finds out what it makes, and is told the limit."""
    limit = policy.max_image_bytes
    if limit is not None and work.action in ("import", "link") and work.size_bytes > limit:
        yield f"max_image_bytes = {policy.describe()['max_image_bytes']}, the image has {work.size_bytes} bytes"


def _sources(policy: Policy, work: ImageWork, image_root: str) -> Iterator[str]:
    """Where it comes from. What is imported has no place here to come from, so a rule must name imports."""
    if work.action == "build" and work.recipe is not None:
        base = work.recipe.base
        path = base
        for word in _ARCHIVES:
            path = path.removeprefix(word)
        if path.startswith("/"):
            yield from _path(policy, path, "as its base", image_root)
        yield from _allowed_base(policy, base)
        if policy.allowed_bases is not None and work.base_path.startswith("/"):
            yield from _in_store(work.base_path, image_root)
        for name in work.recipe.envs:
            if matches(name, policy.denied_envs):
                yield f"denied_envs names {name}, which the recipe sets"
            if policy.allowed_envs is not None and not matches(name, policy.allowed_envs):
                yield f"allowed_envs does not name {name}, which the recipe sets"
    elif work.action == "import":
        yield from _allowed_base(policy, f"import:{work.name}")
    elif work.action == "link":
        yield from _allowed_base(policy, work.source_path)
    for path, what in ((work.base_path, "as its base"), (work.source_path, "as its source")):
        if path and not (work.builder in _IN_OWN_STORE and not path.startswith("/")):
            yield from _path(policy, path, what, image_root)


def _allowed_base(policy: Policy, base: str) -> Iterator[str]:
    allowed = policy.allowed_bases
    if allowed is not None and not matches(real := canonical(_real(base)), (*allowed, *map(_real_pattern, allowed))):
        yield f"allowed_bases = {listed(allowed)}, the image comes from {real[:200]}"


def _real(base: str) -> str:
    """A path is where its links lead: whoever may put a link in an allowed folder may not bring any image by it."""
    word = next((word for word in _ARCHIVES if base.startswith(word)), "")
    path = base.removeprefix(word)
    return f"{word}{os.path.realpath(path)}" if path.startswith("/") else base


def _real_pattern(pattern: str) -> str:
    """The same for a rule, up to the folder of its first wildcard: `/sw/*` holds where /sw itself is a link."""
    word = next((word for word in _ARCHIVES if pattern.startswith(word)), "")
    fixed = re.split(r"[*?\[]", pattern.removeprefix(word), maxsplit=1)[0]
    folder = fixed.rpartition("/")[0]
    if not folder.startswith("/"):
        return pattern
    return f"{word}{os.path.realpath(folder)}{pattern.removeprefix(word).removeprefix(folder)}"


def _in_store(path: str, image_root: str) -> Iterator[str]:
    """What `image:NAME` is, the server says. It must be one that this endpoint made or took in by its rules."""
    root, _, rest = path.rpartition("/store/")
    image_id, _, name = rest.partition("/")
    is_ours = image_root and root and os.path.realpath(root) == os.path.realpath(image_root)
    if not (is_ours and is_id(image_id, "img") and name and "/" not in name):
        yield f"allowed_bases is set, and {path[:200]} is not in the store of images"


def _path(policy: Policy, path: str, what: str, image_root: str) -> Iterator[str]:
    roots = policy.path_roots
    if roots is None or (image_root and is_under(path, (image_root,))) or is_under(path, roots):
        return
    yield f"path_roots = {listed(roots)}, the task names {path[:200]} {what}"


def canonical(base: str) -> str:
    """A base as rules are written for it: `docker://python:3.12` is `docker://docker.io/library/python:3.12`."""
    if not base.startswith("docker://"):
        word = next((word for word in _ARCHIVES if base.startswith(word)), "")
        path = base.removeprefix(word)
        return f"{word}{os.path.normpath(path)}" if path.startswith("/") else base
    name = base.removeprefix("docker://")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        if first in ("index.docker.io", "registry-1.docker.io"):
            name = f"docker.io/{rest}"
        if name.startswith("docker.io/") and "/" not in rest:
            name = f"docker.io/library/{rest}"
        return f"docker://{name}"
    return f"docker://docker.io/{name}" if slash else f"docker://docker.io/library/{name}"
