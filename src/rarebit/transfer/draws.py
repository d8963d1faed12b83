"""Random numbers on the device that depend on seed, step and place alone.

    bits(place) = mix(key + (step * 2^32 + place) * GOLDEN)      splitmix64, as in `data/counter_random.py`

All processes draw the same numbers, whatever their device; a run that goes on from a checkpoint needs
the number of its step only, and a recorded step draws new numbers at every replay.
"""

import torch
from torch import Tensor

__all__ = ["Draws"]


def _signed(bits: int) -> int:
    """Return 64 bits as the integer that torch keeps them in."""
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_STEP = _signed((_GOLDEN << 32) % (1 << 64))


class Draws:
    """A source of random numbers that moves on by one step at a time.

    >>> draws = Draws(key=1234567, device=torch.device("cpu"))
    >>> first = draws.uniform(3)
    >>> draws.advance()
    >>> torch.equal(draws.uniform(3), first)
    False
    """

    def __init__(self, key: int, device: torch.device) -> None:
        self.key = _signed(key % (1 << 64))
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self._unit = torch.tensor(2.0**-53, dtype=torch.float64).to(device)
        self._known: dict[tuple[int, int], Tensor] = {}

    def advance(self) -> None:
        """Go on to the numbers of the next step."""
        self.step.add_(1)

    def uniform(self, *shape: int, first: int = 0) -> Tensor:
        """Return numbers in [0, 1), float64; the places of a step begin at `first`."""
        size = torch.Size(shape)
        bits = torch.add(self._keys(first, size.numel()), self.step, alpha=_STEP)
        bits = (bits ^ _shifted(bits, 30)) * _FIRST
        bits = (bits ^ _shifted(bits, 27)) * _SECOND
        bits = bits ^ _shifted(bits, 31)
        return (_shifted(bits, 11) * self._unit).reshape(size)

    def _keys(self, first: int, number: int) -> Tensor:
        """Return what the places add to the bits in every step, `(number,)`."""
        if (first, number) not in self._known:
            places = torch.arange(first, first + number, device=self.step.device)
            self._known[first, number] = places * _GOLDEN + self.key
        return self._known[first, number]


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right with zeros coming in; torch's own shift keeps the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
