"""Named entities with rare and unseen words: BiLSTM-CRF or a transformer on CoNLL-03, entity F1 by conlleval's rules.

    python recipes/text/ner.py --from conll2003 --device cuda --seeds 5 --trials 6 --compress

The folder holds eng.train, eng.testa and eng.testb, or train.txt, valid.txt and test.txt: a word per line with its tag (IOB1 or
IOB2) in the last column, an empty line after each sentence.

    x_t = [E[w_t]; max-pool CNN(C[characters of w_t])],  h = BiLSTM(x),  p(y | x) = CRF(W h)     (Ma and Hovy, 2016)

    E   `encoder.words`, lower-case words with digits as 0      C   `encoder.letters`
    CRF `crf`: score(y) = sum_t W h_t [y_t] + A[y_(t-1), y_t], normalised over all y

Entities are split by their rarest word: `head` has only words of the top fifth by count, `tail` another word of training,
`unseen` a word that training lacks. `--model` takes a Hugging Face encoder in place of the BiLSTM: fine-tuned with its own
tokenizer where the folder has one, else with initial weights over our words: `BertConfig(...).save_pretrained(folder)` is enough.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _shared import Schedule, Task, changed, device_of, generator, named, options_of, run_recipe
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import rarebit as rb
from rarebit.data.selection import split_by_frequency
from rarebit.errors import DataError, RarebitError, import_extra

__all__ = ["CRF", "main", "spans"]

FILES = (("eng.train", "eng.testa", "eng.testb"), ("train.txt", "valid.txt", "test.txt"))
PARTS = ("train", "valid", "test")
PAD, UNKNOWN = 0, 1
"""Ids of words and letters with a meaning of their own."""
LONGEST = 20
"""Letters of a word that are read."""
POOL = 20
"""Batches whose sentences are sorted by length together, so that little is padded."""
GROUPS = ("head", "tail", "unseen")

Span = tuple[int, int, str]
"""First place, place after the last, kind."""
Sentence = tuple[list[str], list[str]]
"""Words and tags."""


def spans(tags: Sequence[str]) -> list[Span]:
    """Return the entities of IOB1 or IOB2 tags, by the rules of conlleval.

    An entity begins at B, and at I after O or after another kind; it ends before the next beginning, or O.

    >>> spans(["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG"])
    [(0, 2, 'PER'), (2, 3, 'PER'), (4, 5, 'LOC'), (5, 6, 'ORG')]
    """
    found: list[Span] = []
    start, inside = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        if inside and (prefix != "I" or kind != inside):
            found.append((start, place, inside))
            inside = ""
        if prefix != "O" and not inside:
            start, inside = place, kind
    return found


def iobes(tags: Sequence[str]) -> list[str]:
    """Return tags that also say where an entity ends, which models learn better.

    >>> iobes(["I-PER", "I-PER", "B-PER", "O"])
    ['B-PER', 'E-PER', 'S-PER', 'O']
    """
    found = ["O"] * len(tags)
    for start, stop, kind in spans(tags):
        found[start:stop] = [f"I-{kind}"] * (stop - start)
        found[stop - 1] = f"E-{kind}"
        found[start] = f"{'B' if stop - start > 1 else 'S'}-{kind}"
    return found


def iob(tags: Sequence[str]) -> list[str]:
    """Return IOBES tags without their ends.

    >>> iob(["S-PER", "E-PER", "O"])
    ['B-PER', 'I-PER', 'O']
    """
    return [tag.replace("S-", "B-", 1).replace("E-", "I-", 1) for tag in tags]


def f1(correct: int, found: int, true: int) -> float | None:
    """Return F1 in percent; None where there is no entity to find.

    >>> round(f1(371, 539, 459), 2)  # the example in the documentation of conlleval
    74.35
    """
    return 200.0 * correct / (found + true) if true else None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Widths of the BiLSTM-CRF."""

    word_dim: int = 100
    letter_dim: int = 30
    filters: int = 30
    hidden: int = 100
    dropout: float = 0.5
    unknown: float = 0.5
    """How often training takes a word that it sees once for an unknown one."""


class Batch(NamedTuple):
    """Sentences of a batch, padded."""

    types: Tensor
    """Distinct words as they are written, `(B, L)`; 0 is padding."""
    tags: Tensor
    lengths: Tensor
    """On the CPU, where torch packs."""

    @property
    def mask(self) -> Tensor:
        """Where there is a word, `(B, L)`."""
        return self.types > 0


class CRF(nn.Module):
    """A linear-chain conditional random field over tags; sentences have at least one word."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.between = nn.Parameter(torch.zeros(tags, tags))  # A, from row to column
        self.first, self.last = (nn.Parameter(torch.zeros(tags)) for _ in range(2))

    def forward(self, scores: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """Return the negative log-likelihood of each sentence, from `(B, L, T)`, `(B, L)`, `(B, L)` to `(B,)`."""
        return self.partition(scores, mask) - self.score(scores, tags, mask)

    def score(self, scores: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        """Return the score of given tags."""
        own = scores.gather(2, tags[:, :, None])[:, :, 0]
        moves = self.between[tags[:, :-1], tags[:, 1:]]
        end = tags.gather(1, mask.sum(1, keepdim=True) - 1)[:, 0]
        inside = (own * mask).sum(1) + (moves * mask[:, 1:]).sum(1)
        return inside + self.first[tags[:, 0]] + self.last[end]

    def partition(self, scores: Tensor, mask: Tensor) -> Tensor:
        """Return the logarithm of the sum over all tag sequences."""
        total = self.first + scores[:, 0]
        for place in range(1, scores.shape[1]):
            moved = (total[:, :, None] + self.between).logsumexp(1) + scores[:, place]
            total = torch.where(mask[:, place, None], moved, total)
        return (total + self.last).logsumexp(1)

    def decode(self, scores: Tensor, mask: Tensor) -> list[list[int]]:
        """Return the best tags of each sentence (Viterbi)."""
        total, steps = self.first + scores[:, 0], []
        for place in range(1, scores.shape[1]):
            best, before = (total[:, :, None] + self.between).max(1)
            on = mask[:, place, None]
            # over padding every tag comes from itself
            steps.append(torch.where(on, before, torch.arange(total.shape[1], device=total.device)))
            total = torch.where(on, best + scores[:, place], total)
        path = [(total + self.last).argmax(1)]
        for before in reversed(steps):
            path.append(before.gather(1, path[-1][:, None])[:, 0])
        lengths = mask.sum(1).tolist()
        tags = torch.stack(path[::-1], dim=1).tolist()
        return [line[:length] for line, length in zip(tags, lengths, strict=True)]


class WordEncoder(nn.Module):
    """Word and letters to features in context: `(B, L)` to `(B, L, 2 hidden)`."""

    def __init__(self, text: "Text", sizes: Sizes) -> None:
        super().__init__()
        self.sizes, self.width = sizes, 2 * sizes.hidden
        self.words = nn.Embedding(len(text.words), sizes.word_dim, padding_idx=PAD)
        self.letters = nn.Embedding(text.num_letters, sizes.letter_dim, padding_idx=PAD)
        self.cnn = nn.Conv1d(sizes.letter_dim, sizes.filters, 3, padding=1)
        self.lstm = nn.LSTM(
            sizes.word_dim + sizes.filters, sizes.hidden, batch_first=True, bidirectional=True
        )
        bound = (3 / sizes.word_dim) ** 0.5
        nn.init.uniform_(self.words.weight[1:], -bound, bound)
        for name, tensor in text.of_types.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        """Return features; those of padding are zero."""
        words = self.word_of[batch.types]
        if self.training:
            once = self.is_single[batch.types] & (
                torch.rand_like(words, dtype=torch.float32) < self.sizes.unknown
            )
            words = words.masked_fill(once, UNKNOWN)
        types, places = batch.types.unique(return_inverse=True)
        letters = self.letters_of[types]
        read = self.cnn(self.letters(letters).transpose(1, 2))
        read = read.masked_fill((letters == PAD)[:, None], -torch.inf).amax(2)
        read = read.masked_fill(types[:, None] == PAD, 0.0)
        x = torch.cat([self.words(words), F.embedding(places, read)], dim=2)
        x = F.dropout(x, self.sizes.dropout, self.training)
        packed = pack_padded_sequence(x, batch.lengths, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return F.dropout(x, self.sizes.dropout, self.training)


class HuggingFaceEncoder(nn.Module):
    """A Hugging Face encoder: by its own tokenizer, or over our words where it has none; a word is its first piece."""

    def __init__(self, text: "Text", name: str) -> None:
        super().__init__()
        transformers = import_extra("transformers", "text", "--model")
        has_tokenizer = not Path(name).is_dir() or any(Path(name).glob("tokenizer*"))
        if has_tokenizer:
            self.inner = transformers.AutoModel.from_pretrained(name)
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, add_prefix_space=True)
            pieces = tokenizer(text.types[1:], add_special_tokens=False)["input_ids"]
            pieces = [[0], *[found or [tokenizer.unk_token_id] for found in pieces]]
            self.ends = (tokenizer.cls_token_id, tokenizer.sep_token_id)
        else:
            config = transformers.AutoConfig.from_pretrained(name)
            config.vocab_size, config.pad_token_id = len(text.words), PAD
            self.inner = transformers.AutoModel.from_config(config)
            pieces = [[word] for word in text.of_types["word_of"].tolist()]
            self.ends = (None, None)
        self.pieces: list[list[int]] = pieces
        self.width = self.inner.config.hidden_size

    def forward(self, batch: Batch) -> Tensor:
        """Return features; those of padding mean nothing."""
        device, (begin, end) = batch.types.device, self.ends
        ids, firsts = [], []
        for line, length in zip(batch.types.tolist(), batch.lengths.tolist(), strict=True):
            tokens, first = [] if begin is None else [begin], []
            for word in line[:length]:
                first.append(len(tokens))
                tokens += self.pieces[word]
            ids.append(torch.tensor([*tokens, *([] if end is None else [end])]))
            firsts.append(torch.tensor(first))
        inputs = pad_sequence(ids, batch_first=True).to(device)
        places = pad_sequence(firsts, batch_first=True).to(device)
        mask = torch.arange(inputs.shape[1]) < torch.tensor([len(line) for line in ids])[:, None]
        hidden = self.inner(
            input_ids=inputs, attention_mask=mask.long().to(device)
        ).last_hidden_state
        return hidden.gather(1, places[:, :, None].expand(-1, -1, hidden.shape[2]))


class Tagger(nn.Module):
    """An encoder and a CRF."""

    def __init__(self, encoder: WordEncoder | HuggingFaceEncoder, tags: int) -> None:
        super().__init__()
        self.encoder, self.output, self.crf = encoder, nn.Linear(encoder.width, tags), CRF(tags)

    def forward(self, batch: Batch) -> Tensor:
        """Return the scores of each tag at each word, `(B, L, T)`."""
        return self.output(self.encoder(batch))


class Text:
    """Sentences as ids. A type is a word as it is written; several types may be one word."""

    def __init__(self, parts: Sequence[Sequence[Sentence]]) -> None:
        counted = Counter(plain(word) for words, _ in parts[0] for word in words)
        self.words = ["<pad>", "<unk>", *sorted(counted, key=lambda word: (-counted[word], word))]
        self.types = ["<pad>", *sorted({w for part in parts for words, _ in part for w in words})]
        self.tags = sorted({tag for _, tags in parts[0] for tag in iobes(tags)})
        letters = sorted({letter for words, _ in parts[0] for word in words for letter in word})
        self.num_letters = 2 + len(letters)
        self.counts = torch.tensor([0, 0, *(counted[word] for word in self.words[2:])])
        self.is_head = split_by_frequency(self.counts, rb.data.FrequencySplit())
        self.place_of = {word: place for place, word in enumerate(self.words)}
        word_of = torch.tensor(
            [PAD, *(self.place_of.get(plain(t), UNKNOWN) for t in self.types[1:])]
        )
        numbered = {letter: place for place, letter in enumerate(letters, 2)}
        read = [
            torch.tensor([numbered.get(letter, UNKNOWN) for letter in each[:LONGEST]])
            for each in self.types[1:]
        ]
        self.of_types = {
            "word_of": word_of,
            "is_single": self.counts[word_of] == 1,
            "letters_of": pad_sequence([torch.tensor([PAD]), *read], batch_first=True),
        }
        self.sentences = dict(zip(PARTS, parts, strict=True))
        types = {each: place for place, each in enumerate(self.types)}
        tags = {tag: place for place, tag in enumerate(self.tags)}
        self.encoded = {
            name: [
                # a tag that training lacks is never right, whatever stands for it
                (
                    torch.tensor([types[w] for w in ws]),
                    torch.tensor([tags.get(t, 0) for t in iobes(ts)]),
                )
                for ws, ts in part
            ]
            for name, part in self.sentences.items()
        }

    def group(self, words: Iterable[str]) -> str:
        """Return the group of an entity by its rarest word."""
        places = [self.place_of.get(plain(word), UNKNOWN) for word in words]
        if UNKNOWN in places:
            return "unseen"
        return "head" if all(bool(self.is_head[place]) for place in places) else "tail"

    def described(self) -> dict[str, Any]:
        """Return what a result says of the text."""
        lines = [" ".join(words + tags) for part in self.sentences.values() for words, tags in part]
        sizes = {f"{name} sentences": len(part) for name, part in self.sentences.items()}
        digest = sha256("\n".join(lines).encode()).hexdigest()
        return {"words": len(self.words) - 2, "tags": len(self.tags), **sizes, "sha256": digest}


def plain(word: str) -> str:
    """Return a word in lower case with digits as 0.

    >>> plain("May-1996")
    'may-0000'
    """
    return "".join("0" if letter.isdigit() else letter for letter in word.lower())


def read_text(folder: Path) -> Text:
    """Return the text of a folder in CoNLL's columns."""
    for names in FILES:
        if all((folder / name).is_file() for name in names):
            return Text([read_sentences(folder / name) for name in names])
    raise DataError(f"{str(folder)!r} must hold {', '.join(FILES[0])}, or {', '.join(FILES[1])}")


def read_sentences(file: Path) -> list[Sentence]:
    """Return the sentences of a file; lines that start a document are no words."""
    found: list[Sentence] = [([], [])]
    for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):
        columns = line.split()
        if not columns or columns[0] == "-DOCSTART-":
            found.append(([], []))
        elif len(columns) < 2:
            raise DataError(
                f"line {number} of {str(file)!r} must have a word and a tag, got {line!r}"
            )
        else:
            found[-1][0].append(columns[0])
            found[-1][1].append(columns[-1])
    return [sentence for sentence in found if sentence[0]]


def make_text() -> Text:
    """Return a small text: names follow a title or a place word; some are seen once, some never."""
    random = generator(0, 0)

    def sentence(most: int) -> Sentence:
        number = int(most * torch.rand((), generator=random) ** 2)
        name = "Name" + "".join("abcdefghij"[int(digit)] for digit in str(number))
        kind, lead = (("PER", "Mr"), ("LOC", "in"))[int(torch.randint(2, (), generator=random))]
        words = ["so", lead, name, name.upper(), "said", "it"]
        return words, ["O", "O", f"I-{kind}", f"I-{kind}", "O", "O"]

    return Text([[sentence(most) for _ in range(n)] for n, most in ((160, 60), (40, 90), (40, 90))])


class NER(Task):
    """Entities in sentences."""

    name, metric, least = "text-ner", "entity F1", 0.3
    parts = GROUPS

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
        sizes = asdict(self.sizes) if self.hugging_face is None else named(self.hugging_face)
        return {"text": self.text.described(), "sizes": sizes, "schedule": asdict(self.schedule)}

    def model(self) -> Tagger:
        if self.hugging_face is not None:
            return Tagger(HuggingFaceEncoder(self.text, self.hugging_face), len(self.text.tags))
        return Tagger(WordEncoder(self.text, self.sizes), len(self.text.tags))

    def batches(self, seed: int, epoch: int) -> list[Batch]:
        """Return shuffled sentences, of about equal length in a batch."""
        random, size = generator(seed, epoch), self.schedule.batch_size
        sentences = self.text.encoded["train"]
        found = []
        for pool in torch.randperm(len(sentences), generator=random).split(POOL * size):
            ordered = sorted(pool.tolist(), key=lambda place: len(sentences[place][0]))
            found += [ordered[start : start + size] for start in range(0, len(ordered), size)]
        order = torch.randperm(len(found), generator=random).tolist()
        return [self._batch([sentences[place] for place in found[number]]) for number in order]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model.crf(model(batch), batch.tags, batch.mask).mean()

    @torch.no_grad()
    def scores(self, model: nn.Module, part: str) -> dict[str, Any]:
        """Return F1 of all entities and of each group."""
        model.eval()
        encoded = self.text.encoded[part]
        places = sorted(range(len(encoded)), key=lambda place: len(encoded[place][0]))
        tags: dict[int, list[str]] = {}
        size = 2 * self.schedule.batch_size
        for chosen in (places[start : start + size] for start in range(0, len(places), size)):
            batch = self._batch([encoded[place] for place in chosen])
            for place, line in zip(chosen, model.crf.decode(model(batch), batch.mask), strict=True):
                tags[place] = iob([self.text.tags[tag] for tag in line])
        return entity_f1(
            self.text, self.text.sentences[part], [tags[n] for n in range(len(encoded))]
        )

    def streams(self, model: nn.Module) -> dict[str, Tensor]:
        inner = model.encoder
        text = torch.cat([types for types, _ in self.text.encoded["train"]])
        if isinstance(inner, WordEncoder):
            words = inner.word_of.cpu()[text]
            # as often as training takes a word for an unknown one
            every = max(1, round(1 / self.sizes.unknown))
            words[(self.text.counts[words] == 1).nonzero()[::every, 0]] = UNKNOWN
            return {"encoder.words": words}
        table = inner.inner.get_input_embeddings()
        [name] = [name for name, module in model.named_modules() if module is table]
        return {
            name: torch.tensor([piece for each in text.tolist() for piece in inner.pieces[each]])
        }

    def counts_of(self, kind: type[nn.Module]) -> dict[str, Tensor]:
        """Count the row of unknown words as one: it stands for words that training sees about once."""
        counts = super().counts_of(kind)
        if "encoder.words" in counts:
            counts["encoder.words"][UNKNOWN] = 1
        return counts

    def _batch(self, sentences: Sequence[tuple[Tensor, Tensor]]) -> Batch:
        types, tags = (
            pad_sequence(each, batch_first=True) for each in zip(*sentences, strict=True)
        )
        lengths = torch.tensor([len(words) for words, _ in sentences])
        return Batch(types.to(self.device), tags.to(self.device), lengths)


def entity_f1(
    text: Text, sentences: Sequence[Sentence], predicted: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Return F1 of predicted IOB tags against the true ones: of all entities, and by the group of their words."""
    found, true, correct = Counter[str](), Counter[str](), Counter[str]()
    for (words, tags), guesses in zip(sentences, predicted, strict=True):
        right, guessed = set(spans(tags)), set(spans(guesses))
        for counter, chosen in ((true, right), (found, guessed), (correct, right & guessed)):
            for start, stop, _ in chosen:
                counter.update(["all", text.group(words[start:stop])])
    scores = {name: f1(correct[name], found[name], true[name]) for name in ("all", *GROUPS)}
    return scores | {"entities": {name: true[name] for name in ("all", *GROUPS)}}


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    """Make the runs that time allows, print what is there, and write it."""
    began = time.monotonic()
    options = options_of("ner.py", __doc__, given)
    sizes = (
        Sizes(word_dim=16, letter_dim=8, filters=8, hidden=16, dropout=0.1)
        if options.small
        else Sizes()
    )
    # a pretrained encoder needs --lr 3e-5
    schedule = Schedule(epochs=60, batch_size=16, lr=2e-3, warm_up=200)
    if options.small:
        schedule = Schedule(epochs=8, batch_size=16, lr=1e-2, warm_up=10)
    text = make_text() if options.small else read_text(options.source)
    task = NER(text, sizes, changed(schedule, options), device_of(options), options.model)
    return run_recipe(task, options, began)


if __name__ == "__main__":
    try:
        main()
    except RarebitError as error:
        sys.exit(f"error: {error}")
