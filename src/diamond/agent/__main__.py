"""``python -m diamond.agent --server URL --token-file FILE --home DIR``: the agent, without the rest of the command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from diamond.agent.main import run
from diamond.core.errors import DiamondError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m diamond.agent", description="Speak for this machine.")
    parser.add_argument("--server", required=True, metavar="URL", help="address of the Diamond server")
    parser.add_argument("--token-file", required=True, type=Path, metavar="FILE", help="holds the agent's token")
    parser.add_argument("--home", required=True, type=Path, metavar="DIR", help="the agent's own directory")
    parser.add_argument("--once", action="store_true", help="end when everything ordered is done")
    parser.add_argument("--take-over", action="store_true", help="replace another home of this endpoint that is lost")
    options = parser.parse_args()
    try:
        token = options.token_file.read_text().strip()
        return run(
            server_url=options.server,
            token=token,
            home=options.home,
            once=options.once,
            take_over=options.take_over,
        )
    except OSError as error:
        print(f"diamond agent: {error.filename}: {error.strerror}", file=sys.stderr)
    except DiamondError as error:
        print(f"diamond agent: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
