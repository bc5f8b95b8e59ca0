"""What of the prefix cache is worth least: a pure function. Knows numbers; does not know whose they are."""

from __future__ import annotations

import math

HALF_LIFE = 64
"""Admissions after which what was not used is worth half as much."""

Priority = tuple[bool, float]


def priority(num_tokens: int, num_bytes: int, last_used: int) -> Priority:
    """Of two things, the one with the smaller priority goes first.

    num_tokens: that would have to be computed again without it. num_bytes: that its end makes free or of no
    use. last_used: the number of the admission that made or hit it last.

    The second part is the logarithm of tokens x 0.5 ** (age / HALF_LIFE) / bytes, less a term that is the
    same for everything at a given moment: so what is right now stays right. What saves nothing goes before
    all else, the oldest first.
    """
    if not num_tokens:
        return False, last_used
    return True, last_used / HALF_LIFE + math.log2(num_tokens / num_bytes)


def rank_on_path(num_ways: int, is_end: bool, worth: Priority) -> tuple[int, bool, Priority]:
    """Of the states on a path that has too many, the one with the smallest rank goes first.

    num_ways: paths that go on from there. The more do, the more of those to come begin there, however few
    tokens it saves each. is_end: of a prompt or a turn, which the path has gone on from. worth: its priority.
    """
    return num_ways, not is_end, worth
