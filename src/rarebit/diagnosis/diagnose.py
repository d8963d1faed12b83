"""Diagnose the tables of a model, or of a bare safetensors file.

Any `nn.Module` with tables works. The training counts come from the data; without it, the figures that
depend on them are left open.
"""

import json
import os
import shlex
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from rarebit.data.dataset import Dataset, Splits
from rarebit.diagnosis.measure import (
    TableDiagnosis,
    describe_table,
    find_product,
    find_sub_embeddings,
    reweighting,
)
from rarebit.diagnosis.report import Diagnosis, LeftAlone, find_waste
from rarebit.diagnosis.rows import rows_of_slice, rows_of_table, scan, without
from rarebit.errors import DataError, ModelFileError, NoTableError, SettingsError
from rarebit.tables.apply import TableInfo, find_sites
from rarebit.tables.spectrum import abundance_of
from rarebit.tables.table import AnyTable, methods_of
from rarebit.technique import Rank

FLOAT_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
"""The float types of a safetensors file that a table may have."""
PICKLES = (".bin", ".ckpt", ".pt", ".pth")
"""How files of `torch.save` are named."""
TALLER_THAN = 4
"""In a file, a table has more rows than this times its columns; a flatter matrix is a layer."""


def diagnose(
    model: nn.Module,
    data: Dataset | Splits | None = None,
    *,
    counts: Mapping[str, Tensor] | None = None,
) -> Diagnosis:
    """Return the figures and problems of the tables of a model.

    data      its training data; of splits, the training rows count
    counts    instead of data: how often each id was seen in training, `(rows,)`, by the name of the table
              or its last part, the field

    >>> model = nn.ModuleDict({"user": nn.Embedding(1000, 8)})
    >>> table = diagnose(model, counts={"user": torch.ones(1000, dtype=torch.int64)}).tables[0]
    >>> table.never_trained_rows, table.seen_once_share, table.dead_rows
    (0, 1.0, 0)
    """
    known = _counts(data, counts)
    tables: list[TableDiagnosis] = []
    triangles: dict[str, Tensor | None] = {}
    left_alone: list[LeftAlone] = []
    used: set[str] = set()
    masked: set[str] = set()
    for site in find_sites(model):
        reason = _unreadable(site.table)
        if reason is not None:
            left_alone.append(LeftAlone(site.info.name, reason))
            continue
        name = site.info.name if site.info.name in known else site.info.field
        used.add(name)
        if any(method.masks_entries for method in methods_of(site.table)):
            masked.add(site.info.name)
        table, triangles[site.info.name] = _measure(site.table, site.info, known.get(name))
        tables.append(table)
    if not tables and not left_alone:
        raise NoTableError(f"{type(model).__name__} has no tables to diagnose")
    if known and not used & set(known):
        raise DataError(
            f"none of the fields {', '.join(known)} is a table of the model, which has "
            f"{', '.join(sorted(used))}; give counts by the names of its tables"
        )
    findings, excused = find_waste(tables, masked)
    return Diagnosis(
        tables=tuple(tables),
        sub_embeddings=find_sub_embeddings(model, triangles),
        findings=findings,
        excused=excused,
        left_alone=tuple(left_alone),
    )


def diagnose_file(path: str | os.PathLike[str]) -> Diagnosis:
    """Return the figures and problems of the tables in a safetensors file; nothing else is needed.

    A table is a matrix of floats with more rows than 4 times its columns. It is read a few rows at a
    time. A file does not say which fields a stacked table holds: diagnose the model for that.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"user": torch.randn(50, 4), "bias": torch.zeros(4)}, f"{folder}/weights.safetensors")
    ...     found = diagnose_file(f"{folder}/weights.safetensors")
    >>> [table.name for table in found.tables], [thing.name for thing in found.left_alone]
    (['user'], ['bias'])
    """
    path = Path(path)
    tables: list[TableDiagnosis] = []
    left_alone: list[LeftAlone] = []
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118  # a file of tensors is no mapping
            stored = file.get_slice(name)
            shape, dtype = stored.get_shape(), stored.get_dtype()
            reason = _no_table(shape, dtype)
            if reason is not None:
                left_alone.append(LeftAlone(name, reason))
                continue
            num_bytes = prod(shape) * FLOAT_BITS[dtype] // 8
            found = scan(rows_of_slice(stored))
            tables.append(
                describe_table(found, None, name=name, width=shape[1], num_bytes=num_bytes)
            )
    if not tables:
        raise NoTableError(
            f"{str(path)!r} holds no table: no matrix of floats with more rows than {TALLER_THAN} "
            f"times its columns among its {len(left_alone)} tensors"
        )
    findings, excused = find_waste(tables)
    return Diagnosis(
        tables=tuple(tables), findings=findings, excused=excused, left_alone=tuple(left_alone)
    )


def _measure(
    table: AnyTable, info: TableInfo, counts: Tensor | None
) -> tuple[TableDiagnosis, Tensor | None]:
    """Return the figures of a table and the R of its QR."""
    rows = rows_of_table(table)
    if counts is not None:
        counts = _checked(counts, info)
        counts = counts if rows.padding is None else without(counts, rows.padding)
    found = scan(rows)
    set_abundances: tuple[float, ...] = ()
    sets = [method.num_sets for method in methods_of(table) if method.composition_rank is Rank.SETS]
    if sets and found.triangle is not None:  # the columns of a set have the spectrum of theirs in R
        each = found.triangle.chunk(sets[0], dim=1)
        set_abundances = tuple(abundance_of(torch.linalg.svdvals(one)) for one in each)
    try:
        factors = None if find_product(table) is None else reweighting(table)
    except DataError:  # its rows are not finite either, which is a finding
        factors = None
    figures = describe_table(
        found,
        counts,
        name=info.name,
        width=info.width,
        num_bytes=info.num_bytes,
        methods=info.methods,
        set_abundances=set_abundances,
        reweighting=factors,
    )
    return figures, found.triangle


def _counts(
    data: Dataset | Splits | None, counts: Mapping[str, Tensor] | None
) -> Mapping[str, Tensor]:
    if data is not None and counts is not None:
        raise SettingsError("give either data or counts, not both")
    if data is None:
        return counts or {}
    if isinstance(data, Dataset) and data.parts is not None:
        data = data.parts
    return (data.train if isinstance(data, Splits) else data).counts()


def _checked(counts: Any, info: TableInfo) -> Tensor:
    """Return the counts of a table on the CPU; raise if they do not fit the table."""
    tensor = torch.as_tensor(counts).cpu()
    if tensor.shape != (info.rows,) or tensor.is_floating_point() or tensor.is_complex():
        raise DataError(
            f"{info.name} has {info.rows:,} rows, so its counts are {info.rows:,} whole numbers, got "
            f"{tuple(tensor.shape)} of {tensor.dtype}; is it the data that the model was trained on?"
        )
    if len(tensor) and int(tensor.min()) < 0:
        raise DataError(f"the counts of {info.name} must be 0 or more, got {int(tensor.min())}")
    return tensor


def _unreadable(table: AnyTable) -> str | None:
    """Return why the rows of a table cannot be read; None if they can."""
    for parameter in table.parameters():
        if parameter.is_meta:
            return "its weights are not in memory but on the device meta"
        if not parameter.is_floating_point():
            return f"it holds {str(parameter.dtype).removeprefix('torch.')}, no floats"
    return None


def _no_table(shape: list[int], dtype: str) -> str | None:
    """Return why a tensor of a file is no table; None if it is one."""
    if dtype not in FLOAT_BITS:
        return f"it holds {dtype}, and tables hold {', '.join(FLOAT_BITS)}"
    if len(shape) != 2:
        return f"its shape is {tuple(shape)}, and a table is a matrix"
    rows, width = shape
    if not width or rows <= TALLER_THAN * width:
        return f"{rows} x {width} is as flat as a layer: a table has more than {TALLER_THAN} rows per column"
    return None


def _open(path: Path) -> Any:
    """Open a safetensors file; raise with the reason if that is not possible."""
    if path.exists() and not path.is_file():
        raise ModelFileError(f"{str(path)!r} is not a file; give a .safetensors file")
    try:
        with path.open("rb"):  # the system's own message for what cannot be read
            pass
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelFileError(f"the file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ModelFileError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except SafetensorError as error:
        if is_zipfile(path) or path.suffix in PICKLES:
            source, target = map(json.dumps, [str(path), str(path.with_suffix(".safetensors"))])
            convert = (
                "import torch; from safetensors.torch import save_file; "
                f'found = torch.load({source}, map_location="cpu", weights_only=True); '
                "save_file({name: value.clone().contiguous() for name, value in found.items()}, "
                f"{target})"
            )
            raise ModelFileError(
                f"{str(path)!r} is no safetensors file; convert a state dict that torch.save wrote with: "
                f"python -c {shlex.quote(convert)}"
            ) from None
        raise ModelFileError(
            f"{str(path)!r} is no safetensors file, or a damaged one: {error}; save it again"
        ) from None
