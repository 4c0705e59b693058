"""What failing builds print, and what that means: the table `diagnosis.diagnose` looks things up in.

Order is meaning: a cause stands before what it makes other programs say. A pip that cannot reach its index ends with
"no matching distribution", and a full disk makes anything fail anyhow.
"""

from __future__ import annotations

from diamond.agent.builders.symptoms import commands, machine, packages
from diamond.agent.builders.symptoms.symptom import Symptom

TABLE: dict[str, Symptom] = {**machine.SYMPTOMS, **packages.SYMPTOMS, **commands.SYMPTOMS}

__all__ = ["TABLE", "Symptom"]
