"""No wake-up is lost, whoever sends it and whenever."""

from __future__ import annotations

import asyncio
import threading
import time

from diamond.server.hub import Hub
from diamond.server.hub_postgres import pack_topics, unpack_topics


def test_subscribe_look_wait_never_misses_a_change_made_by_threads() -> None:
    rounds, writers = 500, 4
    hub = Hub()
    written, seen = [0] * writers, [0] * writers
    taken = [threading.Semaphore(1) for _ in range(writers)]

    def write(number: int) -> None:
        for count in range(1, rounds + 1):
            # Each change waits until the one before was seen, so that a lost wake-up stops everything.
            assert taken[number].acquire(timeout=20)
            written[number] = count
            hub.notify(f"task:{number}")

    async def follow() -> None:
        with hub.subscribe(*(f"task:{number}" for number in range(writers))) as subscription:
            while min(seen) < rounds:
                for number in range(writers):
                    if written[number] > seen[number]:
                        seen[number] = written[number]
                        taken[number].release()
                if min(seen) < rounds:
                    assert await subscription.wait(10), (written, seen)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    asyncio.run(follow())
    for thread in threads:
        thread.join()
    assert seen == [rounds] * writers


def test_a_change_between_subscribing_and_waiting_ends_the_wait_at_once() -> None:
    async def follow() -> None:
        hub = Hub()
        with hub.subscribe("a", "b") as subscription:
            await asyncio.to_thread(hub.notify, "b")
            assert await subscription.wait(5)
            assert not await subscription.wait(0)

    asyncio.run(follow())


def test_only_the_topic_is_woken() -> None:
    async def follow() -> None:
        hub = Hub()
        with hub.subscribe("a") as one, hub.subscribe("b") as other:
            hub.notify("a", "c")
            assert await one.wait(5)
            assert not await other.wait(0)

    asyncio.run(follow())


def test_close_ends_every_wait_for_good() -> None:
    async def follow() -> None:
        hub = Hub()
        with hub.subscribe("a") as one, hub.subscribe("b") as other:
            waits = [asyncio.create_task(each.wait(30)) for each in (one, other)]
            await asyncio.sleep(0)
            await asyncio.to_thread(hub.close)
            assert await asyncio.gather(*waits) == [True, True]
            assert hub.closing
            assert await one.wait(30)

    asyncio.run(follow())


def test_notify_without_subscribers_needs_no_loop_and_leaves_nothing() -> None:
    hub = Hub()
    hub.notify("task:1")

    async def follow() -> None:
        with hub.subscribe("task:1"):
            pass
        hub.notify("task:1")
        assert not hub._by_topic and not hub._pending

    asyncio.run(follow())
    hub.notify("task:1")


def test_notify_is_cheap_when_nobody_listens() -> None:
    hub = Hub()
    began = time.perf_counter()
    for _ in range(20_000):
        hub.notify("task:1", "events")
    assert time.perf_counter() - began < 1.0


def test_a_hub_can_be_used_again_on_another_loop() -> None:
    hub = Hub()

    async def follow() -> bool:
        with hub.subscribe("a") as subscription:
            hub.notify("a")
            return await subscription.wait(5)

    assert asyncio.run(follow()) and asyncio.run(follow())


def test_payloads_fit_into_a_notification_and_come_back_whole() -> None:
    topics = {f"task:tsk_{number:020d}" for number in range(1000)}
    payloads = list(pack_topics("me", topics))
    assert len(payloads) > 1 and all(len(payload.encode()) < 8000 for payload in payloads)
    assert {topic for payload in payloads for topic in unpack_topics(payload)[1]} == topics
    assert unpack_topics(payloads[0])[0] == "me"
    assert unpack_topics("not ours") == ("", [])
    assert unpack_topics('{"another": "version"}')[1] == []
