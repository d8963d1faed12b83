"""German to English on Multi30k: a small transformer, BLEU and chrF, sentences with rare words apart.

    pip install "rarebit[text]"
    python recipes/text/translation.py --from multi30k --device cuda --seeds 3 --trials 6 --compress

The folder holds train.de, val.de, test_2016_flickr.de and the same in .en. Each language has a vocabulary of byte pairs made from its
training text, and a table of its own: `source` and `target`. Validation scores greedy translations, test those of a beam search,
as sacrebleu does: cased, with its own tokens.

`head` are sentences whose words are all of the top fifth of the German words by count, `tail` those with a rare or an unseen
word. `--model` takes a Hugging Face encoder-decoder with initial weights, over one vocabulary for both languages.
"""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from _shared import Schedule, Task, changed, device_of, generator, named, options_of, run_recipe
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import rarebit as rb
from rarebit.data.selection import split_by_frequency
from rarebit.errors import DataError, RarebitError, import_extra

__all__ = ["Text", "Translator", "main", "translate"]

SIDES = ("de", "en")
FILES = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
PAD, BEGIN, END = 0, 1, 2
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
POOL = 20
"""Batches whose sentences are sorted by length together, so that little is padded."""
SMOOTHING = 0.1

Batch = tuple[Tensor, Tensor]
"""Subwords of sentences and of their translations, padded."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Widths of a transformer of 10 M weights."""

    subwords: int = 6000
    """In each vocabulary."""
    dim: int = 256
    heads: int = 4
    inner: int = 1024
    layers: int = 3
    """In the encoder, and in the decoder."""
    dropout: float = 0.3
    beam: int = 5


class Text:
    """Pairs of sentences as subwords."""

    def __init__(
        self, parts: dict[str, tuple[list[str], list[str]]], subwords: int, *, joint: bool = False
    ) -> None:
        self.parts = parts
        train = parts["train"]
        if joint:
            self.vocabularies = (vocabulary([*train[0], *train[1]], subwords),) * 2
        else:
            self.vocabularies = (vocabulary(train[0], subwords), vocabulary(train[1], subwords))
        self.sizes = [each.get_vocab_size() for each in self.vocabularies]
        self.encoded = {
            name: [
                [torch.tensor([BEGIN, *each.ids, END]) for each in words.encode_batch(lines)]
                for words, lines in zip(self.vocabularies, both, strict=True)
            ]
            for name, both in parts.items()
        }
        counted = Counter(word for line in train[0] for word in words_of(line))
        known = sorted(counted, key=lambda word: (-counted[word], word))
        counts = torch.tensor([counted[word] for word in known])
        is_head = split_by_frequency(counts, rb.data.FrequencySplit())
        self.head = {word for word, head in zip(known, is_head.tolist(), strict=True) if head}

    def is_frequent(self, line: str) -> bool:
        """Return whether a German sentence has frequent words only."""
        return all(word in self.head for word in words_of(line))

    def described(self) -> dict[str, Any]:
        """Return what a result says of the text."""
        lines = [line for both in self.parts.values() for side in both for line in side]
        digest = sha256("\n".join(lines).encode())
        for each in self.vocabularies:
            digest.update(each.to_str().encode())
        pairs = {f"{name} pairs": len(both[0]) for name, both in self.parts.items()}
        return {"subwords": self.sizes, **pairs, "sha256": digest.hexdigest()}


def words_of(line: str) -> list[str]:
    """Return the words of a sentence in lower case.

    >>> words_of("Ein Mann, zwei!")
    ['ein', 'mann', 'zwei']
    """
    return re.findall(r"\w+", line.lower())


def vocabulary(lines: Iterable[str], size: int) -> Any:
    """Return a tokenizer with byte pairs from these lines."""
    package = import_extra("tokenizers", "text", "subwords")
    made = package.Tokenizer(package.models.BPE(unk_token=SPECIAL[3]))
    made.pre_tokenizer, made.decoder = (
        package.pre_tokenizers.Metaspace(),
        package.decoders.Metaspace(),
    )
    trainer = package.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*SPECIAL], show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    return made


class Translator(nn.Module):
    """A transformer with a table for each language and output weights of its own."""

    def __init__(self, source: int, target: int, sizes: Sizes) -> None:
        super().__init__()
        dim = sizes.dim
        settings = {
            "dim_feedforward": sizes.inner,
            "dropout": sizes.dropout,
            "batch_first": True,
            "norm_first": True,
        }
        self.source, self.target = (nn.Embedding(n, dim, padding_idx=PAD) for n in (source, target))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, sizes.heads, **settings),
            sizes.layers,
            nn.LayerNorm(dim),
            enable_nested_tensor=False,
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(dim, sizes.heads, **settings),
            sizes.layers,
            nn.LayerNorm(dim),
        )
        self.dropout, self.output = nn.Dropout(sizes.dropout), nn.Linear(dim, target)
        for name, weight in self.named_parameters():
            if weight.dim() > 1 and name not in ("source.weight", "target.weight"):
                nn.init.xavier_uniform_(weight)
        for table in (self.source, self.target):
            nn.init.normal_(table.weight[1:], std=dim**-0.5)

    def encode(self, source: Tensor) -> Tensor:
        """Return what the decoder reads of sentences `(B, S)`: `(B, S, D)`."""
        return self.encoder(self._placed(self.source(source)), src_key_padding_mask=source == PAD)

    def decode(self, memory: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits of what follows each subword of `(B, T)`: `(B, T, V)`."""
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        read = self.decoder(
            self._placed(self.target(target)),
            memory,
            tgt_mask=later,
            memory_key_padding_mask=source == PAD,
        )
        return self.output(read)

    def _placed(self, rows: Tensor) -> Tensor:
        """Return rows with the waves of their places (Vaswani et al., 2017)."""
        length, dim = rows.shape[1:]
        rates = torch.exp(torch.arange(0, dim, 2, device=rows.device) * (-math.log(1e4) / dim))
        angles = torch.arange(length, device=rows.device)[:, None] * rates
        places = torch.stack([angles.sin(), angles.cos()], dim=2).reshape(length, dim)
        return self.dropout(rows * dim**0.5 + places)


class HuggingFaceTranslator(nn.Module):
    """A Hugging Face encoder-decoder over our subwords, with initial weights from its configuration."""

    def __init__(self, subwords: int, name: str) -> None:
        super().__init__()
        transformers = import_extra("transformers", "text", "--model")
        config = transformers.AutoConfig.from_pretrained(
            name, vocab_size=subwords, pad_token_id=PAD, bos_token_id=BEGIN, eos_token_id=END
        )
        self.inner = transformers.AutoModelForSeq2SeqLM.from_config(config)

    def encode(self, source: Tensor) -> Tensor:
        """Return what the decoder reads."""
        mask = (source != PAD).long()
        return self.inner.get_encoder()(input_ids=source, attention_mask=mask).last_hidden_state

    def decode(self, memory: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits of what follows each subword."""
        mask = (source != PAD).long()
        return self.inner(
            encoder_outputs=(memory,), attention_mask=mask, decoder_input_ids=target
        ).logits


@torch.no_grad()
def translate(
    model: Translator | HuggingFaceTranslator, source: Tensor, *, beam: int, longest: int
) -> Tensor:
    """Return the best translations `(B, T)` that a search with so many beams finds, by the mean score of a subword."""
    number = len(source)
    memory, source = (
        model.encode(source).repeat_interleave(beam, 0),
        source.repeat_interleave(beam, 0),
    )
    tokens = source.new_full((number * beam, 1), BEGIN)
    scores = torch.full((number, beam), -torch.inf, device=source.device)
    scores[:, 0] = 0.0  # all beams begin alike, so one of them is enough
    is_done = torch.zeros_like(source[:, 0], dtype=torch.bool)
    first = torch.arange(number, device=source.device)[:, None] * beam
    for _ in range(longest):
        chances = model.decode(memory, source, tokens)[:, -1].log_softmax(1)
        chances[:, [PAD, BEGIN]] = -torch.inf
        chances[is_done] = -torch.inf
        chances[is_done, PAD] = 0.0  # a finished one stays as it is
        words = chances.shape[1]
        scores, picks = (scores.reshape(-1, 1) + chances).reshape(number, -1).topk(beam, dim=1)
        rows, picks = (picks // words + first).reshape(-1), (picks % words).reshape(-1, 1)
        tokens = torch.cat([tokens[rows], picks], dim=1)
        is_done = is_done[rows] | (picks[:, 0] == END)
        if bool(is_done.all()):
            break
    lengths = (tokens[:, 1:] != PAD).sum(1).reshape(number, beam)
    best = (scores / lengths).argmax(1)
    return tokens[best + first[:, 0], 1:]


class Translation(Task):
    """Sentences and their translations."""

    name, metric, least, parts = "text-translation", "BLEU", 0.3, ("head", "tail", "chrF")

    def __init__(
        self,
        text: Text,
        sizes: Sizes,
        schedule: Schedule,
        device: torch.device,
        model: str | None = None,
    ) -> None:
        self.text, self.sizes, self.schedule = text, sizes, schedule
        self.device, self.hugging_face = device, model

    def facts(self) -> dict[str, Any]:
        model = {} if self.hugging_face is None else named(self.hugging_face)
        sizes = asdict(self.sizes) | model
        return {"text": self.text.described(), "sizes": sizes, "schedule": asdict(self.schedule)}

    def model(self) -> Translator | HuggingFaceTranslator:
        if self.hugging_face is not None:
            return HuggingFaceTranslator(self.text.sizes[0], self.hugging_face)
        return Translator(*self.text.sizes, self.sizes)

    def batches(self, seed: int, epoch: int) -> list[Batch]:
        """Return shuffled pairs, of about equal length in a batch."""
        random, size = generator(seed, epoch), self.schedule.batch_size
        sources, targets = self.text.encoded["train"]
        found = []
        for pool in torch.randperm(len(sources), generator=random).split(POOL * size):
            ordered = sorted(pool.tolist(), key=lambda n: (len(sources[n]), len(targets[n])))
            found += [ordered[start : start + size] for start in range(0, len(ordered), size)]
        order = torch.randperm(len(found), generator=random).tolist()
        return [
            (self._padded(sources, found[number]), self._padded(targets, found[number]))
            for number in order
        ]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        source, target = batch
        logits = model.decode(model.encode(source), source, target[:, :-1])
        return F.cross_entropy(
            logits.flatten(0, 1),
            target[:, 1:].reshape(-1),
            ignore_index=PAD,
            label_smoothing=SMOOTHING,
        )

    def scores(self, model: nn.Module, part: str) -> dict[str, Any]:
        """Return BLEU of all sentences, of those with frequent words only and of the others, and chrF."""
        bleu = import_extra("sacrebleu", "text", "BLEU")
        model.eval()
        lines, references = self.text.parts[part]
        found = self.translations(model, part, beam=self.sizes.beam if part == "test" else 1)
        is_head = [self.text.is_frequent(line) for line in lines]

        def of(*wanted: bool) -> float | None:
            chosen = [n for n, head in enumerate(is_head) if head in wanted]
            pairs = [found[n] for n in chosen], [[references[n] for n in chosen]]
            return bleu.corpus_bleu(*pairs).score if chosen else None

        scores = {"all": of(True, False), "head": of(True), "tail": of(False)}
        sentences = {"head": sum(is_head), "tail": len(is_head) - sum(is_head)}
        return scores | {
            "chrF": bleu.corpus_chrf(found, [references]).score,
            "sentences": sentences,
        }

    def translations(self, model: nn.Module, part: str, *, beam: int) -> list[str]:
        """Return the translations of a part as text."""
        sources = self.text.encoded[part][0]
        order = sorted(range(len(sources)), key=lambda n: len(sources[n]))
        found: dict[int, str] = {}
        for start in range(0, len(order), self.schedule.batch_size):
            places = order[start : start + self.schedule.batch_size]
            source = self._padded(sources, places)
            made = translate(model, source, beam=beam, longest=source.shape[1] * 3 // 2 + 10)
            texts = self.text.vocabularies[1].decode_batch(made.tolist(), skip_special_tokens=True)
            found |= dict(zip(places, texts, strict=True))
        return [found[n] for n in range(len(sources))]

    def streams(self, model: nn.Module) -> dict[str, Tensor]:
        source, target = (torch.cat(side) for side in self.text.encoded["train"])
        if isinstance(model, Translator):
            return {"source": source, "target": target}
        table = model.inner.get_input_embeddings()
        [name, *_] = [name for name, module in model.named_modules() if module is table]
        return {name: torch.cat([source, target])}

    def _padded(self, sentences: Sequence[Tensor], places: Sequence[int]) -> Tensor:
        return pad_sequence([sentences[n] for n in places], batch_first=True).to(self.device)


def read_parts(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Return the sentences of a folder, by part and language."""
    files = {part: [folder / f"{name}.{side}" for side in SIDES] for part, name in FILES.items()}
    missing = [file.name for both in files.values() for file in both if not file.is_file()]
    if missing:
        raise DataError(
            f"{str(folder)!r} must hold {', '.join(missing)}; unpack Multi30k and name its folder"
        )
    found = {}
    for part, both in files.items():
        lines = [file.read_text("utf-8").removesuffix("\n").split("\n") for file in both]
        if len(lines[0]) != len(lines[1]):
            raise DataError(
                f"{both[0].name} and {both[1].name} must have as many lines, got {len(lines[0])} and {len(lines[1])}"
            )
        found[part] = (lines[0], lines[1])
    return found


def make_parts() -> dict[str, tuple[list[str], list[str]]]:
    """Return a small text: words in another order, few of them frequent."""
    random = generator(0, 0)
    chance = 1 / torch.arange(1, 61)

    def pair() -> tuple[str, str]:
        words = torch.multinomial(chance, 4, generator=random).tolist()
        german = ["".join("abcdefghij"[int(digit)] for digit in f"{word:02d}") for word in words]
        return " ".join(german) + ".", " ".join(word.upper() for word in german[::-1]) + "."

    sizes = {"train": 400, "valid": 40, "test": 40}
    pairs = {part: [pair() for _ in range(size)] for part, size in sizes.items()}
    return {part: ([de for de, _ in each], [en for _, en in each]) for part, each in pairs.items()}


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Make the runs that time allows, print what is there, and write it."""
    began = time.monotonic()
    options = options_of("translation.py", __doc__, given)
    sizes = Sizes()
    schedule = Schedule(epochs=60, batch_size=128, lr=1e-3, warm_up=1000, clip=1.0)
    if options.small:
        sizes = Sizes(subwords=120, dim=32, heads=2, inner=64, layers=1, dropout=0.0, beam=2)
        schedule = Schedule(epochs=6, batch_size=20, lr=5e-3, warm_up=20, clip=1.0)
    parts = make_parts() if options.small else read_parts(options.source)
    text = Text(parts, sizes.subwords, joint=options.model is not None)
    task = Translation(text, sizes, changed(schedule, options), device_of(options), options.model)
    return run_recipe(task, options, began)


if __name__ == "__main__":
    try:
        main()
    except RarebitError as error:
        sys.exit(f"error: {error}")
