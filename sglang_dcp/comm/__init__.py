"""Communicators of the decode step: gather the queries, exchange and merge the partials.

Importing this package registers the built-in backends. Nothing here imports SGLang.
"""

from sglang_dcp.comm import a2a, ag_rs, nvlink
from sglang_dcp.comm.base import SERVING_WAIT_S, Communicator, GroupInfo
from sglang_dcp.comm.registry import (
    COMM_BACKENDS,
    comm_backend_names,
    hangs_on_peer_access,
    register_comm_backend,
    resolve_auto,
)
from sglang_dcp.comm.transport import PyncclTransport, TorchTransport, Transport

__all__ = [
    "COMM_BACKENDS",
    "SERVING_WAIT_S",
    "Communicator",
    "GroupInfo",
    "PyncclTransport",
    "TorchTransport",
    "Transport",
    "a2a",
    "ag_rs",
    "nvlink",
    "comm_backend_names",
    "hangs_on_peer_access",
    "register_comm_backend",
    "resolve_auto",
]
