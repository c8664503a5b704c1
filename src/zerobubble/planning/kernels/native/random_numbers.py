"""Random numbers of the kernels: the same sequence as `numpy.random` after `seed` (MT19937; Matsumoto and Nishimura 1998).

Each thread has its own state, so concurrent searches give the same results as alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WORDS, SHIFTED = 624, 397
"""The number of words in the state, and the distance of words that are mixed."""

INDEX, HAS_SPARE = WORDS, WORDS + 1
"""The indices in the state of the next word's index and of the flag for a leftover normal number."""

ALL = 0xFFFFFFFF


class RandomState(NamedTuple):
    """The state of one thread: words of 32 bits, then the two values above, and the leftover normal number."""

    words: NDArray[np.int64]
    spare: NDArray[np.float64]


def new_state() -> RandomState:
    """A state that has been seeded with 0."""
    state = RandomState(np.zeros(WORDS + 2, np.int64), np.zeros(1))
    seed(state, 0)
    return state


def seed(state: RandomState, number: int) -> None:
    """Restarts the sequence, as `numpy.random.seed(number)` does."""
    word = number & ALL
    for at in range(WORDS):
        state.words[at] = word
        word = (1812433253 * (word ^ (word >> 30)) + at + 1) & ALL
    state.words[INDEX] = WORDS
    state.words[HAS_SPARE] = 0


def mix(state: RandomState, at: int, after: int, other: int) -> None:
    """Replaces one word by a mix of three."""
    bits = (state.words[at] & 0x80000000) | (state.words[after] & 0x7FFFFFFF)
    state.words[at] = state.words[other] ^ (bits >> 1) ^ ((bits & 1) * 0x9908B0DF)


def refill(state: RandomState) -> None:
    """Computes the next words of the state."""
    for at in range(WORDS - SHIFTED):
        mix(state, at, at + 1, at + SHIFTED)
    for at in range(WORDS - SHIFTED, WORDS - 1):
        mix(state, at, at + 1, at + SHIFTED - WORDS)
    mix(state, WORDS - 1, 0, SHIFTED - 1)
    state.words[INDEX] = 0


def next_word(state: RandomState) -> int:
    """32 random bits."""
    if state.words[INDEX] == WORDS:
        refill(state)
    word = state.words[state.words[INDEX]]
    state.words[INDEX] += 1
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return int(word ^ (word >> 18))


def random(state: RandomState) -> float:
    """Returns a random number in [0, 1)."""
    high = next_word(state) >> 5
    low = next_word(state) >> 6
    return (high * 67108864.0 + low) / 9007199254740992.0


def randint(state: RandomState, count: int) -> int:
    """Returns a random integer in [0, count), for `count` below 2**32."""
    mask = count - 1
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> shift
    if mask == 0:
        return 0
    found = count
    while found >= count:
        found = next_word(state) & mask
    return found


def between(state: RandomState, first: int, stop: int) -> int:
    """Returns a random integer in [first, stop)."""
    return first + randint(state, stop - first)


def normal(state: RandomState, mean: float, deviation: float) -> float:
    """Returns a normal random number, by the polar method."""
    if state.words[HAS_SPARE] == 1:
        state.words[HAS_SPARE] = 0
        return mean + deviation * state.spare[0]
    x, y, square = 0.0, 0.0, 0.0
    while square >= 1.0 or square == 0.0:
        x = 2.0 * random(state) - 1.0
        y = 2.0 * random(state) - 1.0
        square = x * x + y * y
    factor = np.sqrt(-2.0 * np.log(square) / square)
    state.spare[0] = factor * x
    state.words[HAS_SPARE] = 1
    return mean + deviation * (factor * y)


def uniform(state: RandomState, low: float, high: float) -> float:
    """Returns a random number in [low, high)."""
    return low + (high - low) * random(state)
