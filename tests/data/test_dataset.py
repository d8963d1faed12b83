import numpy as np
import pytest
import torch
from capabilities import needs_cuda
from hypothesis import given
from hypothesis import strategies as st

from rarebit import Dataset
from rarebit.data import Field, Schema
from rarebit.data.order import batch_bounds, shuffled_order
from rarebit.errors import DataError, SettingsError

ONE = Schema((Field(name="user", rows=4),))
ALL = Schema(
    (
        Field(name="user", rows=4),
        Field(name="age", kind="numeric"),
        Field(name="tags", kind="multi", rows=5, max_length=2),
        Field(name="price", kind="numeric"),
        Field(name="item", rows=6),
    )
)
IDS = [[0, 1, 0, 5], [3, 4, 2, 1], [2, 0, 0, 0]]
NUMBERS = [[0.5, 10.0], [-1.0, 20.0], [2.5, 30.0]]
COLUMNS = {
    "user": [0, 3, 2],
    "age": [0.5, -1.0, 2.5],
    "tags": [[1, 0], [4, 2], [0, 0]],
    "price": [10.0, 20.0, 30.0],
    "item": [5, 1, 0],
}


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1.0]], "ids must be integers, got torch.float64; floats cannot hold large ids exactly"),
        (torch.tensor([[1.0]]), "ids must be integers, got torch.float32"),
        (torch.tensor([[1j]]), "ids must hold integers or floats, got torch.complex64"),
        ([[True]], "ids must be integers, got torch.bool"),
        ([["anna"]], "ids must hold integers or floats, got <U4; encode strings as ids first"),
        ([[None]], "ids must hold integers or floats, got object"),
        ([1, 2], "ids must be (rows, slots), got the shape (2,)"),
        ([[[1]]], "ids must be (rows, slots), got the shape (1, 1, 1)"),
        (5, "ids must be (rows, slots), got the shape ()"),
        ([[1, 2]], "the schema has 1 slots, got ids with 2 columns"),
        (np.zeros((0, 1), int), "a data set needs at least one row, got none"),
        ([[2**31]], "ids must fit 32 bits, got 2147483648"),
        ([[-(2**32) + 3]], "ids must fit 32 bits, got -4294967293"),
        (np.array([[2**63]], np.uint64), "ids must fit 32 bits"),
    ],
)
def test_wrong_ids_are_refused(ids, message):
    with pytest.raises(DataError) as caught:
        Dataset(ONE, ids)
    assert message in str(caught.value)


@pytest.mark.parametrize(("bad", "value"), [(4, 4), (-1, -1), (2**31 - 1, 2147483647)])
def test_the_first_id_out_of_range_is_named(bad, value):
    ids = torch.ones(7, 1, dtype=torch.int64)
    ids[3], ids[5] = bad, 99
    message = rf"field 'user' has a table of 4 rows, so ids lie in \[0, 3\]; row 3 holds {value}\."
    with pytest.raises(DataError, match=message):
        Dataset(ONE, ids)


def test_range_is_checked_in_every_slot_of_every_field():
    Dataset(ALL, [[3, 4, 4, 5]], [[0.0, 0.0]])
    for slot, name in enumerate(["user", "tags", "tags", "item"]):
        ids = torch.tensor(IDS)
        ids[1, slot] = 6
        with pytest.raises(DataError, match=f"field '{name}' has a table of .* row 1 holds 6"):
            Dataset(ALL, ids, NUMBERS)


@needs_cuda
def test_range_is_checked_on_the_gpu():
    ids = torch.ones(7, 1, dtype=torch.int64, device="cuda")
    assert Dataset(ONE, ids).device.type == "cuda"
    ids[3], ids[5] = 4, 99
    with pytest.raises(DataError, match=r"field 'user' has a table of 4 rows.*row 3 holds 4"):
        Dataset(ONE, ids)


@given(st.integers(2**24, 2**31 - 2))
def test_large_ids_stay_exact(value):
    schema = Schema((Field(name="user", rows=2**31 - 1), Field(name="age", kind="numeric")))
    data = Dataset.from_columns({"user": [value, 0], "age": [1.5, 2.5]}, schema=schema)
    assert data.ids.dtype == torch.int32
    assert data[:]["user"].tolist() == [value, 0]


@pytest.mark.parametrize("dtype", ["u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", ">i4", ">u8"])
def test_any_integer_type_holds_ids(dtype):
    assert Dataset(ONE, np.array([[1], [3]], dtype)).ids.tolist() == [[1], [3]]
    data = Dataset.from_columns({"user": np.array([1, 3], dtype)})
    assert (data.ids.tolist(), data.schema["user"].rows) == ([[1], [3]], 4)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.int16])
def test_any_integer_tensor_holds_ids(dtype):
    assert Dataset(ONE, torch.tensor([[1], [3]]).to(dtype)).ids.tolist() == [[1], [3]]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f8", np.longdouble, "?", "i8"])
def test_any_number_can_be_numeric(dtype):
    schema = Schema((Field(name="x", kind="numeric"),))
    data = Dataset.from_columns({"x": np.array([1, 0], dtype)}, schema=schema)
    assert (data.numeric.tolist(), data.numeric.dtype) == ([[1.0], [0.0]], torch.float32)


def test_a_read_only_array_is_copied():
    ids = np.array([[1], [3]], np.int32)
    ids.setflags(write=False)
    data = Dataset(ONE, ids)
    data.ids[0] = 2
    assert ids.tolist() == [[1], [3]]


def test_arrays_of_another_shape_are_refused():
    with pytest.raises(DataError, match=r"numeric must have the shape \(3, 2\), got \(3, 1\)"):
        Dataset(ALL, IDS, [[1.0], [2.0], [3.0]])
    with pytest.raises(DataError, match=r"label must have the shape \(3,\), got \(2,\)"):
        Dataset(ALL, IDS, NUMBERS, [0, 1])
    with pytest.raises(DataError, match=r"probability must have the shape \(3,\), got \(3, 1\)"):
        Dataset(ALL, IDS, NUMBERS, probability=[[0.1], [0.2], [0.3]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_numbers_that_are_not_finite_name_their_row(bad):
    numbers = np.array(NUMBERS)
    numbers[1, 0] = numbers[2, 1] = bad
    with pytest.raises(
        DataError, match=r"numeric must be finite, got \[.*\] in row 1; fill or drop"
    ):
        Dataset(ALL, IDS, numbers)
    with pytest.raises(DataError, match=r"label must be finite, got .* in row 2"):
        Dataset(ALL, IDS, NUMBERS, [0, 1, bad])


def test_what_is_not_given_is_zero():
    data = Dataset(ALL, IDS)
    assert (data.numeric.tolist(), data.label.tolist()) == ([[0.0, 0.0]] * 3, [0.0] * 3)
    assert data.probability is None


def test_kinds_are_inferred_from_columns():
    data = Dataset.from_columns(COLUMNS, label=[0, 1, 0])
    assert data.schema == ALL
    assert data.ids.tolist() == IDS
    assert data.numeric.tolist() == NUMBERS
    assert data.label.tolist() == [0.0, 1.0, 0.0]


def test_columns_are_ordered_by_the_schema():
    shuffled = dict(reversed(COLUMNS.items()))
    assert Dataset.from_columns(shuffled, schema=ALL).ids.tolist() == IDS


def test_numbers_alone_make_a_data_set():
    data = Dataset.from_columns({"age": [0.5, 1.5]}, label=[0, 1])
    assert (len(data), data.ids.shape, data.counts()) == (2, (2, 0), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": None}, "the column 'user' is missing"),
        ({"user": None, "users": [0, 1, 2]}, "'user' is missing; did you mean 'users'?"),
        ({"prices": [1.0] * 3}, "'prices' is not in the schema; did you mean 'price'?"),
        (
            {"user": [0, 1]},
            "all columns must have the same number of rows, got {'user': 2, 'age': 3",
        ),
        ({"user": [0.0, 1.0, 2.0]}, "'user' is categorical: ids are integers, got torch.float64"),
        ({"user": [True, False, True]}, "'user' is categorical: ids are integers, got torch.bool"),
        ({"user": ["a", "b", "c"]}, "the column 'user' must hold integers or floats, got <U1"),
        ({"user": [[0], [1], [2]]}, "'user' is categorical: one id per row, got (3, 1)"),
        (
            {"user": torch.tensor(3)},
            "the column 'user' needs one value per row, got a single number",
        ),
        ({"tags": [1, 2, 3]}, "'tags' is multi-valued: ids (n, 2), got (3,); fill shorter rows"),
        ({"tags": [[1] * 3] * 3}, "'tags' is multi-valued: ids (n, 2), got (3, 3)"),
        ({"tags": [[0.5] * 2] * 3}, "'tags' is multi: ids are integers, got torch.float64"),
        ({"age": [[1.0], [2.0], [3.0]]}, "'age' is numeric: one number per row, got 2 axes"),
        ({"age": [1.0, 2.0, float("nan")]}, "numeric must be finite, got [nan, 30.0] in row 2"),
        ({"item": [5, 6, 0]}, "field 'item' has a table of 6 rows"),
    ],
)
def test_wrong_columns_are_refused(change, message):
    columns = {k: v for k, v in (COLUMNS | change).items() if v is not None}
    with pytest.raises(DataError) as caught:
        Dataset.from_columns(columns, schema=ALL)
    assert message in str(caught.value)


def test_inference_refuses_what_is_no_column():
    with pytest.raises(DataError, match=r"'user' is categorical: ids are integers, got torch.bool"):
        Dataset.from_columns({"user": [True, False]})
    with pytest.raises(DataError, match=r"field 'user' has a table of 1 rows.*row 0 holds -1"):
        Dataset.from_columns({"user": [-1, -2]})
    with pytest.raises(DataError, match="a data set needs at least one row, got none"):
        Dataset.from_columns({"user": np.zeros(0, int)})
    with pytest.raises(SettingsError, match="a schema needs at least one field, got none"):
        Dataset.from_columns({})


def test_a_batch_gives_each_field_by_name():
    batch = Dataset(ALL, IDS, NUMBERS, [0, 1, 0])[torch.tensor([2, 1])]
    assert len(batch) == 2
    assert batch["user"].tolist() == [2, 3]
    assert batch["tags"].tolist() == [[0, 0], [4, 2]]
    assert batch["item"].tolist() == [0, 1]
    assert batch["age"].tolist() == [2.5, -1.0]
    assert batch["price"].tolist() == [30.0, 20.0]
    assert batch.label.tolist() == [0.0, 1.0]
    with pytest.raises(DataError, match=r"no field 'usr'; did you mean 'user'\?"):
        batch["usr"]


def test_a_multi_valued_field_of_length_one_keeps_its_axis():
    schema = Schema((Field(name="tags", kind="multi", rows=5, max_length=1),))
    assert Dataset(schema, [[3], [0]])[:]["tags"].tolist() == [[3], [0]]


def test_batches_follow_the_order():
    data = Dataset(ONE, [[0], [1], [2], [3], [3]], label=[0, 1, 0, 1, 1])
    plain = [batch["user"].tolist() for batch in data.batches(2)]
    ordered = [b["user"].tolist() for b in data.batches(2, torch.tensor([4, 3, 2, 1, 0]))]
    assert plain == [[0, 1], [2, 3, 3]]
    assert ordered == [[3, 3], [2, 1, 0]]


@given(st.lists(st.tuples(*[st.integers(0, high) for high in (3, 4, 4, 5)]), min_size=1))
def test_counts_equal_a_naive_count_without_padding(rows):
    counts = Dataset(ALL, [list(row) for row in rows]).counts()
    tags = [tag for row in rows for tag in row[1:3]]
    assert counts["user"].tolist() == [sum(row[0] == i for row in rows) for i in range(4)]
    assert counts["tags"].tolist() == [0] + [tags.count(i) for i in range(1, 5)]
    assert counts["item"].tolist() == [sum(row[3] == i for row in rows) for i in range(6)]


def test_moving_keeps_everything():
    data = Dataset(ALL, IDS, NUMBERS, [0, 1, 0], probability=[0.1, 0.9, 0.2])
    assert data.to("cpu") is data
    moved = data.to("meta")
    assert moved.device.type == "meta"
    assert (moved.schema, len(moved), moved.num_bytes) == (data.schema, 3, data.num_bytes)
    shapes = [(3, 4), (3, 2), (3,), (3,)]
    arrays = [moved.ids, moved.numeric, moved.label, moved.probability]
    assert [(a.shape, a.device.type) for a in arrays] == [(shape, "meta") for shape in shapes]
    assert Dataset(ONE, [[1]]).to("meta").probability is None


@needs_cuda
def test_moving_to_the_gpu_and_back_keeps_every_value():
    data = Dataset(ALL, IDS, NUMBERS, [0, 1, 0], probability=[0.1, 0.9, 0.2])
    back = data.to("cuda").to("cpu")
    assert data.to("cuda").to("cuda").device.type == "cuda"
    for name in ("ids", "numeric", "label", "probability"):
        assert torch.equal(getattr(back, name), getattr(data, name))


def test_num_bytes_is_the_sum_of_the_arrays():
    data = Dataset(ALL, IDS, NUMBERS, [0, 1, 0])
    assert data.num_bytes == 3 * (4 * 4 + 2 * 4 + 4)
    assert Dataset(ONE, [[1]], label=[1], probability=[0.5]).num_bytes == 4 + 4 + 4


@given(st.integers(1, 200), st.integers(1, 50))
def test_batches_cover_every_row_once_in_order(num_rows, batch_size):
    bounds = batch_bounds(num_rows, batch_size)
    assert [row for start, stop in bounds for row in range(start, stop)] == list(range(num_rows))
    sizes = [stop - start for start, stop in bounds]
    assert all(size == batch_size for size in sizes[:-1])
    assert 1 < sizes[-1] <= batch_size + 1 or num_rows == 1


@given(st.integers(1, 60), st.integers(0, 2**63 - 1), st.integers(1, 1000))
def test_an_epochs_order_is_a_permutation_of_seed_and_epoch_only(num_rows, seed, epoch):
    order = shuffled_order(num_rows, seed=seed, epoch=epoch)
    assert sorted(order.tolist()) == list(range(num_rows))
    torch.manual_seed(seed % 1000)
    torch.rand(3)
    assert torch.equal(order, shuffled_order(num_rows, seed=seed, epoch=epoch))


def test_orders_differ_between_seeds_and_epochs():
    pairs = [(seed, epoch) for seed in (0, 1, 2, 2**32, 2**32 + 1) for epoch in (1, 2, 3)]
    orders = {tuple(shuffled_order(50, seed=s, epoch=e).tolist()) for s, e in pairs}
    assert len(orders) == len(pairs)


def test_shuffling_leaves_the_global_random_state_alone():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    shuffled_order(9, seed=0, epoch=1)
    assert torch.equal(torch.rand(2), wanted)
