"""What an agent finds out about a machine, on a real (miniature) cluster: as an ordinary user, on an old Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core import onefile
from testing.minihpc import Site, pythons
from testing.minihpc.fixtures import require, require_apptainer

_CODE = """\
import json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from diamond.agent.site_facts import discover
from diamond.core.codec import encode
home = Path.home() / "agent"
(home / "jobs").mkdir(parents=True, exist_ok=True)
print(json.dumps([encode(discover(home, "alpha")), sys.version_info[:2], sys.modules["diamond.core.sites"].__file__]))
"""


@pytest.fixture(scope="module")
def centre() -> Iterator[Site]:
    require_apptainer(require())
    old = ["3.10"] if pythons.find("3.10") else []
    with Site("alpha", pythons=old) as running:
        running.path("/home/user1/agent.pyz").write_bytes(onefile.build())
        yield running


def look(centre: Site, python: str = "python3", **env: str) -> dict[str, Any]:
    said = centre.run([python, "-c", _CODE, "/home/user1/agent.pyz"], env=env).stdout
    facts, version, where = json.loads(said)
    assert where.startswith("/home/user1/agent.pyz/"), "it must work from inside the one file"
    return {**facts, "version": tuple(version)}


def test_finds_container_runtimes_and_the_file_systems(centre: Site) -> None:
    centre.run(["mkdir", "-p", "/scratch/user1"])
    facts = look(centre)
    assert [name.split()[0] for name in facts["runtimes"]] == ["apptainer", "charliecloud"]
    assert facts["runtimes"][0] == f"apptainer {centre.facts.apptainer}"
    places = {each["role"]: each for each in facts["filesystems"]}
    assert places["home"]["path"] == "/home/user1"
    assert places["scratch"]["path"] == "/scratch/user1"
    assert "runs" not in places  # in the home
    for place in places.values():
        assert place["kind"]
        assert 0 < place["free_bytes"] <= place["total_bytes"]
    assert (facts["site"], facts["warnings"]) == ("", [])


def test_variables_of_the_centre_count(centre: Site) -> None:
    centre.run(["mkdir", "-p", "/home/user1/work", "/home/user1/my scratch"])
    facts = look(centre, WORK="/home/user1/work", SCRATCH="/home/user1/my scratch", NERSC_HOST="perlmutter")
    places = [(each["role"], each["path"]) for each in facts["filesystems"]]
    assert ("scratch", "/home/user1/my scratch") in places
    assert ("project", "/home/user1/work") in places
    assert facts["site"] == "perlmutter"
    assert facts["site_name"].startswith("Perlmutter, ")


def test_the_same_on_python_3_10(centre: Site) -> None:
    if not (prefix := pythons.find("3.10")):
        pytest.skip("this machine has no Python 3.10 to lend to a site")
    inside = pythons.inside("3.10")
    assert isinstance(prefix, Path)
    facts = look(centre, f"{inside}/bin/python3.10")
    assert facts["version"] == (3, 10)
    assert facts["runtimes"]
    assert {each["role"] for each in facts["filesystems"]} >= {"home", "scratch"}
