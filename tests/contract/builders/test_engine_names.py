"""Engines give images names, which an archive could try to take: Podman's alone, since it is the one that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from diamond.core.images import PAYLOAD_FILE
from testing.images import base_folder
from testing.podman import PodmanBench
from testing.registry import SavedImage


@pytest.mark.parametrize("bench", ["podman"], indirect=True)
def test_an_archive_takes_no_name_from_another_image(bench: PodmanBench, tmp_path: Path) -> None:
    saved = SavedImage(base_folder(), {})
    victim = bench.build(bench.recipe())
    saved.write_docker_archive(tmp_path / "plain.tar")
    stranger = bench.podman("pull", f"docker-archive:{tmp_path}/plain.tar").split()[-1]
    bench.podman("tag", victim.facts.path, "localhost/keep:1")
    bench.podman("tag", stranger, victim.facts.path)
    payloads = {}
    for kind in ("docker", "oci"):  # each asks for the victim's name
        bench.podman("save", f"--format={kind}-archive", f"--output={tmp_path}/{kind}.tar", victim.facts.path)
        payloads[kind] = (tmp_path / f"{kind}.tar").read_bytes()
    bench.podman("tag", "localhost/keep:1", victim.facts.path)
    for payload in payloads.values():
        taken = bench.run(bench.order(action="import"), staged={PAYLOAD_FILE: payload})
        assert taken.code == 0, taken.log
        assert taken.facts.digest != victim.facts.digest
        found = bench.podman("image", "inspect", "--format={{.Id}}", victim.facts.path).strip()
        assert f"sha256:{found}" == victim.facts.digest
        assert bench.inside(taken.facts, "echo", "here").strip() == "here"
