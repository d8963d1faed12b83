"""The estimate against numbers worked by hand and against what torch really allocates."""

import re

import pytest
import torch
from capabilities import needs_cuda
from torch import nn

from rarebit import Dataset, Hashing, LowRank, Training, apply_, fit, optimizer
from rarebit.data import Field, Schema
from rarebit.errors import NotEnoughMemoryError, TrainingError
from rarebit.models.deepfm import DeepFM
from rarebit.training.fit import Silence
from rarebit.training.memory import MemoryEstimate, available_memory, estimate_memory

CPU = torch.device("cpu")
SCHEMA = Schema((Field(name="user", rows=100), Field(name="item", rows=50)))


class Tiny(nn.Module):
    """Two tables of 100 x 4 and 50 x 4 float32, a layer of 4 + 1 weights, and 9 buffered numbers."""

    def __init__(self, *, sparse=False, device=None):
        super().__init__()
        self.user = nn.Embedding(100, 4, sparse=sparse, device=device)
        self.item = nn.Embedding(50, 4, sparse=sparse, device=device)
        self.layer = nn.Linear(4, 1, device=device)
        self.register_buffer("seen", torch.zeros(9, device=device))

    def forward(self, batch):
        return self.layer(self.user(batch["user"]) * self.item(batch["item"]))[:, 0]


TABLES = 150 * 4 * 4
NETWORK = 5 * 4
BUFFERS = 9 * 4
WEIGHTS = TABLES + NETWORK


def some_data(rows=20):
    ids = torch.stack([torch.arange(rows) % 100, torch.arange(rows) % 50], dim=1)
    return Dataset(SCHEMA, ids=ids, label=torch.arange(rows) % 2)


DATA = 20 * (2 + 1) * 4


def estimate(model=None, valid=None, given=None, **settings):
    return estimate_memory(
        model or Tiny(), some_data(), valid, settings=Training(**settings), optimizer=given
    )


@pytest.mark.parametrize(
    ("settings", "gradients", "state"),
    [
        ({}, WEIGHTS, 2 * WEIGHTS),
        ({"optimizer": "sgd"}, WEIGHTS, 0),
        ({"optimizer": "sgd", "momentum": 0.9}, WEIGHTS, WEIGHTS),
        ({"optimizer": "adagrad"}, WEIGHTS, WEIGHTS),
        # by rows: a batch of 8 looks 16 rows of 4 numbers up
        ({"tables": "rowwise", "batch_size": 8}, 16 * 4 * 4 + NETWORK, 2 * WEIGHTS),
        # no more than the 20 rows there are
        ({"tables": "rowwise", "optimizer": "sgd"}, 40 * 4 * 4 + NETWORK, 0),
        (
            {"tables": "rowwise", "optimizer": "sgd", "momentum": 0.9, "batch_size": 8},
            16 * 4 * 4 + NETWORK,
            WEIGHTS,
        ),
        (
            {"tables": "rowwise", "optimizer": "adagrad", "batch_size": 8},
            16 * 4 * 4 + NETWORK,
            150 * 4 + NETWORK,
        ),
    ],
)
def test_each_mode_by_hand(settings, gradients, state):
    found = estimate(**settings)
    assert (found.tables, found.network) == (TABLES, NETWORK + BUFFERS)
    assert (found.gradients, found.optimizer_state) == (gradients, state)
    assert (found.train_data, found.valid_data, found.data) == (DATA, 0, DATA)
    assert (found.best_weights, found.average_weights) == (0, 0)
    assert found.total == TABLES + NETWORK + BUFFERS + gradients + state + DATA
    assert found.to_allocate == gradients + state  # the model and the data are there


def test_validation_data_bring_a_copy_of_the_best_weights():
    found = estimate(valid=some_data(10))
    assert found.valid_data == DATA // 2
    assert found.best_weights == WEIGHTS + BUFFERS
    assert found.to_allocate == 3 * WEIGHTS + WEIGHTS + BUFFERS


def test_averages_are_a_copy_and_four_bytes_a_row_by_rows():
    assert estimate(ema_decay=0.9).average_weights == WEIGHTS
    assert estimate(ema_epochs=2.0).average_weights == WEIGHTS
    assert estimate(ema_decay=0.9, tables="rowwise").average_weights == WEIGHTS + 150 * 4


def test_frozen_weights_have_no_gradient_and_no_state():
    model = Tiny()
    model.user.requires_grad_(requires_grad=False)
    found = estimate(model, ema_decay=0.9)
    trained = WEIGHTS - 100 * 4 * 4
    assert (found.tables, found.gradients) == (TABLES, trained)
    assert (found.optimizer_state, found.average_weights) == (2 * trained, trained)


def test_tables_are_as_they_were_after_an_estimate_by_rows():
    model = Tiny()
    model.user.sparse = True
    estimate(model, tables="rowwise")
    assert (model.user.sparse, model.item.sparse) == (True, False)


def test_models_of_ours_look_each_slot_up_once_a_width():
    model = DeepFM(SCHEMA, dim=4, hidden=(3,))
    found = estimate(model, tables="rowwise", batch_size=8)
    assert found.tables == 150 * (4 + 1) * 4
    network = found.network - sum(buffer.nbytes for buffer in model.buffers())
    assert found.gradients == 8 * 2 * (4 + 1) * 4 + network


def test_methods_shrink_the_estimate():
    model = Tiny()
    apply_(model, Hashing(buckets=10), where=lambda t: t.name == "user", verbose=False)
    apply_(model, LowRank(rank=2), where=lambda t: t.name == "item", verbose=False)
    found = estimate(model, tables="rowwise", optimizer="adagrad", batch_size=8)
    right = 2 * 4 * 4  # a small factor that every lookup shares, with a dense gradient
    assert found.tables == 10 * 4 * 4 + 50 * 2 * 4 + right
    assert found.optimizer_state == (10 + 50) * 4 + right + NETWORK
    assert found.gradients == 8 * 2 * (4 + 2) * 4 + right + NETWORK


def train_once(model, made):
    batch = some_data()[:8]
    model(batch).square().sum().backward()
    made.step()


def state_bytes(made):
    """Return the bytes of all state but the counts of steps."""
    tensors = [t for state in made.state.values() for t in state.values() if torch.is_tensor(t)]
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())


BUILDERS = {
    "adam": torch.optim.Adam,
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "adamw": torch.optim.AdamW,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", BUILDERS)
def test_torchs_own_optimizers_take_what_was_estimated(name):
    model = Tiny()
    made = BUILDERS[name](model.parameters())
    before = estimate(model, given=made)
    train_once(model, made)
    counts = sum(t.nbytes for s in made.state.values() for t in s.values() if t is not None)
    counts -= state_bytes(made)
    steps_told = counts if name == "adagrad" else 0  # torch makes Adagrad's state at once
    assert before.optimizer_state == state_bytes(made) + steps_told
    assert before.gradients == sum(p.grad.nbytes for p in model.parameters())
    after = estimate(model, given=made)
    assert after.optimizer_state == state_bytes(made) + counts
    assert after.to_allocate == after.gradients


def test_sparse_adam_takes_what_was_estimated():
    model = Tiny(sparse=True)
    made = torch.optim.SparseAdam([model.user.weight, model.item.weight])
    found = estimate(model, given=made, batch_size=8)
    train_once(model, made)
    assert found.optimizer_state == state_bytes(made) == 2 * TABLES
    by_rows = [model.user.weight.grad._values(), model.item.weight.grad._values()]
    assert found.gradients == sum(values.nbytes for values in by_rows) + NETWORK


@pytest.mark.parametrize("kind", ["adam", "sgd", "adagrad"])
@pytest.mark.parametrize("mode", ["dense", "rowwise"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_optimizers_of_ours_take_what_was_estimated(kind, mode, momentum):
    model = Tiny()
    from_settings = estimate(model, optimizer=kind, tables=mode, momentum=momentum, batch_size=8)
    made = optimizer(model, kind=kind, tables=mode, momentum=momentum)
    found = estimate(model, given=made, batch_size=8)
    assert found.gradients == from_settings.gradients
    train_once(model, made)
    assert from_settings.optimizer_state == state_bytes(made)
    if "optimizer_state" not in found.there:
        assert found.optimizer_state == state_bytes(made)


def test_sparse_momentum_is_counted_by_what_it_stores():
    model = Tiny(sparse=True)
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_once(model, made)
    assert estimate(model, given=made).optimizer_state == 2 * 8 * 4 * 4 + NETWORK


def test_an_unknown_optimizer_is_named():
    model = Tiny()
    found = estimate(model, given=torch.optim.RMSprop(model.parameters()))
    assert (found.optimizer_state, found.unknown_optimizer) == (0, "RMSprop")
    assert re.search(r"\n  optimizer state +unknown  of RMSprop$", str(found))


def test_fifty_million_rows_on_the_meta_device_cost_nothing_to_estimate():
    model = nn.Sequential(nn.Embedding(50_000_000, 16, device="meta"))
    settings = Training(tables="rowwise", optimizer="adagrad", ema_decay=0.999)
    found = estimate_memory(model, some_data(), settings=settings)
    assert (found.tables, found.optimizer_state) == (3_200_000_000, 200_000_000)
    assert found.average_weights == 3_400_000_000
    assert found.gradients == 40 * 16 * 4
    assert found.available is None
    found.check()
    assert found.to_allocate == found.total  # nothing is there on the meta device, nor the data


def test_fifty_million_rows_that_share_one_row_of_storage():
    table = nn.Embedding(1, 16)
    table.weight = nn.Parameter(torch.zeros(1, 16).expand(50_000_000, 16))
    found = estimate_memory(nn.Sequential(table), some_data(), some_data())
    assert found.tables == found.gradients == found.best_weights == 3_200_000_000
    assert found.optimizer_state == 6_400_000_000


def test_the_text_is_aligned_and_sorted_and_leaves_nothings_out():
    found = MemoryEstimate(
        device=CPU,
        tables=3_200_000_000,
        network=1_500_000,
        optimizer_state=6_400_000_000,
        train_data=900,
        there=frozenset({"tables", "train_data"}),
        available=20_000_000_000,
    )
    assert str(found).splitlines() == [
        "memory on cpu: 9.6 GB plus activations, 6.4 GB of it to allocate, 20.0 GB free",
        "  optimizer state  6.4 GB",
        "  tables           3.2 GB  there already",
        "  network          1.5 MB",
        "  training data     900 B  there already",
    ]


def test_an_estimate_of_this_machine_says_what_is_free():
    found = estimate()
    assert found.available is None or found.available > 0
    assert ("unknown" in str(found)) is (found.available is None)
    found.check()


HELP = {
    "tables": "a smaller dim, Hashing or LowRank make the tables smaller",
    "network": "a smaller network helps",
    "gradients": 'gradients, 2.0 GB: tables="rowwise" keeps the gradients of a batch only',
    "optimizer_state": 'tables="rowwise" with optimizer="adagrad" keeps 4 bytes per row',
    "train_data": "training data, 2.0 GB: keep the data elsewhere",
    "valid_data": "validate on fewer rows, or keep the data elsewhere",
    "best_weights": "copy of the best weights, 2.0 GB: valid=None keeps no copy",
    "average_weights": "averaged weights, 2.0 GB: ema_decay=None and ema_epochs=None keep no averages",
}


@pytest.mark.parametrize(("part", "advice"), HELP.items())
def test_what_does_not_fit_is_refused_with_the_largest_part_and_what_helps(part, advice):
    parts = dict.fromkeys(HELP, 100_000_000) | {part: 2_000_000_000}
    found = MemoryEstimate(device=CPU, available=2_600_000_000, **parts)
    beginning = (
        "training would allocate 2.7 GB on cpu, where 2.6 GB are free; the largest part is the "
    )
    with pytest.raises(NotEnoughMemoryError, match=re.escape(beginning) + ".*" + re.escape(advice)):
        found.check()


def test_the_part_to_save_on_is_one_that_is_not_there_yet():
    there = frozenset({"tables"})
    found = MemoryEstimate(device=CPU, tables=9, gradients=5, there=there, available=4)
    with pytest.raises(TrainingError, match=r"5 B on cpu, .* part is the gradients, 5 B"):
        found.check()


def test_what_just_fits_is_not_refused():
    MemoryEstimate(device=CPU, gradients=5, available=5).check()
    MemoryEstimate(device=CPU, gradients=5, available=None).check()


@pytest.fixture
def machine(tmp_path):
    """A machine with 8 MiB available and no control groups."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    text = "MemTotal:  16384 kB\nMemFree:  1 kB\nMemAvailable:    8192 kB\n"
    (tmp_path / "proc" / "meminfo").write_text(text)
    return tmp_path


def put_in_group(machine, line, files):
    (machine / "proc" / "self" / "cgroup").write_text(line)
    for name, text in files.items():
        path = machine / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def free_on(machine):
    return available_memory(CPU, proc=machine / "proc", control_groups=machine / "groups")


def test_available_memory_of_the_system(machine):
    assert free_on(machine) == 8192 * 1024


def test_unknown_without_proc(tmp_path):
    assert available_memory(CPU, proc=tmp_path, control_groups=tmp_path) is None
    (tmp_path / "meminfo").write_text("MemTotal:  16384 kB\n")
    assert available_memory(CPU, proc=tmp_path, control_groups=tmp_path) is None


def test_control_groups_of_version_2_limit_it(machine):
    stat = "anon 1\nfile 9\ninactive_file 50\nactive_file 7\n"
    files = {"memory.max": "1000\n", "memory.current": "300\n", "memory.stat": stat}
    put_in_group(machine, "0::/\n", files)
    assert free_on(machine) == 1000 - 300 + 50


def test_the_tightest_group_on_the_way_to_the_root_counts(machine):
    files = {
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "10\n",
        "a/memory.max": "500\n",
        "a/memory.current": "100\n",
        "memory.max": "5000\n",
        "memory.current": "4000\n",
    }
    put_in_group(machine, "0::/../a/b\n", files)
    assert free_on(machine) == 400


def test_control_groups_of_version_1_limit_it(machine):
    stat = "inactive_file 1\ntotal_inactive_file 20\n"
    files = {
        "memory/memory.limit_in_bytes": "1000\n",
        "memory/memory.usage_in_bytes": "300\n",
        "memory/memory.stat": stat,
        "cpu/memory.limit_in_bytes": "1\n",
    }
    put_in_group(machine, "3:cpu,cpuacct:/\n2:blkio,memory:/docker/x\n0::/\n", files)
    assert free_on(machine) == 1000 - 300 + 20


def test_an_unlimited_group_of_version_1_leaves_what_the_system_has(machine):
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "300\n",
    }
    put_in_group(machine, "2:memory:/\n", files)
    assert free_on(machine) == 8192 * 1024


def test_a_group_above_its_limit_leaves_nothing(machine):
    put_in_group(machine, "0::/\n", {"memory.max": "10", "memory.current": "30"})
    assert free_on(machine) == 0


@needs_cuda
def test_memory_that_torch_holds_unused_is_available():
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    before = available_memory(device)
    held = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    during = available_memory(device)
    del held
    after = available_memory(device)
    assert before - during >= 1 << 28
    assert after - during == 1 << 28


@needs_cuda
def test_data_elsewhere_is_to_be_allocated():
    model = Tiny().cuda()
    found = estimate(model, optimizer="sgd")
    assert "train_data" not in found.there
    assert found.to_allocate == WEIGHTS + DATA
    there = estimate_memory(model, some_data().to("cuda:0"), settings=Training(optimizer="sgd"))
    assert there.to_allocate == WEIGHTS


def test_a_checkpoint_copies_weights_best_weights_state_and_averages():
    model = nn.Sequential(nn.Embedding(10, 2))  # 80 bytes
    settings = Training(ema_decay=0.9)
    with_valid = estimate_memory(
        model, some_data(), some_data(), settings=settings, checkpoints=True
    )
    assert with_valid.checkpoint == 80 + 80 + 160 + with_valid.average_weights
    assert (
        estimate_memory(model, some_data(), settings=Training(), checkpoints=True).checkpoint
        == 80 + 160
    )
    assert estimate_memory(model, some_data(), some_data(), settings=settings).checkpoint == 0


@needs_cuda
def test_data_that_does_not_fit_on_the_gpu_comes_batch_by_batch():
    rows = 20_000_000  # 240 MB
    generator = torch.Generator().manual_seed(0)
    data = Dataset.from_columns(
        {
            "user": torch.randint(100, (rows,), generator=generator, dtype=torch.int32),
            "item": torch.randint(100, (rows,), generator=generator, dtype=torch.int32),
        },
        label=torch.randint(2, (rows,), generator=generator).float(),
    )
    lines = []

    class Lines(Silence):
        def say(self, line):
            lines.append(line)

    model = DeepFM(data.schema, dim=2, hidden=(4,)).cuda()
    some = data[slice(200_000)]
    small = Dataset(data.schema, some.ids, None, some.label)
    fit(model, small, epochs=1, batch_size=1 << 16, progress=False)  # loads what CUDA loads late
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - (220 << 20), dtype=torch.uint8, device="cuda")
    fit(model, data, epochs=1, batch_size=1 << 16, progress=Lines())
    del filler
    torch.cuda.empty_cache()
    assert "the training data does not fit on cuda:0: copied batch by batch" in lines
