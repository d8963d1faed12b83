"""What it means to use a neighbour of shrinkage with another method: each of them says it in a line or two."""

from collections.abc import Mapping

from rarebit.tables.table import Pair

__all__ = ["BEFORE", "neighbour_pairs"]

BEFORE = (
    "aligned-sets",
    "harmless-transfer",
    "hashing",
    "low-rank",
    "masked",
    "mlet",
    "multi-embedding",
    "pep",
    "product-start",
    "pruned",
    "quantize",
    "row-rate",
    "shared-sets",
    "shrinkage",
)
"""Methods whose files do not know of the neighbours."""
NEIGHBOURS = ("forgetting", "frequency-decay", "fresh-tables", "group-stopping", "id-dropout")

COMPARED = "it is there to be compared with shrinkage and its neighbours, one beside the other; use one of them"
FOLDED = "the table is folded first, and its rows are quantised"


def neighbour_pairs(
    words: str, refused: Mapping[str, str]
) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """Return the pairs of a neighbour, applied after another method and before it.

    Such a method takes part in training, so the order means nothing; `words` say what all pairs that are
    not refused mean.

    >>> after, before = neighbour_pairs("rows are dropped", {"pep": "they are not"})
    >>> after["hashing"].allowed, before["pep"].words
    (True, 'they are not')
    """
    both = {
        name: Pair(allowed=name not in refused, words=refused.get(name, words)) for name in BEFORE
    }
    both["quantize"] = Pair(allowed=True, words=FOLDED)
    others = {name: Pair(allowed=False, words=COMPARED) for name in NEIGHBOURS}
    return both | others, both
