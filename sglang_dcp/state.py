"""What a rank knows about its DCP group; set once when the groups are built, read everywhere."""

from dataclasses import dataclass, field
from typing import Any

from sglang_dcp.comm import Communicator
from sglang_dcp.comm.shadow import Shadow
from sglang_dcp.prefill_policy import PrefillPolicy
from sglang_dcp.workspace import ChunkBudget


@dataclass(frozen=True)
class DcpState:
    """One rank's place in its DCP group.

    Attributes:
        dcp_size: ranks in the group (c), a power of two above 1.
        dcp_rank: this rank's index r in the group; it owns virtual slots v with v % c == r.
        group_ranks: world ranks of the group in order.
        coordinator: SGLang's GroupCoordinator of the group (kept alive here).
        comm: the communicator that does stages 4 and 6 (+7).
        owns_coordinator: False if it is upstream's own group of the same ranks.
        shadow: in shadow mode, what compares it with another one.
        chunk_budget: bounds pass-KV's chunks; None: only upstream's capacity does.
        prefill_policy: how prefill reads a striped prefix.
    """

    dcp_size: int
    dcp_rank: int
    group_ranks: tuple[int, ...]
    coordinator: Any
    comm: Communicator
    owns_coordinator: bool = True
    shadow: Shadow | None = None
    chunk_budget: ChunkBudget | None = None
    prefill_policy: PrefillPolicy = field(default_factory=PrefillPolicy)


_state: DcpState | None = None


def set_state(state: DcpState) -> None:
    """Publish this rank's state; called once, by the group hook."""
    global _state
    assert _state is None, "the DCP group is already initialized"
    _state = state


def get_state() -> DcpState:
    """This rank's state; an AssertionError before the groups are built."""
    assert _state is not None, "the DCP group is not initialized"
    return _state


def is_initialized() -> bool:
    """True between the creation and the destruction of the groups."""
    return _state is not None


def clear_state() -> None:
    """Destroy communicator and group; a no-op if there is none."""
    global _state
    if _state is None:
        return
    _state.comm.destroy()
    if _state.shadow is not None:
        _state.shadow.destroy()
    if _state.owns_coordinator:
        _state.coordinator.destroy()
    _state = None
