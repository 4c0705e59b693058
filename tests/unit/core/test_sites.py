"""The site catalogue: every file is sound, every rule is particular to its site."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import diamond
from diamond.core import sites
from diamond.core.errors import InvalidInput

ROOT = Path(__file__).parents[3]
FOLDER = Path(sites.__file__).with_suffix("")
FILES = sorted(FOLDER.glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_sound(path: Path) -> None:
    site = sites.parse_site(json.loads(path.read_text()))
    assert site.key == path.stem
    assert site.name
    assert site.organisation
    assert all(group.sources for group in site.groups().values())
    for source in site.sources.values():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", source.date)
    for pattern in (*site.match.hosts, *site.match.environ.values()):
        re.compile(pattern)
    partitions = {name for gpu in site.hardware.gpus for name in gpu.partitions}
    limits = {limit.name for limit in site.queues.limits} if site.queues else partitions
    assert partitions <= limits, "a partition with GPUs has no documented limit"
    assert len(limits) == len(site.queues.limits if site.queues else limits), "a queue is listed twice"
    assert not site.queues or not site.queues.default or site.queues.default in limits


def test_the_catalogue_has_every_file_once() -> None:
    found = sites.catalogue()
    assert len(found) == len(FILES) >= 18
    assert len({site.name for site in found}) == len(found)
    assert [site.key for site in found] == sorted(site.key for site in found)
    assert sites.find("delta") is not None
    assert sites.find("nowhere") is None


def test_those_the_national_programmes_name_are_there() -> None:
    names = {site.name for site in sites.catalogue()}
    assert names >= {
        "Jetstream2",
        "Delta",
        "DeltaAI",
        "Bridges-2",
        "Anvil",
        "Expanse",
        "Frontera",
        "Lonestar6",
        "Vista",
    }
    assert names >= {"ACES", "Horizon", "Perlmutter", "Polaris", "Frontier", "Aurora"}


@pytest.mark.parametrize("site", sites.catalogue(), ids=lambda site: site.key)
def test_what_users_log_in_to_is_recognised(site: sites.Site) -> None:
    if site.login:
        assert sites.match(site.login, {}) is site
    for domain in site.match.domains:
        assert sites.match(f"login1.{domain}", {}) is site


@pytest.mark.parametrize(
    ("host", "key"),
    [
        ("login1.vista.tacc.utexas.edu", "vista"),
        ("c123-456.vista.tacc.utexas.edu", "vista"),
        ("LOGIN2.LS6.TACC.UTEXAS.EDU.", "lonestar6"),
        ("dt-login03.delta.ncsa.illinois.edu", "delta"),
        ("gpua068.delta.internal.ncsa.edu", "delta"),
        ("gh-login03.delta.ncsa.illinois.edu", "deltaai"),
        ("login12.frontier.olcf.ornl.gov", "frontier"),
        ("andes79.olcf.ornl.gov", "andes"),
        ("aurora-uan-0011", "aurora"),
        ("aurora-uan-0011.aurora.alcf.anl.gov", "aurora"),
        ("polaris-login-01.hsn.cm.polaris.alcf.anl.gov", "polaris"),
        ("sophia-login-02", "sophia"),
        ("bio123456.projects.jetstream-cloud.org", "jetstream2"),
        ("a221.anvil.rcac.purdue.edu", "anvil"),
    ],
)
def test_real_names(host: str, key: str) -> None:
    found = sites.match(host, {})
    assert found is not None
    assert found.key == key


@pytest.mark.parametrize(
    "host",
    [
        "",
        "login1",
        "login01",
        "localhost",
        "vista",
        "vista.example.org",
        "notvista.tacc.utexas.edu",
        "vista.tacc.utexas.edu.example.org",
        "vista-tacc-utexas-edu",
        "tacc.utexas.edu",
        "other.tacc.utexas.edu",
        "delta.ncsa.illinois.edu.evil.net",
        "xdt-login01.delta.ncsa.illinois.edu",
        "cc-login1.campuscluster.illinois.edu",
        "frontier.example.com",
        "crusher.olcf.ornl.gov",
        "andes.example.org",
        "my-aurora-uan-0011",
        "anvil",
        "polaris-login-1",
        "perlmutter",
        "jetstream-cloud.org",
    ],
)
def test_names_that_only_look_alike(host: str) -> None:
    assert sites.match(host, {"HOME": "/root", "SCRATCH": "/scratch"}) is None


def test_variables_and_their_order() -> None:
    perlmutter, vista = sites.find("perlmutter"), sites.find("vista")
    assert sites.match("login07", {"NERSC_HOST": "perlmutter"}) is perlmutter
    assert sites.match("login07", {"NERSC_HOST": "perlmutter2"}) is None
    assert sites.match("login07", {"NERSC_HOST": ""}) is None
    # A shell may bring variables along from where it came; the machine's name cannot be brought.
    assert sites.match("login1.vista.tacc.utexas.edu", {"NERSC_HOST": "perlmutter"}) is vista


def test_a_cluster_name_counts_last_and_contradictions_mean_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sites.parse_site(_raw(key="one", match={"clusters": ["alpha"], "environ": {"AT": "x"}, "sources": ["a"]}))
    two = sites.parse_site(_raw(key="two", match={"clusters": ["beta"], "environ": {"AT": "x|y"}, "sources": ["a"]}))
    monkeypatch.setattr(sites, "catalogue", lambda: (one, two))
    assert sites.match("h", {}, "alpha") is one
    assert sites.match("h", {"AT": "y"}, "alpha") is two
    assert sites.match("h", {"AT": "x"}, "alpha") is None
    assert sites.match("h", {}, "alphabet") is None
    assert sites.match("h", {}, "") is None


def _raw(**more: Any) -> dict[str, Any]:
    known = {
        "key": "here",
        "name": "Here",
        "organisation": "A centre",
        "match": {"domains": ["here.example.org"], "sources": ["a"]},
        "batch": {"scheduler": "slurm", "sources": ["a"]},
        "hardware": {"gpus": [{"model": "A100"}], "sources": ["a"]},
        "sources": {"a": {"title": "A guide", "url": "https://example.org/guide", "date": "2026-01-31"}},
    }
    return {**known, **more}


@pytest.mark.parametrize(
    ("more", "field", "said"),
    [
        ({"colour": "red"}, "colour", "unknown field"),
        ({"key": "Not A Key"}, "", "is not a key"),
        ({"match": {"sources": ["a"]}}, "match", "at least one rule"),
        ({"match": {"domains": ["edu"], "sources": ["a"]}}, "match", "not a domain of one site"),
        ({"match": {"hosts": ["(unclosed"], "sources": ["a"]}}, "match", "unclosed"),
        ({"match": {"hosts": [".*"], "sources": ["a"]}}, "match", "nothing in particular"),
        ({"match": {"domains": ["a.b.org"]}}, "match.sources", "is required"),
        ({"match": {"domains": ["a.b.org"], "sources": []}}, "", "match has no source"),
        ({"match": {"domains": ["a.b.org"], "sources": ["b"]}}, "", "match cites b"),
        ({"batch": {"scheduler": "cron", "sources": ["a"]}}, "batch", "one of slurm, pbs, none"),
        ({"network": {"internet": "yes", "sources": ["a"]}}, "network", "direct, proxy, none"),
        ({"sources": {"a": {"title": "T", "url": "ftp://x", "date": "2026-01-31"}}}, "sources.a", "https"),
        ({"sources": {"a": {"title": "T", "url": "https://x", "date": "lately"}}}, "sources.a", "lately"),
        (
            {"sources": {**_raw()["sources"], "b": {"title": "T", "url": "https://x", "date": "2026-01-31"}}},
            "",
            "nothing cites b",
        ),
        ({"queues": {"limits": [{"name": "q", "max_walltime": 48}], "sources": ["a"]}}, "queues.limits[0]", "of what"),
        ({"storage": {"places": [{"role": "attic", "path": "/x"}], "sources": ["a"]}}, "storage.places[0]", "role"),
        ({"storage": {"places": [{"role": "home"}], "sources": ["a"]}}, "storage.places[0]", "path or a variable"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(more: dict[str, Any], field: str, said: str) -> None:
    sites.parse_site(_raw())
    with pytest.raises(InvalidInput) as caught:
        sites.parse_site(_raw(**more))
    assert caught.value.field.startswith(field)
    assert said in caught.value.message


def test_it_works_from_inside_a_zip_file(tmp_path: Path) -> None:
    package = Path(diamond.__file__).parent
    archive = tmp_path / "diamond.pyz"
    with zipfile.ZipFile(archive, "w") as made:
        for path in [package / "__init__.py", *package.glob("core/*.py"), *package.glob("core/sites/*.json")]:
            made.write(path, Path("diamond") / path.relative_to(package))
    code = (
        "import diamond.core.sites as s; print(s.__file__, len(s.catalogue()), s.match('ls6.tacc.utexas.edu', {}).key)"
    )
    environ = {"PYTHONPATH": str(archive)}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, check=True)
    where, number, key = done.stdout.split()
    assert where.startswith(str(archive))
    assert (int(number), key) == (len(FILES), "lonestar6")


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "generate_sites.py"))["text"]()
    assert (ROOT / "docs" / "sites.md").read_text() == made, "run docs/generate_sites.py"
