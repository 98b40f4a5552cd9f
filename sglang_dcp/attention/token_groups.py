"""Query tokens of one request side by side, so that a kernel reads its keys once for all of them.

A decode kernel takes q [G, s, H, 576]: G groups of s tokens, each group over one sequence. Heads
of several tokens are to it what more heads of one token are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_dcp.workspace import GROUP_FILL

#: FlashMLA: query rows (token, head) of a thread block, tokens of a KV block, and what switching
#: to another sequence costs in KV blocks (its metadata kernel).
ROW_TILE, KV_TILE, SWITCH_BLOCKS = 64, 64, 5


@dataclass(frozen=True)
class TokenGroups:
    """n tokens as G groups of `size` tokens, the last group of a request filled up.

    Attributes:
        requests: [G], the request of each group.
        size: s.
        pack: [G * s] int64, the token in each place (its request's last one in spare places), or
            None where no place is spare.
        unpack: [n] int64, the place of each token; None with pack.
    """

    requests: tuple[int, ...]
    size: int
    pack: torch.Tensor | None
    unpack: torch.Tensor | None

    def packed(self, q: torch.Tensor) -> torch.Tensor:
        """q [n, H, D] of any strides -> [G, s, H, D], contiguous."""
        q = q.contiguous() if self.pack is None else q.index_select(0, self.pack)
        return q.view(len(self.requests), self.size, *q.shape[1:])

    def unpacked(self, grouped: torch.Tensor) -> torch.Tensor:
        """[G, s, ...] -> [n, ...]."""
        places = grouped.flatten(0, 1)
        return places if self.unpack is None else places.index_select(0, self.unpack)


def make_groups(
    requests: Sequence[int], counts: Sequence[int], size: int, device: torch.device | str
) -> TokenGroups:
    """Group counts[i] consecutive tokens of requests[i] each, request after request."""
    of_group: list[int] = []
    pack: list[int] = []
    unpack: list[int] = []
    first = 0
    for request, count in zip(requests, counts, strict=True):
        num_groups = -(-count // size)
        of_group += [request] * num_groups
        unpack += range(len(pack), len(pack) + count)
        pack += [first + min(i, count - 1) for i in range(num_groups * size)]
        first += count
    if len(pack) == len(unpack):
        return TokenGroups(tuple(of_group), size, None, None)
    tensors = (torch.tensor(x).to(device, non_blocking=True) for x in (pack, unpack))
    return TokenGroups(tuple(of_group), size, *tensors)


def sizes_that_fit(counts: Sequence[int], most: int) -> list[int]:
    """Powers of two up to `most`, ascending, whose groups have at most GROUP_FILL * n places."""
    sizes = [1 << i for i in range((max(counts) - 1).bit_length() + 1) if 1 << i <= most]
    num_places = {size: sum(-(-count // size) * size for count in counts) for size in sizes}
    return [size for size in sizes if num_places[size] <= GROUP_FILL * sum(counts)]


def best_group_size(
    counts: Sequence[int], kv_lens: Sequence[int], num_heads: int, num_sms: int
) -> int:
    """Tokens of a group at which FlashMLA's schedule ends first; the largest among equals.

    Its grid is ceil(s * H / 64) blocks of rows times `parts` shares of the keys, which are all
    groups' KV blocks one after another, cut evenly. Few rows leave part of a tile unused, many
    leave no parts to fill the last wave of blocks.

    Args:
        counts: query tokens of each request.
        kv_lens: keys of each request.
        num_heads: H.
        num_sms: multiprocessors of the GPU.
    """

    def cost(size: int) -> float:
        row_blocks = -(-size * num_heads // ROW_TILE)
        parts = max(num_sms // row_blocks, 1)
        waves = -(-row_blocks * parts // num_sms)
        kv_blocks = sum(
            -(-count // size) * (-(-kv_len // KV_TILE) + SWITCH_BLOCKS)
            for count, kv_len in zip(counts, kv_lens, strict=True)
        )
        return waves * (-(-kv_blocks // parts) + SWITCH_BLOCKS)

    return min(reversed(sizes_that_fit(counts, ROW_TILE)), key=cost)
