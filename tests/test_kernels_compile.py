"""Every kernel compiles for Hopper, without a GPU: the interpreter accepts more than the compiler.

The compilation runs in a child process, since kernels of this one may be interpreted.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support import clean_env

from sglang_dcp.kernels.peer_signal import MAX_REGISTERS

I32 = "i32"
TILE = {"D": 512, "ALIGN": 8, "BLOCK_H": 2, "BLOCK_D": 512}
MERGE = TILE | {"N": 8, "BASE_2": True}
PEERS = {"flag_table": "i64", "cnt": "i32", "limit": "i64", "report": "i32"}
MEETING = {"N": 8, "HL": 16, "WORDS": 8, "REFRESH": 1 << 20, "BLOCK_LANES": 512}
MEETING |= {"INTERPRETED": False, "JITTER_US": 0}
LINE_PEERS = {"line_table": "i64", "cnt": "i32", "limit": "i64", "report": "i32"}
LINE_MEETING = {k: v for k, v in MEETING.items() if k not in ("WORDS", "REFRESH")}
RAGGED = dict.fromkeys(("q_nope", "q_pe", "k", "v", "o"), "bf16") | {"lse": "fp32"}
RAGGED |= {"q_indptr": "i32", "kv_indptr": "i32"}
RAGGED_DIMS = {"PE": 64, "BLOCK_PE": 64, "PRECISION": "tf32"}
ORDER = {"C": 8, "D": 512, "R": 64, "BLOCK_D": 512, "BLOCK_R": 64, "BLOCK_TOKENS": 8}
# module, kernel, pointer types, constants, arguments known to be multiples of 16
CASES = {
    "merge_e": (
        "lse_merge.merge_partials_kernel",
        {"out": "bf16", "lse": "fp32", "lens": "i32", "merged": "bf16", "merged_lse": "fp32"},
        MERGE | {"BASE_2": False, "STORE_LSE": True},
    ),
    "merge_2": (
        "lse_merge.merge_partials_kernel",
        {"out": "bf16", "lse": "fp32", "lens": "i32", "merged": "bf16", "merged_lse": "bf16"},
        MERGE | {"STORE_LSE": False},
    ),
    "weigh": (
        "lse_weigh.weigh_partial_kernel",
        {"out": "bf16", "lse": "fp32", "lens": "i32", "weighed": "fp32"},
        MERGE,
    ),
    "pack": (
        "pack.pack_partials_kernel",
        {"o": "bf16", "lse": "fp32", "send_o": "bf16", "send_lse": "fp32"},
        TILE,
    ),
    "pack_q": (
        "pack_q.pack_q_kernel",
        {"nope": "bf16", "pe": "bf16", "out": "bf16"},
        {"NOPE_DIM": 512, "PE_DIM": 64, "ALIGN": 8}
        | {"BLOCK_NOPE": 512, "BLOCK_PE": 64, "BLOCK_ROWS": 2},
    ),
    "merge_state": (
        "state_merge.merge_state_into_kernel",
        {"o": "bf16", "lse": "fp32", "part": "bf16", "part_lse": "fp32", "rows": "i64"},
        TILE | {"HAS_ROWS": True, "BASE_2": True, "PART_BASE_2": False} | {"UPDATE_LSE": True},
    ),
    "nvlink_exchange": (
        "nvlink_exchange.nvlink_exchange_kernel",
        {"o": "bf16", "lse": "fp32", "lens": "i32", "merged": "bf16", "merged_lse": "fp32"}
        | {"o_table": "i64", "lse_table": "i64"}
        | PEERS,
        MEETING
        | {"D": 512, "BLOCK_D": 512, "ALIGN": 8, "ROW_ALIGN": 8, "BASE_2": False, "STORE_LSE": True}
        | {"PEERS": 8, "ROWS": 2, "SLICES": 2, "FLAG_SLICES": 4},
    ),
    "line_exchange": (
        "line_exchange.line_exchange_kernel",
        {"o": "bf16", "lse": "fp32", "lens": "i32", "merged": "bf16", "merged_lse": "fp32"}
        | LINE_PEERS,
        LINE_MEETING
        | {"D": 512, "ALIGN": 8, "BASE_2": False, "STORE_LSE": True}
        | {"PEERS": 8, "ROW_LINES": 9, "CELLS": 64, "BLOCK": 16},
    ),
    # strides and head dim without alignment, one peer
    "line_exchange_odd": (
        "line_exchange.line_exchange_kernel",
        {"o": "fp16", "lse": "fp32", "lens": "i32", "merged": "fp16", "merged_lse": "fp32"}
        | LINE_PEERS,
        LINE_MEETING
        | {"D": 511, "ALIGN": 1, "BASE_2": True, "STORE_LSE": False, "N": 2}
        | {"PEERS": 1, "ROW_LINES": 9, "CELLS": 64, "BLOCK": 32},
    ),
    "nvlink_gather_q": (
        "nvlink_gather_q.nvlink_gather_q_kernel",
        {"nope": "bf16", "pe": "bf16", "q_table": "i64"} | PEERS,
        MEETING | {"NOPE_DIM": 512, "PE_DIM": 64, "VEC": 8, "BLOCK": 256},
    ),
    "line_gather_q": (
        "line_gather_q.line_gather_q_kernel",
        {"nope": "bf16", "pe": "bf16", "q": "bf16"} | LINE_PEERS,
        LINE_MEETING | {"NOPE_CHUNKS": 64, "ROW_CHUNKS": 72, "ALIGN": 8, "CELLS": 64, "BLOCK": 16},
    ),
    # strides without alignment, one peer, float32
    "line_gather_q_odd": (
        "line_gather_q.line_gather_q_kernel",
        {"nope": "fp32", "pe": "fp32", "q": "fp32"} | LINE_PEERS,
        LINE_MEETING
        | {"NOPE_CHUNKS": 128, "ROW_CHUNKS": 144, "ALIGN": 1, "CELLS": 32, "BLOCK": 32, "N": 2},
    ),
    "ragged_expanded": (
        "ragged_attention.ragged_attention_kernel",
        RAGGED,
        RAGGED_DIMS
        | {"GROUP": 1, "CAUSAL": False, "NOPE": 128, "DV": 128}
        | {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_NOPE": 128, "BLOCK_DV": 128},
    ),
    "ragged_latent": (
        "ragged_attention.ragged_attention_kernel",
        RAGGED,
        RAGGED_DIMS
        | {"GROUP": 48, "CAUSAL": True, "NOPE": 512, "DV": 512}
        | {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_NOPE": 512, "BLOCK_DV": 512},
    ),
    "kv_write": (
        "kv_write.set_mla_kv_buffer_dcp_sharded_kernel",
        {"kv": "bf16", "loc": "i64", "nope": "bf16", "rope": "bf16"},
        {"DCP_SIZE": 8, "NOPE_DIM": 512, "ROPE_DIM": 64}
        | {"BLOCK_NOPE": 512, "BLOCK_ROPE": 64, "BLOCK_TOKENS": 4},
    ),
    "pick_rows": (
        "row_pick.pick_rows_kernel",
        {"rows": "bf16", "index": "i32", "out": "bf16"},
        {"W": 576, "BLOCK_W": 1024, "BLOCK_ROWS": 8},
    ),
    "order_rows": (
        "row_order.order_rows_kernel",
        {"gathered": "bf16", "source": "bf16", "nope": "bf16", "rope": "bf16"},
        ORDER | {"HAS_SOURCE": False},
    ),
    "order_rows_by_source": (
        "row_order.order_rows_kernel",
        {"gathered": "bf16", "source": "i64", "nope": "bf16", "rope": "bf16"},
        ORDER | {"HAS_SOURCE": True},
    ),
    "concat_keys": (
        "key_concat.concat_keys_kernel",
        {"nope": "bf16", "rope": "bf16", "out": "bf16"},
        {"H": 48, "D": 128, "R": 64, "BLOCK_D": 128, "BLOCK_R": 64, "BLOCK_ROWS": 16, "ALIGN": 8},
    ),
    "local_lens": (
        "kv_index.fill_local_lens_kernel",
        {"seq_lens": "i64", "all": "i32", "kernel_lens": "i32"},
        {"DCP_SIZE": 8, "BLOCK": 128},
    ),
    "kv_indices": (
        "kv_index.build_local_kv_indices_kernel",
        {"req_to_token": "i32", "req_pool_indices": "i64", "seq_lens": "i64"}
        | {"kv_indptr": "i32", "kv_indices": "i32"},
        {"DCP_SIZE": 8, "BLOCK": 512},
    ),
    "block_table": (
        "kv_index.build_block_table_kernel",
        {"req_to_token": "i32", "req_pool_indices": "i64", "seq_lens": "i32", "table": "i32"},
        {"WIDE_PAGE": 512, "BLOCK": 512},
    ),
}
# kernels that move rows; the rest of their accesses are LSEs and lengths of 4 bytes
ROW_MOVERS = ["merge_e", "merge_2", "merge_state", "weigh", "pack"]
ROW_MOVERS += ["pick_rows", "order_rows", "order_rows_by_source", "concat_keys"]
MEETING_KERNELS = ["nvlink_exchange", "nvlink_gather_q", "line_exchange", "line_gather_q"]
ROW_MOVERS += MEETING_KERNELS
MEMORY_OPS = r"(?:ld|st)\.(?:volatile\.)?global[\w.:]*|atom\.[\w.]*|bar\.sync|fence[\w.]*|trap"

CELLS = r"tensor<\d+x(?:64x!tt\.ptr<i16>|32x!tt\.ptr<i32>), (#\w+)>"
LINE_TILES = rf"tt\.store .* : {CELLS}|tt\.load .*isVolatile = true.* : {CELLS}"


def compile_all() -> dict[str, dict[str, list[str]]]:
    """Of every case, in order; runs in the child.

    "ptx": accesses to global memory and barriers. "lines": layout of every tile of cells that is
    stored, or loaded as volatile. "memory": local memory of a thread, where spilled registers are.
    """
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = {}
    for case, (path, pointers, constants) in CASES.items():
        module, name = path.split(".")
        fn = getattr(importlib.import_module(f"sglang_dcp.kernels.{module}"), name)
        args = fn.arg_names
        types = {f"{p}_ptr": f"*{t}" for p, t in pointers.items()} | dict.fromkeys(
            constants, "constexpr"
        )
        types["scale_log2"] = "fp32"
        fixed = [
            a for a in args if a.endswith("_ptr") or a in ("stride_kv", "stride_nope", "stride_row")
        ]
        source = ASTSource(
            fn=fn,
            signature={a: types.get(a, I32) for a in args},
            constexprs={(args.index(k),): v for k, v in constants.items()},
            attrs={(args.index(a),): [["tt.divisibility", 16]] for a in fixed},
        )
        options = {"num_warps": 4} | ({"maxnreg": MAX_REGISTERS} if "limit" in pointers else {})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ttgir = compiled.asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
        tiles = re.findall(LINE_TILES, ttgir)
        found[case] = {
            "ptx": re.findall(MEMORY_OPS, compiled.asm["ptx"]),
            "lines": [layouts[store or load] for store, load in tiles],
            "memory": re.findall(r"(?:STACK|LOCAL):\d+", resource_usage(compiled.asm["cubin"])),
        }
    return found


def resource_usage(cubin: bytes) -> str:
    """What the CUDA tool that comes with Triton says of a kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.check_output([tool, "-res-usage", file.name], text=True)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, list[str]]]:
    code = "import json, test_kernels_compile as t; print(json.dumps(t.compile_all()))"
    env = clean_env() | {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def accesses(compiled) -> dict[str, list[str]]:
    return {case: found["ptx"] for case, found in compiled.items()}


@pytest.mark.skipif(torch.version.cuda is None, reason="Triton without its CUDA toolchain")
def test_all_kernels_compile(accesses):
    assert accesses.keys() == CASES.keys()
    assert all(accesses.values())


@pytest.mark.skipif(torch.version.cuda is None, reason="Triton without its CUDA toolchain")
@pytest.mark.parametrize("case", ROW_MOVERS)
def test_rows_move_in_16_byte_accesses(accesses, case):
    """Strides that are not specialized must not cost the wide loads (ALIGN keeps them)."""
    assert any("ld.global.v4.b32" in a for a in accesses[case])
    assert any("st.global.v4.b32" in a for a in accesses[case])
    assert not any(a.endswith("b16") for a in accesses[case])


@pytest.mark.skipif(torch.version.cuda is None, reason="Triton without its CUDA toolchain")
@pytest.mark.parametrize(("case", "slices"), [("nvlink_exchange", 2), ("nvlink_gather_q", 1)])
def test_peers_are_signalled_after_the_data(accesses, case, slices):
    """Wide stores, barrier, release at system scope; acquire, barrier, wide loads past the L1."""
    ops = accesses[case]
    raised = [i for i, op in enumerate(ops) if op == "atom.global.sys.release.exch.b32"]
    waits = [i for i, op in enumerate(ops) if op == "atom.global.sys.acquire.add.u32"]
    assert len(raised) == slices
    for i in raised:
        assert ops[i - 1] == "bar.sync"
        assert ops[i - 2].startswith("st.global")
    assert raised[-1] < waits[0]  # all pushes before the first wait
    arrived = [i for i, op in enumerate(ops) if op.startswith("ld.global.cg")]
    assert all(i > waits[0] for i in arrived)
    assert ("ld.global.cg.v4.b32" in ops) == (case == "nvlink_exchange")
    assert ops.count("trap") == slices  # a wait ends with an error, after the record is out
    assert ops[ops.index("trap") - 2 : ops.index("trap")] == ["fence.acq_rel.sys", "bar.sync"]


@pytest.mark.skipif(torch.version.cuda is None, reason="Triton without its CUDA toolchain")
@pytest.mark.parametrize("case", MEETING_KERNELS)
def test_kernels_that_meet_do_not_spill(compiled, case):
    """Their registers are limited, so that the grid is resident."""
    assert sorted(compiled[case]["memory"]) == ["LOCAL:0", "STACK:0"]


@pytest.mark.skipif(torch.version.cuda is None, reason="Triton without its CUDA toolchain")
@pytest.mark.parametrize(
    ("case", "num_ranks", "stored_tiles", "pushes", "chunks"),
    [
        # one push to all peers: lines of 128 threads, 8 * 16 (one peer masked), and 1 * 32
        ("line_exchange", 8, 1, 8, 1),
        ("line_exchange_odd", 2, 1, 2, 2),
        # a push to every peer, then to the own buffer, where every rank's lines go later
        ("line_gather_q", 8, 16, 8, 1),
        ("line_gather_q_odd", 2, 4, 4, 2),
    ],
)
def test_lines_are_written_and_read_as_units(
    compiled, case, num_ranks, stored_tiles, pushes, chunks
):
    """Eight neighbouring lanes hold a line, 16 bytes each; no fence and no flag of its own."""
    layouts, ops = compiled[case]["lines"], compiled[case]["ptx"]
    assert len(layouts) == stored_tiles + 2 * num_ranks  # polls: once and in the loop
    cells = CASES[case][2]["CELLS"] // 8
    for layout in layouts:
        assert f"sizePerThread = [1, {cells}], threadsPerWarp = [4, 8]" in layout, layout
        assert "order = [1, 0]" in layout, layout
    stores = [i for i, op in enumerate(ops) if op == "st.global.v4.b32"][:pushes]
    reads = [i for i, op in enumerate(ops) if op.startswith("ld.volatile")]
    assert len(stores) == pushes
    assert len(reads) == 2 * num_ranks * chunks
    assert all(ops[i] == "ld.volatile.global.v4.b32" for i in reads)
    assert stores[-1] < reads[0]  # all pushes before the first wait
    assert not any(op.startswith("atom") for op in ops)
    assert [op for op in ops if op.startswith("fence")] == ["fence.acq_rel.sys"]  # of the trap
    assert ops.count("trap") == 1
    assert ops[ops.index("trap") - 2 : ops.index("trap")] == ["fence.acq_rel.sys", "bar.sync"]
