"""What quota tools print, in golden samples of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from diamond.agent import quotas
from diamond.agent.quotas import Quota, parse_lfs, parse_mmlsquota, parse_quota, parse_xfs

KIB = 1024

QUOTA = """\
Disk quotas for user user1 (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      /dev/sda1  104856  2097152 4194304       0     120       0       0       0
nas1:/export/home 31457280* 26214400 31457280  518400  199999  200000  200000       0
      /dev/sdb1       8       0       0       0       2       0       0       0
"""


def test_quota() -> None:
    assert parse_quota(QUOTA, "/dev/sda1") == Quota(used_bytes=104856 * KIB, limit_bytes=4194304 * KIB)
    over = parse_quota(QUOTA, "nas1:/export/home")
    assert over == Quota(used_bytes=31457280 * KIB, limit_bytes=31457280 * KIB)
    assert parse_quota(QUOTA, "/dev/sdb1") is None  # no limit
    assert parse_quota(QUOTA, "/dev/sda") is None
    assert parse_quota("Disk quotas for user user1 (uid 1000): none\n", "/dev/sda1") is None


def test_a_centre_s_own_quota_command_is_not_misread() -> None:
    text = "Quota usage for user user1:\n| /u/user1 | 48G | 95G | 100G | 100k | 500k | 600k |\n"
    assert parse_quota(text, "/u/user1") is None
    assert parse_quota(text, "|") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "     /scratch  123456  1000000 2000000       -    1234       0       0       -\n",
            Quota(used_bytes=123456 * KIB, limit_bytes=2000000 * KIB),
        ),
        (
            "/lustre/orion/abc123/scratch/someone\n     53687091200* 53687091200 53687091200 6d23h59m45s 12 0 0 -\n",
            Quota(used_bytes=53687091200 * KIB, limit_bytes=53687091200 * KIB),
        ),
        # A server that did not answer puts its last word into brackets.
        (
            "   /work  [200]  500       0       -     [3]       0       0       -\n",
            Quota(used_bytes=204800, limit_bytes=512000),
        ),
        (
            "   /mnt/a 5  100  7 9       -    1       0       0       -\n",
            Quota(used_bytes=100 * KIB, limit_bytes=9 * KIB),
        ),
        ("     /scratch  123456  0 0       -    1234       0       0       -\n", None),
        ("lfs quota: cannot resolve path '/x': Not a Lustre filesystem\n", None),
        ("", None),
    ],
)
def test_lfs(text: str, found: Quota | None) -> None:
    assert parse_lfs(text) == found


MMLSQUOTA = """\
mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:quota:defQuota:fid:filesetname:
mmlsquota::0:1:::anvil:FILESET:12:proj:100:0:900:0:none:10:0:0:0:none::on:off:12:proj:
mmlsquota::0:1:::anvil:USR:1000:user1:6605824:0:107374182400:0:none:3000:0:1048576:0:none::on:off:::
mmlsquota::0:1:::home:USR:1000:user1:48:26214400:0:0:none:3:0:0:0:none::on:off:::
mmlsquota::0:1:::free:USR:1000:user1:48:0:0:0:none:3:0:0:0:none::on:off:::
"""


def test_mmlsquota() -> None:
    assert parse_mmlsquota(MMLSQUOTA, "anvil") == Quota(used_bytes=6605824 * KIB, limit_bytes=107374182400 * KIB)
    assert parse_mmlsquota(MMLSQUOTA, "/dev/home") == Quota(used_bytes=48 * KIB, limit_bytes=26214400 * KIB)
    assert parse_mmlsquota(MMLSQUOTA, "free") is None
    assert parse_mmlsquota(MMLSQUOTA, "other") is None
    assert parse_mmlsquota("mmlsquota: no such user\n", "anvil") is None


def test_xfs() -> None:
    line = "/dev/sdc1             524288     1048576    2097152     00 [--------] /scratch\n"
    assert parse_xfs(line) == Quota(used_bytes=524288 * KIB, limit_bytes=2097152 * KIB)
    assert parse_xfs("/dev/sdc1  0  0  0  00 [--------] /scratch\n") is None
    assert parse_xfs("xfs_quota: cannot setup path\n") is None


def test_no_tool_means_no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diamond.agent.programs.find", lambda name: None)
    for kind in ("lustre", "gpfs", "xfs", "nfs4", "ext4", ""):
        assert quotas.Reader().of("/", kind=kind, device="x") is None


def test_each_tool_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "quota"
    tool.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\ncat {tmp_path}/answer\nexit 1\n")
    tool.chmod(0o755)
    (tmp_path / "answer").write_text(QUOTA)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    reader = quotas.Reader()
    for device, is_known in (("/dev/sda1", True), ("nas1:/export/home", True), ("/dev/other", False)):
        assert (reader.of("/home", kind="ext4", device=device) is not None) == is_known
    assert (tmp_path / "asked").read_text() == "asked\n"
