"""Hooks that narrow the target model's latent pool: the first of the two places that narrow."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

from sglang_dcp import state
from sglang_dcp.pool import DcpMLATokenToKVPool

_in_target_pools: ContextVar[bool] = ContextVar("sglang_dcp_in_target_pools", default=False)


def around_init_pools(original: Callable[..., None], self: Any) -> None:
    """AROUND ModelRunner._init_pools: only the target model's pools are striped."""
    token = _in_target_pools.set(not self.is_draft_worker)
    try:
        original(self)
    finally:
        _in_target_pools.reset(token)
    pool = self.token_to_kv_pool
    if not isinstance(pool, DcpMLATokenToKVPool):
        raise RuntimeError(
            f"DCP expected to stripe the KV pool, but the model runner made a "
            f"{type(pool).__name__}. Serve this model without --dcp-size."
        )


def around_mla_pool_init(
    original: Callable[..., None], self: Any, size: int, page_size: int, *args: Any, **kwargs: Any
) -> None:
    """AROUND MLATokenToKVPool.__init__: rows of one rank instead of virtual slots.

    The class is switched on the instance, because replacing it in its module would split the
    isinstance checks of the classes that upstream derives from it.
    """
    if type(self) is not MLATokenToKVPool or not _in_target_pools.get():
        original(self, size, page_size, *args, **kwargs)
        return
    dcp_size = state.get_state().dcp_size
    assert size % page_size == 0, (size, page_size)
    assert page_size % dcp_size == 0, (page_size, dcp_size)
    self.__class__ = DcpMLATokenToKVPool
    original(self, size // dcp_size, page_size // dcp_size, *args, **kwargs)
