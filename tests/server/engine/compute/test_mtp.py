"""The checkpoint's MTP head proposes what transformers' own does, and changes no token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bigmodel.devices import max_memory_allocated, reset_peak_memory
from bigmodel.errors import CheckpointMismatchError, ServeError
from bigmodel.quantized.stored import StoredModule
from bigmodel.server.engine import Done, Engine, EngineOptions, build_engine
from bigmodel.server.loading import Loaded, load, load_with_head
from tests.mtp_checkpoints import build, save_with_head
from tests.server.engine.test_engine import flat, prompts, settings
from tests.server.tiny import ask, tiny_tokenizer

KINDS = ("deepseek_v3", "glm4_moe")
EACH = pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.long)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {kind: tmp_path_factory.mktemp(kind) / "model" for kind in KINDS}
    for kind, folder in found.items():
        save_with_head(folder, kind)
    return found


def loaded(folder: Path, head: bool = True, **options: Any) -> Loaded:
    chosen: Any = {
        "max_memory": {"cpu": "256MiB"},
        "context_length": 512,
        "batch_size": 4,
        "draft_tokens": 3,
        **options,
    }
    return load_with_head(str(folder), **chosen) if head else load(str(folder), **chosen)


def engine_of(found: Loaded, draft_tokens: int = 3, **options: Any) -> Engine:
    options.setdefault("kv_bytes", 8 << 20)
    limits = EngineOptions(draft_tokens=draft_tokens, force_speculation=True, **options)
    engine = build_engine(found.model, found.tokenizer, found.plan, limits, draft_model=found.draft_model)
    engine.start()
    return engine


def answers(engine: Engine, asked: list[list[int]], tokens: int) -> list[Any]:
    collectors = [ask(engine, prompt, max_tokens=tokens, **settings(i)) for i, prompt in enumerate(asked)]
    assert all(isinstance(collector.wait(), Done) for collector in collectors)
    engine.stop()
    return [flat(collector) for collector in collectors]


@pytest.mark.slow
def test_the_bits_are_those_without_it(tmp_path: Path) -> None:
    save_with_head(tmp_path / "model", "glm4_moe", first_k_dense_replace=9)
    asked = [*prompts(2), list(range(1, 140))]
    engine = engine_of(loaded(tmp_path / "model"))
    found = answers(engine, asked, 5)
    assert engine.core.counts.drafted > 0
    assert found == answers(engine_of(loaded(tmp_path / "model", head=False)), asked, 5)


@pytest.mark.slow
@EACH
def test_the_tokens_of_a_mixture_are_those_without_it(kind: str, folders: dict[str, Path]) -> None:
    """Its log-probabilities differ in their last bits with what is computed beside a token, also without proposals."""
    asked = [*prompts(2), list(range(1, 140))]
    engine = engine_of(loaded(folders[kind]))
    found = answers(engine, asked, 5)
    assert engine.core.counts.drafted > 0
    plain = answers(engine_of(loaded(folders[kind], head=False)), asked, 5)
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in plain]


def transformers_drafts(model: Any, text: list[int], count: int) -> list[int]:
    """What the head proposes behind a text, by transformers' module, from the whole text each time."""
    from transformers.modeling_layers import MtpModel

    head = MtpModel.from_pretrained(model)
    with torch.no_grad():
        states = model.model(input_ids=torch.tensor([text[:-1]])).last_hidden_state
        tokens = text[1:]
        for _ in range(count):
            positions = torch.arange(len(tokens))[None]
            out = head.forward_layer(0, states, positions, None, input_ids=torch.tensor([tokens]))
            tokens = [*tokens, int(model.lm_head(out[:, -1]).argmax())]
            states = torch.cat([states, out[:, -1:]], dim=1)
    return tokens[len(text) - 1 :]


@pytest.mark.slow
@EACH
def test_it_proposes_what_transformers_own_module_does(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this version of transformers has no MTP module that is called layer by layer")
    found = loaded(folders[kind])
    engine = engine_of(found)
    drafter: Any = engine.core.drafter
    seen: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose

    def recording(sequences: Any) -> None:
        propose(sequences)
        for sequence in sequences:
            seen.append((sequence.token_slice(0, len(sequence)), list(sequence.draft)))

    monkeypatch.setattr(drafter, "propose", recording)
    prompt = list(range(40, 90))  # more states than wait for a proposal: the head reads some with the prompt
    assert isinstance(ask(engine, prompt, max_tokens=8, temperature=0, ignore_eos=True).wait(), Done)
    engine.stop()
    kind_of = type(build(kind))
    monkeypatch.setattr(kind_of, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"])
    whole = kind_of.from_pretrained(folders[kind], attn_implementation="eager")
    drafts = [(text, draft) for text, draft in seen if draft]
    assert max(len(draft) for _, draft in drafts) == 3
    assert len(drafts) >= 4
    for text, draft in drafts:
        assert draft == transformers_drafts(whole, text, len(draft))


def certain(model: Any) -> Any:
    """A model whose layers add nothing, so that a token decides the next one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
            if "norm" in name:
                parameter.fill_(1)
    return model


@pytest.mark.slow
def test_a_head_that_is_right_saves_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in which each token decides the next, the embedding alone predicts it."""
    import tests.mtp_checkpoints as made

    monkeypatch.setattr(made, "build", lambda kind, **changes: certain(build(kind, **changes)))

    def exact(kind: str, model: Any, scratch: Path, **changes: Any) -> dict[str, torch.Tensor]:
        tensors = head_tensors(kind, model, scratch, **changes)
        width = model.config.hidden_size
        for name in tensors:
            if name.endswith(("norm.weight",)):
                tensors[name] = torch.ones_like(tensors[name])
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = torch.zeros_like(tensors[name])
            if name.endswith("eh_proj.weight"):
                tensors[name] = torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1)
        return tensors

    head_tensors = made.head_tensors
    monkeypatch.setattr(made, "head_tensors", exact)
    made.save_with_head(tmp_path / "model", "glm4_moe")
    engine = engine_of(loaded(tmp_path / "model"))
    ask(engine, "the cat", max_tokens=41, temperature=0, ignore_eos=True).wait()
    engine.stop()
    counts = engine.core.counts
    assert counts.accepted == counts.drafted == 30
    assert engine.core.steps == 11


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("accelerators")
@pytest.mark.parametrize("size", [6 << 20, 24 << 20], ids=["streamed", "resident"])
def test_its_bytes_are_in_the_plan_and_the_budget_holds(size: int, tmp_path: Path) -> None:
    large = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 4}
    save_with_head(tmp_path / "model", "glm4_moe", first_k_dense_replace=7, **large)
    options: Any = {"max_memory": {0: size, "cpu": "64MiB"}, "batch_size": 1, "context_length": 256, "padded": False}
    found = loaded(tmp_path / "model", **options)
    device = found.plan.devices[0]
    assert device.draft > 0
    assert device.total <= device.budget == size
    assert bool(found.plan.streamed) == (size == 6 << 20)
    assert found.plan.main_device == 0
    reset_peak_memory("virtual:0")
    engine = engine_of(found, max_sequences=1, kv_bytes=None)
    asked = [list(range(1, 40))]
    with_head = answers(engine, asked, 5)
    assert engine.core.counts.drafted > 0
    assert max_memory_allocated("virtual:0") <= device.total
    plain = loaded(tmp_path / "model", head=False, **options)
    assert with_head == answers(engine_of(plain, max_sequences=1, kv_bytes=None), asked, 5)


@pytest.mark.slow
def test_saving_is_as_without_it(folders: dict[str, Path], tmp_path: Path) -> None:
    with_head = loaded(folders["glm4_moe"])
    engine_of(with_head).stop()
    with_head.model.save_pretrained(tmp_path / "one")
    loaded(folders["glm4_moe"], head=False).model.save_pretrained(tmp_path / "other")
    one, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other"))
    assert one == other


@pytest.mark.slow
def test_a_checkpoint_without_a_head_is_one_clear_error(tmp_path: Path) -> None:
    build("glm4_moe").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError, match="no MTP head"):
        loaded(tmp_path)


@pytest.mark.slow
def test_a_model_with_recurrent_states_is_refused(tmp_path: Path) -> None:
    layers = ["linear_attention", "full_attention"]
    save_with_head(tmp_path / "model", "qwen3_next", num_hidden_layers=2, layer_types=layers)
    found = loaded(tmp_path / "model")
    assert isinstance(found.draft_model, transformers.Qwen3NextForCausalLM)
    reasons = "recurrent states|computed one by one"  # transformers 5.17 computes the latter
    with pytest.raises(ServeError, match=reasons):
        engine_of(found)


def in_fp8(folder: Path) -> None:
    """Store the weights of a checkpoint's layers, the head's among them, in blocks of 16 x 16 of fp8."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    kept = ("eh_proj", "embed_tokens", "head", "gate.weight", "norm")
    for file in sorted(set(index["weight_map"].values())):
        stored = {}
        for name, tensor in load_file(folder / file).items():
            stored[name] = tensor
            if tensor.dim() == 2 and not any(word in name for word in kept):
                stored[name] = tensor.to(torch.float8_e4m3fn)
                blocks = -(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16)
                stored[f"{name}_scale_inv"] = torch.ones(blocks)
        save_file(stored, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(stored, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(config))


def restored(folder: Path) -> None:
    """Store what `in_fp8` stored as float32."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for file in sorted(set(index["weight_map"].values())):
        tensors = {name: t.float() for name, t in load_file(folder / file).items() if not name.endswith("_scale_inv")}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index["weight_map"] = {n: file for n, file in index["weight_map"].items() if not n.endswith("_scale_inv")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.long
@pytest.mark.slow
def test_a_head_that_is_stored_in_fp8_proposes_as_its_restored_weights_do(tmp_path: Path) -> None:
    save_with_head(tmp_path / "fp8", "deepseek_v3")
    in_fp8(tmp_path / "fp8")
    shutil.copytree(tmp_path / "fp8", tmp_path / "whole")
    restored(tmp_path / "whole")
    drafts = []
    for name in ("fp8", "whole"):
        found = loaded(tmp_path / name)
        assert any(isinstance(module, StoredModule) for module in found.draft_model.modules()) == (name == "fp8")
        engine = engine_of(found)
        seen: list[list[int]] = []
        propose = engine.core.drafter.propose  # type: ignore[union-attr]

        def recording(sequences: Any, propose: Any = propose, seen: list[list[int]] = seen) -> None:
            propose(sequences)
            seen.extend(list(sequence.draft) for sequence in sequences)

        engine.core.drafter.propose = recording  # type: ignore[union-attr, method-assign]
        assert isinstance(ask(engine, "the cat", max_tokens=12, temperature=0, ignore_eos=True).wait(), Done)
        engine.stop()
        drafts.append(seen)
    assert drafts[0] == drafts[1]
    assert any(drafts[0])
