"""Two methods of another package: one for tables, one around training."""

from rarebit_gain.cooling import Cooling
from rarebit_gain.gain import Gain

__all__ = ["Cooling", "Gain"]
