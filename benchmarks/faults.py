"""Kill processes, lose power and change checkpoints, again and again; nothing may be lost, diverge or crash.

    python benchmarks/faults.py --kills 100 --power-losses 20 --checkpoints 1000

    kills          SIGKILL at a random time to a process that trains, saves, prepares or compares; then it goes on
    power losses   the same work on a simulated disk that forgets what was not synced; then it goes on
    checkpoints    a whole checkpoint, with right checksums, one value of which is changed; then it is resumed

What goes on must end as if nothing had happened, to the bit. A changed checkpoint may also be refused, in a sentence. The
result is written to `benchmarks/results/faults.json`. All draws come from a printed seed.
"""

import argparse
import copy
import functools
import hashlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rarebit as rb
from rarebit.codes.packed import Pack, load_packed, save_packed
from rarebit.errors import RarebitError
from rarebit.machine import machine
from rarebit.models.deepfm import DeepFM
from rarebit.models.fm import FM
from rarebit.storage.files import Disk, write_file
from rarebit.study.runs import RunFolder, run_key
from rarebit.study.worker import make_run, open_log
from rarebit.training.checkpoints import CheckpointFolder
from rarebit.training.run import read_run
from rarebit.training.settings import RunSettings

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


# Work that is interrupted anywhere, and goes on

RUN = {
    "model": {"name": "fm", "dim": 2},
    "data": {"rows": 600},
    "training": {"epochs": 2, "batch_size": 128, "checkpoint_minutes": 1e-9},
}


class Work:
    """Something that a process does in a folder, and does again after it was interrupted."""

    def begin(self, folder: Path) -> None:
        """Make what is there before."""

    def go_on(self, folder: Path) -> None:
        """Do it, or the rest of it."""
        raise NotImplementedError

    def look(self, folder: Path) -> None:
        """Raise where something that was whole before is not."""

    def end(self, folder: Path) -> str:
        """Return a digest of everything that is left when it is done."""
        raise NotImplementedError


class Fitting(Work):
    """A training with all that has a state, which writes a checkpoint after every step."""

    settings = rb.settings.updated(
        SETTINGS,
        {"epochs": 10, "tables": "rowwise", "ema_decay": 0.95, "checkpoint_minutes": 1e-9},
    )

    def go_on(self, folder: Path) -> None:
        end = train(folder / "checkpoints", self.settings)
        write_file(folder / "digest", end.encode(), error=RarebitError)

    def end(self, folder: Path) -> str:
        return (folder / "digest").read_text()


class Training(Work):
    """A run with its folder: settings, checkpoints, model and result."""

    settings = RunSettings.from_mapping(RUN)

    def go_on(self, folder: Path) -> None:
        begun = (folder / "run" / "run.json").exists()
        if begun:
            assert read_run(folder / "run") == self.settings
        options: Any = {"progress": False, "say": lambda _: None}
        rb.run(self.settings, folder=folder / "run", resume=begun, **options)

    def look(self, folder: Path) -> None:
        if (folder / "run" / "model.json").exists():
            rb.load_model(folder / "run")

    def end(self, folder: Path) -> str:
        values = json.loads((folder / "run" / "run.json").read_text("utf-8"))
        return digest_of(rb.load_model(folder / "run").state_dict(), values["test"])


class Saving(Work):
    """A model that is saved over an older one."""

    def model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return FM(SCHEMA, dim=4)

    @functools.cache  # noqa: B019  # there is one of each
    def digests(self) -> set[str]:
        return {digest_of(self.model(seed).state_dict()) for seed in (1, 2)}

    def begin(self, folder: Path) -> None:
        rb.save_model(self.model(1), folder / "model")

    def go_on(self, folder: Path) -> None:
        rb.save_model(self.model(2), folder / "model")

    def look(self, folder: Path) -> None:
        found = self.end(folder)
        assert found in self.digests()

    def end(self, folder: Path) -> str:
        return digest_of(rb.load_model(folder / "model").state_dict())


class Packing(Saving):
    """A packed table that is saved over an older one."""

    def model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return Pack().wrap(torch.nn.Embedding.from_pretrained(torch.randn(40, 4).relu()))

    def begin(self, folder: Path) -> None:
        save_packed(self.model(1), folder / "table")

    def go_on(self, folder: Path) -> None:
        save_packed(self.model(2), folder / "table")

    def end(self, folder: Path) -> str:
        return digest_of(load_packed(folder / "table").state_dict())


class Preparing(Work):
    """A log that is prepared over an older one."""

    def prepare(self, folder: Path, *, old: bool) -> None:
        rows = [f"{user},{user % 7},{user % 2}" for user in range(40 if old else 60)]
        log = folder.parent / f"{folder.name}.csv"
        log.write_text("\n".join(["user,item,click", *rows]) + "\n")
        rb.prepare(log, folder / "log", label="click", overwrite=True)

    def begin(self, folder: Path) -> None:
        self.prepare(folder, old=True)

    def go_on(self, folder: Path) -> None:
        self.prepare(folder, old=False)

    def look(self, folder: Path) -> None:
        assert len(rb.Dataset.open(folder / "log", verify=True)) in {40, 60}

    def end(self, folder: Path) -> str:
        data = rb.Dataset.open(folder / "log", verify=True)
        return digest_of({"ids": data.ids, "label": data.label})


class Studying(Work):
    """The runs of a study, made one after the other as its workers do."""

    def runs(self, folder: Path) -> Iterator[tuple[Any, RunFolder]]:
        for seed in (1, 2):
            training = RUN["training"] | {"seed": seed}
            settings = RunSettings.from_mapping(RUN | {"training": training})
            yield settings, RunFolder(folder / "study", run_key(settings))

    def go_on(self, folder: Path) -> None:
        for settings, run in self.runs(folder):
            if run.read() is None:
                device = torch.device("cpu")
                make_run(settings, open_log(settings, device), run, device=device, keep_model=True)

    def look(self, folder: Path) -> None:
        for _, run in self.runs(folder):
            if run.read() is not None:
                run.scores()
                rb.load_model(run.model)

    def end(self, folder: Path) -> str:
        runs = [run for _, run in self.runs(folder)]
        scores = {run.key: torch.from_numpy(run.scores()) for run in runs}
        records = [run.read() for run in runs]
        return digest_of(scores, [record and record.valid_auc for record in records])


class Pruning(Work):
    """A pruning in two stages, to two budgets."""

    def go_on(self, folder: Path) -> None:
        begun = (folder / "pruning" / "prune.json").exists()
        settings = RunSettings.from_mapping(RUN | {"methods": []})
        budgets = rb.pruning.PruneSettings(budgets=(200, 100))
        options: Any = {"progress": False, "say": lambda _: None}
        rb.pruning.prune_run(settings, budgets, folder=folder / "pruning", resume=begun, **options)

    def end(self, folder: Path) -> str:
        values = json.loads((folder / "pruning" / "prune.json").read_text("utf-8"))["result"]
        models = [rb.load_model(folder / "pruning" / name) for name in ("100", "200", "unpruned")]
        return digest_of(
            {f"{i}.{name}": w for i, m in enumerate(models) for name, w in m.state_dict().items()},
            [values["unpruned"]["test"], [found["test"] for found in values["budgets"].values()]],
        )


class Comparing(Work):
    """A study with a worker in another process."""

    def go_on(self, folder: Path) -> None:
        rb.study(
            folder / "study",
            methods="baseline,hashing",
            **RUN,  # type: ignore[arg-type]  # values by name
            seeds=2,
            trials=1,
            workers=1,
            device="cpu",
            progress=False,
        )

    def end(self, folder: Path) -> str:
        stored = json.loads((folder / "study" / "results.json").read_text("utf-8"))["study"]
        for cell in stored["cells"]:
            assert not cell.get("missing")
        scores = {
            path.parent.name: torch.from_numpy(np.load(path))
            for path in sorted((folder / "study" / "runs").glob("*/scores.npy"))
        }
        return digest_of(scores)


BATCH = 50
"""Changed checkpoints that one process resumes."""
WORK: dict[str, Work] = {
    "fit": Fitting(),
    "train": Training(),
    "save": Saving(),
    "pack": Packing(),
    "prepare": Preparing(),
    "runs of a study": Studying(),
    "prune": Pruning(),
    "compare": Comparing(),
}


KILLED = {
    "fit": 6,
    "train": 5,
    "save": 2,
    "pack": 1,
    "prepare": 3,
    "runs of a study": 5,
    "prune": 4,
    "compare": 2,
}
"""How the kills are shared out."""
POWERLESS = {
    "fit": 2,
    "train": 5,
    "save": 4,
    "pack": 2,
    "prepare": 4,
    "runs of a study": 5,
    "prune": 5,
}
"""How the power losses are shared out; a study's own workers are other processes, with another disk."""


def digest_of(tensors: Mapping[str, Tensor], more: object = None) -> str:
    """Return a digest of tensors and plain values."""
    found = hashlib.sha256(repr(more).encode())
    for name, tensor in tensors.items():
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


# A disk that forgets what was not synced

KINDS_OF_LOSS = ("none", "all", "last", "some")
LAST = len(KINDS_OF_LOSS)
"""Images after the last operation."""
Image = dict[str, bytes | None]
"""The files below a folder by their path, with their content; None is a folder."""


class Power:
    """Watches the files below a folder, and says what a power loss at this moment would leave of them.

    A name that a folder got or lost since the folder was synced may be there or not. Content that was written since its
    file was synced is empty, or cut, or there.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.lists: dict[int, list[dict[str, int]]] = {}
        """What a folder may list after a power loss, oldest first, by its inode."""
        self.synced: dict[int, bytes] = {}
        self.written: dict[int, bytes] = {}
        self.held: list[int] = []  # open, so that no number is used again
        self.images: list[Image] = []
        self.lock = threading.RLock()
        self.watch(is_synced=True)

    def watch(self, *, is_synced: bool = False) -> None:
        """See what is there now."""
        for path in (self.folder, *sorted(self.folder.rglob("*"))):
            with suppress(FileNotFoundError):
                inode = path.stat().st_ino
                if inode not in self.lists and inode not in self.written:
                    self.held.append(os.open(path, os.O_RDONLY))
                if path.is_dir():
                    self._list(path, is_synced=is_synced)
                else:
                    self.written[inode] = path.read_bytes()
                    if is_synced:
                        self.synced[inode] = self.written[inode]

    def _list(self, path: Path, *, is_synced: bool) -> None:
        now = {child.name: child.stat().st_ino for child in path.iterdir()}
        before = self.lists.setdefault(path.stat().st_ino, [{}])
        if is_synced or now != before[-1]:
            self.lists[path.stat().st_ino] = [now] if is_synced else [*before, now]

    def sync(self, path: Path) -> None:
        """Remember that a file or folder is synced."""
        if not path.resolve().is_relative_to(self.folder):
            return
        if path.is_dir():
            self._list(path, is_synced=True)
        else:
            self.synced[path.stat().st_ino] = path.read_bytes()

    def image(self, kind: str) -> Image:
        """Return what a power loss now would leave: of what is not synced "none", "all", the "last" or "some"."""
        image: Image = {}

        def build(inode: int, place: str) -> None:
            if inode not in self.lists:
                image[place] = self._content(inode, kind)
                return
            if place:
                image[place] = None
            for name, child in self._names(self.lists[inode], kind).items():
                build(child, f"{place}/{name}" if place else name)

        build(self.folder.stat().st_ino, "")
        return image

    def _names(self, lists: list[dict[str, int]], kind: str) -> dict[str, int]:
        """Return what a folder lists; each name as it was at a moment since the last sync."""
        names = dict.fromkeys(name for one in lists for name in one)
        found = {}
        for name in names:
            past = [one.get(name) for one in lists]
            has_just_changed = past[-1] != past[-2:][0]
            chosen = {"none": 0, "all": -1, "last": -int(has_just_changed)}
            found[name] = past[chosen.get(kind, self.chance.randrange(len(past)))]
        return {name: inode for name, inode in found.items() if inode is not None}

    def _content(self, inode: int, kind: str) -> bytes:
        synced, written = self.synced.get(inode, b""), self.written.get(inode, b"")
        if kind != "some" or synced == written:
            return synced
        return self.chance.choice([synced, written[: len(written) // 2], written])

    def close(self) -> None:
        """Let go of the files."""
        for descriptor in self.held:
            os.close(descriptor)


@contextmanager
def watched(folder: Path, chance: random.Random) -> Iterator[Power]:
    """Collect the images of a power loss before each operation of the disk, and after the last."""
    power = Power(folder.resolve(), chance)
    names = [name for name in vars(Disk) if not name.startswith("_")]
    before = {name: getattr(Disk, name) for name in names}

    def seen(name: str) -> Callable[..., Any]:
        def operation(disk: Disk, path: Path, *arguments: Any) -> Any:
            with power.lock:
                power.watch()
                power.images += [power.image(kind) for kind in KINDS_OF_LOSS]
                result = before[name](disk, path, *arguments)
                if name.startswith("sync"):
                    power.sync(path)
                return result

        return operation

    for name in names:
        setattr(Disk, name, seen(name))
    try:
        yield power
        power.watch()
        power.images += [power.image(kind) for kind in KINDS_OF_LOSS]
    finally:
        for name in names:
            setattr(Disk, name, before[name])
        power.close()


def put(image: Image, folder: Path) -> None:
    """Make the files below a folder those of an image."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for place, content in image.items():
        if content is None:
            (folder / place).mkdir(parents=True, exist_ok=True)
        else:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_bytes(content)


def lose_power(
    work: Work, folder: Path, chance: random.Random, most: int | None = None
) -> Counter[str]:
    """Do some work, lose power at some of its moments or at each, and go on after each; count how it ended."""
    folder.mkdir()
    work.begin(folder)
    with watched(folder, chance) as power:
        work.go_on(folder)
    expected, found = work.end(folder), Counter[str]()
    numbers = range(len(power.images))
    for number in numbers if most is None else sorted(chance.sample(numbers, most)):
        put(power.images[number], folder)
        try:
            work.look(folder)
            if number < len(numbers) - LAST:  # what is done stays done
                work.go_on(folder)
            found["same" if work.end(folder) == expected else "different"] += 1
        except Exception as error:  # noqa: BLE001  # nothing may be lost
            found[f"{type(error).__name__}: {error}"] += 1
    return found


# Processes that are killed


class Child:
    """A process that runs a function: this one, forked, so that nothing is imported again."""

    def __init__(self, function: Callable[[], object], log: Path) -> None:
        self.log = log
        log.write_text("")
        self.process = os.fork()
        if self.process:
            with suppress(OSError):  # or the process has done it, below
                os.setpgid(self.process, self.process)
            return
        code = 1
        try:
            os.setpgid(0, 0)
            answer = function()
            log.write_text(json.dumps(answer))
            code = 0
        except BaseException:  # noqa: BLE001  # whatever it is goes to the parent
            log.write_text(traceback.format_exc())
        finally:
            os._exit(code)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for it, and kill it after so many seconds with all that it started; return whether it ended."""
        limit = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            process, status = os.waitpid(self.process, os.WNOHANG)
            if process:
                break
            if time.monotonic() >= limit:
                os.killpg(self.process, signal.SIGKILL)
                status = os.waitpid(self.process, 0)[1]
                break
            time.sleep(0.0005)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and seconds is not None:
            return False
        if code:
            raise RuntimeError(f"a process ended with {code}: {self.log.read_text()[-2000:]}")
        return True

    def answer(self) -> Any:
        """Wait for it and return what its function returned."""
        self.wait()
        return json.loads(self.log.read_text())


def kill_and_go_on(name: str, place: Path, kills: int, chance: random.Random) -> Counter[str]:
    """Kill work so many times, at random moments, and let it end; count what happened."""
    work, log = WORK[name], place / f"{name}.log"

    whole = place / f"{name}, not killed"

    def undisturbed() -> tuple[str, float]:
        whole.mkdir()
        work.begin(whole)
        start = time.monotonic()
        work.go_on(whole)
        return work.end(whole), time.monotonic() - start

    expected, seconds = Child(undisturbed, log).answer()
    if seconds < 1.0:  # of which much was what a first call takes
        shutil.rmtree(whole)
        warmed = Child(lambda: (undisturbed(), shutil.rmtree(whole), undisturbed())[2], log)
        expected, seconds = warmed.answer()
    found, runs = Counter[str](), 0
    while found["kills"] < kills:
        folder, has_ended = place / f"{name} {runs}", False
        folder.mkdir()
        runs += 1
        try:
            Child(functools.partial(work.begin, folder), log).wait()
            while not has_ended:
                wait = chance.uniform(0.0, seconds) if found["kills"] < kills else None
                has_ended = Child(functools.partial(work.go_on, folder), log).wait(wait)
                found["kills"] += not has_ended
                found["inside_a_write"] += any(folder.rglob(".*.writing"))
                Child(functools.partial(work.look, folder), log).wait()
            same = Child(functools.partial(work.end, folder), log).answer() == expected
            found["same" if same else "different"] += 1
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr)
            found["failed"] += 1
    return found


def power_losses_of(name: str, place: Path, losses: int, chance: random.Random) -> Counter[str]:
    """Lose power so many times in work that is done in another process; count how it went on."""
    again = random.Random(chance.random())  # noqa: S311  # nothing secret
    folder = place / f"power {name}"
    work = Child(lambda: lose_power(WORK[name], folder, again, losses), place / f"{name}.log")
    return Counter(work.answer())


def change_checkpoints(count: int, chance: random.Random, place: Path) -> Counter[str]:
    """Resume so many changed checkpoints, in processes that may crash; count how they ended."""
    found, notes, log, batch = Counter[str](), place / "notes", place / "log", 0
    while sum(found.values()) < count:
        kind, seed = batch % len(KINDS), chance.randrange(1 << 30)
        batch += 1
        left = min(BATCH, count - sum(found.values()))
        notes.write_text("")

        def resume(kind: int = kind, seed: int = seed, left: int = left) -> None:
            draws = random.Random(seed)  # noqa: S311  # nothing secret
            with tempfile.TemporaryDirectory() as folder:
                run = Stopped(Path(folder), KINDS[kind])
                changes = all_changes(run.state)
                tensors = [one for one in changes if isinstance(look_up(run.state, one[0]), Tensor)]
                for _ in range(left):
                    path, change = draws.choice(tensors if draws.random() < 0.8 else changes)
                    with notes.open("a") as file:
                        file.write(f"{KINDS[kind]} {path} {change}: ")
                    outcome = run.outcome(changed(run.state, path, change))
                    with notes.open("a") as file:
                        file.write(outcome.replace("\n", " ") + "\n")

        crash = None
        try:
            Child(resume, log).wait()
        except RuntimeError as error:
            crash = str(error)
        lines = notes.read_text().splitlines()
        for line in lines:
            outcome = line.rpartition(": ")[2]
            if outcome in {"same", "refused"}:
                found[outcome] += 1
            else:
                print(line, crash or "", file=sys.stderr)
                found["crash" if line.endswith(": ") else "different"] += 1
        assert lines, crash
    return found


def main() -> None:
    """Make the faults, print and store what came of them, and exit with 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--power-losses", type=int, default=0)
    parser.add_argument("--checkpoints", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT, help="where to write the result as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine()  # before the runs: the commit is that of the code that runs
    chance, start = random.Random(options.seed), time.monotonic()  # noqa: S311  # when to kill, nothing secret
    print(f"seed {options.seed}", file=sys.stderr)
    total = {kind: Counter[str]() for kind in ("kills", "power_losses", "checkpoints")}
    by_work: dict[str, dict[str, Any]] = {"kills": {}, "power_losses": {}}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for kind, share in (("kills", KILLED), ("power_losses", POWERLESS)):
            count, done = getattr(options, kind), 0
            for name in share:
                wanted = -(-count * share[name] // sum(share.values()))
                wanted = min(wanted, count - done)
                done += wanted
                if not wanted:
                    continue
                if kind == "kills":
                    found = kill_and_go_on(name, place, wanted, chance)
                else:
                    found = power_losses_of(name, place, wanted, chance)
                print(f"{kind}: {name}: {dict(found)}", file=sys.stderr)
                total[kind] += found
                by_work[kind][name] = dict(found)
        if options.checkpoints:
            total["checkpoints"] = change_checkpoints(options.checkpoints, chance, place)
            by_work["checkpoints"] = dict(total["checkpoints"])
    fine = {"kills", "inside_a_write", "same", "refused"}
    wrong = sum(found[name] for found in total.values() for name in found if name not in fine)
    result: dict[str, Any] = {
        "kills": total["kills"]["kills"],
        "inside_a_write": total["kills"]["inside_a_write"],
        "power_losses": total["power_losses"].total(),
        "checkpoints": total["checkpoints"].total(),
        "refused": total["checkpoints"]["refused"],
        "wrong": wrong,
        "outcomes": by_work,
        "seed": options.seed,
    }
    result["minutes"] = round((time.monotonic() - start) / 60, 1)
    print(json.dumps(result))
    options.out.write_text(json.dumps(result | {"machine": facts}, indent=1) + "\n", "utf-8")
    sys.exit(0 if wrong == 0 else 1)


if __name__ == "__main__":
    main()
