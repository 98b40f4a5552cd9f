"""Pass-Q or pass-KV for an extend batch: a cost model over lengths that all ranks know.

Both variants are exact, so only time is at stake. Costs are FLOPs and bytes of one layer on one
rank (`planner.crossover` counts them; arXiv 2411.01783 for the question, MLA's answer differs)
over rates that are measured per machine. Prefill runs without graphs, so a layer takes what its
launches take if that is longer. Nothing here knows SGLang or torch.

Legend: c = dcp_size, H = gathered heads (those of c ranks).
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sglang_dcp.planner.crossover import (
    kv_up_flops_per_head,
    latent_bytes,
    pass_kv_flops,
    pass_q_bytes,
    pass_q_flops,
)
from sglang_dcp.planner.ledgers import ACTIVATION_BYTES
from sglang_dcp.planner.models import ModelShape
from sglang_dcp.workspace import ChunkBudget, PassQLimits

logger = logging.getLogger(__name__)

#: How a prefill batch reads its prefixes; "none": there is nothing to read.
Variant = Literal["none", "pass_kv", "pass_q"]
VARIANTS: tuple[Variant, ...] = ("none", "pass_kv", "pass_q")
#: Values of --dcp-prefill.
MODES = ("auto", "pass-kv", "pass-q")
_FORCED: dict[str, Variant] = {"pass-kv": "pass_kv", "pass-q": "pass_q"}

#: The fields of PrefillRates that a host takes.
HOST_TIMES = (
    "layer_host_us",
    "pass_q_layer_us",
    "pass_q_slice_us",
    "pass_kv_layer_us",
    "pass_kv_chunk_us",
)

#: Query rows (token, head) that one block of an absorbed attention kernel holds.
ROW_TILE = 64


@dataclass(frozen=True)
class PrefillRates:
    """What a machine achieves in long kernels, and what the launches of a layer take its host.

    Attributes:
        absorbed_flops_per_s: attention 576 wide over a latent cache.
        mha_flops_per_s: attention on expanded K and V, without a mask.
        gemm_flops_per_s: kv_b_proj.
        hbm_bytes_per_s: device memory.
        link_bytes_per_s: one GPU's traffic in one direction, both directions busy.
        layer_host_us: launches of a layer without a prefix.
        pass_q_layer_us, pass_q_slice_us: what pass-Q adds, per layer and per slice of tokens.
        pass_kv_layer_us, pass_kv_chunk_us: what pass-KV adds, per layer and per chunk of prefixes.
        source: hardware and method.
    """

    absorbed_flops_per_s: float = 600e12
    mha_flops_per_s: float = 650e12
    gemm_flops_per_s: float = 650e12
    hbm_bytes_per_s: float = 4.3e12
    link_bytes_per_s: float = 383e9
    layer_host_us: float = 1080.0
    pass_q_layer_us: float = 85.0
    pass_q_slice_us: float = 200.0
    pass_kv_layer_us: float = 440.0
    pass_kv_chunk_us: float = 420.0
    source: str = (
        "H200, 12 layers, 96 heads, FlashMLA; attention from 1280 to 25600 new tokens on about "
        "110000: scripts/results/bench_prefill_tp2_dcp2.json; host times: "
        "scripts/results/prefill_host_one_gpu.json; HBM and peer copies measured; the GEMM rate is "
        "an estimate"
    )

    def on_host(self, ratio: float) -> PrefillRates:
        """The same GPU behind a host whose launches take `ratio` times as long."""
        slower = {name: getattr(self, name) * ratio for name in HOST_TIMES}
        source = f"{self.source}; host times as measured there, times {ratio:.1f}"
        return dataclasses.replace(self, **slower, source=source)


def load_rates(path: str | Path, others: PrefillRates | None = None) -> PrefillRates:
    """The values of a JSON object, put over `others`; keys are the fields' names.

    All ranks must read the same values, since they must decide alike.

    Args:
        path: of the file.
        others: what the file does not name; None: the defaults.

    Raises:
        ValueError: no such file, not a JSON object, an unknown key, or a rate that is not above 0.
    """
    known = {field.name: field.default for field in dataclasses.fields(PrefillRates)}
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise _bad_rates(path, f"cannot be read ({error})", known) from error
    if not isinstance(data, dict):
        raise _bad_rates(path, f"holds {type(data).__name__}, not an object", known)
    for key, value in data.items():
        if key not in known:
            raise _bad_rates(path, f"has the unknown key {key}", known)
        if not _is_like(known[key], value):
            raise _bad_rates(path, f"says {value!r} for {key}", known)
    return dataclasses.replace(others or PrefillRates(), **data)


def _is_like(default: Any, value: Any) -> bool:
    if isinstance(default, str):
        return isinstance(value, str)
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _bad_rates(path: str | Path, problem: str, known: dict[str, Any]) -> ValueError:
    return ValueError(
        f"the prefill calibration {path} {problem}: it must be a JSON object of rates above 0 "
        f"with keys among {', '.join(known)}. Correct it, or unset the variable that names it."
    )


@dataclass(frozen=True)
class PrefillCosts:
    """Time of one layer's attention of an extend batch, by variant.

    Attributes:
        model: widths of the model.
        num_heads: H.
        dcp_size: c.
        slice_tokens: new tokens that one round of pass-Q moves at most.
        chunk_tokens: prefix tokens that pass-KV reads at a time at most.
        rates: of the machine.
        budget: what the workspace leaves for a chunk beside the new tokens of a batch; None: all.
    """

    model: ModelShape
    num_heads: int
    dcp_size: int
    slice_tokens: int
    chunk_tokens: int
    rates: PrefillRates = PrefillRates()
    budget: ChunkBudget | None = None

    def pass_q_us(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> float:
        """The longer one of what pass-Q takes GPU and host."""
        rates, moved_tokens = self.rates, _moved_tokens(new_lens, prefix_lens)
        num_slices = -(-moved_tokens // self.slice_tokens)
        host_us = rates.pass_q_layer_us + num_slices * rates.pass_q_slice_us
        return max(self._pass_q_gpu_us(new_lens, prefix_lens), rates.layer_host_us + host_us)

    def pass_kv_us(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> float:
        """The longer one of what pass-KV takes GPU and host."""
        rates, chunk_tokens = self.rates, self.chunk_tokens
        if self.budget is not None:
            chunk_tokens = min(chunk_tokens, self.budget.chunk_tokens(new_lens, prefix_lens))
        num_chunks = -(-sum(prefix_lens) // chunk_tokens)
        host_us = rates.pass_kv_layer_us + num_chunks * rates.pass_kv_chunk_us
        return max(self._pass_kv_gpu_us(new_lens, prefix_lens), rates.layer_host_us + host_us)

    def _pass_q_gpu_us(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> float:
        """Absorbed queries of all heads visit every stripe; the fresh part is absorbed too."""
        model, rates, heads = self.model, self.rates, self.num_heads
        moved_tokens = _moved_tokens(new_lens, prefix_lens)
        rows_by_keys = sum(
            -(-n * heads // ROW_TILE) * ROW_TILE * p
            for n, p in zip(new_lens, prefix_lens, strict=True)
        )
        stripe_bytes = sum(prefix_lens) * latent_bytes(model) / self.dcp_size
        attention_s = max(
            pass_q_flops(model) * rows_by_keys / self.dcp_size / rates.absorbed_flops_per_s,
            stripe_bytes / rates.hbm_bytes_per_s,
        )
        fresh_s = pass_q_flops(model) * self._fresh_pairs(new_lens) / rates.absorbed_flops_per_s
        link_s = self._link_s(moved_tokens * heads * pass_q_bytes(model))
        return (attention_s + fresh_s + link_s) * 1e6

    def _pass_kv_gpu_us(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> float:
        """Latent prefixes go to every rank, which expands and attends to them with its heads."""
        model, rates, own_heads = self.model, self.rates, self.num_heads / self.dcp_size
        prefix_tokens = sum(prefix_lens)
        pairs = own_heads * sum(n * p for n, p in zip(new_lens, prefix_lens, strict=True))
        expand_s = (
            kv_up_flops_per_head(model) * own_heads * prefix_tokens / rates.gemm_flops_per_s
            + own_heads * prefix_tokens * self._expand_bytes() / rates.hbm_bytes_per_s
        )
        attention_s = max(
            pass_kv_flops(model) * pairs / rates.mha_flops_per_s,
            own_heads * prefix_tokens * self._kv_bytes() / rates.hbm_bytes_per_s,
        )
        fresh_s = pass_kv_flops(model) * self._fresh_pairs(new_lens) / rates.mha_flops_per_s
        link_s = self._link_s(prefix_tokens * latent_bytes(model))
        return (expand_s + attention_s + fresh_s + link_s) * 1e6

    def crossover_tokens(self, prefix_tokens: int, most: int = 1 << 20) -> int:
        """Fewest new tokens of one request at which pass-Q is not faster; `most` if none is."""
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            lens = [middle], [prefix_tokens]
            if self.pass_q_us(*lens) < self.pass_kv_us(*lens):
                low = middle
            else:
                high = middle
        return high

    def _fresh_pairs(self, new_lens: Sequence[int]) -> float:
        """(query, key, own head) triples of the causal part."""
        return self.num_heads / self.dcp_size * sum(n * (n + 1) / 2 for n in new_lens)

    def _link_s(self, num_bytes: float) -> float:
        sent = (self.dcp_size - 1) / self.dcp_size
        return num_bytes * sent / self.rates.link_bytes_per_s

    def _kv_bytes(self) -> int:
        """Expanded K and V of one token and head."""
        model = self.model
        elements = model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim
        return elements * ACTIVATION_BYTES

    def _expand_bytes(self) -> int:
        """Written by kv_b_proj, and K copied beside its rope part, per token and head."""
        model = self.model
        written = model.qk_nope_head_dim + model.v_head_dim
        copied = 2 * model.qk_nope_head_dim + model.qk_rope_head_dim
        return (written + copied) * ACTIVATION_BYTES


def _moved_tokens(new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
    """New tokens of requests with a prefix."""
    return sum(n for n, p in zip(new_lens, prefix_lens, strict=True) if p)


class PrefillPolicy:
    """Decides per extend batch, from lengths alone: all ranks decide alike.

    Args:
        mode: one of MODES.
        costs: for "auto".
        limits: of pass-Q; a batch with more new tokens goes by pass-KV in every mode.
    """

    def __init__(
        self,
        mode: str = "pass-kv",
        costs: PrefillCosts | None = None,
        limits: PassQLimits | None = None,
    ) -> None:
        assert mode in MODES, mode
        assert mode in _FORCED or costs is not None, "auto needs costs"
        self.mode = mode
        self.costs = costs
        self.limits = limits or PassQLimits()
        self._last: Variant = "none"

    def choose(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> Variant:
        """The variant for requests with so many new tokens on so many cached ones."""
        if not any(prefix_lens):
            return "none"
        if sum(new_lens) > self.limits.batch_tokens:
            return "pass_kv"
        if self.costs is None or self.mode in _FORCED:
            return _FORCED[self.mode]
        pass_q_us = self.costs.pass_q_us(new_lens, prefix_lens)
        pass_kv_us = self.costs.pass_kv_us(new_lens, prefix_lens)
        variant: Variant = "pass_q" if pass_q_us < pass_kv_us else "pass_kv"
        if variant != self._last:
            logger.debug(
                f"DCP: prefill by {variant} from now on: {sum(new_lens)} new tokens on "
                f"{sum(prefix_lens)} cached, a layer {pass_q_us:.0f} us by pass_q, "
                f"{pass_kv_us:.0f} us by pass_kv."
            )
            self._last = variant
        return variant
