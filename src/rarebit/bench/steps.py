"""Training steps with a technique, against the same step without.

Unless a bench says otherwise, all variants train DeepFM in float32 from the same seed, on a log of Criteo's shape
(39 fields, 967,795 values with a row each): width 16, two layers of 400, lazy Adam, batch size 4096, as `fit`
trains it. A measured unit is one step, including getting its batch. `bytes` are those of the tables' weights and
optimizer state.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rarebit.bench._frame import BenchResult, Say, compare, measure, ratios
from rarebit.data.dataset import Batch, Dataset
from rarebit.data.order import shuffled_order
from rarebit.data.synthetic import SyntheticLog, generate
from rarebit.ema import EMA
from rarebit.machine import OtherLoad
from rarebit.methods.forgetting import forget_
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.methods.mlet import MLET
from rarebit.methods.multi_embedding import MultiEmbedding
from rarebit.methods.shrinkage import Shrinkage
from rarebit.methods.tail import Tail
from rarebit.models import build_model, model_class, model_names
from rarebit.models.deepfm import DeepFM
from rarebit.pruning.pep import PEP, set_threshold_
from rarebit.research.row_rate import RowRate
from rarebit.row_gradients.seam import RowGradients, sum_losses
from rarebit.tables.apply import apply_
from rarebit.tables.table import Method
from rarebit.training.optimizers import TableMode, optimizer
from rarebit.training.step import TrainingStep
from rarebit.training.together import StackedStep

ROWS, BATCH_SIZE, SMALL_BATCH = 204_800, 4096, 1024
DIM, HIDDEN, LR = 16, (400, 400), 1e-3
DECAY = 0.999
"""Of the average of weights."""
EPOCH = 1_000_000
"""Rows of an epoch between two forgettings."""
NUM_SETS = 10
PEP_INIT = -5.0
"""A threshold of 0.0067, below which half of the entries start."""
PEP_RISE = 1e-6
"""How much the given threshold rises per step."""


def criteo_log(rows: int = ROWS) -> Dataset:
    """Return the training rows of a generated log of Criteo's shape."""
    return generate(SyntheticLog(preset="criteo", rows=rows)).train


def sliced(data: Dataset, batch_size: int) -> Iterator[Batch]:
    """Yield batches as `fit` does, epoch after epoch."""
    for epoch in itertools.count(1):
        yield from data.batches(batch_size, shuffled_order(len(data), seed=0, epoch=epoch))


class NextStep:
    """A training step as in `fit`, which gets its own batches: one call, one step."""

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        batch_size: int = BATCH_SIZE,
        tables: TableMode = "rowwise",
    ) -> None:
        self.model = model
        self.optimizer = optimizer(model, lr=LR, tables=tables)
        self.step = TrainingStep(model, self.optimizer)
        self.data, self.batches = data, sliced(data, batch_size)

    def __call__(self) -> None:
        """Train on the next batch."""
        self.step(next(self.batches))

    @property
    def table_bytes(self) -> int:
        """The bytes of tables and thresholds, and of the optimizer's state of them."""
        groups = [group for group in self.optimizer.param_groups if group["name"] != "network"]
        held = [parameter for group in groups for parameter in group["params"]]
        state = self.optimizer.state
        kept = [part for p in held for part in state[p].values() if part.dim() > 0]
        return sum(tensor.nbytes for tensor in [*held, *kept])


def deepfm_step(
    data: Dataset,
    method: Method | None = None,
    *,
    dim: int = DIM,
    batch_size: int = BATCH_SIZE,
    tables: TableMode = "rowwise",
) -> NextStep:
    """Return a step of DeepFM, with a method on its tables or without."""
    torch.manual_seed(0)
    model = DeepFM(data.schema, dim=dim, hidden=HIDDEN)
    if method is not None:
        apply_(model, method, verbose=False)
        method.prepare_(model, data)
    return NextStep(model, data, batch_size, tables)


def stack(say: Say, *, budget: float = 30.0) -> BenchResult:
    """Four models of a study as one stacked step, against their four steps one after the other, batch size 1024."""
    say(f"stack: {budget:.0f} s")
    data = criteo_log(50_000)
    alone, members = ([deepfm_step(data, batch_size=SMALL_BATCH) for _ in range(4)] for _ in "ab")
    stacked = StackedStep([each.step for each in members], [torch.Generator() for _ in members])
    batches = sliced(data, len(members) * SMALL_BATCH)

    def one_by_one() -> None:
        for step in alone:
            step()

    return ratios(
        {"alone": one_by_one, "stack": lambda: stacked(next(batches))},
        "stack",
        "alone",
        "time of one stacked step of four models / of their four steps",
        budget=budget,
    )


def ema(say: Say, *, budget: float = 20.0) -> BenchResult:
    """Averaged weights, batch size 1024. `torch`: its `AveragedModel` reads every row in every step."""
    say(f"ema: {budget:.0f} s")
    data = criteo_log()
    plain, ours, torchs = (deepfm_step(data, batch_size=SMALL_BATCH) for _ in range(3))
    EMA(ours.model, ours.optimizer, DECAY)
    averaged = AveragedModel(torchs.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))

    def by_torch() -> None:
        torchs()
        averaged.update_parameters(torchs.model)

    variants: dict[str, Callable[[], None]] = {"plain": plain, "ema": ours, "torch": by_torch}
    meaning = "time of a step averaged by torch / time of a step averaged by ours"
    return ratios(variants, "torch", "ema", meaning, budget=budget, plain=("ema", "plain"))


def forgetting(say: Say, *, budget: float = 20.0) -> BenchResult:
    """What `forget_` adds to an epoch of a million rows: it writes all rows and resets the optimizer."""
    data = criteo_log()
    say(f"forgetting: two variants, {budget:.0f} s")
    step, counts = deepfm_step(data), data.counts()
    step()  # the optimizer has a state from now on
    variants: dict[str, Callable[[], object]] = {
        "step": step,
        "forget": lambda: forget_(step.model, step.optimizer, counts),
    }
    times, figures = compare(variants, budget=budget, load="steps")
    steps, in_steps = math.ceil(EPOCH / BATCH_SIZE), times["forget"] / times["step"]
    return {
        "ratio": (steps + in_steps) / steps,
        "ratio_of": "time of an epoch of a million rows with forgetting / without",
        "forget_in_steps": in_steps,
        "steps_of_an_epoch": steps,
        **figures,
    }


def mlet(say: Say, *, budget: float = 20.0) -> BenchResult:
    """`MLET(inner_dim=64)` on every table but the first-order weights, with lazy and with dense Adam."""
    data = criteo_log()
    result: BenchResult = {
        "ratio": None,
        "ratio_of": "time of a step with MLET / time of a plain step, both with lazy Adam",
    }
    modes: dict[str, TableMode] = {"": "rowwise", "_dense": "dense"}
    for end, tables in modes.items():
        say(f"mlet: {tables} Adam, {budget:.0f} s")
        steps = {
            "plain": deepfm_step(data, tables=tables),
            "mlet": deepfm_step(data, MLET(inner_dim=64), tables=tables),
        }
        times, figures = compare(steps, budget=budget, load=tables, suffix=end)
        result |= {f"ratio{end}": times["mlet"] / times["plain"], **figures}
        result |= {f"{name}_bytes{end}": step.table_bytes for name, step in steps.items()}
    return result


def models(say: Say, *, budget: float = 7.0) -> BenchResult:
    """One step of every model, with width 16 and its own defaults, against a step of DNN.

    Each model takes turns with DNN, one model after the other, so that both meet the same seconds and only
    two are in memory. FFM keeps its own width, since a row of its table has one vector per field.
    """
    data, reference = criteo_log(ROWS // 2), "dnn"

    def step(name: str) -> NextStep:
        torch.manual_seed(0)
        has_width = "dim" in inspect.signature(model_class(name)).parameters and name != "ffm"
        return NextStep(build_model(name, data.schema, {"dim": DIM} if has_width else {}), data)

    dnn = step(reference)
    figures: BenchResult = {
        "ratio": None,
        "ratio_of": "time of the slowest model's step / time of DNN's step",
    }
    ratios = {}
    for name in [name for name in model_names() if name != reference]:
        load = OtherLoad()
        times = measure({reference: dnn, name: step(name)}, budget=budget, warm_up=1)
        ratios[name] = times[name] / times[reference]
        figures |= {
            f"ratio_{name}": ratios[name],
            f"{name}_ms": 1000 * times[name].median,
            f"{name}_iqr_ms": 1000 * times[name].iqr,
            f"{reference}_ms_beside_{name}": 1000 * times[reference].median,
            f"other_load_{name}": load.share(),
        }
        say(f"models: {name} takes {ratios[name]:.2f}x the time of {reference}")
    slowest = max(ratios, key=ratios.__getitem__)
    return figures | {"slowest": slowest, "ratio": ratios[slowest]}


def multi_embedding(say: Say, *, budget: float = 60.0) -> BenchResult:
    """Ten embedding sets of width 10 against one of width 100: DCN-V2 of the paper, batch size 256.

    The tables have the same bytes. The cross networks do not: a matrix of one set has a hundredth of the
    entries of the single one, and there are ten of them.
    """
    data = criteo_log()
    say(f"multi-embedding: two variants, {budget:.0f} s")
    steps = {"single": sets_step(data, num_sets=1), "multi": sets_step(data, num_sets=NUM_SETS)}
    meaning = "time of a step with ten embedding sets / time of a step with one as wide, lazy Adam"
    figures = ratios(steps, "multi", "single", meaning, budget=budget, load="steps")
    weights = {name: list(step.model.parameters()) for name, step in steps.items()}
    return figures | {
        f"{name}_weights": sum(p.numel() for p in own) for name, own in weights.items()
    }


def sets_step(data: Dataset, *, num_sets: int) -> NextStep:
    """Return a step of DCN-V2 whose embedding sets have a total width of 100."""
    torch.manual_seed(0)
    model = build_model("dcn_v2@me", data.schema, {"dim": 100 // num_sets})
    if num_sets > 1:
        apply_(model, MultiEmbedding(num_sets=num_sets), verbose=False)
    return NextStep(model, data, 256)


def pep(say: Say, *, budget: float = 40.0) -> BenchResult:
    """Thresholds at width 64: `scheduled`, one that rises in every step; `learned`, one per entry.

    The thresholds cut some entries from the start: a cut entry costs as much in a step as another.
    """
    data, dim = criteo_log(), 64
    say(f"pep: three variants, {budget:.0f} s")
    steps = {
        "plain": deepfm_step(data, dim=dim),
        "scheduled": deepfm_step(data, PEP(schedule="given"), dim=dim),
        "learned": deepfm_step(data, PEP(init=PEP_INIT), dim=dim),
    }
    variants: dict[str, Callable[[], None]] = {**steps, "scheduled": rising(steps["scheduled"])}
    meaning = "time of a step with a given threshold / time of a plain step, both with lazy Adam"
    learned = ("learned", "plain")
    figures = ratios(
        variants, "scheduled", "plain", meaning, budget=budget, load="steps", learned=learned
    )
    return figures | {f"{name}_bytes": step.table_bytes for name, step in steps.items()}


def rising(step: NextStep) -> Callable[[], None]:
    """Return a step that raises the given threshold first."""
    start = float(torch.sigmoid(torch.tensor(PEP_INIT)))
    thresholds = itertools.accumulate(itertools.repeat(PEP_RISE), initial=start + PEP_RISE)

    def next_step() -> None:
        set_threshold_(step.model, next(thresholds))
        step()

    return next_step


def row_gradients(say: Say, *, budget: float = 20.0) -> BenchResult:
    """The sum rule on the table, which trains the same weights to the last bit; batch size 1024."""
    say(f"row-gradients: {budget:.0f} s")
    data = criteo_log()
    plain, rule = (deepfm_step(data, batch_size=SMALL_BATCH) for _ in range(2))
    rule.step.backward = RowGradients(rule.model, sum_losses).backward
    meaning = "time of a step with the sum rule / time of a plain step"
    return ratios({"plain": plain, "rule": rule}, "rule", "plain", meaning, budget=budget)


def shrinkage(say: Say, *, budget: float = 30.0) -> BenchResult:
    """`Shrinkage()` on every table, including first-order weights; and `RowRate()`, without a prior."""
    data = criteo_log()
    say(f"shrinkage: three variants, {budget:.0f} s")
    steps = {
        "plain": deepfm_step(data),
        "shrunk": deepfm_step(data, Shrinkage()),
        "row_rate": deepfm_step(data, RowRate()),
    }
    meaning = "time of a step of shrunk tables / time of a plain step, both with lazy Adam"
    by_rate = ("row_rate", "plain")
    return ratios(steps, "shrunk", "plain", meaning, budget=budget, load="steps", row_rate=by_rate)


def tail(say: Say, *, budget: float = 30.0) -> BenchResult:
    """`Tail()` in every step: shrunk tables, and the average of network and known rows; and with no rows averaged."""
    data = criteo_log()
    say(f"tail: three variants, {budget:.0f} s")
    methods = {"tail": Tail(), "network": Tail(average="network")}
    steps = {"plain": deepfm_step(data)}
    for name, method in methods.items():
        step = steps[name] = deepfm_step(data, method)
        epoch = EPOCH // BATCH_SIZE
        method.start(step.model, step.optimizer, data.counts(), steps_per_epoch=epoch)
    meaning = "time of a step with the tail method / time of a plain step, both with lazy Adam"
    network = ("network", "plain")
    return ratios(steps, "tail", "plain", meaning, budget=budget, load="steps", network=network)


def transfer(say: Say, *, budget: float = 30.0) -> BenchResult:
    """Harmless transfer: the adversarial loss and the barrier on every table of more than 100 rows.

    Frequent rows, the top fifth of those in the log, are found before the first step.
    """
    data = criteo_log()
    say(f"transfer: two variants, {budget:.0f} s")
    steps = {"plain": deepfm_step(data), "transfer": deepfm_step(data)}
    model = steps["transfer"].model
    running = HarmlessTransfer().start(model, counts=data.counts())
    steps["transfer"].step.backward = running.backward
    meaning = "time of a step with harmless transfer / time of a plain step, both with lazy Adam"
    return ratios(steps, "transfer", "plain", meaning, budget=budget, load="steps")
