"""Parts of a step that may be compiled: a few kernels in place of dozens of small ones.

On a GPU each kernel costs its start, and the parts of a transfer are small. Where sizes depend on the ids, as
on the CPU, most steps have a size of their own and are run as they are.
"""

import types
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch

from rarebit.tables.recorded import is_recording

__all__ = ["Part"]

Owner = TypeVar("Owner")
Given = ParamSpec("Given")
Result = TypeVar("Result")


class Part(Generic[Given, Result]):
    """A method of an object that is compiled, once asked, for the first size that comes twice in a row.

    Where the compiler cannot follow all of it, it is run as it is, which is said once. It may change what the
    object keeps, so it is never begun twice: it is compiled as a whole or not at all.

    >>> class Numbers:
    ...     def add(self, first, second):
    ...         return first + second
    >>> add = Part(Numbers.add, Numbers(), "the sum")
    >>> add(2, torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([4., 6.])
    """

    def __init__(
        self, method: Callable[Concatenate[Owner, Given], Result], owner: Owner, name: str
    ) -> None:
        self.name = name
        self._run: Callable[Given, Result] = types.MethodType(method, owner)
        # torch compiles a function only so many times, and many tables share ours
        self._copy: Callable[Given, Result] = types.MethodType(_copied(method), owner)
        self._say: Callable[[str], object] | None = None
        self._last_size: int | None = None
        self._compiled: tuple[int, Callable[Given, Result]] | None = None

    def compile(self, say: Callable[[str], object]) -> None:
        """Compile it when its time comes; `say` takes the line that says why it is not."""
        self._say = say

    def __call__(self, size: int, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """Return what the method returns; `size` is that of its tensors where it may change."""
        if self._say is None:
            return self._run(*args, **kwargs)
        # no compiler while a step is recorded: whatever it does on the device would be in the recording
        if self._compiled is None and size == self._last_size and not is_recording():
            self._compiled = size, torch.compile(self._copy, dynamic=False, fullgraph=True)
        self._last_size = size
        if self._compiled is not None and self._compiled[0] == size:
            try:
                return self._compiled[1](*args, **kwargs)
            except Exception as error:  # noqa: BLE001  # a fault of the method's own comes again below
                # the first line may be no more than who raised it
                reason = " ".join(str(error).split("\n")[:2]) or type(error).__name__
                self._say(f"{self.name} of the transfer is not compiled: {reason}")
                self._say = None
        return self._run(*args, **kwargs)


def _copied(method: Callable[..., object]) -> types.FunctionType:
    """Return the same function as one of its own."""
    assert isinstance(method, types.FunctionType)
    return types.FunctionType(
        method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__
    )
