"""What training needs of the processes that train together: shares of a batch, joined scores, common decisions.

    Processes         one process, which holds everything
    SpreadProcesses   the processes of `torchrun`, with the tables spread over them

A batch of n rows is cut into W shares of ceil(n / W) neighbouring rows, as TorchRec wants all shares of one size. Where rows
are missing a share is filled up with the batch's first row, which counts for nothing: a process's loss is the mean over its
real rows times `real * W / n`, and the mean of that over the processes is the mean over the batch. The order of the rows
is that of one process, so any number of processes sees the same batches.
"""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from rarebit.data.order import stream_key
from rarebit.errors import SettingsError, TrainingError
from rarebit.sharding.plan import PlanSpec
from rarebit.sharding.sharded import is_spread, shard

TIMEOUT = timedelta(minutes=5)
"""How long a process waits for the others before it gives up."""


class Processes:
    """One process."""

    rank, world = 0, 1

    def share(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return this process's rows of a batch, and how many of them count."""
        return rows, len(rows)

    def loss(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        logits: Tensor,
        labels: Tensor,
        real: int,
        total: int,
    ) -> Tensor:
        """Return the loss of this process's rows, weighed so that the mean over the processes is that of the batch."""
        del real, total  # all rows are here, and count
        return loss(logits, labels)

    def join(self, scores: Tensor, total: int) -> Tensor:
        """Return the scores of a batch from those of all shares."""
        del total
        return scores

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a number over the processes."""
        return value

    def largest(self, value: int) -> int:
        """Return the largest number of all processes."""
        return value


class SpreadProcesses(Processes):
    """The processes of `torchrun`."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.norms: list[SharedBatchNorm] = []

    def share(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return the rows of this rank, filled up with the batch's first."""
        size = -(-len(rows) // self.world)
        own = rows[self.rank * size : (self.rank + 1) * size]
        for norm in self.norms:
            norm.real = len(own)
        return torch.cat([own, rows[:1].expand(size - len(own))]), len(own)

    def loss(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        logits: Tensor,
        labels: Tensor,
        real: int,
        total: int,
    ) -> Tensor:
        """Return the loss of the real rows by their share of the batch; zero, with zero gradients, where there are none."""
        if not real:
            return logits.sum() * 0.0
        return loss(logits[:real], labels[:real]) * (real * self.world / total)

    def join(self, scores: Tensor, total: int) -> Tensor:
        """Return the scores of all ranks without those of the rows that filled shares up."""
        parts = [torch.empty_like(scores) for _ in range(self.world)]
        dist.all_gather(parts, scores.contiguous())
        return torch.cat(parts)[:total]

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the ranks, the same bits in all of them."""
        total = value.clone()
        dist.all_reduce(total)
        return total / self.world

    def largest(self, value: int) -> int:
        """Return the largest of all ranks."""
        found = torch.tensor(value, device=_device())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)


ONE = Processes()


def processes_of(model: nn.Module) -> Processes:
    """Return the processes that train a model: those its tables are spread over, or this one alone."""
    if not is_spread(model):
        return ONE
    processes = SpreadProcesses()
    processes.norms = [module for module in model.modules() if isinstance(module, SharedBatchNorm)]
    return processes


def join_processes(device: str = "cpu") -> None:
    """Let the processes that `torchrun` started know each other; one process alone is a world of one."""
    if dist.is_initialized():
        return
    backend = "nccl" if device.startswith("cuda") else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=TIMEOUT)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def leave_processes() -> None:
    """Wait for the others and end the processes' connection."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def spread_(
    model: nn.Module,
    plan: PlanSpec,
    *,
    kind: str,
    fused: bool,
    seed: int,
    say: Callable[[str], object],
) -> None:
    """Spread a model's tables over the processes, and make what depends on a whole batch see all of it."""
    join_processes()
    for name, module in list(model.named_modules()):
        if type(module) is nn.BatchNorm1d:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, SharedBatchNorm(module))
        elif isinstance(module, _BatchNorm) and not isinstance(module, SharedBatchNorm):
            raise TrainingError(
                f"{name!r} normalises by the rows of one process; use nn.BatchNorm1d, or one process"
            )
    if kind == "adam" and fused:
        raise SettingsError(
            "TorchRec has no row-wise Adam on the CPU; train the tables by rows with optimizer='sgd' or 'adagrad', or set "
            "tables='dense'"
        )
    shard(model, plan, optimizer=kind, fused=fused, say=say if dist.get_rank() == 0 else None)
    if dist.get_rank():  # what dropout draws differs between the ranks
        torch.manual_seed(stream_key(seed, "rank", dist.get_rank()) >> 1)


class SharedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation by the rows of all processes; rows that only fill a share up do not count."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(norm.__dict__)
        self.real: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the mean and variance over all real rows."""
        if not self.training:
            return super().forward(input)
        rows = input[: self.real]
        sums = torch.cat([rows.sum(0), rows.square().sum(0), rows.new_tensor([float(len(rows))])])
        total = all_reduce(sums)
        width = input.shape[1]
        n = total[-1]
        mean, square = total[:width] / n, total[width:-1] / n
        variance = square - mean.square()
        if (
            self.track_running_stats
            and self.running_mean is not None
            and self.running_var is not None
        ):
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            share = (
                self.momentum
                if self.momentum is not None
                else 1.0 / float(self.num_batches_tracked)
            )
            with torch.no_grad():
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * n / (n - 1), share)
        normal = (input - mean) * torch.rsqrt(variance + self.eps)
        scaled: Tensor = normal * self.weight + self.bias if self.affine else normal
        return scaled


def _device() -> torch.device:
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
