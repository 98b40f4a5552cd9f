"""Which new tokens of an extend batch go through pass-Q together, from lengths on the host."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from sglang_dcp.attention.extend import PrefixSlice
from sglang_dcp.layout import all_local_lens


class Piece(NamedTuple):
    """Consecutive new tokens of one request.

    Attributes:
        request: its index in the batch.
        start: row of the first token in the batch.
        num_tokens: how many.
    """

    request: int
    start: int
    num_tokens: int


class Share(NamedTuple):
    """What a backend plans for: how many tokens of which requests attend to their prefixes.

    Attributes:
        requests: indices in the batch, ascending.
        counts: tokens of each, at least 1.
    """

    requests: tuple[int, ...]
    counts: tuple[int, ...]


def cut_slices(
    new_lens: Sequence[int], prefix_lens: Sequence[int], max_tokens: int
) -> list[list[Piece]]:
    """Cut the tokens of requests with a prefix into runs of at most max_tokens, in their order.

    Depends on lengths only, so that all ranks make the same slices.
    """
    assert max_tokens > 0, max_tokens
    slices: list[list[Piece]] = []
    room, start = 0, 0
    for request, (length, prefix) in enumerate(zip(new_lens, prefix_lens, strict=True)):
        at, end = start, start + length
        while prefix and at < end:
            if room == 0:
                slices.append([])
                room = max_tokens
            num_tokens = min(room, end - at)
            slices[-1].append(Piece(request, at, num_tokens))
            at, room = at + num_tokens, room - num_tokens
        start = end
    return slices


def make_prefix_slices(
    new_lens: Sequence[int],
    prefix_lens: Sequence[int],
    max_tokens: int,
    dcp_size: int,
    device: torch.device | str,
    plan: Callable[[Share], Any],
) -> list[PrefixSlice]:
    """The slices of a batch, with the backend's metadata.

    Args:
        new_lens, prefix_lens: lengths of every request of the batch in tokens.
        max_tokens: of a slice.
        dcp_size: c.
        device: of the tensors; they go there without a host sync.
        plan: metadata of the backend for a share; called once for shares that are equal, as the
            inner slices of a long request are.
    """
    planned: dict[Share, Any] = {}
    slices = []
    for pieces in cut_slices(new_lens, prefix_lens, max_tokens):
        share = Share(tuple(p.request for p in pieces), tuple(p.num_tokens for p in pieces))
        if share not in planned:
            planned[share] = plan(share)
        prefixes = torch.tensor([prefix_lens[p.request] for p in pieces], dtype=torch.int32)
        of_tokens = prefixes.repeat_interleave(torch.tensor(share.counts))
        local_lens = all_local_lens(of_tokens, dcp_size).to(device, non_blocking=True)
        slices.append(PrefixSlice(_rows(pieces, device), local_lens, planned[share]))
    return slices


def _rows(pieces: list[Piece], device: torch.device | str) -> slice | torch.Tensor:
    """Rows of the pieces in the batch; a slice where nothing lies between them."""
    first, end = pieces[0].start, pieces[-1].start + pieces[-1].num_tokens
    if end - first == sum(p.num_tokens for p in pieces):
        return slice(first, end)
    rows = torch.cat([torch.arange(p.start, p.start + p.num_tokens) for p in pieces])
    return rows.to(device, non_blocking=True)
