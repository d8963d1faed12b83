"""Kill processes, lose power and change checkpoints, again and again; nothing may be lost, diverge or crash.

    python benchmarks/faults.py --kills 100 --power-losses 20 --checkpoints 1000

    kills          SIGKILL at a random time to a process that trains, saves, prepares or compares; then it goes on
    power losses   the same work on a simulated disk that forgets what was not synced; then it goes on
    checkpoints    a whole checkpoint, with right checksums, one value of which is changed; then it is resumed

What goes on must end as if nothing had happened, to the bit. A changed checkpoint may also be refused, in a sentence. The
result is written to `benchmarks/results/faults.json`. All draws come from a printed seed.
"""

import copy
import hashlib
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rarebit as rb
from rarebit.errors import RarebitError
from rarebit.models.deepfm import DeepFM
from rarebit.training.checkpoints import CheckpointFolder

OUT = Path(__file__).parent / "results" / "faults.json"
SCHEMA = rb.data.Schema(
    (rb.data.Field(name="user", rows=300), rb.data.Field(name="item", rows=50)),
)
SETTINGS = rb.Training(
    epochs=3,
    batch_size=64,
    lr=0.02,
    plateau_factor=0.5,
    patience=None,
)
KINDS = [
    {"optimizer": optimizer, "tables": tables, "ema_decay": decay}
    for optimizer in ("adam", "sgd", "adagrad")
    for tables in ("dense", "rowwise")
    for decay in (0.9, None)
]
"""Optimizers, and whether weights are averaged."""


def draw(n: int, seed: int) -> rb.Dataset:
    """Return rows whose label depends on their user."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([field.rows for field in SCHEMA.fields])
    ids = (sizes * torch.rand(n, len(sizes), generator=generator) ** 2).long()
    noise = torch.rand(n, generator=generator) < 0.3
    return rb.Dataset(SCHEMA, ids, label=(ids[:, 0] % 2 == 0) ^ noise)


def bounded(ids: Tensor, gradients: Tensor) -> Tensor:
    """Bound how far a row moves: a rule that is not linear."""
    del ids
    total = gradients.sum(dim=0)
    return total / total.norm(dim=1, keepdim=True).clamp(min=1e-3)


class PowerCutError(Exception):
    """The process ends here."""


def train(folder: Path, settings: rb.Training, stop_at: int = 0) -> str:
    """Train or resume with all that has a state; return a digest of weights and history.

    A step to stop at raises `PowerCutError` in it.
    """
    torch.manual_seed(0)
    model = DeepFM(SCHEMA, dim=4, hidden=(8,), dropout=0.2)
    steps = 0

    def backward(loss: Tensor) -> None:
        nonlocal steps
        steps += 1
        if steps == stop_at:
            raise PowerCutError
        rows.backward(loss)

    with rb.RowGradients(model, bounded) as rows:
        history = rb.fit(
            model,
            draw(256, seed=1),
            draw(64, seed=2),
            settings=settings,
            folder=folder,
            resume=True,
            backward=backward,
            progress=False,
        )
    return digest(model.state_dict(), history)


def digest(weights: dict[str, Tensor], history: rb.training.History) -> str:
    """Return a digest of all weights and of the history without its times."""
    found = hashlib.sha256()
    for name, weight in weights.items():
        found.update(name.encode() + weight.numpy().tobytes())
    for record in history.epochs:
        found.update(repr((record.epoch, record.train_loss, record.lr, record.valid)).encode())
    return found.hexdigest()


# Checkpoints that were changed and sealed again

Leaf = tuple[Any, ...]


def leaves(tree: Any, path: Leaf = ()) -> Iterator[Leaf]:
    """Yield the way to every value in a state, containers among them."""
    if path:
        yield path
    for key in tree if isinstance(tree, dict) else range(len(tree)) if is_list(tree) else ():
        yield from leaves(tree[key], (*path, key))


def is_list(value: Any) -> bool:
    """Return whether a value has places."""
    return isinstance(value, list | tuple)


TENSOR_CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "shorter": lambda t: t.reshape(-1)[: t.numel() // 2].clone(),
    "longer": lambda t: torch.cat([t.reshape(-1), t.reshape(-1), t.new_zeros(1)]),
    "one number": lambda t: t.reshape(-1)[:1].reshape(()) if t.dim() else t.reshape(1),
    "one row": lambda t: t[:1].clone() if t.dim() and len(t) > 1 else t.reshape(1, 1, -1),
    "flat": lambda t: t.reshape(-1) if t.dim() > 1 else t.reshape(-1, 1),
    "empty": lambda t: t.new_zeros(0),
    "wider type": lambda t: t.to(torch.float64 if t.dtype != torch.float64 else torch.float32),
    "whole numbers": lambda t: t.to(torch.int64 if t.dtype != torch.int64 else torch.int32),
    "half precision": lambda t: t.to(torch.float16),
    "not a number": lambda t: torch.full_like(t, math.nan) if t.is_floating_point() else t - 7,
    "no tensor": lambda _: 7,
}
OTHER_CHANGES: dict[str, Callable[[Any], Any]] = {
    "text": lambda value: "x" if value != "x" else 7,
    "none": lambda value: None if value is not None else 7,
    "mapping": lambda value: {} if value != {} else [],
    "negative": lambda value: -7 if type(value) is int else [value],
    "not finite": lambda value: math.nan if type(value) is float else {"x": value},
}
PLACE_CHANGES = ("missing", "extra")
UNSEEN = {("loop", "stateless"): "missing"}
"""Changes that make a state of an older version, which says less."""


def all_changes(state: dict[str, Any]) -> list[tuple[Leaf, str]]:
    """Return every change that can be made to a state, by place and name."""
    found = []
    for path in leaves(state):
        value, parent = look_up(state, path), look_up(state, path[:-1])
        names = list(TENSOR_CHANGES if isinstance(value, Tensor) else OTHER_CHANGES)
        names += PLACE_CHANGES if isinstance(parent, dict) else ()
        found += [(path, name) for name in names if len(path) > 1 and name != UNSEEN.get(path)]
    return found


def changed(state: dict[str, Any], path: Leaf, change: str) -> dict[str, Any]:
    """Return a copy of a state with one change; tuples become lists on the way to it."""
    state = copy.deepcopy(state)
    parent: Any = state
    for key in path[:-1]:
        if isinstance(parent[key], tuple):
            parent[key] = list(parent[key])
        parent = parent[key]
    value = parent[path[-1]]
    if change == "missing":
        del parent[path[-1]]
    elif change == "extra":
        key = 999 if isinstance(path[-1], int) else f"{path[-1]}.more"
        parent[key] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    else:
        parent[path[-1]] = {**TENSOR_CHANGES, **OTHER_CHANGES}[change](value)
    return state


def look_up(state: Any, path: Leaf) -> Any:
    """Return the value at the end of a way."""
    for key in path:
        state = state[key]
    return state


class Stopped:
    """A run that was stopped in its second epoch, and how it ends."""

    def __init__(self, place: Path, kind: dict[str, Any]) -> None:
        momentum = {"momentum": 0.9} if kind["optimizer"] == "sgd" else {}
        self.settings = rb.settings.updated(SETTINGS, kind | momentum)
        self.place = place
        self.end = train(place / "whole", self.settings)
        with suppress(PowerCutError):
            often = rb.settings.updated(self.settings, {"checkpoint_minutes": 1e-9})
            train(place / "half", often, stop_at=7)
        folder = CheckpointFolder(place / "half")
        found = folder.newest("at-")
        assert found is not None
        self.name, self.best = found.name, f"best-{found.state['best']['epoch']:06d}"
        self.state = {"loop": found.state, "best": folder.read(self.best)}

    def outcome(self, state: dict[str, Any]) -> str:
        """Seal a state and resume from it: "same", "different", "refused", or an error that is not ours."""
        folder = self.place / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            CheckpointFolder(folder).write(self.best, state["best"])
            CheckpointFolder(folder).write(self.name, state["loop"])
            return "same" if train(folder, self.settings) == self.end else "different"
        except RarebitError:
            return "refused"
        except Exception as error:  # noqa: BLE001  # any other error is what is looked for
            return f"{type(error).__name__}: {error}"
