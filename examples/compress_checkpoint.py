"""A trained checkpoint of your own in fewer bytes, without retraining.

    python examples/compress_checkpoint.py

All it takes besides the weights: how often training saw each id, counted here by going through the batches once.
"""

import tempfile
from pathlib import Path

import torch
from _shared import frequent_first
from torch import Tensor, nn

import rarebit as rb

ITEMS, DIM = 20_000, 16


def make_model() -> nn.Sequential:
    """Return the model that the checkpoint belongs to."""
    return nn.Sequential(nn.Embedding(ITEMS, DIM), nn.Flatten(), nn.Linear(2 * DIM, 1))


def main() -> None:
    """Load, compress, save, load again."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(0)
    batches = [(frequent_first(ITEMS, (256, 2), random), torch.rand(256, 1)) for _ in range(20)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(make_model().state_dict(), folder / "trained.pt")  # stands for your checkpoint

        model = make_model()
        model.load_state_dict(torch.load(folder / "trained.pt", weights_only=True))
        counts = rb.count_lookups(model, batches, lambda model, batch: model(batch[0]))

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        felt = rb.measure_sensitivity(model, batches, loss)  # optional: loses less
        rb.compress_(model, counts=counts, size="1/16", sensitivity=felt)
        rb.save_model(model, folder / "small")
        again = rb.load_model(folder / "small", into=make_model())
        sizes = [
            sum(file.stat().st_size for file in folder.glob(pattern))
            for pattern in ("trained.pt", "small/*")
        ]
        is_equal = torch.equal(again(batches[0][0]), model(batches[0][0]))
        print(f"{sizes[0]} bytes before, {sizes[1]} after; the loaded model is equal: {is_equal}")


if __name__ == "__main__":
    main()
