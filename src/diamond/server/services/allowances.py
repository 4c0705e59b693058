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
    """

    output_bytes: int = 256 * 2**30


def refusal(kind: type[DiamondError], have: str, setting: str, *, cure: str, field: str = "") -> DiamondError:
    """`have` says what there is too much of ("you have 200 tokens already"), `cure` what its user can do."""
    return kind(have, hint=f"{cure}; the operator can raise `{setting}` (DIAMOND_{setting.upper()})", field=field)
