"""Measure how far the clocks of the nodes are apart, through the rendezvous."""

from __future__ import annotations

import time
from collections.abc import Iterable

from unsloth_ddp.preflight.rendezvous import Rendezvous

TRIES = 3
ANSWER_SECONDS = 5


def answer_clock_questions(rendezvous: Rendezvous, ranks: Iterable[int]) -> None:
    """Answer on node 0 the other nodes' questions for the time, one node after the other."""
    for rank in ranks:
        rendezvous.put(f"clock/{rank}/ready", True)
        for turn in range(TRIES):
            try:
                rendezvous.get(f"clock/{rank}/ask/{turn}", ANSWER_SECONDS)
            except TimeoutError:
                break
            rendezvous.put(f"clock/{rank}/time/{turn}", time.time())


def measure_clock_skew(rendezvous: Rendezvous, seconds: float) -> tuple[float, float] | None:
    """Return on another node the seconds that its clock is ahead of node 0's, and the error of that figure.

    The try with the shortest round trip counts. None: node 0 did not answer.
    """
    rank = rendezvous.process.ranks.rank
    tries = []
    try:
        rendezvous.get(f"clock/{rank}/ready", seconds)
        for turn in range(TRIES):
            before = time.time()
            rendezvous.put(f"clock/{rank}/ask/{turn}", True)
            there = rendezvous.get(f"clock/{rank}/time/{turn}", ANSWER_SECONDS)
            after = time.time()
            tries.append((abs(after - before) / 2, (before + after) / 2 - there))
    except TimeoutError:
        pass
    if not tries:
        return None
    error, ahead = min(tries)
    return ahead, error
