"""What one table is like: its spectrum, its rows, and how they go with training."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rarebit.diagnosis.frequency import NormBin, count_dead, norm_bins, spearman
from rarebit.diagnosis.reweighting import Reweighting
from rarebit.diagnosis.rows import Scan
from rarebit.settings import to_mapping
from rarebit.tables.spectrum import abundance_of, random_abundance, stable_rank_of

__all__ = ["TableDiagnosis", "describe_table"]


@dataclass(frozen=True, kw_only=True)
class TableDiagnosis:
    """One table, or one field's slice of a stacked table. Padding rows are left out of all figures."""

    name: str
    """Where the table is in the model, such as `backbone.tables.user`; its name in a file."""
    rows: int
    """Rows without padding."""
    width: int
    """How long a row is."""
    num_bytes: int
    """Bytes that are really stored for it."""
    methods: tuple[str, ...] = ()
    """The methods applied to it, in order."""
    spectrum: tuple[float, ...] | None
    """Singular values, the largest first; None for rows of one number, or where one is not finite."""
    information_abundance: float | None
    """Sum of the singular values over the largest one."""
    random_abundance: float | None
    """The same of a table of random numbers of this size."""
    stable_rank: float | None
    """Sum of the squared singular values over the largest one."""
    dead_rows: int
    """Rows whose norm is at most a thousandth of the root mean square of all norms."""
    not_finite_rows: int
    """Rows that hold NaN or an infinite number."""
    never_trained_rows: int | None
    """Rows whose value training never saw; None where the training counts are not known."""
    seen_once_rows: int | None
    """Rows whose value training saw once."""
    norm_correlation: float | None
    """Spearman's correlation of a row's norm and its count, of the values that training saw."""
    norm_by_count: tuple[NormBin, ...]
    """Mean norm of the rows by how often they were seen; empty where that is not known."""
    set_abundances: tuple[float, ...] = ()
    """Information abundance of each embedding set by itself, where several lie side by side."""
    reweighting: Reweighting | None = None
    """How fast each direction is learned, of a table that `MLET` trains as a product."""

    @property
    def field(self) -> str:
        """The last part of the name: the field or attribute it is called by."""
        return self.name.rpartition(".")[2]

    @property
    def abundance_ratio(self) -> float | None:
        """Information abundance over that of a random table: near 1 where nothing has collapsed."""
        if self.information_abundance is None or self.random_abundance is None:
            return None
        return self.information_abundance / self.random_abundance

    @property
    def seen_once_share(self) -> float | None:
        """Of the values that training saw, the share that it saw once."""
        if self.never_trained_rows is None or self.seen_once_rows is None:
            return None
        seen = self.rows - self.never_trained_rows
        return self.seen_once_rows / seen if seen else None

    def directions(self, share: float = 0.99) -> int | None:
        """Return how many directions hold this share of the squared length of all rows together."""
        if self.spectrum is None:
            return None
        squares = torch.tensor(self.spectrum, dtype=torch.float64).square()
        if not squares.sum():
            return 0
        held = squares.cumsum(0) / squares.sum()
        return int((held < share).sum()) + 1

    def to_mapping(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return {
            **to_mapping(self),
            "abundance_ratio": self.abundance_ratio,
            "seen_once_share": self.seen_once_share,
            "directions": self.directions(),
            "reweighting": None if self.reweighting is None else self.reweighting.to_mapping(),
        }


def describe_table(
    scan: Scan,
    counts: Tensor | None,
    *,
    name: str,
    width: int,
    num_bytes: int,
    methods: tuple[str, ...] = (),
) -> TableDiagnosis:
    """Return what a pass over the rows of a table says, with training counts `(N,)` where known."""
    rows, finite = len(scan.norms), scan.finite
    # the direction of a single number says nothing, so first-order weights have no spectrum
    known = None if width == 1 else scan.triangle
    values = None if known is None else torch.linalg.svdvals(known)
    return TableDiagnosis(
        name=name,
        rows=rows,
        width=width,
        num_bytes=num_bytes,
        methods=methods,
        spectrum=None if values is None else tuple(values.tolist()),
        information_abundance=None if values is None else abundance_of(values),
        random_abundance=None if values is None else random_abundance(rows, width),
        stable_rank=None if values is None else stable_rank_of(values),
        dead_rows=count_dead(scan.norms[finite]),
        not_finite_rows=int((~finite).sum()),
        **_frequency(scan, counts),
    )


def _frequency(scan: Scan, counts: Tensor | None) -> Mapping[str, Any]:
    if counts is None:
        return {
            "never_trained_rows": None,
            "seen_once_rows": None,
            "norm_correlation": None,
            "norm_by_count": (),
        }
    norms, known = scan.norms[scan.finite], counts[scan.finite]
    seen = known > 0
    return {
        "never_trained_rows": int((counts == 0).sum()),
        "seen_once_rows": int((counts == 1).sum()),
        "norm_correlation": spearman(norms[seen], known[seen]),
        "norm_by_count": norm_bins(norms, known),
    }
