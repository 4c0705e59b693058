"""How the line `Usage:` of a command's help is written."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand


class Command(TyperCommand):
    """Usage as manuals write it: ``IMAGE [FILE]``, without braces and brackets around words that have their own."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [re.sub(r"^\{(.*)\}|^\[(\[.*)\](?:\.\.\.)?$", r"\1\2", piece) for piece in pieces]
