"""The architectures whose table the guide keeps, by family: some of each."""

from __future__ import annotations

KEPT: dict[str, tuple[str, ...]] = {
    "decoders": (
        "bloom", "cohere", "cohere2", "ernie4_5", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
        "gemma4_text", "glm", "glm4", "gpt2", "gpt_neox", "granite", "helium", "llama", "ministral3", "mistral", "mpt",
        "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2",
    ),
    "mixtures of experts": (
        "deepseek_v3", "gpt_oss", "granitemoe", "llama4", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe",
    ),
    "state spaces and recurrences": ("falcon_mamba", "mamba", "mamba2", "recurrent_gemma", "rwkv"),
    "hybrids": ("bamba", "falcon_h1", "jamba", "lfm2", "nemotron_h", "qwen3_next"),
    "encoders with decoders": ("bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "umt5"),
    "encoders": (
        "albert", "bert", "deberta", "distilbert", "electra", "modernbert", "mpnet", "nystromformer", "roberta",
        "xlm-roberta", "xlnet",
    ),
    "vision": ("beit", "deit", "dinov2", "resnet", "segformer", "swin", "videomae", "vit"),
    "audio": ("audio-spectrogram-transformer", "hubert", "moonshine", "wav2vec2", "wavlm", "whisper"),
    "images and text": (
        "blip", "clip", "gemma3", "gemma4", "git", "idefics3", "llava", "mllama", "paligemma", "qwen2_vl", "siglip",
    ),
    "time series": ("patchtst",),
}  # fmt: skip
