"""Every kernel compiles for Hopper, without a GPU: the interpreter accepts more than the compiler.

The compilation runs in a child process, since kernels of this one may be interpreted.
"""

import json
import re
import subprocess
import sys

import pytest
import torch
from support import clean_env

I32 = "i32"
TILE = {"D": 512, "ALIGN": 8, "BLOCK_H": 2, "BLOCK_D": 512}
MERGE = TILE | {"N": 8, "BASE_2": True}
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
    "kv_write": (
        "kv_write.set_mla_kv_buffer_dcp_sharded_kernel",
        {"kv": "bf16", "loc": "i64", "nope": "bf16", "rope": "bf16"},
        {"DCP_SIZE": 8, "NOPE_DIM": 512, "ROPE_DIM": 64}
        | {"BLOCK_NOPE": 512, "BLOCK_ROPE": 64, "BLOCK_TOKENS": 4},
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
ROW_MOVERS = ["merge_e", "merge_2", "weigh", "pack"]


def compile_all() -> dict[str, list[str]]:
    """PTX global accesses of every case; runs in the child."""
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
        fixed = [a for a in args if a.endswith("_ptr") or a in ("stride_kv", "stride_nope")]
        source = ASTSource(
            fn=fn,
            signature={a: types.get(a, I32) for a in args},
            constexprs={(args.index(k),): v for k, v in constants.items()},
            attrs={(args.index(a),): [["tt.divisibility", 16]] for a in fixed},
        )
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
        )
        found[case] = sorted(set(re.findall(r"(?:ld|st)\.global[\w.:]*", compiled.asm["ptx"])))
    return found


@pytest.fixture(scope="module")
def accesses() -> dict[str, list[str]]:
    code = "import json, test_kernels_compile as t; print(json.dumps(t.compile_all()))"
    env = clean_env() | {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


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
