"""layout.py against brute force over positions and slots."""

import pytest
import torch

from sglang_dcp import layout

SIZES = [1, 2, 3, 4, 8]


def owned(start: int, length: int, rank: int, size: int) -> list[int]:
    return [p for p in range(start, start + length) if p % size == rank]


@pytest.mark.parametrize("dcp_size", SIZES)
def test_local_len_counts_owned_positions(dcp_size):
    for start in range(0, 20):
        for length in range(0, 20):
            for rank in range(dcp_size):
                want = len(owned(start, length, rank, dcp_size))
                assert layout.local_len(length, rank, dcp_size, start) == want
                assert layout.num_owned_below(length, rank, dcp_size) == len(
                    owned(0, length, rank, dcp_size)
                )


@pytest.mark.parametrize("dcp_size", SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tensor_lengths_equal_integer_lengths(dcp_size, dtype):
    lens, start = torch.randint(0, 1000, (2, 50)).to(dtype)
    for rank in range(dcp_size):
        got = layout.local_len(lens, rank, dcp_size, start)
        assert got.dtype == dtype
        want = [
            layout.local_len(n, rank, dcp_size, s)
            for n, s in zip(lens.tolist(), start.tolist(), strict=True)
        ]
        assert got.tolist() == want


@pytest.mark.parametrize("dcp_size", SIZES)
def test_all_local_lens(dcp_size):
    lens, start = torch.randint(0, 300, (2, 17))
    for first in (None, start):
        got = layout.all_local_lens(lens, dcp_size, first)
        starts = [0] * 17 if first is None else first.tolist()
        want = [
            [len(owned(s, n, r, dcp_size)) for n, s in zip(lens.tolist(), starts, strict=True)]
            for r in range(dcp_size)
        ]
        assert got.dtype == torch.int32
        assert got.tolist() == want
        assert torch.equal(got.sum(0), lens)  # every token has exactly one owner


@pytest.mark.parametrize("dcp_size", SIZES)
def test_first_owned(dcp_size):
    for start in range(30):
        for rank in range(dcp_size):
            want = next(p for p in range(start, start + dcp_size) if p % dcp_size == rank)
            assert layout.first_owned(start, rank, dcp_size) == want


@pytest.mark.parametrize(("page_size", "dcp_size"), [(1, 2), (1, 8), (4, 4), (64, 8)])
def test_pages_and_rows_of_a_request(page_size, dcp_size):
    """Random pages from a widened allocator: ownership by position, equal page ids on all ranks."""
    wide = page_size * dcp_size
    pages = torch.randperm(20).tolist()
    length = 19 * wide - 3
    slots = [pages[p // wide] * wide + p % wide for p in range(length)]
    for p, slot in enumerate(slots):
        assert layout.owner(slot, dcp_size) == p % dcp_size
        row = layout.physical_row(slot, dcp_size)
        assert row // page_size == pages[p // wide]
        assert layout.physical_page(slot, page_size, dcp_size) == pages[p // wide]
    for rank in range(dcp_size):
        rows = [layout.physical_row(s, dcp_size) for s in slots[rank::dcp_size]]
        # paged view: row j of the stripe is row j % P of its j // P-th page
        assert rows == [pages[j // page_size] * page_size + j % page_size for j in range(len(rows))]
        assert len(rows) == layout.local_len(length, rank, dcp_size)


def test_rows_are_disjoint_and_complete():
    slots = torch.arange(4 * 32)
    pairs = {(int(layout.owner(s, 4)), int(layout.physical_row(s, 4))) for s in slots}
    assert pairs == {(r, row) for r in range(4) for row in range(32)}


@pytest.mark.parametrize(("page_size", "dcp_size"), [(1, 2), (4, 4), (64, 8)])
def test_every_allocator_slot_fits_the_narrowed_pool(page_size, dcp_size):
    """C rows and one dummy page per rank: the last widened page must not write out of bounds."""
    capacity = 3 * page_size
    wide = page_size * dcp_size
    slots = torch.arange(wide, capacity * dcp_size + wide)  # page 0 is the dummy page
    for rank in range(dcp_size):
        rows = layout.physical_row(slots[layout.owner(slots, dcp_size) == rank], dcp_size)
        assert rows.tolist() == list(range(page_size, capacity + page_size))


def test_dcp_groups():
    assert layout.dcp_groups(8, 8, 8) == [list(range(8))]
    assert layout.dcp_groups(8, 8, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # two attention-TP groups of 4 (dp attention) and two pipeline stages: never crossed
    groups = layout.dcp_groups(16, 4, 4)
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert layout.dcp_groups(4, 2, 1) == [[0], [1], [2], [3]]


def test_dcp_groups_rejects_with_the_way_out():
    with pytest.raises(
        ValueError, match=r"--dcp-size 4 .* has 2 ranks.* 2 % 4 = 2\. Use one of \[1, 2\]"
    ):
        layout.dcp_groups(64, 2, 4)  # public bug: a group across attention replicas was accepted
    with pytest.raises(ValueError, match=r"6 % 4 = 2\. Choose"):
        layout.dcp_groups(6, 4, 2)
    with pytest.raises(ValueError, match="at least 1"):
        layout.dcp_groups(4, 4, 0)
