"""Replicated Q projection: every rank computes the queries of all heads of its DCP group.

An alternative to gathering them (stage 4): q_b_proj and w_kc are gathered once, when weights load,
and a decode step multiplies by c times larger matrices instead of moving [B, H/c, 576] per rank.
Prefill goes on with the own heads, which are a part of the gathered weights and not stored twice.
"""

from typing import Any

import torch
import torch.nn.functional as F

from sglang_dcp.comm.transport import Transport

#: Attribute of an attention module that has them.
ATTRIBUTE = "dcp_all_heads"
SUPPORTED_DTYPES = (torch.bfloat16, torch.float32)


class AllHeads:
    """Stands for an attention module (`self`) while upstream computes absorbed queries.

    It has the projections and the number of heads of the whole group, and everything else from the
    module. The gathered weights are allocated once and filled anew when weights are loaded again,
    so captured graphs read the new ones.

    Args:
        attn: a DeepseekV2AttentionMLA whose weights are loaded.
        transport: collectives of the DCP group; all ranks construct and `gather` together.

    Raises:
        ValueError: the weights are quantized, or of a type that no test serves.
    """

    def __init__(self, attn: Any, transport: Transport) -> None:
        self._attn = attn
        self._transport = transport
        self._name = "q_proj" if attn.q_lora_rank is None else "q_b_proj"
        self.num_local_heads = attn.num_local_heads * transport.size
        weight = getattr(getattr(attn, self._name), "weight", None)
        check_weights(self._name, weight, attn.w_kc)
        assert weight is not None
        self._q_weight = _empty_for(weight, transport.size)
        # upstream keeps w_kc [Hl, 128, 512] as a transposed view
        self._kc = _empty_for(attn.w_kc.transpose(1, 2), transport.size)
        setattr(self, self._name, self._project)
        self.gather()

    def __getattr__(self, name: str) -> Any:
        """Everything that is not the group's is the module's."""
        return getattr(self._attn, name)

    @property
    def w_kc(self) -> torch.Tensor:
        """[H, 128, 512], strided as upstream's own."""
        return self._kc.transpose(1, 2)

    @property
    def extra_bytes(self) -> int:
        """What the other ranks' heads take in this rank's memory."""
        num_bytes = self._q_weight.nbytes + self._kc.nbytes
        return num_bytes - num_bytes // self._transport.size

    def gather(self) -> None:
        """Fill the weights of all heads from the module's, which become views of them."""
        weight, rank = getattr(self._attn, self._name).weight, self._transport.rank
        self._transport.all_gather(self._q_weight, _copied(weight.data))
        self._transport.all_gather(self._kc, _copied(self._attn.w_kc.transpose(1, 2)))
        weight.data = self._q_weight.chunk(self._transport.size)[rank]
        self._attn.w_kc = self._kc.chunk(self._transport.size)[rank].transpose(1, 2)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As the module's linear layer: [B, in] -> ([B, H * 192], no bias)."""
        return F.linear(x, self._q_weight), None


def check_weights(name: str, weight: Any, w_kc: Any) -> None:
    """Raise ValueError unless both are plain matrices of one supported type."""
    dtypes = [getattr(w, "dtype", None) for w in (weight, w_kc)]
    if dtypes[0] not in SUPPORTED_DTYPES or dtypes[0] != dtypes[1]:
        supported = " and ".join(str(dtype).removeprefix("torch.") for dtype in SUPPORTED_DTYPES)
        raise ValueError(
            f"--dcp-replicate-q-proj with weights {name} and w_kc of types {dtypes[0]} and "
            f"{dtypes[1]} was asked for: it gathers unquantized weights, in {supported} only. Drop "
            "--dcp-replicate-q-proj: queries are then gathered in each step."
        )


def replicate(layers: Any, transport: Transport) -> None:
    """Give every attention module of `layers` the heads of its group, or fill them anew."""
    for layer in layers:
        attn = layer.self_attn
        if hasattr(attn, ATTRIBUTE):
            getattr(attn, ATTRIBUTE).gather()
        else:
            setattr(attn, ATTRIBUTE, AllHeads(attn, transport))


def replicated_bytes(model: torch.nn.Module) -> int:
    """What the replicated projections of a model take on this rank; 0 without them."""
    found = (getattr(module, ATTRIBUTE, None) for module in model.modules())
    return sum(all_heads.extra_bytes for all_heads in found if all_heads is not None)


def _empty_for(own: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty((size * own.shape[0], *own.shape[1:]), dtype=own.dtype, device=own.device)


def _copied(own: torch.Tensor) -> torch.Tensor:
    """A contiguous copy: the own weights may lie where they are gathered to."""
    return own.clone(memory_format=torch.contiguous_format)
