"""The simple forms of a request: rows, columns, one user with many items, NDJSON, Arrow.

    {"rows": [{"user": "ann", "price": 2}, {"user": "bob", "price": null}]}
    {"columns": {"user": ["ann", "bob"], "price": [2, null]}}
    {"user": {"user": "ann"}, "items": [{"price": 2}, {"price": 3}]}

Every column that the model reads must be there; null is a missing value. An unknown column is refused.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from rarebit.errors import RequestError, import_extra
from rarebit.serving.columns import Arrays, Input, Place, check_lengths, row_number, shown, to_array
from rarebit.settings import suggest

JSON, NDJSON = "application/json", "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
FORMS = '{"rows": [...]}, {"columns": {...}} or {"user": {...}, "items": [...]}'


class Rows(NamedTuple):
    """The rows of a request, as a model reads them."""

    arrays: Arrays
    num_rows: int


class Form(NamedTuple):
    """How a request was written and how it wants its answer."""

    name: str
    """rows, columns, items, ndjson or arrow."""
    answer: str
    """The content type of the answer."""


def parse(
    body: bytes, content_type: str, accept: str, inputs: Mapping[str, Input], max_rows: int
) -> tuple[Rows, Form]:
    """Return the rows of a request and its form."""
    kind = content_type.partition(";")[0].strip().lower()
    answer = ARROW if ARROW in accept else JSON
    if answer == ARROW:
        import_extra(
            "pyarrow", "data", "an answer in Arrow form"
        )  # now: later it is too late to refuse
    if kind == NDJSON:
        return _from_ndjson(body, inputs, max_rows), Form("ndjson", NDJSON)
    if kind == ARROW:
        return _from_arrow(body, inputs, max_rows), Form("arrow", answer)
    if kind not in ("", JSON) and not kind.endswith("+json"):
        raise RequestError(
            f"unknown content type {shown(kind)}; expected {JSON}, {NDJSON} or {ARROW}", status=415
        )
    values = load_json(body)
    if not isinstance(values, dict):
        raise RequestError(f"expected a JSON object: {FORMS}; got {type(values).__name__}")
    names = set(values)
    if names == {"rows"}:
        rows = _list_of(values["rows"], "rows", max_rows)
        return from_rows(rows, inputs), Form("rows", answer)
    if names == {"columns"}:
        return from_columns(values["columns"], inputs, max_rows), Form("columns", answer)
    if names == {"user", "items"}:
        items = _list_of(values["items"], "items", max_rows)
        return _from_items(values["user"], items, inputs), Form("items", answer)
    found = ", ".join(map(shown, sorted(names)[:5])) or "nothing"
    raise RequestError(f"expected {FORMS}; got an object with {found}")


def load_json(body: bytes | memoryview) -> Any:
    """Return what JSON says, or refuse it."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None


def from_rows(
    rows: Sequence[Any],
    inputs: Mapping[str, Input],
    place: Place = row_number,
    shared: Mapping[str, Any] | None = None,
) -> Rows:
    """Return rows that are objects; `shared` has columns with one value for all rows."""
    own = {name: column for name, column in inputs.items() if not shared or name not in shared}
    try:
        columns = {name: [row[name] for row in rows] for name in own}
        has_more = any(len(row) != len(own) or type(row) is not dict for row in rows)
    except (KeyError, IndexError, TypeError):
        has_more = True
    if has_more:
        for number, row in enumerate(rows):
            _check_row(row, own, place(number), shared)
    arrays = {name: to_array(inputs[name], values, place) for name, values in columns.items()}
    for name, value in (shared or {}).items():
        one = to_array(inputs[name], [value], lambda _: "user")
        arrays[name] = np.repeat(one, len(rows), axis=0)
    return Rows(arrays, len(rows))


def from_columns(columns: Any, inputs: Mapping[str, Input], max_rows: int) -> Rows:
    """Return columns of values as arrays."""
    if type(columns) is not dict:
        raise RequestError(f"columns must be an object of lists, got {type(columns).__name__}")
    _check_names(columns, inputs, "columns")
    for name, values in columns.items():
        _list_of(values, f"column {name!r}", max_rows)
    count = check_lengths(columns)
    return Rows({name: to_array(inputs[name], columns[name]) for name in inputs}, count)


def _from_items(user: Any, items: list[Any], inputs: Mapping[str, Input]) -> Rows:
    if type(user) is not dict:
        raise RequestError(f"user must be an object, got {type(user).__name__}")
    unknown = [name for name in user if name not in inputs]
    if unknown:
        raise RequestError(f"user: {_unknown(unknown[0], inputs)}")
    return from_rows(items, inputs, lambda number: f"item {number}", user)


def _from_ndjson(body: bytes, inputs: Mapping[str, Input], max_rows: int) -> Rows:
    lines = body.split(b"\n")
    if not lines[-1].strip():
        lines.pop()
    _list_of(lines, "the body", max_rows)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            raise RequestError(f"line {number} is not valid JSON: {error}") from None
    return from_rows(rows, inputs, lambda row: f"line {row + 1}")


def _from_arrow(body: bytes, inputs: Mapping[str, Input], max_rows: int) -> Rows:
    pa = import_extra("pyarrow", "data", "a request in Arrow form")
    try:
        with import_extra("pyarrow.ipc", "data", "a request in Arrow form").open_stream(
            pa.py_buffer(body)
        ) as reader:
            table = reader.read_all()
        table.validate(full=True)  # or a wrong offset reads foreign memory
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RequestError(f"the body is not a valid Arrow stream: {error}") from None
    names = table.column_names
    if len(set(names)) != len(names):
        raise RequestError("the names of Arrow columns must be distinct")
    _check_names(names, inputs, "the Arrow table")
    _list_of(range(table.num_rows), "the Arrow table", max_rows)
    arrays = {name: _arrow_array(pa, column, table.column(name)) for name, column in inputs.items()}
    return Rows(arrays, table.num_rows)


def _arrow_array(pa: Any, column: Input, found: Any) -> NDArray[Any]:
    """Return an Arrow column; texts without the detour over Python lists."""
    if pa.types.is_dictionary(found.type):
        found = found.cast(found.type.value_type)
    if column.kind == "categorical" and pa.types.is_string(found.type):
        if found.null_count:
            found = found.fill_null("")
        texts: NDArray[Any] = found.to_numpy()
        return texts
    if pa.types.is_float32(found.type) and column.kind == "categorical":
        # the shortest text of 32 bits, and ids only as far as they tell them apart
        values = [None if one is None else float(str(np.float32(one))) for one in found.to_pylist()]
        if any(one is not None and abs(one) > 1 << 24 for one in values):
            raise RequestError(
                f"column {column.name!r} has ids as 32-bit floats above 2^24, which cannot tell them "
                "apart; send text or integers"
            )
        return to_array(column, values)
    return to_array(column, found.to_pylist())


def _list_of(values: Any, what: str, max_rows: int) -> list[Any]:
    """Return a list that has rows, and no more than allowed."""
    if not isinstance(values, list | range):
        raise RequestError(f"{what} must be a list, got {type(values).__name__}")
    if not values:
        raise RequestError(f"{what} must have at least one row, got none")
    if len(values) > max_rows:
        raise RequestError(
            f"{what} has {len(values):,} rows; this server takes at most {max_rows:,} (--max-rows)",
            status=413,
        )
    return values  # type: ignore[return-value]  # a range is only counted


def _check_row(
    row: Any, own: Mapping[str, Input], where: str, shared: Mapping[str, Any] | None
) -> None:
    """Refuse a row that has not the columns of the model."""
    if type(row) is not dict:
        raise RequestError(f"{where} must be an object of values by column, got {shown(row)}")
    twice = [name for name in row if shared and name in shared]
    if twice:
        raise RequestError(f"{where}: column {twice[0]!r} is also in user; send it once")
    _check_names(row, own, where)


def _check_names(
    found: Sequence[str] | Mapping[str, Any], own: Mapping[str, Input], where: str
) -> None:
    missing = [name for name in own if name not in found]
    unknown = [name for name in found if name not in own]
    if missing:
        more = f", and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        wrong = f"; there is an unknown column {shown(unknown[0])}" if unknown else ""
        raise RequestError(
            f"{where}: column {missing[0]!r} is missing{more}; send null for a missing value{wrong}"
        )
    if unknown:
        raise RequestError(f"{where}: {_unknown(unknown[0], own)}")


def _unknown(name: str, inputs: Mapping[str, Input]) -> str:
    return f"the model reads no column {shown(name)}{suggest(name[:100], inputs)}"


def answer(form: Form, scores: NDArray[np.float32], model: str, version: str) -> bytes:
    """Return the body of an answer."""
    if form.answer == NDJSON:
        return b"".join(b'{"score":%s}\n' % orjson.dumps(score) for score in _plain(scores))
    if form.answer == ARROW:
        pa = import_extra("pyarrow", "data", "an answer in Arrow form")
        facts = {"model": model, "version": version}
        table = pa.table({"score": scores}).replace_schema_metadata(facts)
        sink = pa.BufferOutputStream()
        with import_extra("pyarrow.ipc", "data", "an answer in Arrow form").new_stream(
            sink, table.schema
        ) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())
    found = {"scores": scores, "model": model, "version": version}
    return orjson.dumps(found, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(scores: NDArray[np.float32]) -> list[float]:
    """Return scores as the shortest numbers that 32 bits tell apart."""
    return [float(str(score)) for score in scores]
