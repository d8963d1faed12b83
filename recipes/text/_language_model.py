"""AWD-LSTM: a language model of LSTM layers with five kinds of dropout, tied weights (Merity et al., 2018).

    x_t = E[w_t],  h^1..h^3 = LSTM layers,  p(w_{t+1}) = softmax(E h^3_t + b)

    E    `embedding.weight`, which is also `decoder.weight`

Dropout of whole words, of the inputs, between layers and of the outputs, each with one mask for all steps
of a batch, and of the recurrent weights (`weight_drop`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Hidden", "LanguageModel", "Output", "Sizes"]

Hidden = list[tuple[Tensor, Tensor]]
"""The state of each layer, `(1, B, width)` twice."""


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

    logits: Tensor
    """`(L, B, V)`."""
    hidden: Hidden
    size: Tensor
    """The mean square of the outputs, after their dropout."""
    change: Tensor
    """The mean square of the change of the outputs from word to word."""


class LanguageModel(nn.Module):
    """A tied language model over so many words."""

    def __init__(self, words: int, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.random: torch.Generator | None = None
        """What dropout is drawn from; the global generator if there is none."""
        widths = [sizes.dim, *[sizes.hidden] * (sizes.layers - 1), sizes.dim]
        self.embedding = nn.Embedding(words, sizes.dim)
        self.layers = nn.ModuleList(map(nn.LSTM, widths[:-1], widths[1:]))
        self.decoder = nn.Linear(sizes.dim, words)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, tokens: Tensor, hidden: Hidden) -> Output:
        """Return the logits of the words that follow each of `(L, B)`, and the state after them."""
        sizes, after = self.sizes, []
        x = self._locked(self._words(tokens), sizes.input_dropout)  # (L, B, D)
        for number, (layer, state) in enumerate(zip(self.layers, hidden, strict=True)):
            raw, state_after = self._layer(layer, x, state)
            after.append(state_after)
            is_last = number == sizes.layers - 1
            x = self._locked(raw, sizes.output_dropout if is_last else sizes.hidden_dropout)
        # bfloat16 has the range of float32: safe for logits, whose loss is computed in float32
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda and self.training):
            logits = self.decoder(x)
        return Output(logits, after, x.square().mean(), (raw[1:] - raw[:-1]).square().mean())

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
