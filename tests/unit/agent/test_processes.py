from __future__ import annotations

from diamond.agent.processes import members, scan


def test_a_job_without_a_leader_has_no_processes() -> None:
    """Every process descends from number 1, and in a PID namespace strangers have session 0: neither names a job."""
    assert members(0, scan()) == []
    assert members(1, scan()) == []
