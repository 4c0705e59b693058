"""Wake-ups between processes, over a real PostgreSQL (its library connects by itself, past the blocked sockets)."""

from __future__ import annotations

import asyncio
import time

import pytest
import sqlalchemy as sa

from diamond.server.hub_postgres import PostgresHub


@pytest.mark.postgres
def test_a_change_in_one_process_wakes_a_waiter_in_another(postgres_server: str) -> None:
    url = sa.make_url(postgres_server)

    async def follow() -> None:
        here, there = PostgresHub(url), PostgresHub(url)
        here.start()
        there.start()
        try:
            with there.subscribe("task:1") as subscription, there.subscribe("task:2") as bystander:
                async with asyncio.timeout(20):
                    # Until both are connected, a wake-up may be lost; that is what `recheck_s` is for.
                    while not await subscription.wait(0.2):
                        here.notify("task:1")
                await bystander.wait(0.3)  # woken once, by the connection
                delays = []
                for _ in range(10):
                    await subscription.wait(0)
                    began = time.perf_counter()
                    for _ in range(100):
                        here.notify("task:1")
                    assert await subscription.wait(5)
                    delays.append(time.perf_counter() - began)
                    await asyncio.sleep(0.05)
                assert sorted(delays)[len(delays) // 2] < 0.2, delays
                assert not await bystander.wait(0)
        finally:
            began = time.perf_counter()
            await asyncio.to_thread(here.stop)
            await asyncio.to_thread(there.stop)
            assert time.perf_counter() - began < 5

    asyncio.run(follow())


@pytest.mark.postgres
def test_it_comes_back_after_its_connections_were_cut(postgres_server: str) -> None:
    url = sa.make_url(postgres_server)
    admin = sa.create_engine(url.set(drivername="postgresql+psycopg"), isolation_level="AUTOCOMMIT")

    def cut() -> None:
        with admin.connect() as connection:
            connection.execute(
                sa.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            )

    async def follow() -> None:
        here, there = PostgresHub(url), PostgresHub(url)
        here.start()
        there.start()
        try:
            with there.subscribe("task:1") as subscription:
                async with asyncio.timeout(20):
                    while not await subscription.wait(0.2):
                        here.notify("task:1")
                    await asyncio.to_thread(cut)
                    while await subscription.wait(0.5):
                        pass
                    here.notify("task:1")
                    while not await subscription.wait(0.5):
                        here.notify("task:1")
        finally:
            await asyncio.to_thread(here.stop)
            await asyncio.to_thread(there.stop)

    asyncio.run(follow())
    admin.dispose()
