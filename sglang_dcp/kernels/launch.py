"""Launches that are planned once and then repeated, because eager layers wait for their host.

Triton's dispatch binds, specializes and hashes every argument of every launch, which takes the host
longer than many of these kernels take the GPU. A launcher knows what its launch depends on: shapes
and a few options, which are the same in all layers of a batch and, where buffers are static, in all
steps of a decode batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from sglang_dcp.kernels.dispatch import INTERPRETED

#: Classes of calls that one kernel keeps; every number of new tokens of a prefill is one.
MAX_CLASSES = 1024


class Plan:
    """All of a launch but the tensors that differ from call to call.

    Args:
        grid: one to three numbers of programs.
        arguments: of the kernel, behind those tensors: numbers, and tensors that stay where they
            are.
        named: the kernel's constexprs, and options of the compiler.
    """

    def __init__(self, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        self.grid = grid
        self.arguments = arguments
        self.named = named

    def launch(self, kernel: Any, tensors: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
        """Launch through Triton's dispatch, which compiles what is new.

        Returns:
            The same launch for other tensors of their class, past the dispatch.
        """
        compiled = kernel[self.grid](*tensors, *self.arguments, **self.named)
        if INTERPRETED:
            return lambda *others: kernel[self.grid](*others, *self.arguments, **self.named)
        # a compiled kernel wants its constexprs, too, in their places
        names = kernel.arg_names[len(tensors) + len(self.arguments) :]
        arguments = (*self.arguments, *(self.named[name] for name in names))
        run = compiled[(*self.grid, 1, 1)[:3]]
        return lambda *others: run(*others, *arguments)


class Launches:
    """The launches of one kernel, on the current stream and device."""

    def __init__(self) -> None:
        self._repeats: dict[Hashable, Callable[..., Any]] = {}

    def __call__(
        self,
        kernel: Any,
        tensors: tuple[torch.Tensor, ...],
        others: Hashable,
        plan: Callable[[], Plan],
    ) -> None:
        """Launch the kernel as planned for calls of this class.

        Args:
            kernel: of `triton.jit`, the same in every call.
            tensors: its first arguments. All that Triton and a plan may know of them makes the
                class: shape, strides, dtype, device and whether they lie on 16 bytes.
            others: what the plan depends on besides.
            plan: asked once for each class.
        """
        shapes = [
            (t.shape, t.stride(), t.dtype, t.get_device(), t.data_ptr() % 16 == 0) for t in tensors
        ]
        key = (*shapes, others)
        repeat = self._repeats.get(key)
        if repeat is not None:
            repeat(*tensors)
            return
        repeat = plan().launch(kernel, tensors)
        if len(self._repeats) >= MAX_CLASSES:
            self._repeats.clear()
        self._repeats[key] = repeat
