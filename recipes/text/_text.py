"""A text as word ids: WikiText-2 from its files, or a small text made on the spot.

Words are those of the training part, numbered by count, the most frequent first. Each line ends with <eos>;
a word that training does not have is <unk>.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

import rarebit as rb
from rarebit.data.selection import split_by_frequency
from rarebit.errors import DataError

__all__ = ["Text", "make_text", "read_text"]

PARTS = ("train", "valid", "test")
NAMES = ("wiki.{}.tokens", "{}.txt")
"""What the files are called: by the data set's authors, and in copies of it."""
END, UNKNOWN = "<eos>", "<unk>"
ALIGNED = 8
"""The number of words is a multiple of this: products of matrices are twice as fast then."""


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


def read_text(folder: Path) -> Text:
    """Return the text of a folder with wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens."""
    for pattern in NAMES:
        files = [folder / pattern.format(part) for part in PARTS]
        if all(file.is_file() for file in files):
            return Text.of([_words(file) for file in files])
    raise DataError(
        f"{str(folder)!r} must hold wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens, or "
        f"train.txt, valid.txt and test.txt; it {_held(folder)}; unpack WikiText-2 and name its folder: "
        "--from FOLDER"
    )


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
    return [word for line in lines for word in (*line.split(), END)]


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
