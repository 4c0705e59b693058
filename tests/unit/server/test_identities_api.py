"""Unlinking an identity through the API: one's own, with a credential that may, and not the last way in."""

from __future__ import annotations

import httpx

from diamond.core.accounts import Scope
from diamond.server.identity_file import Allow, IdentityConfig, ProviderConfig
from diamond.server.identity_providers import IdentityProviders
from diamond.server.provider_link import Person
from diamond.server.services import federation, tokens

from .conftest import World

LAB = ProviderConfig(
    name="lab", title="Lab", issuer="https://lab.example", client_id="d", allow=Allow(everybody=True),
    create_accounts=True,
)  # fmt: skip


def test_unlinking(world: World) -> None:
    object.__setattr__(world.ctx, "identity", IdentityProviders(IdentityConfig(local_accounts=False, providers=(LAB,))))
    first, second = (
        federation.link(world.ctx, world.user_id, LAB, Person(issuer=LAB.issuer, subject=subject, label=subject))
        for subject in "ab"
    )
    federation.come_in(world.ctx, LAB, Person(issuer=LAB.issuer, subject="c"), address="", browser="")
    reader = tokens.create(world.ctx, world.user_id, "r", (Scope.LAUNCH,), None, held=frozenset(Scope)).value

    async def test(client: httpx.AsyncClient) -> None:
        path = "/api/v1/me/identities"
        found = (await client.get("/api/v1/me")).json()["identities"]
        assert [item["label"] for item in found] == ["a", "b"]
        async with world.client(reader) as weak, world.client("") as nobody, world.client(world.agent_token) as agent:
            assert (await weak.delete(f"{path}/{first.id}")).status_code == 403
            assert (await nobody.delete(f"{path}/{first.id}")).status_code == 401
            assert (await agent.delete(f"{path}/{first.id}")).status_code == 403
        assert (await client.delete(f"{path}/{first.id}")).status_code == 204
        assert (await client.delete(f"{path}/{first.id}")).status_code == 404
        last = await client.delete(f"{path}/{second.id}")
        assert last.status_code == 409
        assert "only way left" in last.json()["error"]["message"]
        assert (await client.delete(f"{path}/nonsense")).status_code == 404

    world.run(test)
