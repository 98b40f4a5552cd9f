"""What must not serve: schedulers without the plugin, launchers that exclude it, wrong sizes."""

import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang_args import make_args
from simulated_ranks import as_rank
from support import clean_env

ROOT = Path(__file__).parent.parent


class Pipe:
    """The launcher's end of a scheduler's ready pipe, as far as it is used."""

    def __init__(self):
        self.received, self.closed = [], False

    def send(self, info):
        self.received.append(info)

    def close(self):
        self.closed = True


def run_scheduler(server_args, *args):
    """Stands for upstream's run_scheduler_process: announces what `port_args` says."""
    port_args, *_, pipe_writer = args
    pipe_writer.send(port_args)
    pipe_writer.close()


def launch(infos, dcp_size, dp_size=1):
    """Upstream's launch through our hook: infos are what the launcher's pipes deliver.

    Returns (wait_for_ready, the function that scheduler processes run, number of calls).
    """
    from sglang_dcp.hooks.engine import around_launch_scheduler_processes

    result = SimpleNamespace(scheduler_infos=[])
    result.wait_for_ready = lambda: result.scheduler_infos.extend(infos)
    seen = []

    def original(cls, server_args, port_args, run_scheduler_process_func):
        seen.append(run_scheduler_process_func)
        return result, ["process"]

    args = SimpleNamespace(dcp_size=dcp_size, dp_size=dp_size)
    got, processes = around_launch_scheduler_processes(original, object, args, None, run_scheduler)
    assert got is result
    assert processes == ["process"]
    return result, seen[0], args


READY = {"status": "ready", "max_total_num_tokens": 64}
MESSAGE = r"--dcp-size 4 was asked for, .*dcp_size {}: .*plugin is not active.*SGLANG_PLUGINS"


@pytest.mark.parametrize("found", [None, 1, 2])
@pytest.mark.parametrize("path", ["single", "one of two", "dp"])
def test_scheduler_without_plugin(path, found):
    """Every launch path refuses a scheduler whose ready message does not carry dcp_size."""
    good = {**READY, "dcp_size": 4}
    bad = READY if found is None else {**READY, "dcp_size": found}
    refused = pytest.raises(RuntimeError, match=MESSAGE.format(found))
    if path != "dp":
        result, run, args = launch([good, bad] if path == "one of two" else [bad], dcp_size=4)
        with refused:
            result.wait_for_ready()
    else:  # the controller's own message has no such field; its schedulers' do not reach us
        result, run, args = launch([READY], dcp_size=4, dp_size=2)
        result.wait_for_ready()
    # the scheduler's side of the pipe refuses too, in whatever process starts it
    pipe = Pipe()
    with pytest.raises(RuntimeError, match=MESSAGE.format(found)):
        run(args, bad, 0, 0, pipe)
    assert pipe.received == []


@pytest.mark.parametrize("dp_size", [1, 2])
def test_striped_schedulers_serve(dp_size):
    good = {**READY, "dcp_size": 4}
    result, run, args = launch([good, good] if dp_size == 1 else [READY], 4, dp_size)
    result.wait_for_ready()
    assert len(result.scheduler_infos) == (2 if dp_size == 1 else 1)
    pipe = Pipe()
    run(args, good, 0, 0, pipe)
    assert (pipe.received, pipe.closed) == ([good], True)


def test_without_dcp_nothing_is_wrapped():
    result, run, _ = launch([READY], dcp_size=1)
    assert run is run_scheduler
    result.wait_for_ready()


def test_the_checked_target_can_be_spawned():
    """Spawn pickles the target; upstream's function inside must stay the one of its module."""
    _, run, _ = launch([], dcp_size=2)
    again = pickle.loads(pickle.dumps(run))
    assert isinstance(again, partial)
    assert again.func is run.func
    assert again.args == (run_scheduler,)


@pytest.mark.parametrize("rank", [0, 1])
def test_ready_message_carries_the_layout(plugin, monkeypatch, caplog, rank):
    """Every rank tells its launcher; the block in the log comes once a server."""
    from sglang_dcp import state
    from sglang_dcp.hooks import scheduler

    caplog.set_level("INFO", logger=scheduler.__name__)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: rank)
    pool = SimpleNamespace(size=128, page_size=16, get_kv_size_bytes=lambda: 4096)
    fake = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        max_total_num_tokens=512,
        model_config=SimpleNamespace(context_len=4096),
        server_args=SimpleNamespace(device="cpu", attention_backend="torch_mla"),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=torch.nn.Module())),
    )
    with as_rank(1, 4):
        state.get_state().comm.name = "a2a"
        info = scheduler.after_get_init_info(dict(READY), fake)
    assert info == {
        **READY,
        "dcp_size": 4,
        "dcp_comm_backend": "a2a",
        "dcp_kv_rows_per_rank": 128,
        "dcp_physical_page_size": 16,
    }
    logged = [r.getMessage() for r in caplog.records if r.name == scheduler.__name__]
    assert len(logged) == (rank == 0)
    assert all("512" in text and "128" in text and "a2a" in text for text in logged)


def test_failed_wait_is_named(plugin, caplog):
    from sglang_dcp import state
    from sglang_dcp.hooks.scheduler import around_run_event_loop

    def event_loop(scheduler):
        raise RuntimeError("CUDA error: unspecified launch failure")

    with as_rank(1, 4):
        comm = state.get_state().comm
        for reason in (None, "DCP rank 1 waited for rank 2"):
            comm.failure = lambda reason=reason: reason
            with pytest.raises(RuntimeError, match="CUDA error"):
                around_run_event_loop(event_loop, SimpleNamespace())
            assert [r.getMessage() for r in caplog.records] == [reason] * (reason is not None)


# ---------------------------------------------------------------- the launcher


def refusal(*argv):
    """The message with which the launcher ends; no server may start."""
    from sglang_dcp import launch_server

    with pytest.raises(SystemExit) as stopped:
        launch_server.main([*argv, "--device", "cpu"])
    return stopped.value.code


def test_excluded_plugin_is_refused(monkeypatch):
    from sglang_dcp.launch_server import require_plugin

    monkeypatch.setenv("SGLANG_PLUGINS", "other, another")
    with pytest.raises(SystemExit) as stopped:
        require_plugin()
    message = stopped.value.code
    assert message.startswith("error: ")
    assert "SGLANG_PLUGINS='other, another', which excludes the plugin 'sglang_dcp'" in message
    assert "Add sglang_dcp to SGLANG_PLUGINS or unset it" in message
    for allowed in ("other, sglang_dcp", "sglang_dcp", ""):
        monkeypatch.setenv("SGLANG_PLUGINS", allowed)
        require_plugin()


@pytest.mark.parametrize("found", ["0.5.15.post1", "0.5.13", None])
def test_other_version_is_refused(monkeypatch, found):
    from sglang_dcp import compat
    from sglang_dcp.launch_server import require_plugin

    monkeypatch.setattr(compat, "installed_sglang", lambda: found)
    with pytest.raises(SystemExit) as stopped:
        require_plugin()
    assert f"SGLang {found or '(not installed)'}" in stopped.value.code
    assert "Install sglang==0.5.14" in stopped.value.code


def test_refusal_ends_the_process():
    """As a user meets it: exit code 1, the message last on stderr, nothing started."""
    result = subprocess.run(
        [sys.executable, "-m", "sglang_dcp.launch_server", "--model-path", "m", "--dcp-size", "2"],
        env={**clean_env(), "PYTHONPATH": str(ROOT), "SGLANG_PLUGINS": "other"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: sglang_dcp.launch_server was started with")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("size", "match"),
    [
        ("3", "--dcp-size 3 was asked for: it must be a power of two"),
        ("16", "--dcp-size 16 does not divide the attention TP size"),
        ("0", "--dcp-size 0 was asked for: it must be a power of two of at least 1"),
        ("-1", "--dcp-size -1 was asked for: it must be a power of two of at least 1"),
    ],
)
def test_wrong_sizes_end_the_launcher(plugin, monkeypatch, tiny_model, size, match):
    monkeypatch.setattr("sglang.launch_server.run_server", None)
    message = refusal("--model-path", str(tiny_model), "--tp", "8", "--dcp-size", size)
    assert message.startswith(f"error: {match}")


def test_a_word_for_a_size_ends_the_launcher(plugin, tiny_model, capsys):
    assert refusal("--model-path", str(tiny_model), "--tp", "8", "--dcp-size", "x") == 2
    assert "--dcp-size/--decode-context-parallel-size: invalid int value: 'x'" in " ".join(
        capsys.readouterr().err.split()
    )


def dry_run(model, capsys, monkeypatch, *argv):
    from sglang_dcp import launch_server

    monkeypatch.setattr("sglang.launch_server.run_server", None)
    command = ["--model-path", str(model), "--device", "cpu", "--dry-run", *argv]
    assert launch_server.main(command) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("dcp_size", [8, 4, 2])
def test_dry_run_prints_the_groups(plugin, tiny_model, capsys, monkeypatch, dcp_size):
    """TP 8 x CP 8, 4 and 2: consecutive chunks; nothing is served."""
    argv = ("--tp", "8", "--dcp-size", str(dcp_size))
    head, *groups = dry_run(tiny_model, capsys, monkeypatch, *argv)
    assert head == f"TP 8 x PP 1, attention TP 8, DCP {dcp_size}, 1 node(s)"
    assert len(groups) == 8 // dcp_size
    for index, line in enumerate(groups):
        ranks = [index * dcp_size + i for i in range(dcp_size)]
        assert f"DCP group {index}: ranks {', '.join(map(str, ranks))} (owner" in line
        assert f"rank {ranks[0]} + v mod {dcp_size}" in line


def test_dry_run_with_dp_attention_and_pp(plugin, tiny_model, capsys, monkeypatch):
    argv = ["--tp", "4", "--dp", "2", "--enable-dp-attention", "--dcp-size", "2"]
    head, *groups = dry_run(tiny_model, capsys, monkeypatch, *argv)
    assert head.startswith("TP 4 x PP 1, attention TP 2, DCP 2")
    assert [line.split("ranks ")[1][:4] for line in groups] == ["0, 1", "2, 3"]
    argv = ["--tp", "2", "--pp-size", "2", "--disable-overlap-schedule", "--dcp-size", "2"]
    head, *groups = dry_run(tiny_model, capsys, monkeypatch, *argv)
    assert head.startswith("TP 2 x PP 2, attention TP 2, DCP 2")
    assert [line.split("ranks ")[1][:4] for line in groups] == ["0, 1", "2, 3"]


def test_groups_of_other_layouts(plugin, tiny_model):
    from sglang_dcp.launch_server import describe_groups

    args = make_args(tiny_model, dcp_size=4, nnodes=2, dist_init_addr="127.0.0.1:20000")
    lines = describe_groups(args).splitlines()
    assert lines[0].endswith("DCP 4, 2 node(s)")
    assert len(lines) == 3


UNSTRIPED = """
import os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.launch_server import run_server
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":
    args = prepare_server_args(sys.argv[1:])
    args.attention_backend = "torch_native"  # what upstream could serve by itself
    os.environ["SGLANG_PLUGINS"] = "none"  # the schedulers' environment only
    run_server(args)
"""


@pytest.mark.slow
def test_server_with_unstriped_schedulers_ends(tiny_model, tmp_path):
    """End to end: schedulers that came up without the plugin are refused, the server ends."""
    from sglang_dcp.testing.server import free_port

    script = tmp_path / "unstriped.py"
    script.write_text(UNSTRIPED)
    command = [sys.executable, str(script), "--model-path", str(tiny_model), "--device", "cpu"]
    command += ["--tp", "2", "--dcp-size", "2", "--max-total-tokens", "512"]
    result = subprocess.run(
        [*command, "--host", "127.0.0.1", "--port", str(free_port())],
        env={**clean_env(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode != 0
    assert "--dcp-size 2 was asked for, but a scheduler came up with dcp_size None" in result.stderr
    assert "fired up and ready" not in result.stderr
