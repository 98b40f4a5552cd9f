"""`sglang-dcp doctor`: one status a patch, and exit 1 as soon as one does not fit."""

import argparse
import dataclasses
import json

import pytest
import torch

from sglang_dcp import compat, doctor
from sglang_dcp.cli import main
from sglang_dcp.comm import symmetric
from sglang_dcp.comm.nvlink import NvlinkCommunicator
from sglang_dcp.hooks import table


@pytest.fixture
def only_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the table whose module imports fast enough for every test here."""
    monkeypatch.setattr(table, "everything", lambda: {"arguments": table.ARGUMENTS})


@pytest.mark.usefixtures("only_arguments")
def test_json_is_one_object_and_fits(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["versions"]["sglang"] in compat.SUPPORTED_SGLANG
    assert [patch["name"] for patch in found["patches"]] == [p.name for p in table.ARGUMENTS]
    assert found["attention_backends"]["torch_mla"] == "ok"
    assert set(found["communicators"]) >= {"a2a", "ag_rs"}


def test_changed_target_exits_1(monkeypatch, capsys):
    changed = dataclasses.replace(table.ARGUMENTS[-1], params=("self", "new_parameter"))
    monkeypatch.setattr(table, "everything", lambda: {"arguments": (changed,)})
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAIL arguments   server_args.ServerArgs.__post_init__: has parameters ('self',)" in out
    assert "new_parameter" in out


@pytest.mark.usefixtures("only_arguments")
def test_other_version_exits_1(monkeypatch, capsys):
    monkeypatch.setattr(compat, "installed_sglang", lambda: "0.5.99")
    assert doctor.run_doctor(argparse.Namespace(json=False)) == 1
    assert "0.5.99" in capsys.readouterr().out


@pytest.mark.parametrize("priority", [5, 20])
@pytest.mark.parametrize("num_gpus", [0, 1, 2, 8])
@pytest.mark.parametrize("problem", ["", "GPU 1 has no peer access with native atomics to [0]"])
def test_communicators_of_a_machine(monkeypatch, priority, num_gpus, problem):
    """nvlink needs two GPUs that reach each other; auto picks it there if its priority says so."""
    asked = []

    def peer_problem(device, peers):
        asked.append((device, *peers))
        return problem if device == 1 else ""

    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(symmetric, "peer_problem", peer_problem)
    monkeypatch.setattr(NvlinkCommunicator, "priority", priority)
    found = doctor.communicators()
    able = num_gpus > 1 and not problem
    assert found["auto"] == ("picks nvlink" if able and priority > 10 else "picks a2a")
    reasons = {0: "needs CUDA GPUs, not cpu", 1: "needs two GPUs"}
    assert found["nvlink"] == ("ok" if able else reasons.get(num_gpus, problem))
    assert found["a2a"] == found["ag_rs"] == "ok"
    assert asked == [
        (d, *range(num_gpus)) for d in range(min(num_gpus, 2) if problem else num_gpus)
    ]


@pytest.mark.slow
def test_whole_table_fits_the_installed_release():
    bad = [patch for patch in doctor.patch_statuses() if not patch["ok"]]
    assert bad == []
    assert len(doctor.patch_statuses()) >= len(table.ARGUMENTS + table.DCP + table.CPU)
