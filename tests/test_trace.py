"""Traces of decode steps: synthetic ones whose layers, times and order are known."""

import gzip
import json
import random
import statistics
import threading
from pathlib import Path

import pytest
from test_bench import load_script

from sglang_dcp.testing import trace
from sglang_dcp.testing.client import Client

GEMM = "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"
BMM = "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16>(Params)"
SPLIT_K = "void cublasLt::splitKreduce_kernel<32, 16, int>(cublasLt::cublasSplitKParams<float>)"
GEMV = "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, 6, true>(Args)"
ATTENTION = "void sm90::flash_fwd_splitkv_mla_kernel<cutlass::bfloat16_t>(Params)"
COMBINE = "void smxx::decode::flash_fwd_mla_combine_kernel<cutlass::bfloat16_t, 512>(Params)"
FILL = "Memset (Device)"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"

#: What precedes q_b_proj, the core, and what follows o_proj.
HEAD = ["rmsnorm", GEMM, "void rmsnorm<float>(float*)"]
UPSTREAM = [GEMV, SPLIT_K, BMM, "rope", "set_mla_kv_buffer_kernel", ATTENTION, COMBINE, BMM, GEMM]
OURS = [*UPSTREAM[:5], "gather_q_kernel", *UPSTREAM[5:7], NCCL, *UPSTREAM[7:]]
TAIL = ["cross_device_reduce_1stage", "silu", GEMM, "cross_device_reduce_1stage"]


def write_trace(path, core, num_layers=5, num_steps=4):
    """Steps as graph replays with random times; returns their (start, end) and the events."""
    events, clock, spans = [], 1000.0, []

    def add(name, correlation, cat="kernel"):
        nonlocal clock
        clock += random.uniform(0.1, 2.0)
        duration = random.uniform(50, 60) if name == ATTENTION else random.uniform(1, 5)
        events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "ts": clock,
                "dur": duration,
                "tid": 7,
                "args": {"stream": 7, "correlation": correlation},
            }
        )
        clock += duration

    for step in range(num_steps):
        began = len(events)
        names = [FILL, *(HEAD + core + TAIL) * num_layers, GEMM]
        if step == 0:
            names = names[9:]  # the profiler started in the middle of a replay
        for name in names:
            add(name, 500 + step, "gpu_memset" if name == FILL else "kernel")
        if step:
            spans.append((events[began]["ts"], clock))
        add("sampling", 9000 + step)
        add("embedding", 9100 + step)
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9, "tid": 1})
    events.append({"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 0, "tid": 1})
    random.shuffle(events)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as f:
        json.dump({"traceEvents": events}, f)
    return spans, events


@pytest.mark.parametrize("name", ["rank.trace.json.gz", "rank.json"])
@pytest.mark.parametrize(("core", "num_core"), [(UPSTREAM, 7), (OURS, 9)])
def test_layers_of_a_trace(tmp_path, name, core, num_core):
    spans, events = write_trace(tmp_path / name, core)
    kernels = trace.read_kernels(tmp_path / name)
    assert len(kernels) == len(events) - 2
    found = trace.summarize(kernels, num_layers=5)
    period = len(HEAD + core + TAIL)
    assert found["num_steps"] == 3
    assert found["kernels_per_step"] == 5 * period + 2
    assert found["kernels_per_layer"] == {"median": period, "min": period, "max": period}
    assert found["core_kernels"] == {"median": num_core, "min": num_core, "max": num_core}
    assert found["attention"] == ATTENTION
    assert found["step_us"] == pytest.approx(statistics.median(e - b for b, e in spans))
    starts = [begin for begin, _ in spans]
    assert found["step_period_us"] == pytest.approx(
        statistics.median([starts[1] - starts[0], starts[2] - starts[1]])
    )
    attends = [k for k in kernels if k.name == ATTENTION and k.correlation > 500]
    gaps = [
        b.start_us - a.start_us
        for a, b in zip(attends, attends[1:], strict=False)
        if a.correlation == b.correlation
    ]
    assert found["layer_us"] == pytest.approx(statistics.median(gaps))
    assert found["core_nccl"] == found["step_nccl"] == ({NCCL: 5} if core is OURS else {})


def test_the_middle_layer_in_order(tmp_path):
    write_trace(tmp_path / "t.json", OURS)
    found = trace.summarize(trace.read_kernels(tmp_path / "t.json"), num_layers=5)
    rows = found["layer"]
    assert [row["name"] for row in rows] == TAIL + HEAD + OURS
    assert [row["role"] for row in rows if row["role"]] == list(trace.ROLES)
    at = {row["role"]: row for row in rows}
    assert at["q_b_proj"]["name"] == GEMV
    assert at["w_kc"]["name"] == at["w_vc"]["name"] == BMM
    assert at["attention"]["name"] == ATTENTION
    assert at["o_proj"]["name"] == GEMM
    assert rows[0]["start_us"] == 0
    for before, after in zip(rows, rows[1:], strict=False):
        assert after["start_us"] > before["start_us"] + before["us"]


def test_shares_add_up(tmp_path):
    _, events = write_trace(tmp_path / "t.json", UPSTREAM)
    found = trace.summarize(trace.read_kernels(tmp_path / "t.json"), num_layers=5)
    rows = {row["name"]: row for row in found["kernels"]}
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert found["kernels"][0]["name"] == ATTENTION
    assert rows[BMM]["per_step"] == 10
    assert "sampling" not in rows
    durations = [e["dur"] for e in events if e["name"] == BMM and e["args"]["correlation"] > 500]
    assert rows[BMM]["mean_us"] == pytest.approx(statistics.mean(durations))
    assert found["busy_us"] == pytest.approx(
        sum(r["mean_us"] * r["per_step"] for r in rows.values())
    )


def test_names():
    def kernel(name):
        return trace.Kernel(name, 0, 1, 7, 1)

    short = {
        GEMV: "internal::gemvx::kernel",
        BMM: "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16",
        SPLIT_K: "cublasLt::splitKreduce_kernel",
        ATTENTION: "sm90::flash_fwd_splitkv_mla_kernel",
        "void (anonymous namespace)::act<a::b<(int)1>, 2>(x*)": "act",
        FILL: "Memset",
        GEMM: GEMM,
    }
    for name, want in short.items():
        assert kernel(name).short_name == want
    assert [kernel(n).is_gemm for n in (GEMM, BMM, GEMV, SPLIT_K, ATTENTION)] == [True] * 3 + [
        False
    ] * 2
    attends = [
        ATTENTION,
        "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<gemm<1>>(P)",
        "void flashinfer::mla::BatchMLAPagedAttentionKernel<MergeTraits>(P)",
        "_fwd_grouped_kernel_stage1",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>(P)",
    ]
    helpers = [
        COMBINE,
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<int>>>(P)",
        "_fwd_kernel_stage2",
        "void smxx::decode::get_mla_metadata_kernel<1>(P)",
        "merge_attn_states_kernel",
        "set_mla_kv_buffer_dcp_sharded_kernel",
    ]
    for name in attends:
        assert kernel(name).is_attention, name
        assert not kernel(name).is_gemm, name
    assert not any(kernel(name).is_attention for name in helpers)


def test_what_cannot_be_judged_is_refused(tmp_path):
    write_trace(tmp_path / "t.json", UPSTREAM)
    kernels = trace.read_kernels(tmp_path / "t.json")
    with pytest.raises(ValueError, match=r"exactly once in each of 6 layers.*right number"):
        trace.summarize(kernels, num_layers=6)
    eager = [k for k in kernels if k.correlation >= 9000]
    with pytest.raises(ValueError, match="8 kernels but no launch.*one graph replay"):
        trace.summarize(eager, num_layers=5)
    no_gemm = [k for k in kernels if not k.is_gemm]
    with pytest.raises(ValueError, match="0 GEMMs before"):
        trace.summarize(no_gemm, num_layers=5)


# ---------------------------------------------------------------- trace_decode.py as a whole


class FakeServer(Client):
    """A server that decodes until it is aborted and profiles at once."""

    def __init__(self, command, log, module, start_timeout_s):
        super().__init__("http://nowhere")
        self.log_path, self.startup_s, self.aborted = log, 1.0, threading.Event()
        self.core = OURS if "--dcp-size" in command else UPSTREAM
        assert (command[-2:] == ["--odd", "--even=2"]) == ("--dcp-size" in command)
        log.write_text("Decode batch, #running-req: 3, of another request\n")

    def __enter__(self):
        return self

    def __exit__(self, *args):
        assert self.aborted.is_set()

    def log(self, line):
        with self.log_path.open("a") as log:
            log.write(line + "\n")

    def generate(self, prompts, max_new_tokens, **extra):
        assert [len(prompt) for prompt in prompts] == [40] * 3
        if max_new_tokens > 1:
            self.log("Decode batch, #running-req: 3, token")
            assert self.aborted.wait(20)
        return []

    def post(self, path, body, timeout_s=600):
        if path == "/abort_request":
            assert body["abort_all"]
            self.aborted.set()
            return
        assert path == "/start_profile"
        assert (body["num_steps"], body["activities"]) == (4, ["GPU"])
        folder = Path(body["output_dir"])
        folder.mkdir()
        for rank in range(2):
            write_trace(folder / f"17.5-TP-{rank}.trace.json.gz", self.core, num_layers=4)
        self.log("Profiling done. Traces are saved to: x")


def test_servers_are_traced_and_compared(tmp_path, monkeypatch, capsys):
    script = load_script("trace_decode")
    monkeypatch.setattr(script, "Server", FakeServer)
    result = tmp_path / "result.json"
    args = ["--model", "small", "--shape", "3x40", "--steps", "4", "--git-hash", "abc"]
    files = ["--log-dir", str(tmp_path), "--json", str(result)]
    assert script.main([*args, *files, "--server-args=--odd", "--server-args=--even=2"]) == 0
    record = json.loads(result.read_text())
    assert (record["git_hash"], record["shape"]) == ("abc", "3x40")
    upstream, ours = record["runs"]
    assert (upstream["dcp_size"], ours["dcp_size"], ours["comm"]) == (1, 2, "nvlink")
    assert (upstream["core_kernels_more"], ours["core_kernels_more"]) == (0, 2)
    assert ours["kernels_per_layer_more"] == 2
    assert ours["core_nccl"] == {NCCL: 4}
    (other,) = ours["other_ranks"]
    assert other["step_us"] != ours["step_us"]
    shown = capsys.readouterr().err
    assert max(map(len, shown.splitlines())) <= 80
    assert "dcp2 flashmla nvlink" in shown
    assert "9 (+2)" in shown
    assert shown.count("q_b_proj ") == 2

    assert script.main(["--trace", ours["traces"][0], "--layers", "4"]) == 0
    assert "gather_q_kernel" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="error: no attention kernel"):
        script.main(["--trace", ours["traces"][0], "--layers", "7"])
