"""The identity providers of this installation, as its file names them, ready to be asked."""

from __future__ import annotations

import time
from collections.abc import Callable

from diamond.core.errors import NotFound
from diamond.server.github import GitHub
from diamond.server.identity_file import IdentityConfig, ProviderConfig
from diamond.server.provider_link import Provider


class IdentityProviders:
    """One per server process: it remembers what providers publish of themselves.

    Attributes:
        local_accounts: whether people may sign in with a password kept here.
        owners_invite: whether owners of projects may invite people who have no account yet.
    """

    def __init__(self, config: IdentityConfig | None = None, clock: Callable[[], float] = time.time) -> None:
        self._config = config or IdentityConfig()
        self.local_accounts = self._config.local_accounts
        self.owners_invite = self._config.owners_invite
        self._providers = {item.name: _connect(item, clock) for item in self._config.providers}

    def configs(self) -> tuple[ProviderConfig, ...]:
        """In the order of the file."""
        return self._config.providers

    def get(self, name: str) -> Provider:
        """Raises NotFound for one that is not configured."""
        found = self._providers.get(name)
        if found is None:
            raise NotFound(f"there is no identity provider {name[:40]!r} here", hint="sign in at /sign-in")
        return found


def _connect(config: ProviderConfig, clock: Callable[[], float]) -> Provider:
    if config.kind == "github":
        return GitHub(config)
    # Only where it is needed: what verifies tokens takes a tenth of a second to load.
    from diamond.server.oidc import OpenIdConnect

    return OpenIdConnect(config, clock)
