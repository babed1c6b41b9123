"""The wake-up of the driver (``megatron_ext/rollout/wakeup.py``)."""

from __future__ import annotations

import threading
from multiprocessing.connection import wait

from megatron_ext.rollout.wakeup import Wakeup


def test_it_wakes_once_however_often_it_is_set() -> None:
    wakeup = Wakeup()
    assert not wait([wakeup.fileno()], 0.0) and not wakeup.clear()

    def often() -> None:
        for _ in range(10_000):
            wakeup.set()

    threads = [threading.Thread(target=often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert wait([wakeup.fileno()], 0.0) and wakeup.clear()
    assert not wait([wakeup.fileno()], 0.0) and not wakeup.clear()
    wakeup.set()
    assert wakeup.clear()


def test_nothing_happens_after_close() -> None:
    wakeup = Wakeup()
    wakeup.close()
    wakeup.close()
    wakeup.set()
    assert not wakeup.clear()
