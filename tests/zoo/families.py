"""Tiny models with random weights, one or more of each kind of architecture that transformers has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as t

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TEXT: dict[str, Any] = {**SIZES, **SPECIAL, "vocab_size": 160, "max_position_embeddings": 128}
DECODER: dict[str, Any] = {**TEXT, "num_key_value_heads": 2}
IMAGE: dict[str, Any] = {**SIZES, "image_size": 32, "patch_size": 8}
STATES: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 160, "state_size": 8, **SPECIAL}


def _clip() -> Any:
    text = {**TEXT, "max_position_embeddings": 77}
    return t.CLIPModel(t.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=32))


def _wav2vec2() -> Any:
    convolutions = {"conv_dim": [32] * 3, "conv_stride": [5, 4, 4], "conv_kernel": [10, 5, 5]}
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    config = t.Wav2Vec2Config(**SIZES, **convolutions, **positions, num_feat_extract_layers=3, vocab_size=32)
    return t.Wav2Vec2ForCTC(config)


def _segformer() -> Any:
    config = t.SegformerConfig(
        hidden_sizes=[16, 32], depths=[1, 1], num_encoder_blocks=2, sr_ratios=[4, 2], patch_sizes=[7, 3],
        strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
    )  # fmt: skip
    return t.SegformerModel(config)


def _swin() -> Any:
    config = t.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4
    )  # fmt: skip
    return t.SwinModel(config)


def _deepseek_v3() -> Any:
    heads = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    sizes = {**DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**sizes, **heads, **experts))


def _qwen3_next() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    heads = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    config = t.Qwen3NextConfig(**DECODER, **experts, **linear, **heads, shared_expert_intermediate_size=32)
    return t.Qwen3NextForCausalLM(config)


def _jamba() -> Any:
    experts = {"num_experts": 2, "num_experts_per_tok": 1}
    config = t.JambaConfig(
        **DECODER, **experts, attn_layer_period=4, attn_layer_offset=2, use_mamba_kernels=False, mamba_d_state=8
    )
    return t.JambaForCausalLM(config)


def _whisper() -> Any:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 160, "num_mel_bins": 16}
    lengths = {"max_source_positions": 50, "max_target_positions": 64}
    config = t.WhisperConfig(**layers, **sizes, **lengths, **SPECIAL, decoder_start_token_id=1)
    return t.WhisperForConditionalGeneration(config)


def _llava() -> Any:
    vision, text = t.CLIPVisionConfig(**IMAGE), t.LlamaConfig(**DECODER)
    config = t.LlavaConfig(vision_config=vision, text_config=text, image_token_index=150, image_seq_length=16)
    return t.LlavaForConditionalGeneration(config)


def _gemma3() -> Any:
    vision = t.SiglipVisionConfig(**IMAGE).to_dict()
    text = t.Gemma3TextConfig(**DECODER, head_dim=16, sliding_window=32).to_dict()
    config = t.Gemma3Config(
        vision_config=vision, text_config=text, image_token_index=150, boi_token_index=151, eoi_token_index=152,
        mm_tokens_per_image=4,
    )  # fmt: skip
    return t.Gemma3ForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 32}
    config = t.Qwen2VLConfig(
        text_config={**DECODER, "rope_parameters": rope}, vision_config=vision, image_token_id=150, video_token_id=151,
        vision_start_token_id=152, vision_end_token_id=153,
    )  # fmt: skip
    return t.Qwen2VLForConditionalGeneration(config)


def _paligemma() -> Any:
    text = t.GemmaConfig(**DECODER, head_dim=16).to_dict()
    vision = t.SiglipVisionConfig(**IMAGE).to_dict()
    config = t.PaliGemmaConfig(
        vision_config=vision, text_config=text, image_token_index=150, projection_dim=64, hidden_size=64
    )
    return t.PaliGemmaForConditionalGeneration(config)


SHARED: dict[str, Any] = {
    "head_dim": 16, "sliding_window": 32, "num_kv_shared_layers": 1, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 160,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
"""Sizes of decoders whose last layers read the keys and values of earlier ones."""


def _gemma3n_text() -> Any:
    config = t.Gemma3nTextConfig(**DECODER, **SHARED, laurel_rank=8, activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0])
    return t.Gemma3nForCausalLM(config)


def _gemma4() -> Any:
    tokens = {f"{kind}_token_id": 150 + place for place, kind in enumerate(("image", "boi", "eoi", "video", "audio"))}
    vision = t.Gemma4VisionConfig(
        **SIZES, num_key_value_heads=4, head_dim=16, patch_size=4, pooling_kernel_size=2, default_output_length=16
    )
    config = t.Gemma4Config(
        text_config=t.Gemma4TextConfig(**DECODER, **SHARED), vision_config=vision, audio_config=None, **tokens
    )
    return t.Gemma4ForConditionalGeneration(config)


FORWARD: dict[str, Callable[[], Any]] = {
    "ast": lambda: t.ASTModel(t.ASTConfig(**SIZES, max_length=64, num_mel_bins=32)),
    "bert": lambda: t.BertForMaskedLM(t.BertConfig(**TEXT)),
    "clip": _clip,
    "dinov2": lambda: t.Dinov2Model(t.Dinov2Config(**IMAGE)),
    "resnet": lambda: t.ResNetModel(t.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2])),
    "rwkv": lambda: t.RwkvForCausalLM(t.RwkvConfig(**{**SMALL, "attention_hidden_size": 64})),
    "segformer": _segformer,
    "swin": _swin,
    "videomae": lambda: t.VideoMAEModel(t.VideoMAEConfig(**IMAGE, num_frames=4)),
    "vit": lambda: t.ViTForImageClassification(t.ViTConfig(**IMAGE)),
    "wav2vec2": _wav2vec2,
}
"""Models that are used by one forward."""

GENERATING: dict[str, Callable[[], Any]] = {
    "bamba": lambda: t.BambaForCausalLM(
        t.BambaConfig(**DECODER, **STATES, attn_layer_indices=[1], mamba_chunk_size=16)
    ),
    "deepseek_v3": _deepseek_v3,
    "falcon_h1": lambda: t.FalconH1ForCausalLM(
        t.FalconH1Config(**DECODER, **STATES, head_dim=16, mamba_d_ssm=128, mamba_chunk_size=16)
    ),
    "gpt_neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**TEXT)),
    "jamba": _jamba,
    "lfm2": lambda: t.Lfm2ForCausalLM(t.Lfm2Config(**DECODER, layer_types=["conv", "conv", "full_attention", "conv"])),
    "llama4": lambda: t.Llama4ForCausalLM(
        t.Llama4TextConfig(
            **DECODER, head_dim=16, num_local_experts=4, intermediate_size_mlp=96, attention_chunk_size=24
        )
    ),
    "qwen3_next": _qwen3_next,
    "recurrent_gemma": lambda: t.RecurrentGemmaForCausalLM(
        t.RecurrentGemmaConfig(
            **{**DECODER, "num_hidden_layers": 3}, head_dim=16, attention_window_size=32, lru_width=64
        )
    ),
    "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(hidden_size=64, n_layer=4, n_head=4, vocab_size=160, **SPECIAL)),
    "mamba": lambda: t.MambaForCausalLM(t.MambaConfig(**SMALL)),
    "mamba2": lambda: t.Mamba2ForCausalLM(t.Mamba2Config(**SMALL, num_heads=8, head_dim=16, n_groups=2, chunk_size=16)),
}
"""Models that generate text."""

SEEING: dict[str, Callable[[], Any]] = {"gemma3": _gemma3, "llava": _llava, "qwen2_vl": _qwen2_vl}
"""Models that generate text from a prompt with an image in it."""

HEARING: dict[str, Callable[[], Any]] = {"whisper": _whisper}
"""Models that generate text from a sound."""


def _switch() -> Any:
    sizes = {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    experts = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = t.SwitchTransformersConfig(**sizes, **experts, vocab_size=160, **SPECIAL, decoder_start_token_id=0)
    return t.SwitchTransformersForConditionalGeneration(config)


def _nllb_moe() -> Any:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 160}
    experts = {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    config = t.NllbMoeConfig(**layers, **sizes, **experts, **SPECIAL, decoder_start_token_id=2)
    return t.NllbMoeForConditionalGeneration(config)


ROUTING: dict[str, Callable[[], Any]] = {"nllb-moe": _nllb_moe, "switch": _switch}
"""Models whose activations depend on how their routers choose experts; those of more tokens are planned for."""


def _pi0() -> Any:
    vision = {**IMAGE, "model_type": "siglip_vision_model", "vision_use_head": False}
    text = {**DECODER, "head_dim": 16, "model_type": "gemma"}
    vlm = t.PaliGemmaConfig(vision_config=vision, text_config=text, image_token_id=150, projection_dim=64)
    actions = {"chunk_size": 8, "max_state_dim": 6, "max_action_dim": 6}
    config = t.PI0Config(vlm_config=vlm, dit_config=t.GemmaConfig(**DECODER, head_dim=16), **actions)
    return t.PI0ForConditionalGeneration(config)


def _deepseek_v2() -> Any:
    heads = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    sizes = {**DECODER, "num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
    config = t.DeepseekV2Config(**sizes, **heads, **experts, head_dim=8, topk_method="greedy")
    return t.DeepseekV2ForCausalLM(config)


def _granitemoehybrid() -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
    layers = ["mamba", "attention", "mamba", "attention"]
    config = t.GraniteMoeHybridConfig(**DECODER, **STATES, **experts, layer_types=layers, mamba_chunk_size=16)
    return t.GraniteMoeHybridForCausalLM(config)


GLM_TEXT: dict[str, Any] = {
    **DECODER,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
GLM_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip


def _glm(model: Any, config: Any, **text: Any) -> Any:
    """Return a GLM that sees; by default the sections of its rotary positions do not fit its heads."""
    vision = {
        "depth": 2, "hidden_size": 64, "num_heads": 4, "out_hidden_size": 64, "intermediate_size": 96,
        "image_size": 32, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2,
    }  # fmt: skip
    kinds = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    tokens = {f"{kind}_token_id": 150 + place for place, kind in enumerate(kinds)}
    return model(config(text_config={**GLM_TEXT, **text}, vision_config=vision, **tokens))


def _instructblip() -> Any:
    asks = {**SIZES, "num_hidden_layers": 2, "encoder_hidden_size": 64, "vocab_size": 160}
    text = t.LlamaConfig(**DECODER).to_dict()
    config = t.InstructBlipConfig(
        vision_config=IMAGE, qformer_config=asks, text_config=text, num_query_tokens=8, image_token_index=150
    )
    return t.InstructBlipForConditionalGeneration(config)


def _blip_2() -> Any:
    text = t.OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=160, word_embed_proj_dim=64,
        max_position_embeddings=128, **SPECIAL,
    )  # fmt: skip
    asks = {**SIZES, "num_hidden_layers": 2, "encoder_hidden_size": 64, "vocab_size": 160}
    config = t.Blip2Config(
        vision_config=IMAGE, qformer_config=asks, text_config=text.to_dict(), num_query_tokens=8, image_token_index=150
    )
    return t.Blip2ForConditionalGeneration(config)


def _vipllava() -> Any:
    vision, text = t.CLIPVisionConfig(**IMAGE), t.LlamaConfig(**DECODER)
    layers = [-1, -2, 2]  # by default one is the eleventh from the end
    config = t.VipLlavaConfig(
        vision_config=vision, text_config=text, image_token_index=150, image_seq_length=16, vision_feature_layers=layers
    )
    return t.VipLlavaForConditionalGeneration(config)


def _blenderbot() -> Any:
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 160}
    config = t.BlenderbotConfig(**layers, **sizes, **SPECIAL, max_position_embeddings=64)
    return t.BlenderbotForConditionalGeneration(config)


def _sounding(kind: str, **settings: Any) -> Any:
    codec = t.EncodecConfig(
        num_filters=4, hidden_size=16, codebook_size=128, codebook_dim=16, num_lstm_layers=1, target_bandwidths=[1.05]
    )  # fmt: skip
    text = t.T5Config(d_model=64, d_kv=16, d_ff=96, num_layers=3, num_heads=4, vocab_size=160)
    decoder = getattr(t, f"{kind}DecoderConfig")(
        vocab_size=128, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, ffn_dim=96, num_codebooks=2,
        pad_token_id=128, bos_token_id=128,
    )  # fmt: skip
    config = getattr(t, f"{kind}Config")(text_encoder=text, audio_encoder=codec, decoder=decoder, **settings)
    return getattr(t, f"{kind}ForConditionalGeneration")(config)


OTHERS: dict[str, Callable[[], Any]] = {
    "blenderbot": _blenderbot,
    "blip-2": _blip_2,
    "deepseek_v2": _deepseek_v2,
    "gemma3n_text": _gemma3n_text,
    "musicgen": lambda: _sounding("Musicgen"),
    "musicgen_melody": lambda: _sounding("MusicgenMelody", num_chroma=6, chroma_length=8),
    "gemma4": _gemma4,
    "gemma4_text": lambda: t.Gemma4ForCausalLM(t.Gemma4TextConfig(**DECODER, **SHARED)),
    "glm46v": lambda: _glm(t.Glm46VForConditionalGeneration, t.Glm46VConfig),
    "glm4v": lambda: _glm(t.Glm4vForConditionalGeneration, t.Glm4vConfig),
    "glm4v_moe": lambda: _glm(t.Glm4vMoeForConditionalGeneration, t.Glm4vMoeConfig, **GLM_EXPERTS),
    "glm4v_text": lambda: t.Glm4vTextModel(t.Glm4vTextConfig(**GLM_TEXT)),
    "granitemoehybrid": _granitemoehybrid,
    "instructblip": _instructblip,
    "paligemma": _paligemma,
    "pi0": _pi0,
    "shieldgemma2": _gemma3,
    "vipllava": _vipllava,
    "xmod": lambda: t.XmodForCausalLM(
        t.XmodConfig(**TEXT, default_language="en_XX", languages=("en_XX",), is_decoder=True)
    ),
}
"""Models of architectures whose default configs cannot be shrunk, or are not ones that their forwards accept."""
