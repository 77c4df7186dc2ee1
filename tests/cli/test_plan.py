from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM

from bigmodel.cli.main import run
from bigmodel.devices.empty import init_empty_weights
from bigmodel.plan import NodesPlan, Plan
from bigmodel.profile.machine.machine import nominal_machine

from ..examples import alike
from ..mtp_checkpoints import save_with_head
from ..profile.hub_server import HubServer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="50KB")
    return tmp_path / "model"


@pytest.mark.slow
def test_a_million_tokens_are_planned_over_the_accelerator_ram_and_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=1_000_000,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    options = ["--context", "1000000", "--new-tokens", "999000", "--no-padded"]
    options += ["--max-memory", "0=1050MB,cpu=300MB,disk=2GB"]
    capsys.readouterr()
    assert run(["plan", str(tmp_path), *options, "--json"]) == 0
    found = Plan.from_json(capsys.readouterr().out)
    whole = 4 * 10**6 * 2 * 2 * 16 * 4
    assert all(found.devices[key].kv_cache > 0 for key in (0, "cpu", "disk"))
    assert whole <= sum(device.kv_cache for device in found.devices.values()) < 1.02 * whole
    assert all(device.free is not None and device.free >= 0 for device in found.devices.values())
    assert run(["plan", str(tmp_path), *options, "--explain"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "KV in RAM and on disk" in shown
    assert f"RAM holds those of the last {found.kv_in_ram} tokens" in shown
    assert "2 slots for keys and values" in shown


@pytest.mark.slow
def test_the_table_names_parts_devices_and_budgets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(folder), "--max-memory", "cpu=150KB", "--context", "16"]) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("model.embed_tokens", "disk", "cpu", "budget", "146.48 KiB"))


@pytest.mark.slow
def test_json_is_the_plan_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(folder), "--max-memory", "cpu=1MB", "--context", "16", "--batch-size", "2", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.batch_size == 2
    assert plan.devices["cpu"].budget == 10**6
    assert set(plan.device_map.values()) <= {"cpu", "disk"}


@pytest.mark.long
@pytest.mark.slow
def test_throughput_chooses_the_batch_and_says_its_tokens_per_second(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigmodel.plan.planner.measured_machine", nominal_machine)
    options = ["--max-memory", "cpu=250KB", "--context", "16", "--new-tokens", "8", "--objective", "throughput"]
    assert run(["plan", str(folder), *options, "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.batch_size > 1
    assert plan.devices["cpu"].total <= 250_000
    assert run(["plan", str(folder), *options, "--batch-size", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "batch 1" in text
    assert "tokens per second in all" in text


@pytest.mark.slow
def test_inputs_are_given_as_shapes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-memory", "cpu=1MB", "--context", "64", "--strict", "--json"]
    activations = []
    for shape in ("1x8", "3x48"):
        assert run(["plan", str(folder), *options, "--input", f"input_ids={shape}:int64"]) == 0
        plan = Plan.from_json(capsys.readouterr().out)
        activations.append(plan.devices["cpu"].activations)
    assert plan.batch_size == 3
    assert activations[0] < activations[1]


@pytest.mark.slow
def test_sequences_are_planned_with_padding_unless_none_is_padded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = []
    for options in ([], ["--no-padded"]):
        assert run(["plan", str(folder), "--max-memory", "cpu=1GB", "--context", "512", "--json", *options]) == 0
        plans.append(Plan.from_json(capsys.readouterr().out))
    padded, whole = (plan.devices["cpu"].activations for plan in plans)
    assert [plan.padded for plan in plans] == [True, False]
    assert whole < padded


def test_an_input_that_is_no_shape_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(folder), "--input", "input_ids=long"]) != 0
    assert "NAME=SHAPE" in capsys.readouterr().err


@pytest.mark.slow
def test_training_is_planned_for_one_of_several_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for ranks in ("1", "2"):
        training = ["--train", "adamw", "--ranks", ranks, "--sharding", "fsdp", "--context", "16", "--json"]
        assert run(["plan", str(folder), *training]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[1]["weights"] == -(-found[0]["weights"] // 2)
    assert found[1]["total"] < found[0]["total"]


@pytest.mark.parametrize("option", [["--ranks", "2"], ["--sharding", "fsdp"], ["--checkpointing"]])
def test_an_option_of_training_is_not_ignored_without_it(
    folder: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(folder), *option]) == 2
    assert "--train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--offload", "auto"], "--objective"),
        (["--objective", "latency", "--strategy", "balanced"], "--strategy"),
        (["--objective", "latency", "--train", "adamw"], "--train"),
        (["--train", "adamw", "--plot", "picture.svg"], "--max-memory"),
        (["--train", "adamw", "--prefill-chunk-size", "16"], "--prefill-chunk-size"),
        (["--prefill-chunk-size", "small"], "--prefill-chunk-size"),
        (["--prefill-chunk-size", "0"], "--prefill-chunk-size"),
        (["--train", "adamw", "--micro-batch-size", "2"], "--micro-batch-size"),
        (["--micro-batch-size", "few"], "--micro-batch-size"),
        (["--train", "adamw", "--expert-reuse", "0.5"], "--expert-reuse"),
        (["--expert-reuse", "2"], "--expert-reuse"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    folder: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(folder), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
@alike(("given", "size"), [("none", None), ("auto", None), ("16", 16)], first=2)
def test_a_prompt_is_planned_in_chunks_if_asked_for(
    folder: Path, given: str, size: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--context", "48", "--new-tokens", "8", "--max-memory", "cpu=1GB", "--prefill-chunk-size", given]
    assert run(["plan", str(folder), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefill_chunk_size"] == size


@pytest.mark.slow
@alike(("given", "size"), [("none", None), ("2", 2)], first=1)
def test_a_batch_is_planned_in_micro_batches_if_asked_for(
    folder: Path, given: str, size: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--batch-size", "6", "--context", "8", "--max-memory", "0=1MB,1=1MB,cpu=1MB", "--strategy", "balanced"]
    assert run(["plan", str(folder), *options, "--micro-batch-size", given, "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).micro_batch_size == size


def test_habits_of_routers_are_in_the_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(folder), "--max-memory", "cpu=1GB", "--expert-reuse", "0.25", "--json"]) == 0
    assert Plan.from_json(capsys.readouterr().out).expert_reuse == 0.25


@pytest.mark.slow
def test_the_fastest_plan_comes_with_its_seconds(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigmodel.plan.planner.measured_machine", nominal_machine)
    shapes = ["--max-memory", "cpu=1MB", "--context", "16", "--new-tokens", "2"]
    assert run(["plan", str(folder), *shapes, "--objective", "latency", "--offload", "auto"]) == 0
    assert "s per step" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "begins"), [("plan.svg", "<svg"), ("plan.html", "<!doctype html>")])
def test_a_picture_is_written_beside_the_table(
    folder: Path, tmp_path: Path, name: str, begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / name
    assert run(["plan", str(folder), "--max-memory", "cpu=1MB", "--context", "16", "--plot", str(picture)]) == 0
    assert picture.read_text().startswith(begins)
    assert "model.embed_tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_training_under_budgets_is_planned_part_by_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = ["--train", "adamw", "--context", "16", "--max-memory", "cpu=10MB", "--json"]
    assert run(["plan", str(folder), *training]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.devices["cpu"].training > 3 * plan.devices["cpu"].weights
    assert run(["plan", str(folder), *training, "--ranks", "2"]) == 2
    assert "--ranks" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
def test_what_is_streamed_takes_less_of_the_host_when_it_is_quantised(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = []
    for more in ([], ["--offload-dtype", "int8"]):
        budgets = ["--max-memory", "0=150KB,cpu=1GB", "--context", "4"]
        assert run(["plan", str(folder), *budgets, *more, "--json"]) == 0
        held.append(Plan.from_json(capsys.readouterr().out).devices["cpu"].weights)
    assert held[1] < held[0]


def test_training_that_makes_no_sense_is_one_clear_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(folder), "--train", "lion", "--context", "16"]) != 0
    assert "optimizer is 'lion'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_huge_checkpoint_is_planned_from_its_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LlamaConfig(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        vocab_size=128256,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    offset, header = 0, {}
    for name, parameter in model.named_parameters():
        end = offset + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [offset, end]}
        offset = end
    config.save_pretrained(tmp_path)
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)  # a hole: 800 GB that no disk has to hold
    assert run(["plan", str(tmp_path), "--max-memory", "cpu=60GiB", "--context", "512", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.devices["cpu"].weights + plan.devices["disk"].weights == offset > 8 * 10**11


@pytest.mark.slow
def test_a_config_that_holds_an_infinity_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8, "chunk_size": 16}
    Mamba2ForCausalLM(Mamba2Config(num_heads=8, head_dim=8, n_groups=1, **sizes)).save_pretrained(tmp_path)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert run(["plan", str(tmp_path), "--max-memory", "cpu=1GB", "--context", "16", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert plan.devices["cpu"].activations > 0
    assert not plan.guarded


@pytest.mark.slow
def test_a_repository_is_planned_without_downloading_its_weights(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "hub" / "owner").mkdir(parents=True)
    folder.rename(folder.parent / "hub" / "owner" / "tiny")
    with HubServer(folder.parent / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        assert run(["plan", "owner/tiny", "--max-memory", "cpu=1MB", "--context", "16"]) == 0
        sent = sum(count for name, count in hub.sent.items() if name.endswith(".safetensors"))
    assert "model.embed_tokens" in capsys.readouterr().out
    assert sent == 0, "the config says what the headers would"


@pytest.mark.slow
@alike(
    ("arguments", "says"),
    [
        (["--max-memory", "cpu=-1GB"], "cpu"),
        (["--max-memory", "cpu=plenty"], "plenty"),
        (["--max-memory", "gpu=1GB"], "gpu"),
        (["--max-memory", "1GB"], "DEVICE=SIZE"),
        (["--context", "99999999"], "99999999"),
        (["--dtype", "float99"], "float99"),
        (["--offload-dtype", "int3"], "int3"),
        (["--batch-size", "0"], "batch-size"),
        (["--max-memory", "cpu=10KB"], "does not fit"),
    ],
    first=8,
)
def test_bad_input_is_one_line(
    folder: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(folder), *arguments]) in (1, 2)
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.count("\n") == 1


def test_what_is_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(tmp_path / "nothing")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert run(["plan", str(tmp_path)]) == 1
    assert "safetensors" in capsys.readouterr().err


def test_a_config_that_transformers_does_not_know_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text('{"model_type": "never-heard-of"}')
    assert run(["plan", str(folder)]) == 1
    errors = capsys.readouterr().err
    assert "never-heard-of" in errors
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_the_plan_says_whether_proposals_pay_and_counts_the_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with_head(tmp_path / "model", "glm4_moe")
    capsys.readouterr()
    arguments = ["plan", str(tmp_path / "model"), "--max-memory", "cpu=64MiB", "--context", "64", "--json"]
    found = []
    for more in ((), ("--speculate", "mtp")):
        assert run([*arguments, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, with_head = found
    assert plain["speculation"] is None
    assert with_head["speculation"]["most"] == 1
    (cpu,) = (device for device in with_head["devices"] if device["device"] == "cpu")
    (before,) = (device for device in plain["devices"] if device["device"] == "cpu")
    assert cpu["draft"] > 0
    assert cpu["total"] > before["total"]
    assert cpu["budget"] == before["budget"]


@pytest.mark.long
@pytest.mark.slow
def test_nodes_are_planned_from_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [{"name": name, "max_memory": {"cpu": "1MB"}, "machine": "nominal"} for name in ("a", "b")]
    (tmp_path / "nodes.json").write_text(json.dumps({"nodes": nodes, "link": {"rate": "1GB"}}))
    options = ["--nodes", str(tmp_path / "nodes.json"), "--context", "16"]
    assert run(["plan", str(folder), *options, "--json"]) == 0
    plan = NodesPlan.from_json(capsys.readouterr().out)
    assert [stage.node for stage in plan.stages] == ["a", "b"]
    assert run(["plan", str(folder), *options]) == 0
    assert "slowest" in capsys.readouterr().out
    assert run(["plan", str(folder), *options, "--max-memory", "cpu=1MB"]) != 0
    assert "--max-memory: not with --nodes" in " ".join(capsys.readouterr().err.split())
