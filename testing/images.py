"""What tests of images build on, where no registry can be reached: a small Debian as a folder, and a way to packages.

    with Site("alpha", binds={**BINDS, **image_binds()}) as site, Proxy(site.server_address) as proxy:
        site.run([...], env=build_envs(proxy))     # as user1; the base is at BASE_INSIDE

The folder belongs to user1's number and is shared read-only by every site; it is built once and kept outside the
repository, like the sites' own root file systems.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from testing.minihpc import rootfs
from testing.minihpc.inside import ACCOUNTS
from testing.proxy import Proxy

_MAKE = 2  # raise it when `_build` changes
BASE_INSIDE = "/opt/bases/debian"
CA_INSIDE = "/opt/bases/ca.crt"
BASE = rootfs.Release(
    suite="trixie", variant="minbase", packages=("python3", "python3-pip", "python3-venv", "ca-certificates")
)


@lru_cache
def base_folder() -> Path:
    """Debian 13 with Python, as a folder that user1 of a site can copy; built now if it is not there."""
    target = rootfs.cache_dir().parent / "images" / f"base-{_MAKE}-{BASE.key}"
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.is_dir():
        with rootfs.locked(target.with_name(f"{target.name}.lock")):
            if not target.is_dir():
                _build(target)
    return target


def _build(target: Path) -> None:
    rootfs.say(f"building the base of test images in {target} (once; half a minute)")
    folder = Path(tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".part", dir=target.parent))
    try:
        root = folder / "root"
        rootfs.bootstrap(BASE, root)
        for device in (root / "dev").iterdir():
            shutil.rmtree(device) if device.is_dir() and not device.is_symlink() else device.unlink()
        shutil.rmtree(root / "var/cache/apt", ignore_errors=True)
        owner = ACCOUNTS["user1"].uid
        subprocess.run(["chown", "-R", f"{owner}:{owner}", str(root)], check=True)
        subprocess.run(["chmod", "-R", "go+rX", str(root)], check=True)  # every account may build on it
        root.chmod(0o755)
        os.rename(root, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ca_file() -> Path:
    """The certificates this machine trusts: a proxy on the way to a package index may have its own."""
    for named in (
        os.environ.get("SSL_CERT_FILE"),
        ssl.get_default_verify_paths().cafile,
        "/etc/ssl/certs/ca-certificates.crt",
    ):
        if named and Path(named).is_file():
            return Path(named)
    raise RuntimeError("this machine has no file of trusted certificates")


def image_binds() -> dict[str, Path]:
    """For Site(binds=…)."""
    return {BASE_INSIDE: base_folder(), CA_INSIDE: ca_file()}


def build_envs(proxy: Proxy) -> dict[str, str]:
    """For an agent, or a build, that is to reach package indexes from inside a site."""
    return {
        "http_proxy": proxy.url,
        "https_proxy": proxy.url,
        "PIP_CERT": CA_INSIDE,
        "SSL_CERT_FILE": CA_INSIDE,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_DEFAULT_TIMEOUT": "120",
    }
