"""Ctrl-C and SLURM's warning, delivered as real signals (``megatron_ext/training/interrupt.py``)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from megatron_ext.training.interrupt import Interrupted, InterruptFlag

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers_come_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_flag(number: signal.Signals) -> None:
    with InterruptFlag() as flag:
        flag.check()
        os.kill(os.getpid(), number)
        assert flag.raised
        for _ in range(2):
            with pytest.raises(Interrupted):
                flag.check()


@pytest.mark.parametrize("first", SIGNALS)
def test_the_second_signal_interrupts_at_once(first: signal.Signals) -> None:
    with InterruptFlag() as flag:
        os.kill(os.getpid(), first)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert flag.raised


def test_handlers_are_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError, match="boom"), InterruptFlag():
        raise RuntimeError("boom")


def test_a_flag_can_be_used_again() -> None:
    for _ in range(2):
        with InterruptFlag() as flag:
            assert not flag.raised
            flag.check()
