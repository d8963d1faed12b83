"""A language model on WikiText-2 or any text: perplexity of all, of frequent and of rare words, and by tenths.

    python recipes/text/language_model.py --from wikitext-2 --paper --device cuda --together 6 --minutes 25

`--from` takes a folder with wiki.train.tokens and so on (WikiText-2 and WikiText-103), one with train.txt, valid.txt and
test.txt, or one text file: its lines are cut in ten, of which eight train. The model is AWD-LSTM (Merity et al., 2018), three
LSTM layers with five kinds of dropout and tied weights; `--model` takes a Hugging Face causal model over the same words.

    x_t = E[w_t],  h^1..h^3 = LSTM layers,  p(w_{t+1}) = softmax(E h^3_t + b)

    E    `embedding.weight`, which is also `decoder.weight`; with `--untie` the two are apart, as `--arms tail` needs

With `--adaptive` the output is an adaptive softmax (Grave et al., 2017): frequent words first, and rare ones in two groups of
narrower rows, which are only computed where a word of theirs is wanted. For large vocabularies such as that of WikiText-103.

Dropout of whole words, of the inputs, between layers and of the outputs, each with one mask for all steps of a batch, and of
the recurrent weights (`weight_drop`). The schedule is AWD-LSTM's with `--paper`, else a short one. On a GPU a step is recorded
as a CUDA graph, and `--together` makes the steps of several runs side by side.
"""

import argparse
import functools
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from _shared import (
    ARMS,
    Run,
    Schedule,
    Task,
    Training,
    changed,
    device_of,
    named,
    options_of,
    run_recipe,
)
from torch import Tensor, nn
from torch.nn import functional as F

import rarebit as rb
from rarebit.data.selection import split_by_frequency
from rarebit.errors import DataError, RarebitError, SettingsError, import_extra
from rarebit.methods.tail import RunningTail
from rarebit.training.checkpoints import map_tensors

__all__ = ["LanguageModel", "Text", "main", "read_text"]

PARTS = ("train", "valid", "test")
NAMES = ("wiki.{}.tokens", "{}.txt")
"""What the files are called: by the data set's authors, and in copies of it."""
END, UNKNOWN = "<eos>", "<unk>"
ALIGNED = 8
"""The number of words is a multiple of this: products of matrices are twice as fast then."""
TENTHS = 10
WARM_UP = 3
"""Ordinary steps before one is recorded: they make the optimizer's state and choose kernels."""
AHEAD = 16
"""Every so many steps the host waits for those before: at most twice as many are asked for in advance."""

FIRST, SECOND = 16, 4
"""An adaptive softmax has one word in so many at once, and so many in its first group."""

Hidden = list[tuple[Tensor, Tensor]]
"""The state of each layer, `(1, B, width)` twice."""
Cut = tuple[int, int]
"""Where a batch begins in the columns of the text, and its length."""


@dataclass(frozen=True)
class Text:
    """The three parts of a text."""

    words: tuple[str, ...]
    """By id, the most frequent first."""
    counts: Tensor
    """How often training has each, `(V,)`; the last few may stand for no word, and have none."""
    train: Tensor
    valid: Tensor
    test: Tensor
    """Ids, one after the other."""

    @classmethod
    def of(cls, parts: Sequence[Sequence[str]]) -> "Text":
        """Return the text of three lists of words."""
        counted = Counter(parts[0])
        # equal counts by the word, so that ids do not depend on the order of the text
        words = sorted(counted, key=lambda word: (-counted[word], word))
        number = {word: place for place, word in enumerate(words)}
        ids = [_numbered(name, part, number) for name, part in zip(PARTS, parts, strict=True)]
        size = -(-len(words) // ALIGNED) * ALIGNED
        return cls(tuple(words), ids[0].bincount(minlength=size), *ids)

    @property
    def is_head(self) -> Tensor:
        """Which words are frequent: the top fifth, `(V,)` of bools."""
        return split_by_frequency(self.counts, rb.data.FrequencySplit())

    def described(self) -> dict[str, int | str]:
        """Return what a result says of it."""
        parts = (self.train, self.valid, self.test)
        digest = sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
        tokens = {f"{name} tokens": len(part) for name, part in zip(PARTS, parts, strict=True)}
        head = int(self.is_head.sum())
        return {"words": len(self.words), "head words": head, **tokens, "sha256": digest}


def read_text(source: Path) -> Text:
    """Return the text of a folder with a file per part, or of one file."""
    if source.is_file():
        return cut_text(source.read_text("utf-8"))
    folder = source
    for pattern in NAMES:
        files = [folder / pattern.format(part) for part in PARTS]
        if all(file.is_file() for file in files):
            return Text.of([_words(file) for file in files])
    raise DataError(
        f"{str(folder)!r} must hold wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or "
        f"train.txt, valid.txt and test.txt; it {_held(folder)}; unpack WikiText-2 and name its folder, or a "
        "text file: --from FOLDER"
    )


def cut_text(text: str) -> Text:
    r"""Return a text whose lines are cut in ten: eight parts for training, then one each for validation and test.

    Words that training sees once, and those that it lacks, are <unk>.

    >>> found = cut_text("a b a b a\n" * 8 + "a c\n" * 2)
    >>> found.words, len(found.valid)
    (('a', 'b', '<eos>', '<unk>'), 3)
    """
    lines = [[*line.split(), END] for line in text.removesuffix("\n").split("\n")]
    ends = [0, len(lines) * 8 // TENTHS, len(lines) * 9 // TENTHS, len(lines)]
    parts = [[word for line in lines[a:b] for word in line] for a, b in itertools.pairwise(ends)]
    seen = Counter(parts[0])
    known = [[word if seen[word] > 1 else UNKNOWN for word in part] for part in parts]
    return Text.of([[*known[0], UNKNOWN], *known[1:]])


def make_text(seed: int = 0, *, words: int = 120, lines: int = 96, length: int = 160) -> Text:
    """Return a small text: words of 8 kinds, few of them frequent; each kind is mostly followed by the next.

    >>> text = make_text()
    >>> len(text.words), text.words[0]
    (121, 'w0')
    """
    random = torch.Generator().manual_seed(seed)
    kinds = 8
    follows = torch.eye(kinds).roll(1, dims=1) + 0.02
    kind_of = torch.arange(words) % kinds
    chance = (1.0 / torch.arange(1, words + 1)) * (
        kind_of == torch.arange(kinds)[:, None]
    )  # (8, V)
    kind = torch.zeros(lines, dtype=torch.int64)
    found = []
    for _ in range(length):
        kind = torch.multinomial(follows[kind], 1, generator=random)[:, 0]
        found.append(torch.multinomial(chance[kind], 1, generator=random)[:, 0])
    text = [[f"w{word}" for word in line] + [END] for line in torch.stack(found, dim=1).tolist()]
    # a sixth each for validation and test; every word is in training once
    cut = lines // 6
    every = [f"w{word}" for word in range(words)]
    parts = [[*text[2 * cut :], every], text[:cut], text[cut : 2 * cut]]
    return Text.of([[word for line in part for word in line] for part in parts])


def _words(file: Path) -> list[str]:
    lines = file.read_text("utf-8").removesuffix("\n").split("\n")
    # one object per word, however often it occurs: WikiText-103 has 103 million
    return [sys.intern(word) for line in lines for word in (*line.split(), END)]


def _numbered(part: str, words: Sequence[str], number: dict[str, int]) -> Tensor:
    unknown = number.get(UNKNOWN)
    if unknown is None:
        missing = next((word for word in words if word not in number), None)
        if missing is not None:
            raise DataError(
                f"the {part} part has the word {missing!r}, which training has not; put {UNKNOWN} in its "
                "place, and in that of some rare words of training"
            )
    return torch.tensor([number.get(word, unknown) for word in words])


def _held(folder: Path) -> str:
    if not folder.is_dir():
        return "is no folder"
    names = sorted(path.name for path in folder.iterdir())
    return f"holds {', '.join(names[:5]) or 'nothing'}{' and more' if len(names) > 5 else ''}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Widths and dropouts, as AWD-LSTM has them for WikiText-2."""

    layers: int = 3
    dim: int = 400
    # NOTE[DIFF]: AWD-LSTM has 1150; products of matrices are slow where rows are not a multiple of 16 bytes.
    hidden: int = 1152
    word_dropout: float = 0.1
    input_dropout: float = 0.65
    hidden_dropout: float = 0.2
    output_dropout: float = 0.4
    weight_drop: float = 0.5


class Output(NamedTuple):
    """What the model makes of a batch `(L, B)`."""

    logits: Tensor | None
    """`(L, B, V)`; None of an adaptive softmax that was asked for losses."""
    losses: Tensor | None
    """Those of the words asked for, `(L B,)`."""
    hidden: Hidden
    size: Tensor
    """The mean square of the outputs, after their dropout."""
    change: Tensor
    """The mean square of the change of the outputs from word to word."""


class LanguageModel(nn.Module):
    """AWD-LSTM over so many words."""

    def __init__(
        self, words: int, sizes: Sizes, *, tied: bool = True, adaptive: bool = False
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.random: torch.Generator | None = None
        """What dropout is drawn from; the global generator if there is none."""
        widths = [sizes.dim, *[sizes.hidden] * (sizes.layers - 1), sizes.dim]
        self.embedding = nn.Embedding(words, sizes.dim)
        self.layers = nn.ModuleList(map(nn.LSTM, widths[:-1], widths[1:]))
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        if adaptive:
            cutoffs = [words // FIRST, words // SECOND]
            self.decoder: nn.Module = nn.AdaptiveLogSoftmaxWithLoss(sizes.dim, words, cutoffs)
            return
        decoder = self.decoder = nn.Linear(sizes.dim, words)
        if tied:
            decoder.weight = self.embedding.weight
        else:
            nn.init.uniform_(decoder.weight, -0.1, 0.1)
        nn.init.zeros_(decoder.bias)

    def forward(self, tokens: Tensor, hidden: Hidden, targets: Tensor | None = None) -> Output:
        """Return the logits of the words that follow each of `(L, B)`, the losses of those asked for, and the state after them."""
        sizes, after = self.sizes, []
        x = self._locked(self._words(tokens), sizes.input_dropout)  # (L, B, D)
        for number, (layer, state) in enumerate(zip(self.layers, hidden, strict=True)):
            raw, state_after = self._layer(layer, x, state)
            after.append(state_after)
            is_last = number == sizes.layers - 1
            x = self._locked(raw, sizes.output_dropout if is_last else sizes.hidden_dropout)
        # bfloat16 has the range of float32: safe for logits, whose loss is computed in float32
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda and self.training):
            logits, losses = self._decode(x, targets)
        return Output(
            logits, losses, after, x.square().mean(), (raw[1:] - raw[:-1]).square().mean()
        )

    def _decode(self, x: Tensor, targets: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if not isinstance(self.decoder, nn.AdaptiveLogSoftmaxWithLoss):
            logits: Tensor = self.decoder(x)
            return logits, _losses(logits, targets)
        rows = x.flatten(0, 1)
        if targets is None:
            return self.decoder.log_prob(rows).unflatten(0, x.shape[:2]), None
        return None, -self.decoder(rows, targets.flatten()).output

    def start(self, batch_size: int) -> Hidden:
        """Return the state before the first word."""
        weight = self.embedding.weight
        zeros = [weight.new_zeros(1, batch_size, layer.hidden_size) for layer in self.layers]
        return [(zero, zero) for zero in zeros]

    def _words(self, tokens: Tensor) -> Tensor:
        """Return the rows of the tokens; a word that is dropped is dropped everywhere."""
        rows = self.embedding(tokens)
        kept = self._kept(rows.new_empty(self.embedding.num_embeddings, 1), self.sizes.word_dropout)
        return rows if kept is None else rows * F.embedding(tokens, kept)

    def _locked(self, x: Tensor, chance: float) -> Tensor:
        """Drop the same features `(1, B, D)` at all steps."""
        kept = self._kept(torch.empty_like(x[:1]), chance)
        return x if kept is None else x * kept

    def _kept(self, empty: Tensor, chance: float) -> Tensor | None:
        """Return a mask of what is kept, scaled so that means stay; None where nothing is dropped."""
        if chance == 0 or not self.training:
            return None
        return empty.bernoulli_(1 - chance, generator=self.random).div_(1 - chance)

    def _layer(
        self, layer: nn.LSTM, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run a layer with some of its recurrent weights dropped."""
        parts = dict(layer.named_parameters())  # in the order that torch.lstm takes
        recurrent = parts["weight_hh_l0"]
        kept = self._kept(torch.empty_like(recurrent), self.sizes.weight_drop)
        parts["weight_hh_l0"] = recurrent if kept is None else recurrent * kept
        # one piece of memory: cuDNN would copy the weights into one
        flat = torch.cat([part.reshape(-1) for part in parts.values()])
        pieces = flat.split([part.numel() for part in parts.values()])
        weights = [piece.view_as(part) for piece, part in zip(pieces, parts.values(), strict=True)]
        raw, *after = torch.lstm(x, state, weights, True, 1, 0.0, self.training, False, False)
        return raw, (after[0], after[1])


class HuggingFaceModel(nn.Module):
    """A Hugging Face causal model over our words, with initial weights from its configuration."""

    random: torch.Generator | None = None

    def __init__(self, words: int, name: str, *, tied: bool = True) -> None:
        super().__init__()
        transformers = import_extra("transformers", "text", "--model")
        config = transformers.AutoConfig.from_pretrained(
            name, vocab_size=words, tie_word_embeddings=tied, bos_token_id=0, eos_token_id=0
        )
        self.inner = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, tokens: Tensor, hidden: Hidden, targets: Tensor | None = None) -> Output:
        """Return logits and losses; each batch is read from its own beginning."""
        logits = self.inner(input_ids=tokens.T).logits.transpose(0, 1)
        nothing = logits.new_zeros(())
        return Output(logits, _losses(logits, targets), hidden, nothing, nothing)

    def start(self, batch_size: int) -> Hidden:
        """Return no state."""
        del batch_size
        return []


def _losses(logits: Tensor, targets: Tensor | None) -> Tensor | None:
    if targets is None:
        return None
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")


class RecordedSteps:
    """Steps with the same tensors, recorded as CUDA graphs after a few ordinary ones; on a CPU they are simply made.

    A step is some thousand small kernels, one after the other, that leave most of a GPU idle. Recorded it is one launch, and
    the steps of several runs are made side by side, each on its own stream. There is one recording per size.
    """

    def __init__(self, step: Callable[[int], None], random: torch.Generator) -> None:
        self.step, self.random = step, random
        is_cuda = random.device.type == "cuda"
        self.stream = torch.cuda.Stream(random.device) if is_cuda else None
        self.mark = torch.cuda.Event() if is_cuda else None
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.done: Counter[int] = Counter()
        self.why_not: str | None = None

    def __call__(self, size: int) -> None:
        """Do it; call it on `stream`."""
        if self.stream is not None and self.done[size] == WARM_UP:
            self._record(size, self.stream)
        self.done[size] += 1
        if size in self.graphs:
            self.graphs[size].replay()
        else:
            self.step(size)
        if self.mark is not None and self.done.total() % AHEAD == 0:
            self.mark.synchronize()
            self.mark.record(self.stream)

    def forget(self) -> None:
        """Record anew: the step has become another one."""
        self.graphs, self.done = {}, Counter()

    def _record(self, size: int, stream: torch.cuda.Stream) -> None:
        """Record it; where that fails, keep the reason and go on without."""
        # All share their memory: nothing that a step leaves there is read by another.
        pool = next((graph.pool() for graph in self.graphs.values()), None)
        graph, before = torch.cuda.CUDAGraph(), self.random.clone_state()
        graph.register_generator_state(self.random)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.step(size)
        except Exception as error:  # noqa: BLE001  # anything in a step may be what cannot be recorded
            self.random.graphsafe_set_state(before)  # or it goes on waiting for the recording's end
            self.why_not = str(error).split("\n", 1)[0]
        else:
            self.graphs[size] = graph


@dataclass(frozen=True, kw_only=True)
class ShortSchedule(Schedule):
    """AWD-LSTM's settings, but for a short schedule.

    NOTE[DIFF]: AWD-LSTM takes 750 epochs of SGD at 30, averages from where validation stalls, 750 more, and
    batches of a random length; here Adam, a rate that rises and then falls to 0 as a cosine, a length of 70.
    """

    epochs: int = 8
    batch_size: int = 80
    length: int = 70
    lr: float = 2e-3
    patience: int = 0
    """None: all epochs are made."""
    rising: float = 0.05
    """The share of the steps in which the rate rises."""
    clip: float = 0.25
    weight_decay: float = 1.2e-6
    size_penalty: float = 2.0
    """The weight of the mean square of the outputs: AWD-LSTM's alpha."""
    change_penalty: float = 1.0
    """The weight of that of their change from word to word: its beta."""
    eval_batch_size: int = 80

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return Adam, on a GPU in the form that can be recorded, with its rate on the device."""
        decay, device = self.weight_decay, next(model.parameters()).device
        if device.type != "cuda":
            return torch.optim.Adam(model.parameters(), weight_decay=decay)
        rate = torch.zeros((), device=device)
        return torch.optim.Adam(
            model.parameters(), lr=rate, weight_decay=decay, fused=True, capturable=True
        )

    def cuts(self, rows: int, seed: int) -> list[list[Cut]]:
        """Return how columns of so many words are cut in each epoch: all alike, what is left over is dropped."""
        del seed
        starts = range(0, rows - self.length, self.length)
        return [[(start, self.length) for start in starts]] * self.epochs

    def starts_averaging(self, valid: Sequence[float]) -> bool:
        """Return whether to average weights after epochs of these validation perplexities."""
        del valid
        return False

    def share(self, step: int, steps: int, length: int) -> float:
        """Return the rate of a step of so many, in parts of the highest, for a batch of this length."""
        del length
        rising = max(1, round(self.rising * steps))
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


@dataclass(frozen=True, kw_only=True)
class PaperSchedule(ShortSchedule):
    """AWD-LSTM's own: SGD, batches of a random length, and the mean of the weights once validation stalls (NT-ASGD).

    NOTE[DIFF]: AWD-LSTM takes 750 epochs and 750 more from the averaged weights, and scores test in one column.
    """

    epochs: int = 50
    lr: float = 30.0
    eval_batch_size: int = 10
    trigger: int = 5
    """Averaging starts after an epoch that is worse than the best of those before the last so many."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return SGD, on a GPU with its rate on the device."""
        device, decay = next(model.parameters()).device, self.weight_decay
        rate = torch.zeros((), device=device) if device.type == "cuda" else self.lr
        return torch.optim.SGD(model.parameters(), lr=rate, weight_decay=decay, fused=True)

    def cuts(self, rows: int, seed: int) -> list[list[Cut]]:
        """Return batches of about `length` words, one in twenty of about half as many."""
        draws, epochs = np.random.default_rng(seed), []
        for _ in range(self.epochs):
            start, cuts = 0, []
            while start < rows - 2:
                mean = self.length if draws.random() < 0.95 else self.length / 2
                length = max(5, int(draws.normal(mean, 5)))
                length = min(length, rows - 1 - start)
                cuts.append((start, length))
                start += length
            epochs.append(cuts)
        return epochs

    def starts_averaging(self, valid: Sequence[float]) -> bool:
        """Return whether the last of these epochs is worse than the best of those before the last few."""
        *earlier, last = valid
        return len(earlier) > self.trigger and last > min(earlier[: -self.trigger])

    def share(self, step: int, steps: int, length: int) -> float:
        """Return a rate that follows the length of the batch: its loss is a mean over the words."""
        del step, steps
        return length / self.length


class LanguageTraining(Training):
    """A run that carries the state of the model from batch to batch, and averages weights as the paper does."""

    task: "WordModel"

    def __init__(self, task: "WordModel", run: Run) -> None:
        super().__init__(task, run)
        self.model.random = torch.Generator(task.device).manual_seed(run.seed)
        self.average: rb.EMA | None = None
        """The mean of the weights since averaging started."""
        self.steps = sum(map(len, task.cuts(run.seed)))
        longest = max(length for cuts in task.cuts(run.seed) for _, length in cuts)
        self.tokens = task.train[:longest].clone()
        self.targets = self.tokens.clone()
        self.hidden = [(h, h.clone()) for h, _ in self.model.start(task.schedule.batch_size)]
        self._recorded = RecordedSteps(self._train_on_batch, self.model.random)
        _wait(task.device)

    @property
    def is_recorded(self) -> bool | str:
        """Whether steps are replayed from a recording on a GPU, or why they are not."""
        return self._recorded.why_not or bool(self._recorded.graphs)

    def train_step(self, say: Callable[[str], object]) -> bool:
        """Make a step on the run's own stream."""
        with torch.cuda.stream(self._recorded.stream):
            return super().train_step(say)

    def update(self, batch: Cut) -> None:
        """Train on a batch."""
        start, length = batch
        if start == 0:
            for state in self.hidden:
                torch._foreach_zero_(state)  # in place: a recording reads these
        tokens, targets = batch_at(self.task.train, start, length)
        self.tokens[:length].copy_(tokens)
        self.targets[:length].copy_(targets)
        self.model.train()
        self._recorded(length)

    def averaged(self) -> AbstractContextManager[None]:
        """Put the mean of the weights into the model, once averaging has started."""
        return super().averaged() if self.average is None else self.average.applied()

    def result(self) -> dict[str, Any]:
        """Return the scores of the best epoch, and whether steps were recorded."""
        _wait(self.task.device)
        return super().result() | {"steps_recorded": self.is_recorded}

    def state(self) -> dict[str, Any]:
        """Return all that the coming steps depend on."""
        assert self.model.random is not None
        _wait(self.task.device)
        return super().state() | {
            "average": None if self.average is None else self.average.training_state(),
            "random": self.model.random.get_state(),
            "hidden": self.hidden,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, before the first step."""
        assert self.model.random is not None
        super().load(state)
        if state["average"] is not None:
            self._start_averaging().load_training_state(self._moved(state["average"]))
        self.model.random.set_state(state["random"])
        self.hidden = self._moved(state["hidden"])
        _wait(self.task.device)

    def _moved(self, state: Any) -> Any:
        return map_tensors(state, lambda tensor: tensor.to(self.task.device))

    def _rate(self, batch: Cut) -> float:
        return self.task.schedule.share(self.step, self.steps, batch[1])

    def _start_averaging(self) -> rb.EMA:
        self._recorded.forget()
        self.average = rb.EMA(self.model, self.optimizer, decay=1.0)
        return self.average

    def _train_on_batch(self, length: int) -> None:
        """Train on the batch of this length that lies in `tokens` and `targets`."""
        schedule = self.task.schedule
        self.optimizer.zero_grad()  # first: a recording that failed may have left gradients
        found = self.model(self.tokens[:length], self.hidden, self.targets[:length])
        loss = found.losses.mean()
        penalty = schedule.size_penalty * found.size + schedule.change_penalty * found.change
        self.backward(loss + penalty)
        for old, new in zip(self.hidden, found.hidden, strict=True):
            torch._foreach_copy_(old, [part.detach() for part in new])  # in place, see above
        self.loss_sum += loss.detach()

    def _end_epoch(self, say: Callable[[str], object]) -> None:
        super()._end_epoch(say)
        if self.average is not None:
            self.history[-1]["averaged"] = True
        elif not isinstance(
            self.addition, rb.EMA | RunningTail
        ) and self.task.schedule.starts_averaging(
            [epoch["valid"]["all"] for epoch in self.history]
        ):
            self._start_averaging()
        if isinstance(self.addition, RunningTail):
            self._recorded.forget()  # the optimizer of rare rows was restarted


class WordModel(Task):
    """The next word of a text."""

    name, metric, least, higher = "text-language-model", "perplexity", 0.5, False
    schedule: ShortSchedule

    def __init__(
        self,
        text: Text,
        sizes: Sizes,
        schedule: ShortSchedule,
        device: torch.device,
        *,
        tied: bool = True,
        adaptive: bool = False,
        model: str | None = None,
    ) -> None:
        self.text, self.sizes, self.schedule, self.device = text, sizes, schedule, device
        self.tied, self.adaptive, self.hugging_face = tied, adaptive, model
        self.train = columns(text.train, schedule.batch_size).to(device)
        self.columns = {
            "valid": columns(text.valid, schedule.eval_batch_size).to(device),
            "test": columns(text.test, schedule.eval_batch_size).to(device),
        }
        if not self.cuts(0)[0]:
            raise DataError(
                f"a batch is {schedule.batch_size} x {schedule.length} words, the training text has "
                f"{len(text.train)}; lower --batch-size"
            )

    def facts(self) -> dict[str, Any]:
        sizes = asdict(self.sizes) if self.hugging_face is None else named(self.hugging_face)
        tied = {"tied": self.tied} | ({"softmax": "adaptive"} if self.adaptive else {})
        return {
            "text": self.text.described(),
            "sizes": sizes | tied,
            "schedule": asdict(self.schedule),
        }

    def model(self) -> LanguageModel | HuggingFaceModel:
        words = len(self.text.counts)
        if self.hugging_face is not None:
            return HuggingFaceModel(words, self.hugging_face, tied=self.tied)
        return LanguageModel(words, self.sizes, tied=self.tied, adaptive=self.adaptive)

    def training(self, run: Run) -> LanguageTraining:
        if ARMS[run.arm].tail and self.tied:
            raise SettingsError(
                "tail changes the input table, so that must be one of its own: add --untie"
            )
        return LanguageTraining(self, run)

    @functools.cache  # noqa: B019  # a task lives as long as its process
    def cuts(self, seed: int) -> list[list[Cut]]:
        """Return where the batches of each epoch begin, and their lengths."""
        return self.schedule.cuts(len(self.train), seed)

    def batches(self, seed: int, epoch: int) -> list[Cut]:
        return self.cuts(seed)[epoch]

    def loss(self, model: nn.Module, batch: Cut) -> Tensor:
        tokens, targets = batch_at(self.train, *batch)
        losses: Tensor = model(tokens, model.start(tokens.shape[1]), targets).losses
        return losses.mean()

    def counts_of(self, kind: type[nn.Module]) -> dict[str, Tensor]:
        """Return the counts of the text; of models with other tables, by use."""
        return {"embedding": self.text.counts} if kind is LanguageModel else super().counts_of(kind)

    def streams(self, model: nn.Module) -> dict[str, Tensor]:
        if isinstance(model, LanguageModel):
            return {"embedding": self.text.train}
        table = model.inner.get_input_embeddings()
        [name] = [name for name, module in model.named_modules() if module is table]
        return {name: self.text.train}

    @torch.no_grad()
    def scores(self, model: nn.Module, part: str) -> dict[str, Any]:
        """Return the perplexity of all words, of frequent and rare ones, and by tenths of the words of the text.

        A word's own perplexity is that of the place where it stands, whatever stands before it. The first tenth has the
        most frequent words.
        """
        model.eval()
        tokens = self.columns[part]
        hidden, length = model.start(tokens.shape[1]), self.schedule.length
        sums = torch.zeros(2, len(self.text.counts), dtype=torch.float64, device=tokens.device)
        for start in range(0, len(tokens) - 1, length):
            inputs, targets = batch_at(tokens, start, length)
            found = model(inputs, hidden, targets)
            hidden, places = found.hidden, targets.reshape(-1)
            losses = found.losses.double()
            sums[0].index_add_(0, places, losses)
            sums[1].index_add_(0, places, torch.ones_like(losses))
        model.train()
        losses, words = sums.cpu()
        is_head = self.text.is_head
        # ids are in the order of counts; a word is in the tenth of its middle
        tenth = ((words.cumsum(0) - words / 2) * TENTHS / words.sum()).long().clamp(max=TENTHS - 1)
        by_tenth = [
            torch.zeros(TENTHS, dtype=torch.float64).index_add_(0, tenth, each)
            for each in (losses, words)
        ]
        return {
            "all": perplexity(losses.sum(), words.sum()),
            "head": perplexity(losses[is_head].sum(), words[is_head].sum()),
            "tail": perplexity(losses[~is_head].sum(), words[~is_head].sum()),
            "tenths": [perplexity(*each) for each in zip(*by_tenth, strict=True)],
        }


def perplexity(loss: Tensor, words: Tensor) -> float | None:
    """Return the perplexity of summed losses; None of no words."""
    return math.exp(min(float(loss / words), 700.0)) if words else None


def columns(tokens: Tensor, number: int) -> Tensor:
    """Return so many pieces of a text side by side, `(L, B)`; what is left over is dropped.

    >>> columns(torch.arange(7), 2).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    length = len(tokens) // number
    return tokens[: length * number].reshape(number, length).T.contiguous()


def batch_at(tokens: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the words from a place on, and those that follow them, `(length or less, B)` both."""
    stop = min(start + length, len(tokens) - 1)
    return tokens[start:stop], tokens[start + 1 : stop + 1]


def _wait(device: torch.device | str) -> None:
    """Wait for a GPU: the streams that fill tensors and those that read them are not the same."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


SMALL_SIZES = Sizes(
    layers=2,
    dim=16,
    hidden=24,
    word_dropout=0.0,
    input_dropout=0.1,
    hidden_dropout=0.1,
    output_dropout=0.1,
    weight_drop=0.1,
)
SMALL_SCHEDULE = ShortSchedule(epochs=3, batch_size=4, length=20, lr=2e-2, eval_batch_size=4)
SMALL_PAPER = PaperSchedule(epochs=8, batch_size=4, length=20, lr=5.0, eval_batch_size=4, trigger=2)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this recipe."""
    parser.add_argument(
        "--paper", action="store_true", help="SGD at 30 and NT-ASGD, 50 epochs, in place of Adam"
    )
    parser.add_argument(
        "--untie",
        action="store_true",
        help="give the input a table of its own, as the arm tail needs",
    )
    parser.add_argument(
        "--adaptive",
        action="store_true",
        help="an adaptive softmax, for large vocabularies; the input has a table of its own then",
    )


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Make the runs that time allows, print what is there, and write it."""
    began = time.monotonic()
    options = options_of("language_model.py", __doc__, given, add_options)
    if options.adaptive and options.model is not None:
        raise SettingsError(
            "--adaptive is for the LSTM; a Hugging Face model has an output of its own"
        )
    tied = not (options.untie or options.adaptive)
    if options.arms is None and tied:
        options.arms = [arm for arm in ARMS if not ARMS[arm].tail]
    if options.paper:
        schedule: ShortSchedule = SMALL_PAPER if options.small else PaperSchedule()
    else:
        schedule = SMALL_SCHEDULE if options.small else ShortSchedule()
    torch.set_float32_matmul_precision("high")
    task = WordModel(
        make_text() if options.small else read_text(options.source),
        SMALL_SIZES if options.small else Sizes(),
        changed(schedule, options),
        device_of(options),
        tied=tied,
        adaptive=options.adaptive,
        model=options.model,
    )
    return run_recipe(task, options, began)


if __name__ == "__main__":
    try:
        main()
    except RarebitError as error:
        sys.exit(f"error: {error}")
