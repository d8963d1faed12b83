"""Checks for your own methods: what every method of Rarebit guarantees, as scikit-learn checks its estimators.

`check_method(MyMethod())` runs all checks and raises AssertionError at the first broken guarantee. In a test suite,
`method_checks` makes one test of each:

    @pytest.mark.parametrize(("name", "check"), method_checks(MyMethod()))
    def test_contract(name, check):
        check()

The checks need torch only and take a few seconds for a method.
"""

import copy
import json
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rarebit.callbacks import TrainingMethod
from rarebit.data.dataset import Batch, Dataset, Splits
from rarebit.data.schema import Field, Schema
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.errors import SettingsError, UnsupportedTableError
from rarebit.models._base import RankingModel
from rarebit.models.dcn_v2 import DCNv2
from rarebit.models.deepfm import DeepFM
from rarebit.sets.sets import SetsMethod
from rarebit.study.variants import CONTROLS
from rarebit.tables.apply import TableInfo, apply_, end_training_, find_tables, merge_
from rarebit.tables.collection import TableCollection
from rarebit.tables.grow import grow_
from rarebit.tables.table import AnyTable, Method, Table
from rarebit.technique import (
    BASELINE,
    Rank,
    Technique,
    refusal,
    technique_class,
    technique_from_mapping,
    technique_name,
    technique_names,
    technique_to_mapping,
)
from rarebit.training.fit import Silence
from rarebit.training.metrics import evaluate
from rarebit.training.model_file import load_model, save_model
from rarebit.training.run import Trained, start_model, train_model
from rarebit.training.settings import RunSettings, Training

__all__ = ["check_method", "method_checks"]

N, D = 13, 6
"""Rows and width of the table that the checks use: more rows than wide, no common divisor."""
SHAPES = [(N, D), (40, D)]
SCHEMA = Schema(
    (
        Field(name="user", rows=11),
        Field(name="tags", kind="multi", rows=9, max_length=3, pooling="mean"),
        Field(name="age", kind="numeric"),
        Field(name="item", rows=N),
        Field(name="words", kind="multi", rows=10, max_length=2, pooling="sum"),
    )
)
IDS = torch.tensor([3, 12, 7, 3, 0, 5, 8, 11])
IDS_2D = IDS.view(4, 2)
OFFSETS = torch.tensor([0, 3, 3, 5])  # the second bag is empty
LAST_OFFSET = torch.tensor([0, 3, 3, 8])  # three bags, and where the last one ends
TEXTS = ("title", "paper", "control", "cost", "applies")
MAX_TITLE = 72
"""A title and a name fit in 80 columns."""
RUN = RunSettings(
    model="fm",
    model_settings={"dim": 4},
    data=SyntheticLog(rows=1500),
    training=Training(epochs=3, batch_size=64, lr=0.02, patience=None),
)

Check = Callable[[], None]
Call = tuple[Callable[[], nn.Module], tuple[Tensor, ...], dict[str, Tensor]]


def check_method(method: Technique | type[Technique]) -> None:
    """Raise AssertionError at the first guarantee that a method breaks.

    Pass a class to check it with default settings, sized for half of a table where it needs a size.

    >>> from rarebit import Hashing
    >>> check_method(Hashing(buckets=5))
    """
    for name, check in method_checks(method):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # the same weights and batches in every call
                check()
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def method_checks(method: Technique | type[Technique]) -> Iterator[tuple[str, Check]]:
    """Yield name and function of each check for a method.

    >>> from rarebit import Forgetting
    >>> [name for name, check in method_checks(Forgetting())][:3]
    ['settings', 'texts', 'knobs']
    """
    one = method.for_share(SHAPES, 0.5) if isinstance(method, type) else method
    checks: list[Callable[[Any], None]] = [*GENERAL]
    if isinstance(one, TrainingMethod):
        checks += AROUND_TRAINING
    elif isinstance(one, SetsMethod):
        checks += OF_MODELS
    elif isinstance(one, Method):
        checks += [*OF_TABLES, *([] if one.after_training else OF_TRAINED_TABLES), *OF_MODELS]
    if isinstance(one, Method) and one.callback() is not None:
        checks.append(check_resumes)
    for check in checks:
        yield check.__name__.removeprefix("check_"), partial(check, one)
    if isinstance(one, Method) and one.composition_rank is not None:
        for name in technique_names():
            other = technique_class(name)
            if issubclass(other, Method) and other is not type(one):
                yield f"composition with {name}", partial(_check_both_orders, one, other)


# --- every method


def check_settings(method: Technique) -> None:
    """Settings are a frozen dataclass, and a settings file gives the same method back."""
    params = vars(type(method)).get("__dataclass_params__")
    assert params is not None, "the settings are no dataclass"
    assert params.frozen, "the settings are not frozen: use @dataclass(frozen=True, kw_only=True)"
    values = json.loads(json.dumps(technique_to_mapping(method)))
    found = technique_from_mapping(values)
    assert found == method, f"from a settings file comes {found}, not {method}"


def check_texts(method: Technique) -> None:
    """All texts are there, and a study knows the control."""
    for name in TEXTS:
        text = getattr(method, name)
        assert isinstance(text, str), f"{name} is no text"
        assert text.strip() == text != "", f"{name} is empty or has space around it"
        assert "\n" not in text, f"{name} has several lines"
    assert len(method.title) <= MAX_TITLE, f"the title has {len(method.title)} characters"
    names = technique_names()
    made = [control for name in names for control in technique_class(name).controls]
    known = {BASELINE, *CONTROLS, *method.controls, *made, *names, technique_name(method)}
    assert method.control in known, f"control {method.control!r} is unknown"
    assert method.control != technique_name(method), "the control is the method itself"


def check_knobs(method: Technique) -> None:
    """Every knob is a setting, and the method can be built with each of its values."""
    settings = [field.name for field in fields(cast(Any, method))]
    for name, values in method.knobs.items():
        assert name in settings, f"the knob {name!r} is no setting"
        assert isinstance(values, tuple), f"the values of {name!r} are no tuple"
        assert len(set(values)) == len(values) > 0, f"{name!r} has no values, or one twice"
        for value in values:
            try:
                built = replace(cast(Any, method), **{name: value})
            except SettingsError as error:
                raise AssertionError(f"{name}={value!r} is refused: {error}") from error
            assert getattr(built, name) == value, f"{name}={value!r} does not stay"


def check_rank(method: Technique) -> None:
    """The method has a rank, and the exceptions it declares name methods that exist."""
    assert isinstance(method.composition_rank, Rank), "it has no composition_rank"
    for name in (*method.excludes, *method.follows):
        try:
            other = technique_class(name)
        except SettingsError as error:
            raise AssertionError(f"it declares {name!r}, which is no method") from error
        same = other.composition_rank == method.composition_rank
        assert name in method.excludes or same, f"it follows {name!r} by its rank already, or never"
    for reason in method.excludes.values():
        assert reason.strip() == reason != "", "it excludes a method without a reason"
        assert not reason.endswith("."), "a message continues after the reason: no full stop"


# --- methods for tables


def check_lookups(method: Method) -> None:
    """A table keeps its attributes, pools as torch does, has a full state dict, and merges exactly."""
    for name, (make, arguments, options) in lookups().items():
        plain, model, other = make(), applied(method, make()), applied(method, make())
        _check_attributes(model.table, plain)
        before = model(*arguments, **options)
        other.load_state_dict(model.state_dict())
        same = torch.equal(other(*arguments, **options), before)
        assert same, f"{name}: the state dict does not hold all of it"
        if isinstance(plain, nn.EmbeddingBag):
            with torch.no_grad():
                plain.weight.copy_(model.table.weight)
            _assert_close(before, plain(*arguments, **options), f"{name}, pooled by torch")
        assert bool(merge_(model, verbose=False)), f"{name}: nothing was merged"
        _check_attributes(model.table, plain)
        _assert_close(model(*arguments, **options), before, f"{name}, merged", tolerance=1e-6)
        assert not merge_(model, verbose=False), f"{name}: merged twice"
        parts = [module for module in model.modules() if module is not model]
        left = [part for part in parts if not type(part).__module__.startswith("torch.")]
        assert not left, f"{name}: {left} is left"
        assert type(model.table) is type(plain), f"{name}: it is a {type(model.table)}"


def _check_attributes(table: Any, plain: nn.Module) -> None:
    for name in ("num_embeddings", "embedding_dim", "padding_idx"):
        assert getattr(table, name) == getattr(plain, name), f"{name} changed"
    assert table.weight.shape == (N, D), "the shape of .weight changed"


def check_padding(method: Method) -> None:
    """The padding row is zero, whatever is stored, and gets no gradient."""
    for padding in (0, 3, -1):
        model = applied(method, nn.Embedding(N, D, padding_idx=padding))
        rows = model(torch.full((2, 2), padding % N))
        assert bool((rows == 0).all()), "the padding row is not zero"
        _backward(method, rows.sum())
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert not any(bool(g.any()) for g in gradients), "padding gets a gradient"
        merge_(model, verbose=False)
        assert not bool(model.table.weight[padding].any()), "merged, the padding row is not zero"
        assert model.table.padding_idx == padding % N, "merged, the padding is another row"


def check_weight(method: Method) -> None:
    """`.weight` holds the rows of all ids, with their gradient."""
    for table in (nn.Embedding(N, D, padding_idx=2), nn.EmbeddingBag(N, D, padding_idx=2)):
        model, factors = applied(method, table), torch.randn(N, D)
        inside = model.table if isinstance(model.table, Table) else model.table.table
        rows = inside(torch.arange(N))
        _assert_close(model.table.weight, rows, ".weight")
        if method.after_training:
            continue
        expected = torch.autograd.grad((rows * factors).sum(), list(model.parameters()))
        assert model.table.weight.requires_grad, ".weight has no gradient"
        loss = (model.table.weight * factors).sum()
        found = torch.autograd.grad(loss, list(model.parameters()))
        for one, other in zip(found, expected, strict=True):
            _assert_close(one, other, "the gradient of .weight")


def check_count(method: Method, stored: Callable[[int, int], int] | None = None) -> None:
    """Weights and bytes are counted as they are stored; `stored` is a formula for rows and width."""
    for table in (nn.Embedding(N, D), nn.EmbeddingBag(N, D)):
        model = applied(method, table)
        (info,) = find_tables(model)
        assert info.num_bytes == _bytes(model.state_dict().values()), "its bytes are miscounted"
        formula = info.num_parameters if stored is None else stored(N, D)
        assert info.num_parameters == formula, "not the number that the formula says"
        if not method.after_training:
            weights = sum(p.numel() for p in model.parameters())
            assert info.num_parameters == weights, "its weights are miscounted"
    tables = cast(TableCollection, small_model().backbone.tables)
    apply_(tables, method, verbose=False)
    infos = find_tables(tables)
    if stored is not None:
        formulas = [stored(info.rows, D) for info in infos]
        assert [info.num_parameters for info in infos] == formulas, "not what the formula says"
    total = sum(info.num_bytes for info in infos)
    assert _bytes(tables.state_dict().values()) == total, "the bytes of a stack are miscounted"


def check_learns(method: Method) -> None:
    """A few steps lower the loss, and move every stored weight."""
    model, ids, target = applied(method), torch.arange(N), torch.randn(N, D)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(10):
        loss = (model(ids) - target).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0], f"the loss goes from {losses[0]} to {losses[-1]}"
    same = [name for name, p in model.named_parameters() if bool((p == start[name]).all())]
    assert not same, f"{same} did not move"


def check_gradients(method: Method) -> None:
    """Two ids give a gradient to two stored rows at most; a sparse table stays sparse, also merged.

    A table without `inner` stores no rows, and only has to merge as it was.
    """
    for make, padding, sparse in product((nn.Embedding, nn.EmbeddingBag), (None, 0), (False, True)):
        model = applied(method, make(N, D, padding_idx=padding, sparse=sparse))
        model(torch.tensor([[4, 9, 4]])).sum().backward()
        stored = model.table
        while stored is not None and not isinstance(stored, nn.Embedding):
            stored = getattr(stored, "inner", None) if isinstance(stored, Table) else stored.table
        if stored is not None:
            assert stored.weight.grad is not None, "the stored rows get no gradient"
            assert stored.weight.grad.is_sparse or not sparse, "the gradient is dense"
            touched = int(stored.weight.grad.to_dense().any(dim=1).sum())
            assert 1 <= touched <= 2, f"{touched} rows get a gradient for two ids"
        merge_(model, verbose=False)
        assert model.table.sparse == sparse, "merged, the table's gradients are of another kind"


def check_frozen(method: Method) -> None:
    """A table that is not trained stays so."""
    for make in (nn.Embedding, nn.EmbeddingBag):
        model = applied(method, make(N, D).requires_grad_(requires_grad=False))
        assert not any(p.requires_grad for p in model.parameters()), "a weight is trained"
        merge_(model, verbose=False)
        assert not model.table.weight.requires_grad, "the merged table is trained"


def check_dtype(method: Method, device: str = "cpu") -> None:
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
            merge_(model, verbose=False)


def check_autocast(method: Method) -> None:
    """Rows are computed in the table's own precision, whatever autocast says."""
    tables = cast(TableCollection, small_model().backbone.tables)
    apply_(tables, method, verbose=False)
    for model, ids in ((applied(method), IDS), (tables, small_batch().ids)):
        expected = model(ids)
        with torch.autocast("cpu", torch.bfloat16):
            rows = model(ids)
        assert rows.dtype == torch.float32, f"rows are {rows.dtype}"
        assert torch.equal(rows, expected), "rows are others under autocast"


def check_stack(method: Method) -> None:
    """A collection equals the loop over its tables: values and gradients, in float64."""
    collection = cast(TableCollection, small_model().double().backbone.tables)
    apply_(collection, method, verbose=False)
    move_(collection)
    ids = small_batch().ids
    factors = torch.randn(len(ids), len(collection.fields), D, dtype=torch.float64)
    tables = copy.deepcopy(collection).tables()
    pairs = list(zip(tables, collection.fields, strict=True))
    looped = torch.stack([_pooled(table, field, ids) for table, field in pairs], dim=1)
    stacked = collection(ids)
    _assert_close(stacked, looped, "rows")
    _backward(method, (stacked * factors).sum())
    _backward(method, (looped * factors).sum())
    # gradients are laid out as the weights are, so a copy that holds them splits them by table
    shadow = copy.deepcopy(collection)
    with torch.no_grad():
        for target, source in zip(shadow.parameters(), collection.parameters(), strict=True):
            target.copy_(torch.zeros_like(source) if source.grad is None else source.grad)
    for found, (table, field) in zip(shadow.tables(), pairs, strict=True):
        for name, parameter in table.named_parameters():
            own = found.get_parameter(name)
            assert parameter.grad is not None or method.after_training, f"{name} gets no gradient"
            if parameter.grad is not None:
                _assert_close(own.detach(), parameter.grad, f"gradients of {field.name}")


def check_share(method: Method) -> None:
    """Sized for a share, a method keeps no more of the weights of real tables."""
    # no default of either kind: it needs a size
    sizes = [field for field in fields(cast(Any, method)) if field.default is field.default_factory]
    for share in (0.4, 0.7, 1.0):
        sized = type(method).for_share(SHAPES, share)
        assert type(sized) is type(method), f"sized, it is a {type(sized).__name__}"
        model = nn.ModuleList([nn.Embedding(*shape) for shape in SHAPES])
        plain = sum(parameter.numel() for parameter in model.parameters())
        apply_(model, sized, verbose=False)
        if sized.training_only:  # its tables are as small as it says once they are at inference
            end_training_(model)
        kept = sum(parameter.numel() for parameter in model.parameters()) / plain
        assert not sizes or kept <= share, f"{sized} keeps {kept}, not {share}"


def check_shape_after(method: Method) -> None:
    """The next method gets tables of the shape that `shape_after` says."""
    for shape in (*SHAPES, (2, D)):
        model, probe = Holder(nn.Embedding(*shape)), _Probe([])
        if method.unsuited(*shape) is None:
            apply_(model, method, verbose=False)
        apply_(model, probe, verbose=False)
        assert probe.seen == [method.shape_after(*shape)], f"the next method gets {probe.seen}"


# --- methods for tables and for embedding sets, in a model


def check_model(method: Method) -> None:
    """A model can be saved, loaded and merged: the scores stay, and so do the names of weights.

    With embedding sets or a plain table left in it, a merged model may have other names.
    """
    batch, has_sets = small_batch(), isinstance(method, SetsMethod)
    for left_out in ("",) if has_sets else ("", "item"):
        model = small_model(method)
        names = [name for name, _ in model.named_parameters()]
        where = partial(_is_not, left_out) if left_out else None
        apply_(model, method, where=where, verbose=False)
        move_(model)
        before = model(batch)
        with tempfile.TemporaryDirectory() as folder:
            found = load_model(save_model(model, Path(folder) / "model"))
        assert find_tables(found) == find_tables(model), "the loaded model has other tables"
        assert torch.equal(found(batch), before), "the loaded model scores otherwise"
        merged = bool(merge_(model, verbose=False))
        _assert_close(model(batch), before, "merged", tolerance=1e-6)
        assert not merge_(model, verbose=False), "merged twice"
        assert merged or has_sets, "nothing was merged"
        same = [name for name, _ in model.named_parameters()] == names
        assert same or has_sets or left_out, "weights have other names"


def check_grows(method: Method) -> None:
    """A table gets more rows and old ids keep theirs to the last bit, also in a stack and a file; or it refuses by name."""
    for name, (make, arguments, options) in lookups().items():
        if isinstance(method, SetsMethod):  # which takes a backbone
            break
        model = applied(method, make())
        before = model(*arguments, **options)
        if not _grows(model, method, {"table": N + 4}):
            return
        assert torch.equal(model(*arguments, **options), before), f"{name}: old ids changed"
        new = model(torch.arange(N, N + 4).unsqueeze(-1))
        assert bool(new.isfinite().all()), f"{name}: new rows are not finite"
        assert model.table.weight.shape == (N + 4, D), f"{name}: .weight has another shape"
        merge_(model, verbose=False)
        assert model.table.num_embeddings == N + 4, f"{name}: merged, it has other rows"
    zoo, batch = small_model(method), small_batch()
    apply_(zoo, method, verbose=False)
    move_(zoo)
    before = zoo(batch)
    if not _grows(zoo, method, {"item": N + 3, "tags": 12}):
        return
    assert torch.equal(zoo(batch), before), "old ids of a stack changed"
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_model(save_model(zoo, folder))
    assert torch.equal(loaded(batch), before), "a grown model does not come back from its file"
    assert find_tables(loaded) == find_tables(zoo), "other tables come back from its file"


def _grows(model: nn.Module, method: Method, sizes: dict[str, int]) -> bool:
    """Grow the tables of a model; return whether its method allows that."""
    before, why_not = find_tables(model), ""
    try:
        grow_(model, sizes, verbose=False)
    except UnsupportedTableError as error:
        why_not = str(error)
    if why_not:
        assert "merge_" in why_not, f"{method} refuses to grow without advice: {why_not}"
        assert find_tables(model) == before, "a table that cannot grow changed"
    return not why_not


def check_mode_and_dtype(method: Method) -> None:
    """Applying and merging keep the mode everywhere in a model, and its precision."""
    for training in (True, False):
        models: list[nn.Module] = [small_model(method)]
        where = None
        if not isinstance(method, SetsMethod):
            models += [Holder(nn.Embedding(N, D)), Holder(nn.EmbeddingBag(N, D))]
            where = partial(_is_not, "user")
        for model in models:
            model.double().train(training)
            apply_(model, method, where=where, verbose=False)
            assert {m.training for m in model.modules()} == {training}, "applying changed the mode"
            kinds = {p.dtype for p in model.parameters()} - {torch.float64}
            assert not kinds, f"not in the precision of the model: {kinds}"
            merge_(model, verbose=False)
            assert {m.training for m in model.modules()} == {training}, "merging changed the mode"


def check_cost(method: Method) -> None:
    """A step allocates nothing of a table's size, except the dense gradient of what is stored."""
    rows = 10_000
    schema, ids = Schema(tuple(Field(name=n, rows=rows) for n in "ab")), torch.randint(rows, (4, 2))
    models: list[tuple[nn.Module, Any]] = [
        (DCNv2(schema, dim=D, hidden=(8,), std=1.0), Dataset(schema, ids)[:])
    ]
    if not isinstance(method, SetsMethod):
        models += [
            (Holder(nn.Embedding(rows, D, padding_idx=0)), ids),
            (Holder(nn.EmbeddingBag(rows, D)), ids),
            (TableCollection(schema.fields, D, std=1.0), ids),
        ]
    for model, argument in models:
        apply_(model, method, verbose=False)
        with counting_large_tensors(rows) as made:
            loss = model(argument).square().sum()
            if loss.requires_grad:
                loss.backward()
        stored = [p for p in model.parameters() if p.numel() >= rows]
        assert len(made) <= len(stored), f"{made} for {len(stored)} stored weights"


# --- methods around training


def check_trains(method: TrainingMethod) -> None:
    """A run trains, and leaves a plain model without hooks that is worth what its history says."""
    model, history = _train(method)
    plain = start_model(RUN, _splits().train.schema, say=_silent)
    kinds = [type(module) for module in model.modules()]
    assert kinds == [type(module) for module in plain.modules()], "it leaves modules behind"
    assert list(model.state_dict()) == list(plain.state_dict()), "it leaves weights behind"
    hooked = [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]  # noqa: SLF001  # torch has no public list
    assert not hooked, "it leaves hooks behind: remove them in close()"
    assert history.best_epoch is not None
    kept = history.epochs[history.best_epoch - 1].valid
    assert evaluate(model, _splits().valid).overall == kept, "the best epoch was measured otherwise"
    others = set(history.reports) - {technique_name(method)}
    assert not others, f"it reports for others: {others}"
    try:
        json.dumps(history.reports)
    except TypeError as error:
        raise AssertionError(f"its report has more than plain values: {error}") from error


def check_resumes(method: Technique, stops: Sequence[int] = (2, 8)) -> None:
    """A run that was stopped in its first epoch and in its last one resumes to the same bits and report."""
    # what a method warns of is not at issue here
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        whole = _train(method)
        place = Path(folder) / "run"
        for advance in stops:
            with suppress(_StoppedError):
                _train(method, folder=place, resume=True, progress=_StopAt(advance))
                raise AssertionError("the run ended before it was stopped")
        again = _train(method, folder=place, resume=True)
    ours, theirs = again.model.state_dict(), whole.model.state_dict()
    same = list(ours) == list(theirs) and all(torch.equal(ours[k], theirs[k]) for k in theirs)
    assert same, "resumed, it has other weights: see state_dict()"
    assert again.history.reports == whole.history.reports, "resumed, its report is another"


# --- composition


def check_pair(first: Method, then: Method) -> None:
    """A pair that is allowed trains and merges, and one that is refused is refused with its reason."""
    reason = refusal(type(first), type(then))
    models: list[tuple[nn.Module, tuple[Any, ...]]] = [(small_model(first, then), (small_batch(),))]
    if not any(isinstance(method, SetsMethod) for method in (first, then)):
        models += [
            (Holder(nn.Embedding(N, D, padding_idx=3)), (IDS,)),
            (Holder(nn.EmbeddingBag(N, D, padding_idx=3)), (IDS, OFFSETS)),
        ]
    for model, arguments in models:
        apply_(model, first, verbose=False)
        if reason is None:
            _check_allowed(model, arguments, first, then)
            continue
        before, message = find_tables(model), ""
        try:
            apply_(model, then, verbose=False)
        except UnsupportedTableError as error:
            message = str(error)
        assert message, "the pair is declared as refused, and was applied"
        assert reason in message, f"the message does not give the reason: {message}"
        assert find_tables(model) == before, "a refused method changed a table"


def _sized(other: type[Method], shape: tuple[int, int]) -> Method | None:
    """Return a method with a size and counts for a table of this shape; None if it cannot be that small."""
    for shapes, share in ((SHAPES, 0.5), ([shape], 1.0)):
        with suppress(SettingsError):
            sized = other.for_share(shapes, share)
            if sized.unsuited(*shape) is None:
                has_counts = any(field.name == "counts" for field in fields(cast(Any, sized)))
                # how often an id was seen: a table must know
                return cast(Method, replace(cast(Any, sized), counts=7)) if has_counts else sized
    return None


def _check_both_orders(method: Method, other: type[Method]) -> None:
    after, before = _sized(other, method.shape_after(N, D)), _sized(other, (N, D))
    pairs = [(method, after), (before, method)]
    for first, then in [(a, b) for a, b in pairs if a is not None and b is not None]:
        try:
            check_pair(first, then)
        except AssertionError as error:
            names = f"{technique_name(first)}+{technique_name(then)}"
            raise AssertionError(f"{names}: {error}") from error


def _check_allowed(
    model: nn.Module, arguments: tuple[Any, ...], first: Method, then: Method
) -> None:
    changes = apply_(model, then, verbose=False)
    changed = [info for info in changes.after if len(info.methods) >= 2]
    assert changed, f"no table has both, but {[info.methods for info in changes.after]}"
    names = (type(first).__name__, type(then).__name__)
    last = changed[0].methods[-2:]
    assert tuple(text.partition("(")[0] for text in last) == names, f"the table has {last}"
    move_(model)
    if not (first.after_training or then.after_training):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        start = F.softplus(-model(*arguments)).mean()
        start.backward()
        optimizer.step()
        end = F.softplus(-model(*arguments)).mean()
        assert end.item() < start.item(), "a step does not lower the loss"
    before = model(*arguments)
    merge_(model, verbose=False)
    assert not merge_(model, verbose=False), "merged, something is left to merge"
    _assert_close(model(*arguments), before, "merged", tolerance=1e-5)


GENERAL: Sequence[Callable[[Any], None]] = (check_settings, check_texts, check_knobs, check_rank)
OF_TABLES: Sequence[Callable[[Any], None]] = (
    check_lookups,
    check_padding,
    check_weight,
    check_count,
    check_frozen,
    check_dtype,
    check_autocast,
    check_stack,
    check_share,
    check_shape_after,
)
OF_TRAINED_TABLES: Sequence[Callable[[Any], None]] = (check_learns, check_gradients)
OF_MODELS: Sequence[Callable[[Any], None]] = (
    *(check_model, check_mode_and_dtype, check_cost),
    check_grows,
)
AROUND_TRAINING: Sequence[Callable[[Any], None]] = (check_trains, check_resumes)


# --- what the checks use


class Holder(nn.Module):
    """A user's model with one table."""

    table: Any

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, *arguments: Tensor, **options: Tensor) -> Any:
        """Look rows up."""
        return self.table(*arguments, **options)


def lookups() -> dict[str, Call]:
    """Return every way to use a table: what makes it, and the arguments of a call."""
    weights = torch.linspace(-1.0, 1.0, len(IDS))

    def bag(**options: Any) -> Callable[[], nn.Module]:
        return lambda: nn.EmbeddingBag(N, D, **options)

    calls: dict[str, Call] = {}
    for mode in ("sum", "mean", "max"):
        padded = bag(mode=mode, padding_idx=3)
        last = bag(mode=mode, include_last_offset=True, padding_idx=3)
        calls |= {
            f"bag, {mode}": (bag(mode=mode), (IDS, OFFSETS), {}),
            f"bag, {mode} 2d": (bag(mode=mode), (IDS_2D,), {}),
            f"bag, {mode}, padding": (padded, (IDS, OFFSETS), {}),
            f"bag, {mode}, nothing but padding": (padded, (torch.full((2, 3), 3),), {}),
            f"bag, {mode}, last offset": (last, (IDS, LAST_OFFSET), {}),
        }
    return calls | {
        "bag, weights": (bag(mode="sum"), (IDS, OFFSETS), {"per_sample_weights": weights}),
        "bag, weights 2d": (
            bag(mode="sum", padding_idx=3),
            (IDS_2D,),
            {"per_sample_weights": weights.view(4, 2)},
        ),
        "embedding": (lambda: nn.Embedding(N, D), (IDS_2D,), {}),
        "embedding, padding": (lambda: nn.Embedding(N, D, padding_idx=3), (IDS_2D,), {}),
        "embedding, last row is padding": (lambda: nn.Embedding(N, D, padding_idx=-1), (IDS,), {}),
    }


def applied(method: Method, table: nn.Module | None = None) -> Holder:
    """Return a model whose table has the method, moved away from where the method started it."""
    model = Holder(nn.Embedding(N, D) if table is None else table)
    apply_(model, method, verbose=False)
    move_(model)
    return model


def move_(model: nn.Module, scale: float = 0.3) -> None:
    """Shift all weights at random, as training would; of plain tables, padding stays zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=scale)
        for module in model.modules():
            tables = module.tables() if isinstance(module, TableCollection) else [module]
            for table in tables:
                if isinstance(table, nn.Embedding) and table.padding_idx is not None:
                    table.weight[table.padding_idx] = 0.0


def small_model(*methods: Technique) -> RankingModel:
    """Return a model that all these methods can be applied to."""
    sets = any(isinstance(method, SetsMethod) for method in methods)
    model = (DCNv2 if sets else DeepFM)(SCHEMA, dim=D, hidden=(8,))
    move_(model)
    return model


def small_batch(rows: int = 16) -> Batch:
    """Return a batch in which some values are padding, and one row has nothing else."""
    table_fields = SCHEMA.table_fields
    ids = torch.cat([torch.randint(f.rows, (rows, f.max_length)) for f in table_fields], dim=1)
    for name in ("tags", "words"):
        ids[0, SCHEMA.slots[name]] = 0
        ids[1:3, SCHEMA.slots[name].start] = 0
    label = torch.randint(2, (rows,))
    return Dataset(SCHEMA, ids, torch.randn(rows, 1), label)[slice(None)]


@contextmanager
def counting_large_tensors(least: int) -> Iterator[list[str]]:
    """Note each new piece of memory of so many numbers or more, by the operation that made it."""
    made: list[str] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            del types
            result = func(*args, **(kwargs or {}))
            given = {_memory(a) for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)}
            for tensor in tree_leaves(result):
                is_large = isinstance(tensor, Tensor) and tensor.numel() >= least
                if is_large and _memory(tensor) not in given:
                    made.append(f"{func} {tuple(tensor.shape)}")
            return result

    with Counter():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        yield made


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _is_not(field: str, info: TableInfo) -> bool:
    return info.field != field


def _assert_close(found: Tensor, expected: Tensor, what: str, *, tolerance: float = 0.0) -> None:
    # torch's usual tolerances where none is given
    both: dict[str, Any] = {"atol": tolerance, "rtol": tolerance} if tolerance else {}
    assert_close(found, expected, msg=lambda text: f"{what}: {text}", **both)


def _backward(method: Method, loss: Tensor) -> None:
    """Send a gradient back, unless the method's tables are not trained."""
    if method.after_training:
        assert not loss.requires_grad, "a table that is not trained gets a gradient"
    else:
        loss.backward()


def _pooled(table: nn.Module, field: Field, ids: Tensor) -> Tensor:
    """Return one row per row of the batch, with loops."""
    rows = []
    for values in ids[:, SCHEMA.slots[field.name]]:
        kept = [i for i in values if field.kind != "multi" or i != 0]
        total = sum((table(i) for i in kept), start=torch.zeros(D, dtype=torch.float64))
        rows.append(total / max(len(kept), 1) if field.pooling == "mean" else total)
    return torch.stack(rows)


@dataclass(frozen=True)
class _Probe(Method):
    """A method that notes the shapes it is given."""

    seen: list[tuple[int, int]]

    def wrap(self, base: AnyTable) -> Table:
        self.seen.append((base.num_embeddings, base.embedding_dim))
        return _ProbeTable(self, base)


class _ProbeTable(Table):
    def rows(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.inner(ids))


@cache
def _splits() -> Splits:
    return generate(cast(SyntheticLog, RUN.data))


def _train(method: Technique, **options: Any) -> Trained:
    # a checkpoint after each step, so that a stopped run resumes from the last one
    training = replace(RUN.training, checkpoint_minutes=1e-9)
    settings = replace(RUN, methods=(method,), training=training)
    train, valid, _ = _splits()
    usual: dict[str, Any] = {"progress": False, "say": _silent}
    return train_model(settings, train, valid, **usual | options)


class _StoppedError(Exception):
    """Stands for whatever ends a training early."""


class _StopAt(Silence):
    """Stops training at a call of the progress bar."""

    def __init__(self, advance: int) -> None:
        self.left = advance

    def advance(self, rows: int) -> None:
        del rows
        self.left -= 1
        if self.left == 0:
            raise _StoppedError


def _silent(line: str) -> None:
    del line
