"""Which stretch of the text a sample is: a shuffle of each epoch that needs no memory. Pure.

A sample is `length + 1` tokens of the concatenated documents; neighbours share one token, which is the last target of
the one and the first input of the other. Sample n of all steps is number k of epoch e, (e, k) = divmod(n, samples), and
lies at place P_e(k), where P_e shuffles the places. So the number n is all that has to be remembered to go on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_ROUNDS = 6


@dataclass(frozen=True)
class Permutation:
    """A bijection of 0 ... count - 1 that looks random and is computed value by value.

    A balanced Feistel network (Luby and Rackoff 1988) permutes the smallest power of four that is not below `count`;
    what falls outside goes through again until it falls inside (cycle walking; Black and Rogaway 2002), at most four
    times on average.

    Attributes:
        count: 1 or more.
        key: Which of the permutations; at most 64 bytes.
    """

    count: int
    key: bytes

    def __call__(self, index: int) -> int:
        """Return where `index` goes, both from 0 to count - 1."""
        half = max(1, ((self.count - 1).bit_length() + 1) // 2)
        found = self._walk(index, half)
        while found >= self.count:
            found = self._walk(found, half)
        return found

    def _walk(self, value: int, half: int) -> int:
        mask = (1 << half) - 1
        left, right = value >> half, value & mask
        for number in range(_ROUNDS):
            message = number.to_bytes(1, "little") + right.to_bytes(8, "little")
            mixed = hashlib.blake2b(message, digest_size=8, key=self.key).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        return left << half | right


@dataclass(frozen=True)
class SampleOrder:
    """Where every sample of a run begins.

    Attributes:
        tokens: How many there are to train on; at least length + 1.
        length: Targets of a sample.
        seed: Of the shuffles.
    """

    tokens: int
    length: int
    seed: int

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return (self.tokens - 1) // self.length

    def start(self, number: int) -> int:
        """Return the token at which a sample begins, by its number over all steps and epochs.

        What is left over at the end, less than a sample, is left out; where samples begin moves from epoch to epoch
        within this rest, so that no token is always left out.
        """
        epoch, index = divmod(number, self.samples)
        key = hashlib.blake2b(f"{self.seed}:{epoch}".encode(), digest_size=32).digest()
        rest = (self.tokens - 1) % self.length
        shift = int.from_bytes(key[:8], "little") % (rest + 1)
        return shift + self.length * Permutation(self.samples, key)(index)

    def dropout_seed(self, number: int) -> int:
        """Return 63 bits to seed generators with before a forward whose first sample has this number over all steps."""
        digest = hashlib.blake2b(f"{self.seed}:dropout:{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
