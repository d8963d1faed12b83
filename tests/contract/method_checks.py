"""What every method promises, one function a promise: each raises AssertionError when it is broken.

The checks take any `Method`, also one from outside the package, and look through the public calls.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rarebit as rb
from rarebit.models._base import RankingModel
from rarebit.models.dcn_v2 import DCNv2
from rarebit.models.deepfm import DeepFM
from rarebit.sets.sets import SetsMethod
from rarebit.tables.collection import TableCollection

N, D = 13, 6
"""Rows and width of the table that the checks use: more rows than wide, no common divisor."""

SCHEMA = rb.Schema(
    (
        rb.Field(name="user", rows=11),
        rb.Field(name="tags", kind="multi", rows=9, max_length=3, pooling="mean"),
        rb.Field(name="age", kind="numeric"),
        rb.Field(name="item", rows=N),
        rb.Field(name="words", kind="multi", rows=10, max_length=2, pooling="sum"),
    )
)

IDS = torch.tensor([3, 12, 7, 3, 0, 5, 8, 11])
IDS_2D = IDS.view(4, 2)
OFFSETS = torch.tensor([0, 3, 3, 5])  # the second bag is empty
LAST_OFFSET = torch.tensor([0, 3, 3, 8])  # three bags, and where the last one ends

Call = tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, Tensor]]


def bag(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(N, D, **options)


def lookups() -> dict[str, Call]:
    """Return every way to use a table: what makes it, and the arguments of a call."""
    weights = torch.linspace(-1.0, 1.0, len(IDS))
    calls: dict[str, Call] = {
        "embedding": (lambda: nn.Embedding(N, D), (IDS_2D,), {}),
        "embedding, padding": (lambda: nn.Embedding(N, D, padding_idx=3), (IDS_2D,), {}),
        "embedding, last row is padding": (lambda: nn.Embedding(N, D, padding_idx=-1), (IDS,), {}),
        "bag, weights": (bag(mode="sum"), (IDS, OFFSETS), {"per_sample_weights": weights}),
        "bag, weights 2d": (
            bag(mode="sum", padding_idx=3),
            (IDS_2D,),
            {"per_sample_weights": weights.view(4, 2)},
        ),
    }
    for mode in ("sum", "mean", "max"):
        padded = bag(mode=mode, padding_idx=3)
        calls |= {
            f"bag, {mode}": (bag(mode=mode), (IDS, OFFSETS), {}),
            f"bag, {mode} 2d": (bag(mode=mode), (IDS_2D,), {}),
            f"bag, {mode}, padding": (padded, (IDS, OFFSETS), {}),
            f"bag, {mode}, nothing but padding": (padded, (torch.full((2, 3), 3),), {}),
            f"bag, {mode}, last offset": (
                bag(mode=mode, include_last_offset=True, padding_idx=3),
                (IDS, LAST_OFFSET),
                {},
            ),
        }
    return calls


class Holder(nn.Module):
    """A stranger's model: one table, called as it is called."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, *arguments: Tensor, **options: Tensor) -> Tensor:
        return self.table(*arguments, **options)


def applied(method: rb.Method, table: nn.Module | None = None) -> Holder:
    """Return a model whose table has the method, moved away from where the method started it."""
    model = Holder(nn.Embedding(N, D) if table is None else table)
    rb.apply_(model, method, verbose=False)
    move_(model)
    return model


def move_(model: nn.Module, scale: float = 0.3) -> None:
    """Shift all weights at random, as training would; of plain tables, padding stays zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
        for module in model.modules():
            for table in module.tables() if isinstance(module, TableCollection) else [module]:
                if isinstance(table, nn.Embedding) and table.padding_idx is not None:
                    table.weight[table.padding_idx] = 0.0


def stored_table(table: Any) -> nn.Embedding:
    """Return the plain table at the bottom of a wrapped one."""
    while not isinstance(table, nn.Embedding):
        table = table.inner if isinstance(table, rb.Table) else table.table
    return table


def zoo_model(*methods: rb.Method) -> RankingModel:
    """Return a model of ours that all these methods can be applied to."""
    sets = any(isinstance(method, SetsMethod) for method in methods)
    kind: type[RankingModel] = DCNv2 if sets else DeepFM
    model = kind(SCHEMA, dim=D, hidden=(8,))
    move_(model)
    return model


def zoo_batch(rows: int = 16) -> rb.Batch:
    """Return a batch in which some values are padding, and one row has nothing else."""
    fields = SCHEMA.table_fields
    ids = torch.cat([torch.randint(f.rows, (rows, f.max_length)) for f in fields], dim=1)
    for name in ("tags", "words"):
        ids[0, SCHEMA.slots[name]] = 0
        ids[1:3, SCHEMA.slots[name].start] = 0
    label = torch.randint(2, (rows,))
    return rb.Dataset(SCHEMA, ids, torch.randn(rows, 1), label)[slice(None)]


OF_TRAINING = ("check_learns", "check_touched_rows", "check_sparse")
"""What only a method whose tables are trained can promise."""


def all_checks() -> dict[str, Callable[[rb.Method], None]]:
    """Return the checks that take a method and no more, by name."""
    found = {name: thing for name, thing in globals().items() if name.startswith("check_")}
    return {name: check for name, check in found.items() if check is not check_count}


def backward(method: rb.Method, loss: Tensor) -> None:
    """Send a gradient back, unless the method's tables are not trained."""
    if method.after_training:
        assert not loss.requires_grad, "a table that is not trained gets a gradient"
    else:
        loss.backward()


def check_merge(method: rb.Method) -> None:
    """Merging changes no output, ends in torch's own classes, and is done only once."""
    for name, (make, arguments, options) in lookups().items():
        model = applied(method, make())
        before = model(*arguments, **options)
        assert bool(rb.merge_(model, verbose=False)), f"{name}: nothing was merged"
        after = model(*arguments, **options)
        assert_close(after, before, atol=1e-6, rtol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
        assert not rb.merge_(model, verbose=False), f"{name}: merged twice"
        foreign = [m for m in list(model.modules())[1:] if not in_torch(m)]
        assert not foreign, f"{name}: {foreign} is left"
        assert type(model.table) is type(make())


def in_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def check_merge_in_a_model(method: rb.Method) -> None:
    """The same for the stacked tables of one of our own models."""
    model, batch = zoo_model(), zoo_batch()
    names = [name for name, _ in model.named_parameters()]
    rb.apply_(model, method, verbose=False)
    move_(model)
    before = model(batch)
    assert bool(rb.merge_(model, verbose=False))
    assert_close(model(batch), before, atol=1e-6, rtol=1e-6)
    assert not rb.merge_(model, verbose=False)
    assert [name for name, _ in model.named_parameters()] == names


def check_bags(method: rb.Method) -> None:
    """A bag answers as torch's own does over the same rows."""
    for name, (make, arguments, options) in lookups().items():
        plain = make()
        if isinstance(plain, nn.EmbeddingBag):
            model = applied(method, copy.deepcopy(plain))
            with torch.no_grad():
                plain.weight.copy_(model.table.weight)
            expected = plain(*arguments, **options)
            assert_close(
                model(*arguments, **options),
                expected,
                msg=lambda text, n=name: f"{n}: {text}",
            )


def check_padding(method: rb.Method) -> None:
    """The padding row is zero, whatever is stored, and nothing is learned from it."""
    for padding in (0, 3, -1):
        model = applied(method, nn.Embedding(N, D, padding_idx=padding))
        ids = torch.full((2, 2), padding % N)
        rows = model(ids)
        assert bool((rows == 0).all()), "the padding row is not zero"
        backward(method, rows.sum())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert not any(bool(g.any()) for g in gradients), "padding gets a gradient"
        rb.merge_(model, verbose=False)
        assert not bool(model.table.weight[padding].any())
        assert model.table.padding_idx == padding % N


def check_attributes(method: rb.Method) -> None:
    """The table keeps its shape and its padding, merged or not."""
    for make, _, _ in lookups().values():
        plain = make()
        model = applied(method, make())
        for _ in range(2):
            for attribute in ("num_embeddings", "embedding_dim", "padding_idx"):
                assert getattr(model.table, attribute) == getattr(plain, attribute), attribute
            assert model.table.weight.shape == (N, D)
            rb.merge_(model, verbose=False)


def check_weight(method: rb.Method) -> None:
    """`.weight` is the rows of all ids, and so is its gradient."""
    for table in (nn.Embedding(N, D, padding_idx=2), nn.EmbeddingBag(N, D, padding_idx=2)):
        model, weights = applied(method, table), torch.randn(N, D)
        plain = model.table if isinstance(model.table, rb.Table) else model.table.table
        rows = plain(torch.arange(N))
        assert_close(model.table.weight, rows)
        if method.after_training:
            continue
        expected = torch.autograd.grad((rows * weights).sum(), list(model.parameters()))
        assert model.table.weight.requires_grad, ".weight has no gradient"
        loss = (model.table.weight * weights).sum()
        assert_close(torch.autograd.grad(loss, list(model.parameters())), expected)


def check_state_dict(method: rb.Method) -> None:
    """All that decides the rows is in the state dict."""
    for make, arguments, options in lookups().values():
        model, other = applied(method, make()), applied(method, make())
        other.load_state_dict(model.state_dict())
        assert_close(other(*arguments, **options), model(*arguments, **options), rtol=0, atol=0)


def check_count(method: rb.Method, stored: Callable[[int, int], int]) -> None:
    """The weights stored are those of the formula, and those that are reported."""
    for table in (nn.Embedding(N, D), nn.EmbeddingBag(N, D)):
        model = applied(method, table)
        (info,) = rb.find_tables(model)
        assert info.num_bytes == sum(t.nbytes for t in model.state_dict().values())
        assert info.num_parameters == stored(N, D), "not the number that the formula says"
        if not method.after_training:
            assert info.num_parameters == sum(p.numel() for p in model.parameters())
            masks = sum(b.nbytes for b in model.buffers())
            assert info.num_bytes == 4 * info.num_parameters + masks
    tables = zoo_model().backbone.tables
    rb.apply_(tables, method, verbose=False)
    infos = rb.find_tables(tables)
    assert [info.num_parameters for info in infos] == [stored(info.rows, D) for info in infos]
    assert sum(t.nbytes for t in tables.state_dict().values()) == sum(i.num_bytes for i in infos)


def check_learns(method: rb.Method) -> None:
    """A few steps lower the loss, and move every weight that is stored."""
    model, ids, wanted = applied(method), torch.arange(N), torch.randn(N, D)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(10):
        loss = (model(ids) - wanted).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0], f"the loss goes from {losses[0]} to {losses[-1]}"
    same = [name for name, p in model.named_parameters() if bool((p == start[name]).all())]
    assert not same, f"{same} did not move"


def check_touched_rows(method: rb.Method) -> None:
    """A lookup of two ids gives a gradient to two stored rows at most."""
    for padding in (None, 0):
        model = applied(method, nn.Embedding(N, D, padding_idx=padding))
        model(torch.tensor([4, 9, 4])).sum().backward()
        gradient = stored_table(model.table).weight.grad
        touched = int(gradient.any(dim=1).sum())
        assert 1 <= touched <= 2, f"{touched} rows get a gradient for two ids"


def check_stack(method: rb.Method) -> None:
    """A collection equals the loop over its tables: values and gradients, in float64."""
    collection = zoo_model().double().backbone.tables
    rb.apply_(collection, method, verbose=False)
    move_(collection)
    ids = zoo_batch().ids
    weights = torch.randn(len(ids), len(collection.fields), D, dtype=torch.float64)
    tables = copy.deepcopy(collection).tables()
    looped = torch.stack([_pooled(t, f, ids) for t, f in _with_fields(tables, collection)], dim=1)
    stacked = collection(ids)
    assert_close(stacked, looped, msg=lambda text: f"rows: {text}")
    backward(method, (stacked * weights).sum())
    backward(method, (looped * weights).sum())
    for field, found, table in zip(
        collection.fields, _split_gradients(collection), tables, strict=True
    ):
        expected = {name: p.grad for name, p in table.named_parameters()}
        label = f"gradients of {field.name}: "
        assert_close(found, expected, msg=lambda text, label=label: label + text)


def _with_fields(
    tables: list[Any], collection: TableCollection
) -> Iterator[tuple[nn.Module, rb.Field]]:
    return zip(tables, collection.fields, strict=True)


def _pooled(table: nn.Module, field: rb.Field, ids: Tensor) -> Tensor:
    """Return one row a row of the batch, with loops."""
    rows = []
    for values in ids[:, SCHEMA.slots[field.name]]:
        kept = [i for i in values if field.kind != "multi" or i != 0]
        total = sum((table(i) for i in kept), start=torch.zeros(D, dtype=torch.float64))
        rows.append(total / max(len(kept), 1) if field.pooling == "mean" else total)
    return torch.stack(rows)


def _split_gradients(collection: TableCollection) -> list[dict[str, Tensor]]:
    """Return the gradients by field: they are laid out as the weights are, so they split alike."""
    shadow = copy.deepcopy(collection)
    with torch.no_grad():
        for target, source in zip(shadow.parameters(), collection.parameters(), strict=True):
            target.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    return [{n: p.detach() for n, p in t.named_parameters()} for t in shadow.tables()]


def check_frozen(method: rb.Method) -> None:
    """A table that was not trained stays so."""
    for make in (lambda: nn.Embedding(N, D), lambda: nn.EmbeddingBag(N, D)):
        model = applied(method, make().requires_grad_(requires_grad=False))
        assert not any(p.requires_grad for p in model.parameters()), "a weight is trained"
        rb.merge_(model, verbose=False)
        assert not model.table.weight.requires_grad, "the merged table is trained"


def check_dtype(method: rb.Method, device: str = "cpu") -> None:
    """A table stays in its precision and on its device."""
    for make, arguments, options in lookups().values():
        model = applied(method, make().to(device, torch.float64))
        here = [argument.to(device) for argument in arguments]
        doubles = {name: value.to(device, torch.float64) for name, value in options.items()}
        for _ in range(2):
            rows = model(*here, **doubles)
            for tensor in (rows, *model.parameters(), *model.buffers()):
                assert tensor.device.type == device, "not on the device of the table"
                wide = tensor.dtype == torch.float64 or not tensor.is_floating_point()
                assert wide, f"{tensor.dtype}, not in the precision of the table"
            rb.merge_(model, verbose=False)


def check_sparse(method: rb.Method) -> None:
    """A table with sparse gradients keeps them, merged or not."""
    for make in (nn.Embedding, nn.EmbeddingBag):
        model = applied(method, make(N, D, sparse=True))
        model(IDS_2D).sum().backward()
        stored = stored_table(model.table)
        assert stored.weight.grad is not None
        assert stored.weight.grad.is_sparse, "the gradient is dense"
        rb.merge_(model, verbose=False)
        assert model.table.sparse, "the merged table is not sparse"


def check_mode(method: rb.Method) -> None:
    """Training and evaluation mode stay as they are, everywhere in the model."""
    for training in (True, False):
        for model in (Holder(nn.Embedding(N, D)), Holder(nn.EmbeddingBag(N, D)), zoo_model()):
            model.train(training)
            rb.apply_(model, method, where=lambda t: t.field != "user", verbose=False)
            assert _modes(model) == {training}, "applying changed the mode"
            rb.merge_(model, verbose=False)
            assert _modes(model) == {training}, "merging changed the mode"


def _modes(model: nn.Module) -> set[bool]:
    return {module.training for module in model.modules()}


def check_autocast(method: rb.Method) -> None:
    """Rows are computed in the table's own precision, whatever autocast says."""
    tables = zoo_model().backbone.tables
    rb.apply_(tables, method, verbose=False)
    for model, ids in ((applied(method), IDS), (tables, zoo_batch().ids)):
        expected = model(ids)
        with torch.autocast("cpu", torch.bfloat16):
            rows = model(ids)
        assert rows.dtype == torch.float32, f"rows are {rows.dtype}"
        assert_close(rows, expected, rtol=0, atol=0)


def check_cost(method: rb.Method, rows: int = 10_000) -> None:
    """A step makes nothing of the table's size, save the dense gradient of what is stored."""
    fields = (rb.Field(name="a", rows=rows), rb.Field(name="b", rows=rows))
    ids = torch.randint(rows, (4, 2))
    for model in (
        Holder(nn.Embedding(rows, D, padding_idx=0)),
        Holder(nn.EmbeddingBag(rows, D)),
        TableCollection(fields, D),
    ):
        rb.apply_(model, method, verbose=False)
        with counting_large_tensors(rows) as made:
            backward(method, model(ids).square().sum())
        stored = [p for p in model.parameters() if p.numel() >= rows]
        assert len(made) <= len(stored), f"{made} for {len(stored)} stored weights"


@contextmanager
def counting_large_tensors(least: int) -> Iterator[list[str]]:
    """Note each new piece of memory of so many numbers or more, by the operation that made it."""
    made: list[str] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            given = {_memory(a) for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)}
            for tensor in tree_leaves(result):
                is_large = isinstance(tensor, Tensor) and tensor.numel() >= least
                if is_large and _memory(tensor) not in given:
                    made.append(f"{func} {tuple(tensor.shape)}")
            return result

    with Counter():
        yield made


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
