"""A container registry for tests, over HTTPS, where none can be reached: it serves one image, made of a folder.

    with Registry("127.0.0.1", tmp_path, SavedImage(base_folder(), {"FROM_BASE": "yes"})) as registry:
        Recipe(base=f"docker://{registry.reference}")     # with SSL_CERT_FILE=registry.ca

It knows what pulling needs: whether it is there, manifests, blobs.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import ssl
import subprocess
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from diamond.server import tls
from diamond.server.settings import Settings

NAME = "team/base"
TAG = "1"
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG_TYPE = "application/vnd.docker.container.image.v1+json"
_LAYER_TYPE = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_OCI_TYPE = "application/vnd.oci.image.manifest.v1+json"


class SavedImage:
    """An image of one layer with everything that is in a folder."""

    def __init__(self, root: Path, envs: Mapping[str, str]) -> None:
        argv = ["tar", "-C", str(root), "-c", "--owner=0", "--group=0", "--numeric-owner", "--exclude=./dev/*", "."]
        self.tar = subprocess.run(argv, check=True, capture_output=True).stdout
        config = {
            "architecture": _MACHINES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Env": [f"{name}={value}" for name, value in envs.items()], "User": "nobody"},
            "rootfs": {"type": "layers", "diff_ids": [_digest(self.tar)]},
            "history": [{"created_by": "a test"}],
        }
        self.config = json.dumps(config).encode()
        self.layer = gzip.compress(self.tar, compresslevel=1)
        manifest = {
            "schemaVersion": 2,
            "mediaType": _TYPE,
            "config": _described(self.config, _CONFIG_TYPE),
            "layers": [_described(self.layer, _LAYER_TYPE)],
        }
        self.manifest = json.dumps(manifest).encode()

    def write_docker_archive(self, path: Path) -> None:
        """As `docker save` writes it."""
        name = f"{_digest(self.config).partition(':')[2]}.json"
        manifest = [{"Config": name, "RepoTags": ["team/base:1"], "Layers": ["layer.tar"]}]
        files = {name: self.config, "layer.tar": self.tar, "manifest.json": json.dumps(manifest).encode()}
        _write_tar(path, files)

    def write_oci_archive(self, path: Path) -> None:
        """As `podman save --format=oci-archive` writes it."""
        described = {
            "schemaVersion": 2,
            "mediaType": _OCI_TYPE,
            "config": _described(self.config, "application/vnd.oci.image.config.v1+json"),
            "layers": [_described(self.layer, "application/vnd.oci.image.layer.v1.tar+gzip")],
        }
        manifest = json.dumps(described).encode()
        index = {"schemaVersion": 2, "manifests": [_described(manifest, _OCI_TYPE)]}
        blobs = {f"blobs/sha256/{_digest(data)[7:]}": data for data in (self.config, self.layer, manifest)}
        layout = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode()}
        _write_tar(path, layout | blobs, folders=("blobs", "blobs/sha256"))


def _write_tar(path: Path, files: Mapping[str, bytes], folders: Sequence[str] = ()) -> None:
    with tarfile.open(path, "w") as archive:
        for name in folders:  # without which Apptainer, which makes none, cannot unpack what is in them
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(info)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _described(data: bytes, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "size": len(data), "digest": _digest(data)}


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        media_type, data = self.server.files.get(self.path.partition("?")[0], ("", None))
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        if data is not None:
            self.send_header("Content-Type", media_type)
            self.send_header("Docker-Content-Digest", _digest(data))
        self.end_headers()
        if body and data:
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        self.server.asked.append(self.path)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, files: Mapping[str, tuple[str, bytes]]) -> None:
        super().__init__((host, 0), _Handler)
        self.files = files
        self.asked: list[str] = []


class Registry:
    """Use as a context manager. `ca` is the file of the authority its certificate is signed by."""

    def __init__(self, host: str, folder: Path, image: SavedImage) -> None:
        blobs = {_digest(data): data for data in (image.config, image.layer)}
        files = {f"/v2/{NAME}/blobs/{digest}": ("application/octet-stream", data) for digest, data in blobs.items()}
        for name in (TAG, _digest(image.manifest)):
            files[f"/v2/{NAME}/manifests/{name}"] = (_TYPE, image.manifest)
        files["/v2/"] = ("application/json", b"{}")
        self._server = _Server(host, files)
        certificates = tls.prepare(Settings(home=folder, host=host), now=time.time())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.cert, certificates.key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        assert certificates.ca is not None
        self.ca = certificates.ca
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def reference(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}/{NAME}:{TAG}"
