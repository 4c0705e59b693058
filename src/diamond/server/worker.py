"""`python -m diamond.server.worker`: one of several server processes, started by `workers.Supervisor` alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

from diamond.core.errors import DiamondError
from diamond.server.logs import configure_logging
from diamond.server.main import make_context, make_hub, open_database, run_worker
from diamond.server.settings import Settings
from diamond.server.workers import end_with_supervisor, read_place


def main() -> int:
    place = read_place()
    settings = Settings(**json.loads(place.settings))
    configure_logging(settings.log_level, settings.log_format)
    db = open_database(settings)
    try:
        hub = make_hub(db)
        ctx = make_context(settings, db, hub)
        sockets = [socket.socket(fileno=place.listener_fd)]
        if place.is_first:
            sockets.append(socket.socket(fileno=place.first_fd))

        def ready() -> None:
            with contextlib.suppress(BrokenPipeError):  # nobody waits for one that was started again
                os.write(place.ready_fd, b"r")
            os.close(place.ready_fd)

        end_with_supervisor(lambda: os.kill(os.getpid(), signal.SIGTERM))
        run_worker(settings, ctx, hub, place, sockets, ready)
    except DiamondError as error:
        print(f"error: worker {place.index}: {error}", file=sys.stderr)
        return 1
    finally:
        db.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
