"""Harmless transfer in language models whose output weights are the table of the input: LSTM and Transformer.

    python examples/tied_language_model.py

A tied weight has a gradient for all of its rows in every step, so every rare word takes part in every step. A method
for tables needs a table of its own: `untie=True` gives the input a copy, and the output keeps the weight.
"""

import torch
from _shared import VOCABULARY, make_text, tell
from torch import Tensor, nn
from torch.nn import functional as F

import rarebit as rb

DIM, LENGTH, LINES, BATCH = 32, 24, 960, 32


class Tied(nn.Module):
    """Words to vectors, something that reads them in order, and back with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, DIM)
        self.output = nn.Linear(DIM, VOCABULARY)
        self.output.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next word at each place, `(B, L, V)`."""
        return self.output(self.read(self.words(tokens)))

    def read(self, rows: Tensor) -> Tensor:
        """Return what is known after each place, `(B, L, D)`."""
        raise NotImplementedError


class LSTM(Tied):
    """A recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM, batch_first=True)

    def read(self, rows: Tensor) -> Tensor:
        """Return the outputs of the LSTM."""
        return self.lstm(rows)[0]


class Transformer(Tied):
    """One with attention to what stands before."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, DIM))
        self.layer = nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True)

    def read(self, rows: Tensor) -> Tensor:
        """Return the outputs of the layer."""
        length = rows.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.layer(rows + self.places[:length], src_mask=mask, is_causal=True)


def train(model: Tied, text: Tensor) -> None:
    """Train, and print what the transfer did."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    counts = text.reshape(-1).bincount(minlength=VOCABULARY)
    losses = []
    with rb.HarmlessTransfer().start(model, text, counts=counts) as transfer:
        for _ in range(4):
            for lines in torch.randperm(LINES).split(BATCH):
                tokens = text[lines]
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))
                transfer.backward(loss)  # the only changed line; it was loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    tell(transfer, losses)


def main() -> None:
    """Train both models, and one whose table of the input has a low rank."""
    text = make_text(LINES, LENGTH)
    for kind in (LSTM, Transformer):
        torch.manual_seed(0)
        print(kind.__name__)
        train(kind(), text)
    torch.manual_seed(0)
    model = LSTM()
    rb.apply_(model, rb.LowRank(rank=8), untie=True)
    train(model, text)


if __name__ == "__main__":
    main()
