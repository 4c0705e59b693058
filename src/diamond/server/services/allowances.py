"""How much one person may have at a time of what costs the server something and quotas do not count.

The numbers are settings of the operator's; whoever is refused is told the number and, for the operator, the setting.
"""

from __future__ import annotations

from dataclasses import dataclass

from diamond.core.errors import DiamondError


@dataclass(frozen=True, kw_only=True)
class Allowances:
    """For each user. Sessions are not refused: the one that was used longest ago ends."""

    sessions: int = 50
    tokens: int = 200
    projects: int = 100


@dataclass(frozen=True, kw_only=True)
class Caps:
    """How much the server keeps and takes, of one job or for one endpoint, where the stores do not see to it.

    Attributes:
        output_bytes: of files that one job brings.
        job_bytes_per_s, endpoint_bytes_per_s: of logs and curves.
        calls_per_s: of one endpoint's agent.
        reserve_bytes: free space on the server's disk, below which nothing large is taken.
    """

    output_bytes: int = 256 * 2**30
    job_bytes_per_s: float = 32 * 2**20
    endpoint_bytes_per_s: float = 128 * 2**20
    calls_per_s: float = 200.0
    reserve_bytes: int = 2**30


def refusal(kind: type[DiamondError], have: str, setting: str, *, cure: str, field: str = "") -> DiamondError:
    """`have` says what there is too much of ("you have 200 tokens already"), `cure` what its user can do."""
    return kind(have, hint=f"{cure}; the operator can raise `{setting}` (DIAMOND_{setting.upper()})", field=field)
