"""A discovery document cannot have the server ask what is inside. Nothing here may even try to connect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from diamond.server import oidc
from diamond.server.identity_file import ProviderConfig
from diamond.server.provider_link import Attempt, ProviderTrouble

ISSUER = "https://login.example.org"
ATTEMPT = Attempt(state="s", key="k", redirect_uri="https://diamond.example.org/sign-in/main/callback")


def address(monkeypatch: pytest.MonkeyPatch, issuer: str = ISSUER, **places: str) -> str:
    document = {
        "issuer": issuer, "authorization_endpoint": f"{issuer}/authorize", "token_endpoint": f"{issuer}/token",
        "jwks_uri": f"{issuer}/keys", **places,
    }  # fmt: skip

    async def get(*_arguments: Any) -> Any:
        return document

    monkeypatch.setattr(oidc, "get", get)
    config = ProviderConfig(name="main", title="Main", client_id="c", issuer=issuer, discovery_url=f"{issuer}/d")
    return asyncio.run(oidc.OpenIdConnect(config).address(ATTEMPT))


@pytest.mark.parametrize("field", ["authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint"])
@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "[::1]", "localhost", "10.0.0.1", "169.254.169.254", "168.63.129.16", "2130706433"],
)  # fmt: skip
def test_places_inside_are_refused(monkeypatch: pytest.MonkeyPatch, field: str, host: str) -> None:
    with pytest.raises(ProviderTrouble) as caught:
        address(monkeypatch, **{field: f"https://{host}/x"})
    assert host.strip("[]") not in caught.value.message, "what the operator's network is called is nobody's business"


@pytest.mark.parametrize("issuer", [ISSUER, "https://10.0.0.1"])
def test_a_provider_of_the_operators_own_network_is_fine(monkeypatch: pytest.MonkeyPatch, issuer: str) -> None:
    assert address(monkeypatch, issuer).startswith(f"{issuer}/authorize?")
