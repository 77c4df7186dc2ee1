"""Which tensors of a checkpoint are its MTP head's, and what they are called there."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigmodel.errors import CheckpointMismatchError
from bigmodel.profile.model.mtp import as_head
from bigmodel.profile.source import meta_model
from bigmodel.sources.mtp import MtpSource, head_config, head_name
from bigmodel.sources.resolve import open_source
from tests.mtp_checkpoints import KINDS, build, save_with_head


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.61.eh_proj.weight", "model.embed_tokens.eh_proj.weight"),
        ("model.layers.61.enorm.weight", "model.embed_tokens.enorm.weight"),
        ("model.layers.61.shared_head.norm.weight", "model.norm.weight"),
        ("model.layers.61.shared_head.head.weight", None),
        ("model.layers.61.embed_tokens.weight", None),
        ("model.layers.61.self_attn.q_a_proj.weight_scale_inv", "model.layers.0.self_attn.q_a_proj.weight_scale_inv"),
        ("model.layers.61.mlp.experts.7.up_proj.weight", "model.layers.0.mlp.experts.7.up_proj.weight"),
        ("model.layers.6.mlp.up_proj.weight", None),
        ("model.layers.60.mlp.up_proj.weight", None),
        ("model.norm.weight", None),
        ("mtp.fc.weight", "model.embed_tokens.eh_proj.weight"),
        ("mtp.pre_fc_norm_hidden.weight", "model.embed_tokens.hnorm.weight"),
        ("mtp.norm.weight", "model.norm.weight"),
        ("mtp.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("mtp.layers.1.self_attn.q_proj.weight", None),
    ],
)
def test_names(name: str, expected: str | None) -> None:
    assert head_name(name, 61) == expected


def test_a_head_has_one_layer_of_the_models_last_kind() -> None:
    content = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "x": 1}
    assert head_config(content, True) == {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "tie_word_embeddings": False,
        "x": 1,
    }
    assert head_config({"first_k_dense_replace": 3}, False)["first_k_dense_replace"] == 1


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_the_heads_tensors_are_those_of_a_model_of_one_layer(kind: str, tmp_path: Path) -> None:
    save_with_head(tmp_path / "model", kind)
    source = MtpSource(open_source(tmp_path / "model"))
    head = as_head(meta_model(source))
    experts = {name for name in source.weight_map() if ".mlp.experts." in name}
    assert experts
    wanted = {name for name in head.state_dict() if ".mlp.experts." not in name}
    assert set(source.weight_map()) - experts == wanted
    assert {name for header in source.headers().values() for name in header} == set(source.weight_map())


@pytest.mark.slow
def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    build("glm4_moe").save_pretrained(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"no MTP head.*model\.layers\.3\.eh_proj"):
        MtpSource(open_source(tmp_path))
