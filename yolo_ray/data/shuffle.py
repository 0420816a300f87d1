"""An order of any number of photos that takes no memory: the place of one is computed when it is asked for.

A Feistel network permutes the numbers of a power of four; a number that falls outside the wanted range goes through it
again until it falls inside ("cycle walking"; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). Its
round function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), which mixes all bits.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6


class Shuffle:
    """A permutation of range(length), drawn from ``generator``: ``shuffle[places]`` are int64 numbers."""

    def __init__(self, length: int, generator: np.random.Generator) -> None:
        self.length = length
        self._bits = np.uint64(max(1, -(-(length - 1).bit_length() // 2)))  # of each half
        self._mask = np.uint64((1 << int(self._bits)) - 1)
        self._keys = generator.integers(0, 2**64, ROUNDS, dtype=np.uint64)

    def __len__(self) -> int:
        """How many numbers it permutes."""
        return self.length

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """What stands at ``places`` int64, each in [0, length)."""
        numbers = self._permuted(places.astype(np.uint64))
        while (outside := numbers >= self.length).any():
            numbers[outside] = self._permuted(numbers[outside])
        return numbers.astype(np.int64)

    def _permuted(self, numbers: np.ndarray) -> np.ndarray:
        left, right = numbers >> self._bits, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & self._mask)
        return left << self._bits | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser; products are modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
