"""Tables that are stored small, and looked up without unpacking."""

from rarebit.codes.packed import Pack, load_packed, save_packed

__all__ = ["Pack", "load_packed", "save_packed"]
