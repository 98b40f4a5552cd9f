"""Repeated launches: what makes a class of calls, and what a compiled kernel is given."""

import pytest
import torch

from sglang_dcp.kernels import launch
from sglang_dcp.kernels.launch import Launches, Plan


class Kernel:
    """A kernel of a tensor, a number and two constexprs that notes how it is launched."""

    arg_names = ("x_ptr", "n", "WIDTH", "BASE")

    def __init__(self):
        self.dispatched, self.repeated = [], []

    def __getitem__(self, grid):
        def dispatch(*args, **named):
            self.dispatched.append((grid, args, named))
            return Compiled(self.repeated)

        return dispatch


class Compiled:
    def __init__(self, repeated):
        self.repeated = repeated

    def __getitem__(self, grid):
        return lambda *args: self.repeated.append((grid, args))


def plan_of(x, plans):
    def plan():
        plans.append(x)
        return Plan((x.shape[0],), x.stride(0), BASE=2, WIDTH=x.shape[1], num_warps=4)

    return plan


@pytest.fixture
def compiled(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)


def test_a_class_is_planned_once_and_then_repeated(compiled):
    """The repeat takes the new tensor, and constexprs where the signature has them."""
    kernel, launches, plans = Kernel(), Launches(), []
    first, second = torch.zeros(5, 8), torch.ones(5, 8)
    for x in (first, second):
        launches(kernel, (x,), "e", plan_of(x, plans))
    assert plans == [first]
    ((grid, args, named),) = kernel.dispatched
    assert (grid, args, named) == ((5,), (first, 8), {"BASE": 2, "WIDTH": 8, "num_warps": 4})
    ((grid, args),) = kernel.repeated
    assert grid == (5, 1, 1)
    assert args[0] is second
    assert args[1:] == (8, 8, 2)


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(4, 8),
        torch.zeros(5, 16)[:, :8],
        torch.zeros(5, 8, dtype=torch.float16),
        torch.zeros(41)[1:].view(5, 8),
    ],
    ids=["shape", "stride", "dtype", "alignment"],
)
def test_whatever_a_plan_may_read_makes_a_class(compiled, other):
    kernel, launches, plans = Kernel(), Launches(), []
    for x in (torch.zeros(5, 8), other):
        launches(kernel, (x,), "e", plan_of(x, plans))
    assert len(plans) == len(kernel.dispatched) == 2
    launches(kernel, (other,), "2", plan_of(other, plans))
    assert len(plans) == 3
    assert not kernel.repeated


def test_classes_are_bounded(compiled, monkeypatch):
    """Every prefill may bring a number of tokens that never comes again."""
    monkeypatch.setattr(launch, "MAX_CLASSES", 3)
    kernel, launches, plans = Kernel(), Launches(), []
    for n in (*range(1, 9), 8):
        x = torch.zeros(n, 8)
        launches(kernel, (x,), "e", plan_of(x, plans))
    assert len(launches._repeats) <= 3
    assert len(plans) == 8


def test_interpreted_kernels_repeat_their_first_plan(monkeypatch):
    """So tests without a GPU notice what a launcher forgot to name in the class."""
    monkeypatch.setattr(launch, "INTERPRETED", True)
    kernel, launches, plans = Kernel(), Launches(), []
    for x in (torch.zeros(5, 8), torch.ones(5, 8)):
        launches(kernel, (x,), "e", plan_of(x, plans))
    assert len(plans) == 1
    assert [args[1:] for _, args, _ in kernel.dispatched] == [(8,), (8,)]
    assert kernel.dispatched[1][1][0].eq(1).all()
