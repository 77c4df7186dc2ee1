"""Values of fields that bodies do not have, which ask for nothing: requests with these are as those without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAMPLING: dict[str, tuple[Any, ...]] = {
    # vLLM's
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "return_mm_kwargs": (True,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
    "watermarking": (False,),
    # llama.cpp's
    "backend_sampling": (False,),
    "cache_prompt": (True,),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "grammar": ("",),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
    "id_slot": (-1,),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "n_cache_reuse": (0,),
    "n_cmpl": (1,),
    "n_discard": (0,),
    "n_indent": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "preserved_tokens": ([],),
    "repeat_penalty": (1, 1.0),
    "response_fields": ([],),
    "return_progress": (False,),
    "return_tokens": (False,),
    "t_max_predict_ms": (-1, 0),
    "timings_per_token": (False,),
    "top_n_sigma": (-1, -1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
}

NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "CompletionBody": {**_SAMPLING, "suffix": ("",)},
    "ChatBody": {
        **_SAMPLING,
        "echo": (False,),
        "functions": ([],),
        "modalities": (["text"],),
        "parse_tool_calls": (True,),
        "reasoning_budget_tokens": (-1,),
        "reasoning_format": ("auto", "deepseek"),  # apart from the content, which is how it is sent
        "reasoning_in_content": (False,),
        "return_prompt_text": (False,),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "thinking_budget_tokens": (-1,),
        "thinking_forced_open": (False,),
        "verbosity": ("medium",),
    },
    "ResponsesBody": {
        "context_management": ([],),
        "enable_response_messages": (False,),
        "include_stop_str_in_output": (False,),
        "min_tokens": (0,),
        "priority": (0,),
        "skip_special_tokens": (True,),
    },
    "MessagesBody": {"mcp_servers": ([],)},
    "CountTokensBody": {"mcp_servers": ([],), "speed": ("standard",)},
    "EmbeddingsBody": {
        "add_special_tokens": (True,),
        "embed_dtype": ("float32",),
        "embd_normalize": (2,),
        "priority": (0,),
        "truncation_side": ("right",),
        "use_activation": (True,),
    },
    "RerankBody": {"add_special_tokens": (True,), "priority": (0,), "truncation_side": ("right",)},
    "TokenizeBody": {"add_special": (False,), "parse_special": (True,), "with_pieces": (False,)},
}
"""By name of the body and of the field."""


def asks_for_nothing(known: Mapping[str, tuple[Any, ...]], name: str, value: Any) -> bool:
    """Whether a field of this name and value is among those ``known`` to ask for nothing."""
    return any(type(each) is type(value) and each == value for each in known.get(name, ()))
