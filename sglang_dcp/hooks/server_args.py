"""Hooks on sglang.srt.server_args: the DCP arguments as real fields, and what follows from them.

Everything DCP changes in other arguments is recorded in `dcp_derived` as name -> (asked, derived).
ServerArgs runs its whole `__post_init__` again on `dataclasses.replace` and on `asdict` round
trips, so the recorded changes are first undone and then derived anew: `replace(args, dcp_size=1)`
is the argument set of a server without DCP.
"""

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Annotated, Any, Optional

from sglang.srt.arg_groups.arg_utils import Arg
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase
from sglang.srt.utils import is_sm90_supported

from sglang_dcp import envs
from sglang_dcp.comm import comm_backend_names
from sglang_dcp.hooks.guards import (
    check_dcp_size,
    check_options,
    check_replicate_q_proj,
    check_server_args,
)
from sglang_dcp.prefill_policy import MODES

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ArgField:
    """One dataclass field to be added to ServerArgs.

    Attributes:
        name: field name; the CLI flag follows from it.
        annotation: `Annotated[type, Arg(...)]`, as SGLang writes its own fields.
        default: default value.
    """

    name: str
    annotation: Any
    default: Any

    def add_to(self, cls: type) -> None:
        """Add the field to dataclass `cls` as if it had been declared there."""
        field = dataclasses.field(default=self.default)
        field.name = self.name
        field.type = self.annotation
        field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        cls.__dataclass_fields__[self.name] = field  # type: ignore[attr-defined]
        cls.__annotations__[self.name] = self.annotation
        setattr(cls, self.name, self.default)


DCP_SIZE = ArgField(
    "dcp_size",
    Annotated[
        int,
        Arg(
            help="Decode context parallel size: the MLA KV cache of every request is striped by "
            "token over this many consecutive ranks of each attention TP group. A power of two "
            "that divides the attention TP size; 1 turns it off.",
            aliases=["--decode-context-parallel-size"],
        ),
    ],
    1,
)
DCP_COMM_BACKEND = ArgField(
    "dcp_comm_backend",
    Annotated[
        str,
        Arg(
            help="How decode context parallelism gathers queries and exchanges partial outputs; "
            "'auto' picks the fastest that the machine supports.",
            choices=comm_backend_names(),
        ),
    ],
    "auto",
)
DCP_REPLICATE_Q_PROJ = ArgField(
    "dcp_replicate_q_proj",
    Annotated[
        bool,
        Arg(
            help="Under decode context parallelism, compute the queries of all heads of the group "
            "on every rank instead of gathering them in each layer: q_b_proj and w_kc are "
            "gathered once, when weights load, and take dcp_size times their memory.",
        ),
    ],
    False,
)
DCP_WORKSPACE_MB = ArgField(
    "dcp_workspace_mb",
    Annotated[
        int,
        Arg(
            help="MiB that prefill over a cached prefix may use, at any prefix, to gather its rows "
            "and expand them to K and V; taken from what --mem-fraction-static leaves. Attention "
            "backend triton gathers the whole prefix and does not keep to it.",
        ),
    ],
    512,
)
DCP_PREFILL = ArgField(
    "dcp_prefill",
    Annotated[
        str,
        Arg(
            help="How prefill reads a cached prefix that is striped over the ranks: 'pass-kv' "
            "gathers the prefix, 'pass-q' sends the queries of the new tokens to every stripe. "
            "Both are exact. 'auto' takes the one that a cost model of bytes and FLOPs finds "
            "faster, per batch: pass-q up to a few hundred new tokens on a long prefix.",
            choices=list(MODES),
        ),
    ],
    "auto",
)
DCP_DERIVED = ArgField("dcp_derived", Annotated[Optional[dict], Arg(no_cli=True)], None)  # noqa: UP045
FIELDS = (
    DCP_SIZE,
    DCP_COMM_BACKEND,
    DCP_REPLICATE_Q_PROJ,
    DCP_PREFILL,
    DCP_WORKSPACE_MB,
    DCP_DERIVED,
)


def _undo_derived(kwargs: dict[str, Any], derived: dict[str, Any] | None) -> None:
    """Put back what the user had asked for wherever `kwargs` still holds a derived value."""
    for name, (asked, value) in (derived or {}).items():
        if name == "cuda_graph_prefill":
            config: Any = copy.deepcopy(kwargs.get("cuda_graph_config"))
            if isinstance(config, dict):  # from asdict: an entry counts as the user's, so drop it
                if config.get("prefill", {}).get("backend") == value:
                    del config["prefill"]["backend"]
            elif config is not None and config.prefill.backend == value:
                config.prefill.backend = asked
            kwargs["cuda_graph_config"] = config
        elif kwargs.get(name) == value:
            kwargs[name] = asked


def verify_phase_one() -> None:
    """Raise PatchError if an argument hook did not take effect in this process."""
    from sglang_dcp.hooks import registry, table

    registry.verify(table.ARGUMENTS)


def around_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND ServerArgs.__init__: the generated method knows only the fields it was made with."""
    values = {field.name: kwargs.pop(field.name, field.default) for field in FIELDS}
    check_dcp_size(values["dcp_size"])
    if values["dcp_size"] > 1:
        verify_phase_one()
    _undo_derived(kwargs, values["dcp_derived"])
    self.__dict__.update(values, dcp_derived=None)
    original(self, *args, **kwargs)


def before_post_init(self: Any) -> None:
    """First statement of __post_init__ where the source declares the fields (patches/).

    There the generated __init__ has just stored them, and `around_init` has nothing to do.
    """
    check_dcp_size(self.dcp_size)
    if self.dcp_size > 1:
        verify_phase_one()
    _undo_derived(self.__dict__, self.dcp_derived)
    self.dcp_derived = None


def around_eq(original: Callable[..., Any], self: Any, other: Any) -> Any:
    """AROUND ServerArgs.__eq__: two argument sets that differ only in DCP fields are not equal."""
    equal = original(self, other)
    if equal is not True:
        return equal
    return all(getattr(self, f.name) == getattr(other, f.name) for f in FIELDS)


def after_repr(result: str, self: Any) -> str:
    """AFTER ServerArgs.__repr__: show the DCP fields as the generated method shows its own."""
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in FIELDS)
    return f"{result[:-1]}, {shown})"


def _derive(args: Any, name: str, value: Any) -> None:
    """Set argument `name` to `value` and record what it was before its first derivation."""
    derived = args.dcp_derived or {}
    asked, _ = derived.get(name, (getattr(args, name), None))
    if getattr(args, name) != value:
        args.dcp_derived = {**derived, name: (asked, value)}
        setattr(args, name, value)


def before_handle_cpu_backends(self: Any) -> None:
    """BEFORE ServerArgs._handle_cpu_backends: the CPU recipe and its attention backend."""
    if self.device != "cpu":
        return
    envs.set_cpu_recipe(num_ranks=self.tp_size)
    if self.is_attention_backend_not_set() and self.use_mla_backend():
        # Upstream's default (intel_amx) has no MLA and no LSE without AMX.
        self.attention_backend = "torch_mla"
    if self.attention_backend == "torch_mla":
        # "CUDA" graphs on CPU are torch.compile regions whose operators exist on CUDA only.
        self.cuda_graph_config.decode.backend = Backend.DISABLED
        self.cuda_graph_config.prefill.backend = Backend.DISABLED


def before_attention_backend(self: Any) -> None:
    """BEFORE ServerArgs._handle_attention_backend_compatibility: a default that DCP supports."""
    if self.dcp_size == 1 or self.device != "cuda" or not self.is_attention_backend_not_set():
        return
    if is_sm90_supported():  # upstream picks fa3 here, which returns no LSE for the stripe
        _derive(self, "attention_backend", "flashmla")
        _derive(self, "page_size", 64)  # as upstream would, but remembering what was asked


def after_handle_cuda_graph_config(result: None, self: Any) -> None:
    """AFTER ServerArgs._handle_cuda_graph_config: no prefill graph.

    Under a prefill graph every extend attends absorbed over the paged pool, which holds a stripe.
    Options are refused here for the first time, before upstream judges them by a page size that
    the user has not asked for.
    """
    if self.dcp_size == 1:
        return
    check_options(self)
    prefill = self.cuda_graph_config.prefill
    if prefill.backend == Backend.DISABLED:
        return
    if (Phase.PREFILL, "backend") in self._cuda_graph_config_locked:
        raise ValueError(
            f"--dcp-size {self.dcp_size} with a prefill CUDA graph ({prefill.backend}) was asked "
            "for: under it every prefill reads the whole prefix from one rank's pool, which holds "
            f"1/{self.dcp_size} of it. Leave out the prefill graph option or use "
            "--disable-prefill-cuda-graph."
        )
    self.dcp_derived = {"cuda_graph_prefill": (prefill.backend, Backend.DISABLED)}
    prefill.backend = Backend.DISABLED


def after_handle_page_size(result: None, self: Any) -> None:
    """AFTER ServerArgs._handle_page_size: widen once (seed: physical C rows, logical c*C).

    From here on every part of SGLang sees virtual pages of P * c tokens; the pool's constructor
    and the attention backends narrow again.
    """
    if self.dcp_size > 1:
        _derive(self, "page_size", self.page_size * self.dcp_size)


def after_post_init(result: None, self: Any) -> None:
    """AFTER ServerArgs.__post_init__: derive the rest, then refuse what no test exercises."""
    check_replicate_q_proj(self)
    if self.dcp_size == 1:
        return
    if self.model_path.lower() in ("none", "dummy"):
        return  # upstream returns early too: an argument set without a model cannot serve
    check_server_args(self)
    page_size, asked = self.page_size, self.chunked_prefill_size
    _derive(self, "chunked_prefill_size", max(asked // page_size, 1) * page_size)
    if asked != self.chunked_prefill_size:
        logger.info(
            f"DCP: chunked_prefill_size {asked} -> {self.chunked_prefill_size}, a multiple of the "
            f"widened page ({page_size} tokens)."
        )
