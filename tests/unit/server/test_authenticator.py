"""How long a credential is taken for good without asking the database."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from starlette.requests import Request

from diamond.core.accounts import ALL_SCOPES, Scope
from diamond.core.errors import Unauthenticated
from diamond.server.auth import CACHE_S, CACHE_UNTOLD_S, Authenticator
from diamond.server.services import tokens
from diamond.server.services.context import Context
from diamond.server.store.models import TokenRow
from testing.context import Clock


class World:
    """An authenticator whose two clocks tests move, and a token that may be taken away behind its back."""

    def __init__(self, ctx: Context, clock: Clock, user_id: str) -> None:
        self.ctx, self.clock, self.now, self.told = ctx, clock, 0.0, True
        self.authenticator = Authenticator(ctx, clock=lambda: self.now, is_told=lambda: self.told)
        self.token = tokens.create(ctx, user_id, "t", (Scope.READ,), 3600.0, held=ALL_SCOPES).value

    def identify(self) -> Any:
        settings = SimpleNamespace(trusted_networks=(), public_url="")
        app = SimpleNamespace(state=SimpleNamespace(runtime=SimpleNamespace(settings=settings)))
        headers = [(b"authorization", f"Bearer {self.token}".encode())]
        scope = {"type": "http", "method": "GET", "path": "/", "headers": headers, "app": app, "client": ("::1", 1)}
        return asyncio.run(self.authenticator.identify(Request(scope)))

    def take_away(self) -> None:
        with self.ctx.db.write() as session:
            session.execute(sa.update(TokenRow).values(revoked_at=self.ctx.clock()))

    def refused(self) -> bool:
        try:
            self.identify()
        except Unauthenticated:
            return True
        return False


@pytest.fixture
def world(ctx: Context, clock: Clock, user_id: str) -> World:
    return World(ctx, clock, user_id)


@pytest.mark.parametrize(("told", "within_s"), [(True, CACHE_S), (False, CACHE_UNTOLD_S)])
def test_what_nobody_told_of_is_noticed_in_time(world: World, told: bool, within_s: float) -> None:
    world.told = told
    assert world.identify().user_id
    world.take_away()
    world.now = within_s - 0.1
    assert not world.refused()
    world.now = within_s
    assert world.refused()


def test_being_told_ends_it_at_once(world: World) -> None:
    world.identify()
    world.take_away()
    world.authenticator.forget()
    assert world.refused()


def test_it_does_not_outlive_its_own_end(world: World) -> None:
    world.identify()
    world.clock.advance(3601)
    assert world.refused(), "though it is still remembered"


def test_what_dies_while_it_is_looked_up_is_not_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tokens.authenticate

    def meanwhile(*args: Any) -> Any:
        found = real(*args)
        world.take_away()
        world.authenticator.forget()
        return found

    monkeypatch.setattr(tokens, "authenticate", meanwhile)
    assert world.identify().user_id, "this one was still good when it was asked about"
    monkeypatch.setattr(tokens, "authenticate", real)
    assert world.refused()
