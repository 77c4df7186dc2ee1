"""Events cross from a thread to the event loop in order, many with one wake-up."""

from __future__ import annotations

import asyncio
import threading

from bigmodel.server.engine import Delta, Done
from bigmodel.server.mailbox import Mailbox, Relay


def test_events_of_many_threads_arrive_whole_and_in_order() -> None:
    async def collect() -> list[list[int]]:
        relay = Relay(asyncio.get_running_loop())
        boxes = [Mailbox(relay) for _ in range(4)]

        def work(box: Mailbox) -> None:
            slot = box.slot(3)
            for number in range(500):
                slot.put(Delta(number, "x"))
            slot.put(Done(1, 500, 0))

        threads = [threading.Thread(target=work, args=(box,)) for box in boxes]
        for thread in threads:
            thread.start()
        seen: list[list[int]] = []
        for box in boxes:
            got: list[int] = []
            while 3 not in box.finished or len(got) < 500:
                got += [event.index for number, event in await box.take() if isinstance(event, Delta) and number == 3]
            seen.append(got)
        for thread in threads:
            thread.join()
        return seen

    assert asyncio.run(collect()) == [list(range(500))] * 4


def test_a_burst_wakes_the_loop_once() -> None:
    async def count() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        calls = []
        plain = loop.call_soon_threadsafe

        def counted(*arguments: object) -> object:
            calls.append(arguments)
            return plain(*arguments)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        box = Mailbox(Relay(loop))
        for number in range(100):
            box.slot(0).put(Delta(number, "x"))
        return len(calls), len(await box.take())

    assert asyncio.run(count()) == (1, 100)


def test_events_for_a_loop_that_is_gone_are_dropped() -> None:
    loop = asyncio.new_event_loop()
    relay = Relay(loop)

    async def make() -> Mailbox:
        return Mailbox(relay)

    box = loop.run_until_complete(make())
    loop.close()
    for _ in range(3):
        box.slot(0).put(Done(0, 0, 0))
        assert relay.undelivered == 0


def test_what_nobody_sees_before_the_end_arrives_with_the_end() -> None:
    async def collect() -> tuple[bool, list[object]]:
        box = Mailbox(Relay(asyncio.get_running_loop()), at_once=True)
        first, second = box.slot(0), box.slot(1)
        first.put(Delta(0, "a"))
        second.put(Delta(0, "b"))
        await asyncio.sleep(0)
        taking = asyncio.ensure_future(box.take())
        await asyncio.sleep(0)
        early = taking.done()
        first.put(Done(1, 1, 0))
        return early, [(number, type(event)) for number, event in await taking]

    assert asyncio.run(collect()) == (False, [(0, Delta), (0, Done)])
