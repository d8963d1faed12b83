"""Select which rare items may learn from frequent ones, and keep selections on disk.

Harmless transfer learning for item embeddings, "select", equation 3:

    S     the frequent items of a field, the top fifth of its values    `source`
    T     the other items that training saw
    s_i   how often item i co-occurs with the top 1,000 items    `co_occurrence.py`
    T'    those of T with max over j in S of cos(s_i, s_j) >= eta    `target`

eta is such that a fifth of T is left out, rounded down: first items that co-occur with no top item, then
those of the lowest similarity; equal ones keep their order. Items that training never saw are in neither
S nor T.

A stored selection is a folder; selections/DIGEST/ in a prepared log holds that of some settings and fields:

    selection.json                fields by name, settings, and the checksum of the data
    tensors-<name>.safetensors    counts, masks, similarities and relatives of each field

Shapes: N rows of a field, K relatives of an item.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from rarebit.data.co_occurrence import SparseCounts, count_in_records, count_in_text
from rarebit.data.dataset import Dataset
from rarebit.data.schema import PADDING
from rarebit.errors import DataError, SettingsError
from rarebit.settings import check_types, from_mapping, require, suggest, to_mapping
from rarebit.storage.files import TensorFolder

RARE, FREQUENT = 1 << 10, 1 << 12
"""Items compared at once."""
CHECKED = 1 << 8
"""Items whose relatives are compared again at once, in float64."""


@dataclass(frozen=True, kw_only=True)
class FrequencySplit:
    """Which items of a field are frequent: a share of its values, a count, or given ids.

    >>> select(None, torch.tensor([5, 0, 9, 1]), FrequencySplit(threshold=5))["items"].source
    tensor([ True, False,  True, False])
    """

    top: float = 0.2
    """Share of the values that training saw, the most frequent ones, rounded up."""
    threshold: int | None = None
    """Instead of a share: items seen at least this often."""
    ids: tuple[int, ...] | None = None
    """Instead of a share: these items, if one field is selected from."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 < self.top <= 1, f"top must be a share above 0, up to 1, got top={self.top}")
        require(
            self.threshold is None or self.threshold >= 1,
            f"threshold must be at least 1, got threshold={self.threshold}",
        )
        require(
            self.threshold is None or self.ids is None,
            "frequent items are given by threshold or by ids, got both; leave one out",
        )


@dataclass(frozen=True, kw_only=True)
class CoOccurrence:
    """Which rare items have a frequent relative, by what they co-occur with.

    >>> CoOccurrence(drop=0.5).top_items
    1000
    """

    top_items: int = 1000
    """Items are similar if they co-occur with the same ones of this many most frequent items."""
    relatives: int = 5
    """Number of nearest frequent items kept per rare item."""
    drop: float = 0.2
    """Share of the rare items to leave out, those least similar to any frequent one, rounded down."""
    threshold: float | None = None
    """Instead of a share: leave out items of a lower similarity."""
    split: FrequencySplit = FrequencySplit()
    """Which items are frequent."""

    def __post_init__(self) -> None:
        check_types(self)
        require(
            1 <= self.top_items <= 32_767,
            f"top_items must be from 1 to 32,767, got top_items={self.top_items}",
        )
        require(
            self.relatives >= 1, f"relatives must be at least 1, got relatives={self.relatives}"
        )
        require(0 <= self.drop <= 1, f"drop must be a share from 0 to 1, got drop={self.drop}")
        require(
            self.threshold is None or 0 <= self.threshold <= 1,
            f"threshold must be a cosine from 0 to 1, got threshold={self.threshold}",
        )


@dataclass(frozen=True)
class FieldSelection:
    """Which items of one field may learn from which; a tensor has one entry or row per id."""

    counts: Tensor
    """How often training saw each item, `(N,)`."""
    source: Tensor
    """Whether it is frequent, `(N,)` of bools."""
    target: Tensor
    """Whether it is rare and may learn from frequent ones, `(N,)` of bools."""
    similarity: Tensor
    """The cosine of a rare item to the nearest frequent one, `(N,)`; 0 of all others."""
    relatives: Tensor
    """The ids of the nearest frequent items of a rare one, `(N, K)`, the nearest first. The item's own id
    where there is none, with weight 0."""
    weights: Tensor
    """Their cosines, `(N, K)`; 0 where there is none."""

    @property
    def rare(self) -> Tensor:
        """Whether training saw an item, but not often: a target, or one left out, `(N,)` of bools."""
        return (self.counts > 0) & ~self.source

    def to(self, device: torch.device | str) -> "FieldSelection":
        """Return the same on another device."""
        return FieldSelection(*(getattr(self, part.name).to(device) for part in fields(self)))


@dataclass(frozen=True)
class Selection:
    """Which items of which fields may learn from which others.

    >>> selection = select(None, {"user": torch.tensor([1, 9, 1, 0, 2])}, FrequencySplit())
    >>> selection["user"].source, selection["user"].target
    (tensor([False,  True, False, False, False]), tensor([ True, False,  True, False,  True]))
    >>> selection.explain("user", 3)
    'user 3 was never seen in training: it is left alone'
    """

    fields: Mapping[str, FieldSelection]
    """The selection of each field, by its name."""
    settings: CoOccurrence | FrequencySplit
    """What it was made by."""
    data_checksum: str = ""
    """The checksum of the prepared data it was made of; empty where that is not known."""

    def __getitem__(self, name: str) -> FieldSelection:
        if name not in self.fields:
            raise DataError(f"nothing was selected of {name!r}{suggest(name, list(self.fields))}")
        return self.fields[name]

    def explain(self, field: str, item: int, words: Sequence[str] | None = None) -> str:
        """Return the decision on an item as a sentence; `words` has a name for each id, if given.

        >>> tokens = torch.tensor([0, 1, 0, 2, 0, 1, 0, 3])
        >>> chosen = select(tokens, {"word": tokens.bincount()}, CoOccurrence(split=FrequencySplit(top=0.5)))
        >>> chosen.explain("word", 2, words=["the", "cat", "dog", "owl"])
        "word 'dog' was seen once: rare, it may learn from 'the' (0.62), 'cat' (0.62)"
        """
        found = self[field]
        if not 0 <= item < len(found.counts):
            raise DataError(f"{field!r} has ids from 0 to {len(found.counts) - 1}, got {item}")

        def name(row: int) -> str:
            return str(row) if words is None else repr(words[row])

        count = int(found.counts[item])
        if count == 0 and not found.source[item]:
            return f"{field} {name(item)} was never seen in training: it is left alone"
        often = "once" if count == 1 else f"{count:,} times"
        pairs = zip(found.relatives[item].tolist(), found.weights[item].tolist(), strict=True)
        near = ", ".join(f"{name(row)} ({weight:.2f})" for row, weight in pairs if weight > 0)
        fate = f"rare, left out, as it is least like any frequent item{near and ': '}{near}"
        if found.source[item]:
            fate = "frequent, others may learn from it"
        elif found.target[item]:
            fate = f"rare, it may learn from {near or 'frequent items'}"
        return f"{field} {name(item)} was seen {often}: {fate}"


def select(
    data: Dataset | Tensor | None,
    counts: Mapping[str, Tensor] | Tensor,
    settings: CoOccurrence | FrequencySplit = CoOccurrence(),
    *,
    fields: Sequence[str] | None = None,
    padding: int | None = None,
    data_checksum: str = "",
) -> Selection:
    """Return which items may learn from which, by a click log, or by the tokens of a text.

    `counts` are how often training saw each item, for all fields; one tensor for a text, whose field is
    then called "items". `fields` are those to select from, or all. `padding` is the id of a text's
    positions without a token. A `FrequencySplit` alone only uses the counts.

    >>> data = Dataset.from_columns({"user": [0, 0, 0, 1, 2], "item": [0, 1, 0, 0, 2]}, label=[0] * 5)
    >>> select(data, data.counts(), CoOccurrence(drop=0.5))["user"].target
    tensor([False,  True, False])
    """
    counts = {"items": counts} if isinstance(counts, Tensor) else counts
    seen = _seen(data, counts, fields, padding)
    split = settings if isinstance(settings, FrequencySplit) else settings.split
    if split.ids is not None and len(seen) != 1:
        raise DataError(
            f"ids are the frequent items of one field, got {', '.join(seen)}; choose one: fields=[...]"
        )
    sources = {name: split_by_frequency(count, split) for name, count in seen.items()}
    if isinstance(settings, FrequencySplit):
        chosen = {name: _all_rare(seen[name], source) for name, source in sources.items()}
        return Selection(chosen, settings, data_checksum)
    top = settings.top_items
    if isinstance(data, Dataset):
        met = count_in_records(data, counts, top_items=top, fields=list(seen)).fields
    elif isinstance(data, Tensor):
        met = count_in_text(data, counts, top_items=top, padding=padding).fields
    else:
        raise DataError(
            "co-occurrence is counted in a Dataset or in a tensor of tokens, got none; give one, or "
            "select by FrequencySplit alone"
        )
    chosen = {name: _selected(seen[name], sources[name], met[name], settings) for name in seen}
    return Selection(chosen, settings, data_checksum)


def split_by_frequency(counts: Tensor, split: FrequencySplit) -> Tensor:
    """Return which items of a field are frequent, `(N,)` of bools; equal counts keep their order."""
    found = torch.zeros(len(counts), dtype=torch.bool)
    if split.ids is not None:
        for row in split.ids:
            if not 0 <= row < len(counts):
                raise DataError(f"ids must be from 0 to {len(counts) - 1}, got {row}")
        found[list(split.ids)] = True
    elif split.threshold is not None:
        found = counts.cpu() >= split.threshold
    else:
        number = math.ceil(_part(split.top, int(torch.count_nonzero(counts))))
        found[torch.argsort(counts.cpu(), descending=True, stable=True)[:number]] = True
    return found


def find_relatives(
    met: SparseCounts, rare: Tensor, frequent: Tensor, number: int
) -> tuple[Tensor, Tensor]:
    """Return the frequent items nearest to each rare one, `(len(rare), number)`, and their cosines.

    Every rare item is compared with every frequent one in float32. The nearest ones are compared again
    in float64, so that equal items have equal cosines. The id is -1 where there is none.
    """
    ids = torch.full((len(rare), number), -1)
    cosines = torch.zeros(len(rare), number)
    for some in frequent.split(FREQUENT):
        theirs = F.normalize(met.dense(some), dim=1)
        for start in range(0, len(rare), RARE):
            rows = slice(start, start + RARE)
            near = F.normalize(met.dense(rare[rows]), dim=1) @ theirs.T  # (RARE, FREQUENT)
            values, places = near.topk(min(number, len(some)), dim=1)
            found = torch.cat([ids[rows], some[places]], dim=1)
            cosines[rows], best = torch.cat([cosines[rows], values], dim=1).topk(number, dim=1)
            ids[rows] = found.gather(1, best)
    ids[cosines <= 0] = -1
    for start in range(0, len(rare), CHECKED):
        rows = slice(start, start + CHECKED)
        ids[rows], cosines[rows] = _compare_again(met, rare[rows], ids[rows])
    return ids, cosines


def _compare_again(met: SparseCounts, rare: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return relatives `(R, K)` and exact cosines, the nearest first, equal ones by id."""
    ids = ids.sort(dim=1).values
    distinct, place = ids.clamp(min=0).unique(return_inverse=True)
    theirs = F.normalize(met.dense(distinct, torch.float64), dim=1)
    ours = F.normalize(met.dense(rare, torch.float64), dim=1)
    found = torch.bmm(theirs[place], ours[:, :, None])[:, :, 0]
    cosines = torch.where(ids >= 0, found, 0.0).float()
    nearest = torch.argsort(cosines, dim=1, descending=True, stable=True)
    return ids.gather(1, nearest), cosines.gather(1, nearest)


def _selected(
    counts: Tensor, source: Tensor, met: SparseCounts, settings: CoOccurrence
) -> FieldSelection:
    """Return the selection of one field from the co-occurrence of its items."""
    rare = ((counts > 0) & ~source).nonzero()[:, 0]
    ids, cosines = find_relatives(met, rare, source.nonzero()[:, 0], settings.relatives)
    similarity = torch.zeros(len(counts)).index_copy_(0, rare, cosines[:, 0])
    relatives = torch.arange(len(counts))[:, None].repeat(1, settings.relatives)
    relatives[rare] = torch.where(ids >= 0, ids, rare[:, None])
    weights = torch.zeros(len(counts), settings.relatives).index_copy_(0, rare, cosines)
    target = torch.zeros_like(source)
    if bool(source.any()) and settings.threshold is not None:
        target[rare[similarity[rare] >= settings.threshold]] = True
    elif bool(source.any()):
        order = torch.argsort((met.offsets.diff()[rare] > 0).to(torch.int8), stable=True)
        order = order[torch.argsort(similarity[rare][order], stable=True)]
        target[rare[order[math.floor(_part(settings.drop, len(order))) :]]] = True
    return FieldSelection(counts, source, target, similarity, relatives, weights)


def _all_rare(counts: Tensor, source: Tensor) -> FieldSelection:
    """Return the selection by frequency alone: every rare item is a target, and has no relatives."""
    nothing = torch.zeros(len(counts), 0)
    target = (counts > 0) & ~source if bool(source.any()) else torch.zeros_like(source)
    return FieldSelection(counts, source, target, torch.zeros(len(counts)), nothing.long(), nothing)


def _part(share: float, number: int) -> Fraction:
    """Return an exact share of a number: a fifth of 5 is 1, whatever float 0.2 is."""
    return Fraction(str(share)) * number


def _seen(
    data: Dataset | Tensor | None,
    counts: Mapping[str, Tensor],
    names: Sequence[str] | None,
    padding: int | None,
) -> dict[str, Tensor]:
    """Return the counts of the chosen fields on the CPU, with zero for padding."""
    multi = set()
    if isinstance(data, Dataset):
        multi = {field.name for field in data.schema.table_fields if field.kind == "multi"}
    found = {}
    for name in counts if names is None else names:
        if name not in counts:
            raise DataError(f"there are no counts of {name!r}{suggest(name, list(counts))}")
        found[name] = counts[name].detach().cpu().long().clone()
        place = PADDING if name in multi else padding
        if place is not None and place < len(found[name]):
            found[name][place] = 0
    return found


DESCRIPTION = "selection.json"
SELECTIONS = "selections"
"""The folder of selections in that of a prepared log."""
DIGITS = 20
FOLDER = TensorFolder("selection", DESCRIPTION, DataError, "select again")
KINDS: dict[str, type[CoOccurrence] | type[FrequencySplit]] = {
    "co-occurrence": CoOccurrence,
    "frequency-split": FrequencySplit,
}
PARTS: dict[str, tuple[torch.dtype, int]] = {
    "counts": (torch.int64, 1),
    "source": (torch.bool, 1),
    "target": (torch.bool, 1),
    "similarity": (torch.float32, 1),
    "relatives": (torch.int64, 2),
    "weights": (torch.float32, 2),
}
"""What is kept of a field, of which type, and with how many dimensions."""


def save_selection(selection: Selection, folder: str | os.PathLike[str]) -> Path:
    """Write a selection to a folder, which is made if need be, and return the folder.

    >>> import tempfile
    >>> selection = select(None, {"user": torch.tensor([9, 1, 1])}, FrequencySplit(threshold=5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     again = load_selection(save_selection(selection, folder))
    >>> again["user"].target
    tensor([False,  True,  True])
    """
    tensors = {
        f"{index}.{part}": getattr(field, part)
        for index, field in enumerate(selection.fields.values())
        for part in PARTS
    }
    [kind] = [kind for kind, settings in KINDS.items() if isinstance(selection.settings, settings)]
    description = {
        "selection": list(selection.fields),
        "kind": kind,
        "settings": to_mapping(selection.settings),
        "data_sha256": selection.data_checksum,
    }
    return FOLDER.write(folder, description, tensors)


def load_selection(
    folder: str | os.PathLike[str], *, data_checksum: str | None = None
) -> Selection:
    """Read a selection from a folder; raise if it was made from data of another checksum.

    >>> load_selection("nowhere")
    Traceback (most recent call last):
    rarebit.errors.DataError: 'nowhere' holds no selection: selection.json is missing
    """
    made_of = FOLDER.read_description(folder).get("data_sha256")
    if data_checksum is not None and made_of != data_checksum:
        raise DataError(
            f"the selection in {str(folder)!r} was made of other data than this; select again"
        )
    description, tensors = FOLDER.read(folder)
    try:
        settings = from_mapping(KINDS[description["kind"]], description["settings"])
        names = description["selection"]
        fields = {name: _field(index, tensors) for index, name in enumerate(names)}
    except (LookupError, SettingsError, TypeError) as error:
        raise FOLDER.unreadable(folder, error) from None
    return Selection(fields, settings, description["data_sha256"])


def stored_selection(
    train: Dataset,
    settings: CoOccurrence | FrequencySplit = CoOccurrence(),
    *,
    fields: Sequence[str],
    folder: str | os.PathLike[str] | None = None,
    data_checksum: str = "",
) -> Selection:
    """Return the selection of training rows; in the folder of a prepared log it is computed once.

    Several processes may compute it at once: the first one stores it. A folder that cannot be written
    to is no error, and neither is a stored selection that cannot be read.
    """
    counts = {name: count.cpu() for name, count in train.counts().items()}
    values = [type(settings).__name__, to_mapping(settings), list(fields)]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:DIGITS]
    place = None if folder is None else Path(folder) / SELECTIONS / digest
    if place is not None:
        with suppress(DataError):
            found = load_selection(place, data_checksum=data_checksum)
            if found.settings == settings and all(
                name in found.fields and torch.equal(found.fields[name].counts, counts[name])
                for name in fields
            ):
                return found
    selection = select(
        train.to("cpu"), counts, settings, fields=fields, data_checksum=data_checksum
    )
    if place is not None:
        with suppress(DataError):  # the folder may be read-only
            save_selection(selection, place)
    return selection


def _field(index: int, tensors: Mapping[str, Tensor]) -> FieldSelection:
    """Return the selection of one field; raise if its tensors do not fit each other."""
    field = FieldSelection(*(tensors[f"{index}.{part.name}"] for part in fields(FieldSelection)))
    rows = len(field.counts)
    for part, (dtype, dimensions) in PARTS.items():
        found = getattr(field, part)
        if found.dtype != dtype or found.dim() != dimensions or len(found) != rows:
            raise TypeError(f"its {part} are {tuple(found.shape)} of {found.dtype}")
    inside = (field.relatives >= 0) & (field.relatives < rows)
    if field.relatives.shape != field.weights.shape or not bool(inside.all()):
        raise TypeError("its relatives are not rows with a weight each")
    return field
