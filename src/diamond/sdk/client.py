"""The client: one server, one token, and the objects behind which its routes are grouped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx

from diamond.core.codec import decode
from diamond.core.errors import InstallationProblem, InvalidInput, Unavailable
from diamond.core.events import Event
from diamond.core.home import ClientConfig, Home
from diamond.sdk.bundles import Bundles
from diamond.sdk.endpoints import Endpoints
from diamond.sdk.tasks import Tasks
from diamond.sdk.transport import API, RETRIES, START_HINT, Transport

if TYPE_CHECKING:
    from diamond.sdk.accounts import Accounts
    from diamond.sdk.audit import Audit
    from diamond.sdk.images import Images
    from diamond.sdk.logins import Logins
    from diamond.sdk.notices import Notices
    from diamond.sdk.pools import Pools
    from diamond.sdk.projects import Projects
    from diamond.sdk.quotas import Quotas
    from diamond.sdk.secrets import Secrets
    from diamond.sdk.templates import Templates
    from diamond.sdk.tokens import Tokens


class Client:
    """A connection to a Diamond server. Safe to share between threads; use it as a context manager.

    Example:
        >>> with Client() as diamond:
        ...     task = diamond.tasks.create({"run": "python train.py", "workdir": "."})
        ...     print(diamond.tasks.wait(task.id).state)

    Args:
        url: address of the server; None: DIAMOND_URL, then client.json in Diamond's home.
        token: user token; None: DIAMOND_TOKEN, then client.json.
        timeout_s: seconds to wait for each answer before the call counts as failed.
        retries: how often a call that may be repeated is sent again after a passing failure.
        ca_file: certificate of the one authority to trust; None: DIAMOND_CA, then what client.json says for this
            address, else those of the system.
        transport: httpx transport instead of the network (tests).

    Attributes:
        tasks: launch, follow and stop tasks; fetch what they left behind.
        images: build, share, copy and remove software environments.
        endpoints: clusters and machines, and their queues.
        pools: nodes that are held, and shared between tasks.
        bundles: folders as content-addressed uploads.
        projects: who works together, and what they share.
        secrets: values that tasks use by name.
        templates: tasks to begin with.
        quotas: how much you may have, and how much you have.
        accounts: who you are; for administrators, everybody's accounts.
        audit: who did what, from where.
        notices: be told of what happened, by e-mail or webhook.
        tokens: make, list and revoke tokens of yours.
        logins: sign in without a browser, as `diamond login` does.

    Raises:
        InstallationProblem: neither an address was given nor one is saved.
        InvalidInput: the address is not an HTTP address.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        timeout_s: float = 30.0,
        *,
        retries: int = RETRIES,
        ca_file: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if url is None or token is None or ca_file is None:
            saved = ClientConfig.load(Home.find())
            url = url or (saved.url if saved else None)
            # A saved token belongs to the saved address: it is not shown to any other server.
            is_saved = saved is not None and saved.url == (url or "").rstrip("/")
            token = token or (saved.token if saved and is_saved else "")
            if ca_file is None and saved is not None and (is_saved or os.environ.get("DIAMOND_CA")):
                ca_file = saved.ca
        if not url:
            raise InstallationProblem(
                "no Diamond server is known here",
                hint="start one on this machine with: diamond up    (or sign in to another: diamond login URL)",
            )
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidInput(
                f"{url[:80]!r} is not the address of a server", hint="write e.g. http://127.0.0.1:7421", field="url"
            )
        self.url = url.rstrip("/")
        self._transport = Transport(
            self.url, token or "", timeout_s=timeout_s, retries=retries, ca_file=ca_file or "", transport=transport
        )
        self.bundles = Bundles(self._transport)
        self.tasks = Tasks(self._transport, self.bundles)
        self.endpoints = Endpoints(self._transport)

    @cached_property
    def images(self) -> Images:
        # Made when it is used: listing tasks need not wait for all that images are made of.
        from diamond.sdk.images import Images

        return Images(self._transport, self.bundles, self.tasks)

    @cached_property
    def audit(self) -> Audit:
        from diamond.sdk.audit import Audit

        return Audit(self._transport)

    @cached_property
    def notices(self) -> Notices:
        from diamond.sdk.notices import Notices

        return Notices(self._transport)

    @cached_property
    def pools(self) -> Pools:
        from diamond.sdk.pools import Pools

        return Pools(self._transport)

    @cached_property
    def accounts(self) -> Accounts:
        from diamond.sdk.accounts import Accounts

        return Accounts(self._transport)

    @cached_property
    def projects(self) -> Projects:
        from diamond.sdk.projects import Projects

        return Projects(self._transport)

    @cached_property
    def tokens(self) -> Tokens:
        from diamond.sdk.tokens import Tokens

        return Tokens(self._transport)

    @cached_property
    def quotas(self) -> Quotas:
        from diamond.sdk.quotas import Quotas

        return Quotas(self._transport)

    @cached_property
    def logins(self) -> Logins:
        from diamond.sdk.logins import Logins

        return Logins(self._transport)

    @cached_property
    def secrets(self) -> Secrets:
        from diamond.sdk.secrets import Secrets

        return Secrets(self._transport)

    @cached_property
    def templates(self) -> Templates:
        from diamond.sdk.templates import Templates

        return Templates(self._transport, self.bundles, self.tasks)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; the client cannot be used afterwards."""
        self._transport.close()

    def health(self, *, retries: int | None = None) -> dict[str, Any]:
        """``{"status", "version", "epoch"}`` of the server; needs no token.

        Args:
            retries: how often to ask again when nobody answers; None: as other calls do.

        Raises:
            ServerUnreachable: nobody answers at the address.
        """
        found = self._transport.json("GET", f"{API}/health", retries=retries)
        return dict(found)

    def server_date(self) -> str:
        """The server's clock as its answers give it (an HTTP date); empty when it gives none."""
        return str(self._transport.request("GET", f"{API}/health").headers.get("Date", ""))

    def info(self) -> dict[str, Any]:
        """``{"version", "data_dir", "database", "counts"}`` of the server. Raises Unauthenticated for a bad token."""
        return dict(self._transport.json("GET", f"{API}/info"))

    def events(self, since: int | None = None, *, follow: bool = False, limit: int = 500) -> Iterator[Event]:
        """What happened on the server, oldest first.

        Args:
            since: give events after this `seq`; None: from the beginning, or with `follow` from now on.
            follow: go on for ever, waiting for new events; server restarts are waited out.
            limit: most events fetched in one request.

        Yields:
            Each event exactly once.
        """
        path = f"{API}/events"
        cursor = since if since is not None else (self._newest_event() if follow else 0)
        while True:
            wait_s = 20.0 if follow else 0.0
            params = {"since": cursor, "limit": limit, "wait_s": wait_s or None}
            try:
                page = self._transport.json("GET", path, params=params, wait_s=wait_s)
            except Unavailable:
                if not follow:
                    raise
                continue
            found = [decode(Event, raw) for raw in page["events"]]
            yield from found
            if not found and not follow:
                return
            cursor = max([cursor, *(event.seq for event in found)])

    def _newest_event(self) -> int:
        """The present end of the event log; the server gives it with any page, however far back it starts."""
        cursor = 0
        while True:
            page = self._transport.json("GET", f"{API}/events", params={"since": cursor, "limit": 1000})
            if not page["events"]:
                return cursor
            cursor = int(page["events"][-1]["seq"])


__all__ = ["START_HINT", "Client"]
