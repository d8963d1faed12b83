"""A diagnosis: figures of all tables, what they mean in words, and both as files."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rarebit.diagnosis.findings import Finding
from rarebit.diagnosis.plots import draw_plots
from rarebit.diagnosis.sub_embeddings import SubEmbeddings
from rarebit.diagnosis.table import TableDiagnosis
from rarebit.diagnosis.text import explanation, reweighting_cells, table_cells, text_table
from rarebit.diagnosis.transfer import LEDGER_TITLE, barrier_cells, ledger_cells, ledger_notes
from rarebit.errors import ModelFileError
from rarebit.settings import to_mapping
from rarebit.words import size

__all__ = ["TRAINED_AS_PRODUCTS", "Diagnosis", "LeftAlone"]

FORMAT = 1
NUMBERS = "diagnosis.json"
NOTHING_WRONG = (
    "Nothing stands out: no table has collapsed, and no table has rows that are dead, or rare and many, "
    "as far as that is known."
)
TRAINED_AS_PRODUCTS = "Tables that MLET trains as products, and how fast their directions learn"
NO_COUNTS = (
    "Training counts are not known, so rows that were never trained, values seen once, and how norms go "
    "with frequency are left open; give the training data to see them."
)


@dataclass(frozen=True)
class LeftAlone:
    """Something that is no table, or one that cannot be looked at."""

    name: str
    """Its name."""
    reason: str
    """Why, in words."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What the tables of a model or file are like. `str()` is text for people."""

    tables: tuple[TableDiagnosis, ...]
    """Every table, or each field's slice of a stacked one."""
    sub_embeddings: tuple[SubEmbeddings, ...] = ()
    """What fields show to each other, for FFM and DCN-V2."""
    findings: tuple[Finding, ...] = ()
    """What is wasted and what to try, the worst first."""
    left_alone: tuple[LeftAlone, ...] = ()
    """What was not looked at, and why."""
    reports: Mapping[str, Any] = field(default_factory=dict)
    """What methods that took part in the training tell of it, by their names."""

    @property
    def transfer(self) -> Mapping[str, Any] | None:
        """The ledger of harmless transfer, where the run had one."""
        return self.reports.get("harmless-transfer")

    @property
    def wide_tables(self) -> tuple[TableDiagnosis, ...]:
        """The tables with rows of several numbers: all but first-order weights."""
        return tuple(table for table in self.tables if table.width > 1)

    @property
    def counts_known(self) -> bool:
        """Whether it is known of any table how often its values were seen in training."""
        return any(table.never_trained_rows is not None for table in self.tables)

    @property
    def notes(self) -> tuple[str, ...]:
        """What else there is to say, a sentence each: what is not shown, not known, or not wrong."""
        single = [table for table in self.tables if table.width == 1]
        notes = []
        if single:
            what = "table has" if len(single) == 1 else "tables have"
            stored = size(sum(table.num_bytes for table in single))
            notes.append(
                f"{len(single)} more {what} rows of one number, {stored}, and no spectrum."
            )
        notes += map(str, self.sub_embeddings)
        if self.left_alone:
            names = ", ".join(thing.name for thing in self.left_alone)
            notes.append(f"Left alone, as no tables or not to be read: {names}.")
        if self.tables and not self.counts_known:
            notes.append(NO_COUNTS)
        if self.tables and not self.findings:
            notes.append(NOTHING_WRONG)
        return tuple(notes)

    def __str__(self) -> str:
        parts = []
        if self.wide_tables:
            cells = table_cells(self.wide_tables, wide=True)
            parts += [text_table(cells), explanation(cells[0])]
        products = reweighting_cells(self.tables)
        if products[1]:
            parts += ["", TRAINED_AS_PRODUCTS, text_table(products), explanation(products[0]), ""]
        if self.transfer is not None:
            parts += ["", *_ledger_text(self.transfer), ""]
        parts += [f"- {finding}" for finding in self.findings]
        return "\n".join([*parts, *self.notes])

    def to_mapping(self) -> dict[str, Any]:
        """Return everything as plain values, as `diagnosis.json` holds it."""
        return {
            "format": FORMAT,
            "tables": [table.to_mapping() for table in self.tables],
            "sub_embeddings": [matrix.to_mapping() for matrix in self.sub_embeddings],
            "findings": [finding.to_mapping() for finding in self.findings],
            "left_alone": [to_mapping(thing) for thing in self.left_alone],
            **({"reports": dict(self.reports)} if self.reports else {}),
        }

    def save(self, folder: str | os.PathLike[str], *, plots: bool = True) -> list[Path]:
        """Write `diagnosis.json` and the plots to a folder; return the files.

        Each file is written under another name and renamed, so that one with its name is whole.
        """
        folder = Path(folder)
        text = json.dumps(self.to_mapping(), indent=1, allow_nan=False) + "\n"
        files = {NUMBERS: text.encode()}
        if plots:
            files |= draw_plots(self.tables, self.sub_embeddings)
        written = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                partial = folder / f"{name}.partial"
                partial.write_bytes(content)
                written.append(partial.replace(folder / name))
        except OSError as error:
            raise ModelFileError(
                f"cannot write the diagnosis to {str(folder)!r}: {error.strerror}; choose a folder "
                "you may write to"
            ) from None
        return written


def _ledger_text(ledger: Mapping[str, Any]) -> list[str]:
    both = [cells for cells in (ledger_cells(ledger), barrier_cells(ledger)) if cells[1]]
    shown = [line for cells in both for line in (text_table(cells), explanation(cells[0]))]
    return [LEDGER_TITLE, *shown, *ledger_notes(ledger)]
