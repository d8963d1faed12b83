"""The processes that train one model together."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["gather_counts", "gather_ranks", "ignore_in_ddp", "keep_from_ddp", "world_size"]


def world_size() -> int:
    """Return the number of processes that train together."""
    if not distributed.is_available() or not distributed.is_initialized():
        return 1
    return distributed.get_world_size()


def gather_ranks(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the tensors of all processes, joined along their first axis in the order of the ranks."""
    padded = tensor.new_zeros(max(counts), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, counts, strict=True)])


def gather_counts(counts: Sequence[int], device: torch.device) -> list[list[int]]:
    """Return the counts of all processes: for each count, one number per rank."""
    own = torch.tensor(counts, device=device)
    parts = [torch.empty_like(own) for _ in range(world_size())]
    distributed.all_gather(parts, own)
    return [list(ranks) for ranks in torch.stack(parts, dim=1).tolist()]


def keep_from_ddp(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[str]:
    """Make DDP ignore these parameters too; return the names it ignored before."""
    before = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    ours = set(parameters)
    named = model.named_parameters(remove_duplicate=False)
    ignore_in_ddp(model, [*before, *(name for name, parameter in named if parameter in ours)])
    return before


def ignore_in_ddp(model: nn.Module, names: list[str]) -> None:
    """Make DDP ignore these parameters and no others."""
    for parameter in model.parameters():
        parameter.__dict__.pop("_ddp_ignored", None)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # noqa: SLF001  # the only way DDP has
