"""What every model promises, one function a promise: each raises AssertionError when it is broken."""

import copy
import dataclasses
import json
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb
from rarebit.models._base import RankingModel
from rarebit.tables.collection import TableCollection
from rarebit.testing import counting_large_tensors

SCHEMA = rb.data.Schema(
    (
        rb.data.Field(name="user", rows=11),
        rb.data.Field(name="tags", kind="multi", rows=9, max_length=3, pooling="mean"),
        rb.data.Field(name="age", kind="numeric"),
        rb.data.Field(name="words", kind="multi", rows=10, max_length=2, pooling="sum"),
        rb.data.Field(name="item", rows=13),
        rb.data.Field(name="price", kind="numeric"),
    )
)

Make = Callable[[rb.data.Schema], RankingModel]
"""What builds a model for a schema, small."""


def make_batch(rows: int = 24, schema: rb.data.Schema = SCHEMA) -> rb.data.Batch:
    """Return a batch in which some values are padding, and one row has nothing else."""
    ids = torch.cat(
        [torch.randint(f.rows, (rows, f.max_length)) for f in schema.table_fields], dim=1
    )
    for field in schema.table_fields:
        if field.kind == "multi":
            ids[0, schema.slots[field.name]] = 0
            ids[1:3, schema.slots[field.name].start] = 0
    numbers = torch.randn(rows, len(schema.numeric_fields))
    return rb.Dataset(schema, ids, numbers, torch.randint(2, (rows,)))[slice(None)]


def lively(make: Make, schema: rb.data.Schema = SCHEMA) -> RankingModel:
    """Return a model with weights far from zero, so that a difference shows."""
    model = make(schema)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
        for module in model.modules():
            for table in module.tables() if isinstance(module, TableCollection) else []:
                if table.padding_idx is not None:
                    table.weight[table.padding_idx] = 0.0
    return model


def some_rows(batch: rb.data.Batch, rows: Tensor | slice) -> rb.data.Batch:
    return rb.data.Batch(batch.ids[rows], batch.numeric[rows], batch.label[rows], batch.schema)


def all_checks() -> dict[str, Callable[[Make], None]]:
    """Return the checks by name."""
    return {name: thing for name, thing in globals().items() if name.startswith("check_")}


def check_shape(make: Make) -> None:
    """One finite score a row, for any number of rows and any kinds of fields."""
    simple = rb.data.Schema(
        (rb.data.Field(name="user", rows=4), rb.data.Field(name="item", rows=5))
    )
    lists = rb.data.Schema((rb.data.Field(name="tags", kind="multi", rows=4, max_length=3),))
    for schema in (SCHEMA, simple, lists):
        for training, rows in ((True, 24), (False, 24), (False, 3)):
            scores = lively(make, schema).train(training)(make_batch(rows, schema))
            assert scores.shape == (rows,), f"the shape is {tuple(scores.shape)}"
            assert bool(torch.isfinite(scores).all())


def check_single_row(make: Make) -> None:
    """A single row can be scored in evaluation mode."""
    scores = lively(make).eval()(some_rows(make_batch(), slice(1)))
    assert scores.shape == (1,), f"the shape is {tuple(scores.shape)}"


def check_gradients(make: Make) -> None:
    """Each parameter, and of each table each row that was looked up, gets a gradient."""
    model, batch = lively(make), make_batch()
    F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} gets no gradient"
        assert bool(parameter.grad.any()), f"the gradient of {name} is zero"
    for module in model.modules():
        if isinstance(module, TableCollection):
            _check_rows_with_gradients(module, batch)


def _check_rows_with_gradients(tables: TableCollection, batch: rb.data.Batch) -> None:
    shadow = copy.deepcopy(tables)  # gradients are laid out as the weights are: they split alike
    with torch.no_grad():
        for target, source in zip(shadow.parameters(), tables.parameters(), strict=True):
            target.copy_(source.grad)
    for field, table in zip(tables.fields, shadow.tables(), strict=True):
        ids = set(batch[field.name].flatten().tolist()) - ({0} if field.kind == "multi" else set())
        found = set(table.weight.any(dim=1).nonzero().flatten().tolist())
        assert found == ids, f"{field.name}: rows {found} get a gradient, {ids} were looked up"


def check_every_field_counts(make: Make) -> None:
    """Another value in one field of a row gives that row another score, and no other row."""
    model, batch = lively(make).eval(), make_batch()
    scores = model(batch)
    for field in SCHEMA.fields:
        changed = model(_with_another_value(batch, field)) - scores
        assert bool(changed[5] != 0), f"{field.name} does not count"
        changed[5] = 0.0
        assert float(changed.abs().max().detach()) < 1e-5, f"{field.name}: other rows change too"


def _with_another_value(batch: rb.data.Batch, field: rb.data.Field) -> rb.data.Batch:
    ids, numeric = batch.ids.clone(), batch.numeric.clone()
    if field.kind == "numeric":
        numeric[5, SCHEMA.numeric_fields.index(field)] += 1.0
    else:
        column = SCHEMA.slots[field.name].start
        ids[5, column] = (ids[5, column] + 1) % field.rows
    return dataclasses.replace(batch, ids=ids, numeric=numeric)


def check_batch_size(make: Make) -> None:
    """A row has the same score alone and in a batch."""
    model, batch = lively(make).eval(), make_batch()
    alone = [model(some_rows(batch, slice(row, row + 1))) for row in range(len(batch))]
    assert_close(model(batch), torch.cat(alone), atol=1e-5, rtol=1e-5)


def check_row_order(make: Make) -> None:
    """Rows in another order have the same scores in that order, in training too."""
    model, batch = lively(make), make_batch()
    order = torch.randperm(len(batch))
    assert_close(model(some_rows(batch, order)), model(batch)[order], atol=1e-5, rtol=1e-5)


def check_padding(make: Make) -> None:
    """What a list is filled up with changes no score."""
    model, batch = lively(make).eval(), make_batch()
    with torch.no_grad():
        expected = model(batch)
        for module in model.modules():
            for table in module.tables() if isinstance(module, TableCollection) else []:
                if table.padding_idx is not None:
                    table.weight[table.padding_idx] = 100.0
        assert_close(model(batch), expected, atol=0, rtol=0)


def check_rebuild(make: Make) -> None:
    """Settings, through JSON, and state dict are all it takes to build the model again."""
    model, batch = lively(make).eval(), make_batch()
    settings = json.loads(json.dumps(model.settings))
    schema = rb.data.Schema.from_mapping(json.loads(json.dumps(model.schema.to_mapping())))
    again = type(model)(schema, **settings).eval()
    shapes = [{n: t.shape for n, t in m.state_dict().items()} for m in (model, again)]
    assert shapes[0] == shapes[1], "the settings do not say all"
    again.load_state_dict(model.state_dict())
    assert_close(again(batch), model(batch), atol=0, rtol=0)


def check_autocast(make: Make) -> None:
    """In half precision scores are finite and near those in full precision."""
    model, batch = lively(make).eval(), make_batch()
    expected = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        scores = model(batch).float()
    assert bool(torch.isfinite(scores).all())
    scale = float(expected.detach().abs().max())
    assert_close(scores, expected, atol=0.03 * scale, rtol=0.03)


def check_precision(make: Make) -> None:
    """In double precision all is computed so, and scores are near those in single precision."""
    model, batch = lively(make).eval(), make_batch()
    expected = model(batch)
    scores = model.double()(batch)
    assert scores.dtype == torch.float64, f"scores are {scores.dtype}"
    assert_close(scores.float(), expected, atol=1e-5, rtol=1e-4)


def check_methods(make: Make) -> None:
    """Tables of the model can be made smaller, trained and merged."""
    model, batch = lively(make), make_batch()
    widest = max(table.width for table in rb.find_tables(model))
    # first-order weights are left alone, unless a model has nothing else
    options = {"min_width": min(2, widest), "verbose": False}
    hashing, low_rank = rb.Hashing(buckets=5), rb.LowRank(rank=min(2, widest))
    assert rb.apply_(model, hashing, where=lambda t: t.field != "item", **options)
    assert rb.apply_(model, low_rank, where=lambda t: t.field != "user", **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    F.binary_cross_entropy_with_logits(model(batch), batch.label).backward()
    optimizer.step()
    scores = model.eval()(batch)
    assert bool(rb.merge_(model, verbose=False))
    assert_close(model(batch), scores, atol=1e-5, rtol=1e-5)


def check_cost(make: Make) -> None:
    """A step makes nothing of a table's size, save the dense gradient of the table."""
    rows = 10_000
    fields = (
        rb.data.Field(name="user", rows=rows),
        rb.data.Field(name="tags", kind="multi", rows=rows, max_length=3),
    )
    model, batch = make(rb.data.Schema(fields)), make_batch(8, rb.data.Schema(fields))
    with counting_large_tensors(rows) as made:
        model(batch).sum().backward()
    stored = [parameter for parameter in model.parameters() if parameter.numel() >= rows]
    assert len(made) <= len(stored), f"{made} for {len(stored)} tables"


def check_compile(make: Make) -> None:
    """The model compiles in one piece, and scores and gradients are the same."""
    model, batch = lively(make), make_batch()
    expected = model(batch)
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own, as it loads parts
        torch.compiler.reset()  # all models share code: forget how the last one was compiled
        try:
            scores = torch.compile(model, fullgraph=True, backend="aot_eager")(batch)
        except RuntimeError as error:  # what torch raises where it cannot
            raise AssertionError(f"it does not compile: {error}") from error
    assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(scores.sum(), list(model.parameters()))
    assert_close(found, gradients, atol=1e-5, rtol=1e-5)
