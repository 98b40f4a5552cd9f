"""The DCP arguments as real fields of ServerArgs, and what they derive and restore."""

import copy
import dataclasses
import os
import pickle

import pytest
from sglang_args import SEED, fields_of, make_args, make_args_on

pytestmark = pytest.mark.usefixtures("plugin")

#: (P as the user asks for it, dcp_size) -> every page size that SGLang shall see is P * c.
PAGES = [(None, 2), (1, 2), (4, 2), (64, 2), (1, 8), (4, 8), (64, 8)]


def parse(*argv):
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args([*argv, "--device", "cpu", "--random-seed", str(SEED)])


def dcp_values(args):
    values = args.dcp_size, args.dcp_comm_backend, args.page_size, args.dcp_replicate_q_proj
    return *values, args.dcp_prefill


def test_fields_travel(tiny_model, tmp_path):
    """CLI and its alias, YAML, keywords, pickle, asdict, replace and copy all carry DCP."""
    command = ["--model-path", str(tiny_model), "--tp", "8", "--dtype", "float32"]
    want = (4, "ag_rs", 8, True, "pass-q")
    flags = ["--dcp-size", "4", "--dcp-comm-backend", "ag_rs", "--dcp-replicate-q-proj"]
    flags += ["--dcp-prefill", "pass-q"]
    args = parse(*command, *flags, "--page-size", "2")
    assert dcp_values(args) == want
    alias = parse(
        *command,
        "--decode-context-parallel-size=4",
        "--dcp-comm-backend=ag_rs",
        "--dcp-replicate-q-proj",
        "--dcp-prefill=pass-q",
        "--page-size=2",
    )
    assert dcp_values(alias) == want

    yaml = tmp_path / "serve.yaml"
    options = ("dcp-size: 4", "dcp-comm-backend: ag_rs", "dcp-replicate-q-proj: true")
    options += ("dcp-prefill: pass-q",)
    yaml.write_text("\n".join([*options, "page-size: 2", ""]))
    assert dcp_values(parse(*command, "--config", str(yaml))) == want
    keywords = make_args(
        tiny_model,
        dcp_size=4,
        dcp_comm_backend="ag_rs",
        dcp_replicate_q_proj=True,
        dcp_prefill="pass-q",
        dtype="float32",
        page_size=2,
    )
    assert dcp_values(keywords) == want

    for travelled in (
        pickle.loads(pickle.dumps(keywords)),
        copy.deepcopy(keywords),
        type(keywords)(**dataclasses.asdict(keywords)),
        dataclasses.replace(keywords),
        dataclasses.replace(dataclasses.replace(keywords)),
    ):
        assert travelled == keywords
        assert travelled.dcp_derived == keywords.dcp_derived
        assert dcp_values(travelled) == want


def test_defaults_are_upstreams(tiny_model):
    args = parse("--model-path", str(tiny_model), "--tp", "8")
    assert dcp_values(args) == (1, "auto", 1, False, "auto")
    assert args.dcp_derived is None
    assert {"dcp_size", "dcp_comm_backend", "dcp_prefill"} <= {
        f.name for f in dataclasses.fields(args)
    }


def test_eq_and_repr_see_dcp(tiny_model):
    args = make_args(tiny_model, dcp_size=2, page_size=2)
    plain = make_args(tiny_model, page_size=4)
    assert args.page_size == plain.page_size
    assert args == make_args(tiny_model, dcp_size=2, page_size=2)
    assert args != make_args(tiny_model, dcp_size=2, page_size=2, dcp_comm_backend="a2a")
    assert args != make_args(tiny_model, dcp_size=2, page_size=2, dcp_prefill="pass-q")
    assert args != plain
    # nothing but the DCP fields tells these two apart
    other = copy.copy(args)
    other.dcp_size = 4
    assert args != other
    assert args != "not arguments"
    assert "dcp_size=2" in repr(args)
    assert "dcp_comm_backend='auto'" in repr(args)
    assert repr(args).endswith(")")


@pytest.mark.parametrize(("page_size", "dcp_size"), PAGES)
@pytest.mark.parametrize("device", ["cpu", "cuda", "hopper"])
def test_page_widening_survives_replace(tiny_model, monkeypatch, device, page_size, dcp_size):
    """Both directions: to DCP and back give exactly the sets that were made so from scratch."""
    asked = {"page_size": page_size, "chunked_prefill_size": 2053, "tp_size": 8}

    def make(**values):
        return make_args_on(device, monkeypatch, tiny_model, **asked, **values)

    plain, wide = make(), make(dcp_size=dcp_size)
    physical = 64 if device == "hopper" else page_size or 1  # FlashMLA has pages of 64 only
    assert wide.page_size == physical * dcp_size
    assert wide.chunked_prefill_size == max(2053 // wide.page_size, 1) * wide.page_size

    assert fields_of(dataclasses.replace(wide, dcp_size=1)) == fields_of(plain)
    twice = dataclasses.replace(dataclasses.replace(wide), dcp_size=1)
    assert fields_of(twice) == fields_of(plain)
    assert dataclasses.replace(wide, tp_size=8).page_size == wide.page_size
    if device == "hopper":  # upstream has settled on fa3 by then, as if it had been asked for
        with pytest.raises(ValueError, match=r"fa3.*Use --attention-backend flashmla"):
            dataclasses.replace(plain, dcp_size=dcp_size)
        return
    widened = dataclasses.replace(plain, dcp_size=dcp_size)
    for name in ("page_size", "chunked_prefill_size", "cuda_graph_config", "attention_backend"):
        assert getattr(widened, name) == getattr(wide, name), name
    assert fields_of(dataclasses.replace(widened, dcp_size=1)) == fields_of(plain)


@pytest.mark.parametrize("dcp_size", [2, 8])
def test_replaced_page_size_is_physical(tiny_model, dcp_size):
    args = make_args(tiny_model, dcp_size=dcp_size, page_size=4)
    assert dataclasses.replace(args, page_size=16).page_size == 16 * dcp_size
    narrow = dataclasses.replace(args, page_size=16, dcp_size=1)
    assert narrow.page_size == 16
    other = dataclasses.replace(args, dcp_size=4, page_size=1)
    assert (other.page_size, other.dcp_size) == (4, 4)


def test_asdict_restores_upstream(tiny_model, monkeypatch):
    """Engine(**asdict(args)) with dcp_size 1: page size, backend and prefill graph come back."""
    wide = make_args_on("hopper", monkeypatch, tiny_model, dcp_size=2, page_size=4)
    again = type(wide)(**{**dataclasses.asdict(wide), "dcp_size": 1})
    plain = make_args_on("hopper", monkeypatch, tiny_model, page_size=4)
    assert fields_of(again) == fields_of(plain)
    assert plain.cuda_graph_config.prefill.backend != "disabled"


def test_prefill_graph_is_off(tiny_model, monkeypatch):
    args = make_args_on("cuda", monkeypatch, tiny_model, dcp_size=2)
    assert args.cuda_graph_config.prefill.backend == "disabled"
    assert args.cuda_graph_config.decode.backend == "full"
    plain = dataclasses.replace(args, dcp_size=1)
    assert plain.cuda_graph_config.prefill.backend == "tc_piecewise"  # it had been on
    off = make_args_on("cuda", monkeypatch, tiny_model, dcp_size=2, disable_prefill_cuda_graph=True)
    assert dataclasses.replace(off, dcp_size=1).cuda_graph_config.prefill.backend == "disabled"


@pytest.mark.parametrize("backend", ["tc_piecewise", "breakable"])
@pytest.mark.parametrize("dcp_size", [1, 2])
def test_prefill_graph_asked_for_is_refused(tiny_model, monkeypatch, backend, dcp_size):
    def make():
        return make_args_on(
            "cuda",
            monkeypatch,
            tiny_model,
            dcp_size=dcp_size,
            cuda_graph_backend_prefill=backend,
        )

    if dcp_size == 1:
        assert make().cuda_graph_config.prefill.backend == backend
        return
    with pytest.raises(ValueError, match=rf"--dcp-size 2 .*{backend}.*1/2.*--disable-prefill"):
        make()


@pytest.mark.parametrize("dcp_size", [1, 2])
def test_cpu_default_backend(tiny_model, dcp_size):
    args = make_args(tiny_model, dcp_size=dcp_size)
    assert args.attention_backend == "torch_mla"
    assert args.cuda_graph_config.decode.backend == "disabled"
    assert args.cuda_graph_config.prefill.backend == "disabled"
    explicit = make_args(tiny_model, attention_backend="torch_native")
    assert explicit.attention_backend == "torch_native"


def test_cpu_recipe_is_set(tiny_model, monkeypatch):
    """Launchers set what CPU ranks need; what the user has set stays."""
    from sglang_dcp import envs

    for name in [*envs.CPU_RECIPE, "SGLANG_CPU_OMP_THREADS_BIND"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    make_args(tiny_model, tp_size=4)
    assert os.environ["SGLANG_USE_CPU_ENGINE"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert len(os.environ["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 4


@pytest.mark.parametrize("machine", ["hopper", "cuda"])
def test_hopper_default_backend(tiny_model, monkeypatch, machine):
    args = make_args_on(machine, monkeypatch, tiny_model, dcp_size=2)
    plain = dataclasses.replace(args, dcp_size=1)
    if machine == "hopper":
        assert (args.attention_backend, args.page_size) == ("flashmla", 128)
        assert (plain.attention_backend, plain.page_size) == ("fa3", 1)
    else:
        assert (args.attention_backend, args.page_size) == ("triton", 2)
        assert (plain.attention_backend, plain.page_size) == ("triton", 1)
    asked = make_args_on(
        machine, monkeypatch, tiny_model, dcp_size=2, attention_backend="flashinfer"
    )
    assert (asked.attention_backend, asked.page_size) == ("flashinfer", 2)


@pytest.mark.parametrize(
    ("asked", "page_size", "dcp_size", "want"),
    [(4096, 1, 2, 4096), (33, 1, 8, 32), (1000, 64, 8, 512), (5, 4, 8, 32), (None, 64, 8, 4096)],
)
def test_chunked_prefill_size_fits_the_widened_page(tiny_model, asked, page_size, dcp_size, want):
    args = make_args(tiny_model, chunked_prefill_size=asked, page_size=page_size, dcp_size=dcp_size)
    assert args.chunked_prefill_size == want
    args.check_server_args()  # upstream's own assertion, which names no flag
    assert dataclasses.replace(args, dcp_size=1).chunked_prefill_size == (asked or 4096)


@pytest.mark.parametrize("dcp_size", [0, -1, 3, 6, 12])
def test_dcp_size_must_be_a_power_of_two(tiny_model, dcp_size):
    with pytest.raises(ValueError, match=rf"--dcp-size {dcp_size} was asked for.*power of two"):
        make_args(tiny_model, dcp_size=dcp_size)


@pytest.mark.parametrize("dcp_size", ["x", "2", 2.0, True, None])
def test_dcp_size_must_be_an_integer(tiny_model, dcp_size):
    with pytest.raises(ValueError, match=r"--dcp-size .* was asked for: .*an integer"):
        make_args(tiny_model, dcp_size=dcp_size)


@pytest.mark.parametrize("values", [["--dcp-size", "x"], ["--dcp-comm-backend", "x"]])
def test_command_line_names_the_flag(tiny_model, capsys, values):
    with pytest.raises(SystemExit) as stopped:
        parse("--model-path", str(tiny_model), *values)
    assert stopped.value.code == 2
    assert values[0] in capsys.readouterr().err


def test_dummy_model_keeps_its_arguments(plugin):
    """Upstream builds argument sets without a model, e.g. for its parsers; DCP must not object."""
    from sglang.srt.server_args import ServerArgs

    assert ServerArgs(model_path="dummy", dcp_size=2).dcp_size == 2
