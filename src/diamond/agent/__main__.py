"""``python -m diamond.agent --server URL --token-file FILE --home DIR``: the agent, without the rest of the command.

An enrolled agent needs only ``--home DIR``. What else an agent's home can be asked for is in `diamond.agent.command`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from diamond.agent import centre
from diamond.agent.background import apply_saved_environment
from diamond.agent.config import AgentConfig, choose_home, token_file
from diamond.agent.credentials import Credentials
from diamond.agent.main import run, set_up_logging
from diamond.agent.schedulers.choice import KINDS
from diamond.core.errors import DiamondError, InvalidInput


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):
        from diamond.agent.command import main as command

        return command(argv)
    parser = argparse.ArgumentParser(prog="diamond-agent run", description="Speak for this machine.")
    parser.add_argument("--server", metavar="URL", help="address of the Diamond server")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="holds the agent's token")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="certificate of the one authority to trust")
    parser.add_argument("--home", type=Path, metavar="DIR", help="the agent's own directory")
    parser.add_argument("--name", help="the endpoint, where several are enrolled here")
    parser.add_argument("--once", action="store_true", help="end when everything ordered is done")
    parser.add_argument("--take-over", action="store_true", help="replace another home of this endpoint that is lost")
    parser.add_argument("--scheduler", choices=KINDS, help="what runs the jobs; auto: Slurm where there is one")
    parser.add_argument("--saved-environment", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    try:
        return run_agent(options)
    except OSError as error:
        print(f"diamond agent: {error.filename}: {error.strerror}", file=sys.stderr)
    except DiamondError as error:
        print(f"diamond agent: {error}", file=sys.stderr)
    return 1


def run_agent(options: argparse.Namespace) -> int:
    home = choose_home(options.home, options.name)
    if options.saved_environment:  # something keeps it running, and would start it again and again
        apply_saved_environment(home)
        set_up_logging()
        centre.wait_while_stopped()
    centre.refuse_stopped()
    config = AgentConfig.load(home)
    server = options.server or (config.server if config else None)
    if server is None:
        raise InvalidInput(f"no agent is enrolled in {home}", hint="enrol it first, or give --server and --token-file")
    ca_file = options.ca or (config.ca_file(home) if config and not options.server else None)
    return run(
        server_url=server,
        token=Credentials.load(options.token_file or token_file(home)),
        home=home,
        ca_file=ca_file,
        once=options.once,
        take_over=options.take_over,
        scheduler=options.scheduler,
    )


if __name__ == "__main__":
    sys.exit(main())
