"""What training needs of the processes that train together: shares of a batch, joined scores, common decisions.

    Processes         one process, which holds everything
    SpreadProcesses   the processes of `torchrun`, with the tables spread over them

A batch of n rows is cut into W shares of ceil(n / W) neighbouring rows, as TorchRec wants all shares of one size. Where rows
are missing a share is filled up with the batch's first row, which counts for nothing: a process's loss is the mean over its
real rows times `real * W / n`, and the mean of that over the processes is the mean over the batch. Seed and epoch decide the
order of the rows, so any number of processes sees the same batches.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rarebit.data.order import stream_key
from rarebit.errors import SettingsError, TrainingError
from rarebit.sharding.plan import PlanSpec
from rarebit.sharding.sharded import (
    GradientAverage,
    device_of_process,
    is_spread,
    pieces_of,
    shard,
    sharded_rows,
    shared_parameters,
)

Say: TypeAlias = Callable[[str], object]

TIMEOUT = timedelta(minutes=5)
"""How long a process waits for the others before it gives up."""


class Processes:
    """One process."""

    rank, world = 0, 1
    here = 1
    """How many of them share the memory of this machine."""
    agree_every = 1
    """Steps between two common decisions, which wait for all processes."""

    def share(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return this process's rows of a batch, and how many of them count."""
        return rows, len(rows)

    def loss(
        self,
        loss: Callable[..., Tensor],
        parts: Sequence[Tensor],
        real: int,
        total: int,
    ) -> Tensor:
        """Return the loss of this process's logits, labels and weights, weighed so that the mean over the processes is that of the batch."""
        del real, total  # all rows are here, and count
        return loss(*parts)

    def send_early(self, ids: Tensor, last: Tensor) -> None:
        """Let the ids of the next batch set out before the backward of the last one."""

    def average_gradients(self) -> None:
        """Average the gradients of what every process holds."""

    def release(self) -> None:
        """Leave the model's gradients alone, after the last step."""

    def norm(self, norms: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients from those of the parameters."""
        del parameters
        total: Tensor = torch.linalg.vector_norm(norms)
        return total

    def reseed(self, seed: int, num_steps: int) -> None:
        """Let each process but the first draw random numbers of its own, as dropout does."""

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

    agree_every = 10

    def __init__(self, model: nn.Module) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.norms = [module for module in model.modules() if isinstance(module, SharedBatchNorm)]
        self.shared = shared_parameters(model)
        self.gradients = GradientAverage(self.shared)
        self.exchanges = list(dict.fromkeys(rows.exchange for rows in sharded_rows(model)))

    def share(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return the rows of this rank, filled up with the batch's first."""
        size = -(-len(rows) // self.world)
        own = rows[self.rank * size : (self.rank + 1) * size]
        for norm in self.norms:
            norm.real = len(own)
        return torch.cat([own, rows[:1].expand(size - len(own))]), len(own)

    def loss(
        self,
        loss: Callable[..., Tensor],
        parts: Sequence[Tensor],
        real: int,
        total: int,
    ) -> Tensor:
        """Return the loss of the real rows by their share of the batch; zero, with zero gradients, where there are none."""
        if not real:
            return parts[0].sum() * 0.0
        return loss(*(part[:real] for part in parts)) * (real * self.world / total)

    def send_early(self, ids: Tensor, last: Tensor) -> None:
        """Let the ids of the next batch set out, for tables that looked up those of the last one as they were."""
        for exchange in self.exchanges:
            exchange.send_early(ids, last)

    def average_gradients(self) -> None:
        """Average the gradients of all but the pieces, which TorchRec did; the ids of the next batch go on."""
        for exchange in self.exchanges:
            exchange.send_on()
        self.gradients.finish()

    def release(self) -> None:
        """Leave the model's gradients alone, after the last step."""
        self.gradients.close()

    def norm(self, norms: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients; those of pieces are added up over the ranks."""
        shared = {id(parameter) for parameter in self.shared}
        is_shared = torch.tensor([id(p) in shared for p in parameters], device=norms.device)
        of_pieces = norms[~is_shared].square().sum()
        dist.all_reduce(of_pieces)
        return (of_pieces + norms[is_shared].square().sum()).sqrt()

    def reseed(self, seed: int, num_steps: int) -> None:
        """Draw other random numbers than the first rank does, as dropout does."""
        if self.rank:
            torch.manual_seed(stream_key(seed, "rank", self.rank, num_steps) >> 1)

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
        found = torch.tensor(value, device=device_of_process())
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)


ONE = Processes()


def processes_of(model: nn.Module) -> Processes:
    """Return the processes that train a model: those its tables are spread over, or this one alone."""
    return SpreadProcesses(model) if is_spread(model) else ONE


def join_processes(device: str = "cpu", timeout: timedelta = TIMEOUT) -> None:
    """Let the processes that `torchrun` started know each other."""
    if dist.is_initialized():
        return
    if not os.environ.keys() >= {"RANK", "WORLD_SIZE"}:
        raise SettingsError(
            "several processes need torchrun, which starts them: torchrun --nproc-per-node 2 -m rarebit train ..."
        )
    # not before: a torch without them can do all else
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    backend = "gloo"
    if device.startswith("cuda"):
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    # what a killed process told the others of itself is still there after a restart
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = PrefixStore(f"rarebit-{attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=timeout)


def leave_processes() -> None:
    """Wait for the others and end the processes' connection."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def spread_(
    model: nn.Module,
    plan: PlanSpec = "auto",
    *,
    whole_rows: bool = False,
    batch_size: int | None = None,
    say: Say | None = None,
) -> None:
    """Spread a model's tables over the processes, and let what depends on a whole batch see all of it."""
    share_norms_(model)
    say = say if dist.get_rank() == 0 else None
    shard(model, plan, whole_rows=whole_rows, batch_size=batch_size, say=say)


def share_norms_(model: nn.Module) -> None:
    """Let batch normalisation use the rows of all processes."""
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d):
            own = type(module)
            parents = (SharedBatchNorm,) if own is nn.BatchNorm1d else (own, SharedBatchNorm)
            module.__class__ = type(
                own.__name__, parents, {}
            )  # it stays the object that others may hold
        elif isinstance(module, _BatchNorm):
            raise TrainingError(
                f"{name!r} normalises by the rows of one process; use nn.BatchNorm1d, or one process"
            )


@torch.no_grad()
def gather_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of the plain model, in the first process; the others return nothing. All must call it."""
    rank, held = dist.get_rank(), {name for name, _ in pieces_of(model)}
    found = {n: v for n, v in model.state_dict().items() if n not in held} if rank == 0 else {}
    for rows in sharded_rows(model):
        own = {place: (home.weight, first) for place, (home, first) in rows.homes.items()}
        if rank == 0:
            found[rows.weight] = torch.empty(rows.shape, device=device_of_process())
        for source in range(dist.get_world_size()):
            for place, at in rows.rectangles(source).items():
                if rank == source:
                    weight, first = own[place]
                    part = weight[first : first + at.rows].contiguous()
                elif rank == 0:
                    part = torch.empty(at.rows, at.columns, device=device_of_process())
                if source and rank == source:
                    dist.send(part, 0)
                elif source and rank == 0:
                    dist.recv(part, source)
                if rank == 0:
                    found[rows.weight][at.inside] = part
    return found


class SharedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation by the rows of all processes; rows that only fill a share up do not count."""

    real: int | None = None
    """How many rows of the batch count, the first ones; None: all."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the mean and variance over all real rows."""
        from torch.distributed.nn.functional import all_reduce

        if not self.training:
            return super().forward(input)
        rows = input[: self.real]
        width = input.shape[1]
        total = all_reduce(torch.cat([rows.sum(0), rows.new_tensor([float(len(rows))])]))
        n = total[width]
        mean = total[:width] / n
        variance = all_reduce((rows - mean).square().sum(0)) / n
        if (
            self.track_running_stats
            and self.running_mean is not None
            and self.running_var is not None
        ):
            assert self.num_batches_tracked is not None
            self.num_batches_tracked += 1
            share = self.momentum
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
            with torch.no_grad():
                self.running_mean.lerp_(mean, share)
                self.running_var.lerp_(variance * n / (n - 1), share)
        normal = (input - mean) * torch.rsqrt(variance + self.eps)
        scaled: Tensor = normal * self.weight + self.bias if self.affine else normal
        return scaled
