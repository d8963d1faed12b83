"""TorchRec's own DLRM with MLET tables, over two processes on the CPU, and back to a plain model.

    python examples/torchrec_dlrm.py

Apply methods first, then shard, then wrap. What `unshard` reads needs neither TorchRec's exchange nor its processes.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import rarebit as rb

SIZES = {"user": 20_000, "item": 5_000, "tags": 300}
DIM, NUMBERS, BATCH, STEPS, PROCESSES = 16, 4, 256, 150, 2


def build() -> nn.Module:
    """Return DLRM with the tables of MLET: products of two factors in training, plain tables after `merge_`."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
        for name, rows in SIZES.items()
    ]
    model = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables),
        dense_in_features=NUMBERS,
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[32, 1],
    )
    rb.apply_(model, rb.MLET(inner_dim=64), where=lambda table: table.rows > 1000, verbose=False)
    return model


def draw(step: int, rank: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Return one process's part of a batch: numbers, ids of users and items with up to three tags, and labels."""
    random = torch.Generator().manual_seed(step * PROCESSES + rank)
    lengths = torch.ones(len(SIZES), BATCH, dtype=torch.int64)
    lengths[2] = torch.randint(0, 4, (BATCH,), generator=random)
    ids = [
        (rows * torch.rand(int(n.sum()), generator=random) ** 3).long()
        for rows, n in zip(SIZES.values(), lengths, strict=True)
    ]
    chance = torch.where(ids[1] % 4 == 0, 0.8, 0.2)
    label = torch.bernoulli(chance, generator=random)
    features = KeyedJaggedTensor(list(SIZES), torch.cat(ids), lengths=lengths.reshape(-1))
    return torch.rand(BATCH, NUMBERS, generator=random), features, label


def loss_of(model: nn.Module, batch: tuple[Tensor, KeyedJaggedTensor, Tensor]) -> Tensor:
    """Return the mean loss of a batch."""
    numbers, features, label = batch
    return F.binary_cross_entropy_with_logits(model(numbers, features).squeeze(1), label)


def train(rank: int, folder: str) -> None:
    """Train as one of the processes, and write the pieces."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES)
    model = build()
    rb.shard(model, say=print if rank == 0 else None)
    optimizer = rb.optimizer(model, lr=0.05, kind="adagrad", tables="rowwise")
    wrapped = DistributedDataParallel(model)
    for step in range(STEPS):
        loss = loss_of(wrapped, draw(step, rank))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step in (0, STEPS - 1):
            print(f"step {step + 1}: loss {loss.item():.4f}")
    rb.save_shards(model, Path(folder) / "pieces")
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, draw(STEPS, rank))
    if rank == 0:
        print(f"two processes on new rows: loss {loss.item():.6f}")
    del wrapped  # it holds the group, whose threads must end before the process does
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Start the processes; then read what they wrote in this one."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train, (folder,), PROCESSES)
        model = build().eval()
        model.load_state_dict(rb.unshard(Path(folder) / "pieces"))
    rb.merge_(model, verbose=False)
    with torch.no_grad():
        loss = loss_of(model, draw(STEPS, 0))
    print(f"one plain process on the same rows: loss {loss.item():.6f}")
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags.values()
    print(f"its tables: {sorted({type(bag).__name__ for bag in bags})}")


if __name__ == "__main__":
    main()
