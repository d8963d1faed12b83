"""MovieLens-1M with the ids of users and films beside PEP's seven fields. See ml_1m.py."""

from typing import ClassVar

from rarebit.data.log_schema import Column, LogSchema
from rarebit.data.sources.ml_1m import COLUMNS, ML1M

__all__ = ["ML1MWithIds"]


class ML1MWithIds(ML1M):
    """MovieLens-1M, nine fields."""

    title = "MovieLens-1M with ids, nine fields: a film that a user rated, liked or not"
    facts = (
        "Ratings above 3 are positive, below 3 negative; ratings of 3 are left out.",
        "User and film ids are used beside the seven fields of PEP.",
    )
    protocols: ClassVar[dict[str, LogSchema]] = {
        "clean": LogSchema(
            label="label", columns=(Column(name="user"), Column(name="movie"), *COLUMNS)
        ),
    }
