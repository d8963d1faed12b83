"""DartsEmb: widths by groups of frequency, which a search on validation rows finds (Zhao et al., 2020).

    AutoEmb: Automated Embedding Dimensionality Search in Streaming Recommendations, https://arxiv.org/abs/2002.11252

    e(i) = E[i, :d_m] P_m                       m = m_g, g the group of id i
    e(i) = Σ_m y_m E[i, :d_m] P_m               y = softmax_m(gamma_g), while widths are searched

    d_m    `widths_of`: D / 8, D / 4 and D, the spaces {1, 2, 8}, {2, 4, 16} and {4, 8, 32} of PEP's comparison
    g      ids in order of frequency, `DartsEmb.group` per group
    m_g    `ChosenTable.choice`
    gamma  `SearchedTable.logits`, G x 3: moved by the gradient of validation rows, after each step of the weights on training
           rows (DARTS of first order, Liu et al., 2019)
    E      `inner`, N x D: only training has all columns of all rows
    P_m    `projections[m]`, of which d_m rows are used; with all D columns a row is as it is

A run trains for `DartsEmb.search` epochs to find gamma, picks the width of each group, and trains again from the start with these.
Applied to a table without a run, groups of frequent ids are wider.

NOTE[DIFF]: AutoEmb has one table per width and a network that computes y from the popularity of an id; PEP's authors say no more than the
spaces. Here widths share a table, as in their AutoDim (arXiv 2006.14827), without its batch normalisation, so that rows merge.

Not to save memory in training, nor for ids that are in another order than that of their counts.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rarebit.callbacks import Callback, TrainingData
from rarebit.codes.packed import TakesParts
from rarebit.errors import TrainingError
from rarebit.research._compressors import Compressor, StandaloneTable, within
from rarebit.settings import check_types, require
from rarebit.tables.table import AnyTable, Table, full_table, is_trainable, plain_like

if TYPE_CHECKING:
    from rarebit.training.run import Trained, TrainingJob

__all__ = ["ChosenTable", "DartsEmb", "MixedRows", "SearchedTable"]

PARTS = (8, 4, 1)
"""Candidate widths, as parts of the table's."""
LR = 3e-3
"""The learning rate of gamma, in Adam with the betas (0.5, 0.999) of DARTS."""
SIZES_PER_COLUMN = 16
"""A size is found in steps of so many parts of a column."""


@dataclass(frozen=True, kw_only=True)
class DartsEmb(Compressor):
    """Give each group of ids as many columns as a search on validation rows finds worth their bytes.

    >>> DartsEmb(width=4.0)
    DartsEmb(width=4.0, group=128, search=1, stage='settled')
    """

    title: ClassVar[str] = "widths by groups of frequency, which validation rows search"
    paper: ClassVar[str] = (
        "Zhao et al., AutoEmb: Automated Embedding Dimensionality Search in Streaming Recommendations, arXiv 2002.11252"
    )
    cost: ClassVar[str] = (
        "a run trains twice, the first time with a step on validation rows after each step; training has the whole table"
    )
    applies: ClassVar[str] = (
        "as a control for small tables at inference; ids must be numbered from the most frequent one on"
    )
    training_only: ClassVar[bool] = True
    excludes: ClassVar[Mapping[str, str]] = {
        **Compressor.excludes,
        "hashing": "it groups ids by their frequency, and buckets are in no such order; use one of them",
        "masked": "it stores rows of its own; use one of them",
        "harmless-transfer": "a search needs the gradient behind the rows, which transfer holds back; use one of them",
    }

    width: float
    """Columns of a row, the mean over all."""
    group: int = 128
    """Ids of a group."""
    search: int = 1
    """Epochs in which a run searches."""
    stage: Literal["search", "settled", "frozen"] = "settled"
    """"search": all widths at once, mixed. "settled": each group has its width. "frozen": no other columns are left."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.width >= 1, f"width must be at least 1, got {self.width}")
        for name in ("group", "search"):
            number = getattr(self, name)
            require(number >= 1, f"{name} must be at least 1, got {name}={number}")

    @property
    def after_training(self) -> bool:
        """What is left is not trained further."""
        return self.stage == "frozen"

    @classmethod
    def for_share(cls, shapes: Sequence[tuple[int, int]], share: float) -> Self:
        """Return the largest mean width that keeps at most this share of the weights at inference.

        >>> DartsEmb.for_share([(100_000, 16), (50, 16)], share=1 / 4).width
        3.9375
        """
        most = max((width for _, width in shapes), default=1)
        sizes = range(SIZES_PER_COLUMN, most * SIZES_PER_COLUMN + 1)
        return cls.largest(lambda size: cls(width=size / SIZES_PER_COLUMN), sizes, shapes, share)

    def stored(self, rows: int, width: int) -> int:
        """Return the weights of a table at inference; four choices of a group take as much as one."""
        projections = sum(widths_of(width)[:-1]) * width
        groups = -(-rows // self.group)
        return self.numbers(rows, width) + projections - (-groups // 4)

    def numbers(self, rows: int, width: int) -> int:
        """Return how many numbers the rows of a table have."""
        return int(self.sizes(rows) @ torch.tensor(widths_of(width))[self.even(rows, width)])

    def sizes(self, rows: int) -> Tensor:
        """Return the number of ids of each group, `(G,)`."""
        starts = torch.arange(0, rows, self.group)
        return (rows - starts).clamp(max=self.group)

    def even(self, rows: int, width: int) -> Tensor:
        """Return the choice of each group that is as even as the mean width allows, the first groups the widest, `(G,)`."""
        widths, sizes = widths_of(width), self.sizes(rows)
        choice = torch.zeros(len(sizes), dtype=torch.int64)
        for place in range(1, len(widths)):
            # what the narrower rows leave pays for wider ones, from the first group on
            left = self.width * rows - int((sizes * torch.tensor(widths)[choice]).sum())
            choice += (sizes * (widths[place] - widths[place - 1])).cumsum(0) <= left
            if bool((choice < place).any()):
                break
        return choice

    def wrap(self, base: AnyTable) -> Table:
        """Return a table with the rows of `base` in its columns, in the stage of the method."""
        weight = full_table(
            base if self.stage != "frozen" or isinstance(base, nn.Embedding) else base.merge()
        )
        inner = plain_like(base, weight.clone(), padding_idx=base.padding_idx)
        kind = SearchedTable if self.stage == "search" else ChosenTable
        table = kind(replace(self, stage="settled") if self.stage == "frozen" else self, inner)
        table.requires_grad_(requires_grad=is_trainable(base))
        return (
            table.frozen() if isinstance(table, ChosenTable) and self.stage == "frozen" else table
        )

    def serve(self, table: Table) -> AnyTable:
        """Return the table with the columns that it uses."""
        return table.frozen() if isinstance(table, ChosenTable) else table.merge()

    def callback(self) -> "Callback | None":
        """Return what moves gamma, while widths are searched."""
        return _Search() if self.stage == "search" else None

    def drive(self, job: "TrainingJob") -> "Trained | None":
        """Search, pick the widths of all groups, and train from the start with these."""
        if self.stage != "settled":
            return None
        first = [
            replace(self, stage="search") if one is self else one for one in job.settings.methods
        ]
        model = job.start(first)
        training = replace(job.settings.training, epochs=self.search, patience=None)
        job.fit(model, first, training=training, resume=False)
        found = self.pick([table for table in model.modules() if isinstance(table, SearchedTable)])
        model = job.start(job.settings.methods)
        settled = [table for table in model.modules() if isinstance(table, ChosenTable)]
        for table, choice in zip(settled, found, strict=True):
            table.choice.copy_(choice)
        return job.fit(model, job.settings.methods, folder=job.folder)

    def pick(self, tables: Sequence["SearchedTable"]) -> list[Tensor]:
        """Return the choices of each table: the likeliest ones at the lowest price of a number that meets the size."""
        # NOTE[DIFF]: the paper takes the likeliest width, whatever its size; at one size of all methods it must have a price
        likely, costs, most = [], [], 0
        for table in tables:
            widths = torch.tensor(widths_of(table.embedding_dim))
            sizes = self.sizes(table.num_embeddings)
            likely.append(table.logits.detach().cpu().double().log_softmax(-1))
            costs.append(sizes.unsqueeze(1) * widths.double())
            most += self.numbers(table.num_embeddings, table.embedding_dim)
        best = within(torch.cat(likely), torch.cat(costs), most)
        return list(best.split([len(part) for part in likely]))


def widths_of(width: int) -> list[int]:
    """Return the widths that a table may have, the narrowest first.

    >>> widths_of(16), widths_of(4)
    ([2, 4, 16], [1, 4])
    """
    return sorted({max(width // part, 1) for part in PARTS})


class _Widths(Table):
    """A table of which an id uses the first columns, and a projection of them."""

    def __init__(self, method: DartsEmb, inner: AnyTable) -> None:
        super().__init__(method, inner)
        weight = full_table(inner)
        self.darts, width = method, weight.shape[1]
        self.widths = widths_of(width)
        start = weight.new_zeros(len(self.widths) - 1, width, width)
        for projection, own in zip(start, self.widths, strict=False):
            projection[:own].normal_(std=own**-0.5)  # so that a row has the variance of the table
        self.projections = nn.Parameter(start)  # P_m

    @abstractmethod
    def shares(self, groups: Tensor) -> Tensor:
        """Return how much of each width the ids of these groups `(...)` have, `(..., M)`."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return Σ_m y_m E[i, :d_m] P_m."""
        ids = ids.long()
        stored, shares = self.inner(ids), self.shares(ids // self.darts.group)
        rows = torch.zeros_like(stored)
        for place, width in enumerate(self.widths):
            own = stored[..., :width]
            is_whole = width == self.embedding_dim
            projected = own if is_whole else own @ self.projections[place, :width]
            rows = rows + shares[..., place, None] * projected
        return rows

    @property
    def num_weights(self) -> int:
        """What is trained."""
        return sum(parameter.numel() for parameter in self.parameters())


class SearchedTable(_Widths):
    """A table whose rows are mixtures over all widths."""

    def __init__(self, method: DartsEmb, inner: AnyTable) -> None:
        super().__init__(method, inner)
        groups = len(method.sizes(inner.num_embeddings))
        logits = self.projections.new_zeros(groups, len(self.widths))
        self.register_buffer("logits", logits)  # gamma: validation rows move it, not the optimizer

    logits: Tensor

    def shares(self, groups: Tensor) -> Tensor:
        """Return softmax(gamma_g)."""
        return F.embedding(groups, self.logits).softmax(-1)


class ChosenTable(_Widths):
    """A table whose rows have the width of their group."""

    choice: Tensor

    def __init__(self, method: DartsEmb, inner: AnyTable) -> None:
        super().__init__(method, inner)
        even = method.even(inner.num_embeddings, inner.embedding_dim)
        self.register_buffer("choice", even.to(self.projections.device))  # m_g

    def shares(self, groups: Tensor) -> Tensor:
        """Return 1 for the width of a group, and 0 for the others."""
        places = torch.arange(len(self.widths), device=groups.device)
        return (self.choice[groups].unsqueeze(-1) == places).to(self.projections.dtype)

    @torch.no_grad()
    def frozen(self) -> "MixedRows":
        """Return the table without the columns that it does not use."""
        widths = torch.tensor(self.widths, device=self.choice.device)[self.choice]
        own = widths.repeat_interleave(self.darts.group)[: self.num_embeddings]
        columns = torch.arange(self.embedding_dim, device=own.device)
        values = full_table(self.inner)[columns < own.unsqueeze(1)]
        return MixedRows(self, values)


class MixedRows(TakesParts, StandaloneTable):
    """Rows of several widths, one after the other, and a projection for each width."""

    choice: Tensor
    first: Tensor
    """Where the rows of each group begin; counted, never stored."""

    def __init__(self, source: ChosenTable, values: Tensor) -> None:
        method = replace(source.darts, stage="frozen")
        super().__init__(method, source)
        self.darts, self.widths = method, source.widths
        used = [p[:width] for p, width in zip(source.projections, self.widths, strict=False)]
        self.values = nn.Parameter(values.clone(), requires_grad=False)
        self.projections = nn.Parameter(torch.cat(used).detach().clone(), requires_grad=False)
        self.register_buffer("choice", source.choice.to(torch.uint8))
        self.register_buffer("first", torch.zeros(0, dtype=torch.int64), persistent=False)
        self._count()

    def _count(self) -> None:
        if int(self.choice.max()) >= len(self.widths):
            raise ValueError(f"it names a width beyond its {len(self.widths)}")
        widths = torch.tensor(self.widths)[self.choice.long().cpu()]
        lengths = self.darts.sizes(self.num_embeddings) * widths
        if int(lengths.sum()) != len(self.values):
            raise ValueError(f"{len(self.values)} numbers are not those of its groups")
        self.first = (lengths.cumsum(0) - lengths).to(self.choice.device)

    def take(self, tensors: Mapping[str, Tensor]) -> str | None:
        """Take over the tensors of a file; or return what is wrong with them."""
        for name in ("values", "projections", "choice"):
            own, found = getattr(self, name), tensors.get(name)
            if (
                found is None
                or found.dim() != own.dim()
                or (name != "values" and found.shape != own.shape)
            ):
                return f"{name} is missing or has another shape"
            taken = found.detach().to(own.device, own.dtype, copy=True)
            kept = nn.Parameter(taken, requires_grad=False) if name != "choice" else taken
            setattr(self, name, kept)
        try:
            self._count()
        except ValueError as error:
            return str(error)
        return None

    def rows(self, ids: Tensor) -> Tensor:
        """Return E[i, :d_m] P_m."""
        ids = ids.long()
        group = ids // self.darts.group
        choice = self.choice[group].long().unsqueeze(-1)  # (..., 1)
        inside, begin = (ids - group * self.darts.group).unsqueeze(-1), 0
        rows = self.values.new_zeros(*ids.shape, self.embedding_dim)
        last = len(self.values) - 1
        for place, width in enumerate(self.widths):
            columns = torch.arange(width, device=ids.device)
            at = (self.first[group].unsqueeze(-1) + inside * width + columns).clamp(max=last)
            own = self.values[at] * (choice == place)
            is_whole = width == self.embedding_dim
            rows = rows + (own if is_whole else own @ self.projections[begin : begin + width])
            begin += width
        return rows

    @property
    def num_weights(self) -> int:
        """The numbers of all rows, and the projections."""
        return self.values.numel() + self.projections.numel()


class _Search(Callback):
    """Moves gamma by the gradient of a batch of validation rows, after each step of the weights."""

    def start(self, model: nn.Module, data: TrainingData) -> None:
        if data.valid is None:
            raise TrainingError(
                "darts-emb searches on validation rows, and there are none; prepare the log with a validation split"
            )
        self.model, self.valid, self.data = model, data.valid, data
        self.tables = [table for table in model.modules() if isinstance(table, SearchedTable)]
        self.optimizer = torch.optim.Adam(
            [table.logits for table in self.tables], lr=LR, betas=(0.5, 0.999)
        )
        self.order = torch.empty(0, dtype=torch.int64)

    def after_step(self, num_steps: int) -> None:
        size = min(self.data.batch_size, len(self.valid))
        steps = len(self.valid) // size
        epoch, place = divmod(num_steps - 1, steps)
        if place == 0 or not len(self.order):
            self.order = self.valid.order(seed=self.data.seed, epoch=epoch + 1)
        logits = [table.logits.requires_grad_() for table in self.tables]
        rows = self.order[place * size : (place + 1) * size]
        batch = self.valid[rows].to(logits[0].device)
        loss = F.binary_cross_entropy_with_logits(self.model(batch).float(), batch.label.float())
        gradients = torch.autograd.grad(loss, logits)
        for one, gradient in zip(logits, gradients, strict=True):
            one.requires_grad, one.grad = False, gradient
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.optimizer.state_dict()) if self.optimizer.state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self.optimizer.load_state_dict(dict(state))
