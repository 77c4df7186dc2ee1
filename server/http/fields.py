"""Fields of requests that clients know from other servers, and what becomes of each: none is silently ignored.

A field is honoured where the body has it. Others are refused by name, but for values of them that ask for nothing, such
as ``use_beam_search=false``: some clients send these with every request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from bigmodel.server.http.batch_bodies import BatchBody
from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.messages_bodies import CountTokensBody, MessagesBody
from bigmodel.server.http.neutral import NEUTRAL
from bigmodel.server.http.pooled_bodies import EmbeddingsBody, RerankBody
from bigmodel.server.http.responses_bodies import ResponsesBody
from bigmodel.server.http.text_bodies import CompletionBody
from bigmodel.server.http.tokenize_bodies import DetokenizeBody, TokenizeBody

BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/embeddings": EmbeddingsBody,
    "/v1/rerank": RerankBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/v1/batches": BatchBody,
}
"""The body of each route that takes JSON."""

_OPENAI_SAMPLING = (
    "frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop stream stream_options "
    "temperature top_p user"
)
_VLLM_SAMPLING = (
    "add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo ignore_eos "
    "include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids min_p min_tokens priority "
    "prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs "
    "return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start session_id "
    "skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs "
    "thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking"
)
_LLAMA_SAMPLING = (
    "backend_sampling cache_prompt dry_allowed_length dry_base dry_multiplier dry_penalty_last_n "
    "dry_sequence_breakers dynatemp_exponent dynatemp_range grammar grammar_lazy grammar_triggers id_slot ignore_eos "
    "json_schema lora min_keep min_p mirostat mirostat_eta mirostat_tau n_cache_reuse n_cmpl n_discard n_indent n_keep "
    "n_predict n_probs post_sampling_probs preserved_tokens repeat_last_n repeat_penalty response_fields "
    "return_progress return_tokens samplers t_max_predict_ms timings_per_token top_k top_n_sigma typical_p "
    "xtc_probability xtc_threshold"
)

KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    path: {server: tuple(sorted(names.split())) for server, names in servers.items()}
    for path, servers in {
        "/v1/chat/completions": {
            "OpenAI": f"{_OPENAI_SAMPLING} audio function_call functions max_completion_tokens messages metadata "
            "modalities moderation parallel_tool_calls prediction prompt_cache_key prompt_cache_options "
            "prompt_cache_retention reasoning_effort response_format safety_identifier service_tier store tool_choice "
            "tools top_logprobs verbosity web_search_options",
            "vLLM": f"{_VLLM_SAMPLING} add_generation_prompt chat_template chat_template_kwargs "
            "continue_final_message documents include_reasoning media_io_kwargs mm_processor_kwargs return_prompt_text",
            "llama.cpp": f"{_LLAMA_SAMPLING} add_generation_prompt chat_format chat_template_kwargs parse_tool_calls "
            "reasoning_budget_tokens reasoning_format reasoning_in_content thinking_budget_tokens thinking_forced_open",
        },
        "/v1/completions": {
            "OpenAI": f"{_OPENAI_SAMPLING} best_of echo prompt suffix",
            "vLLM": f"{_VLLM_SAMPLING} prompt_embeds",
            "llama.cpp": _LLAMA_SAMPLING,
        },
        "/v1/responses": {
            "OpenAI": "access_programs background context_management conversation image include input instructions "
            "max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls previous_response_id "
            "prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning safety_identifier "
            "service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p "
            "truncation user",
            "vLLM": "cache_salt chat_template chat_template_kwargs enable_response_messages ignore_eos "
            "include_stop_str_in_output kv_transfer_params logit_bias min_tokens mm_processor_kwargs "
            "previous_input_messages priority repetition_penalty request_id seed skip_special_tokens stop "
            "structured_outputs top_k vllm_xargs",
        },
        "/v1/messages": {
            "Anthropic": "cache_control container context_management diagnostics inference_geo max_tokens mcp_servers "
            "messages metadata model output_config output_format service_tier speed stop_sequences stream system "
            "temperature thinking tool_choice tools top_k top_p user_profile_id workspace_id",
            "vLLM": "cache_salt chat_template_kwargs kv_transfer_params",
        },
        "/v1/messages/count_tokens": {
            "Anthropic": "cache_control context_management mcp_servers messages model output_config output_format "
            "speed system thinking tool_choice tools user_profile_id workspace_id",
        },
        "/v1/embeddings": {
            "OpenAI": "dimensions encoding_format input model user",
            "vLLM": "add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs "
            "continue_final_message embed_dtype endianness messages mm_processor_kwargs normalize priority request_id "
            "truncate_prompt_tokens truncation_side use_activation",
            "llama.cpp": "content embd_normalize",
        },
        "/v1/rerank": {
            "Jina": "documents model query return_documents top_n",
            "Cohere": "documents max_chunks_per_doc max_tokens_per_doc model priority query rank_fields "
            "return_documents top_n",
            "vLLM": "activation add_special_tokens cache_salt chat_template documents mm_processor_kwargs model "
            "priority query request_id softmax top_n truncate_prompt_tokens truncation_side use_activation user",
            "llama.cpp": "texts",
        },
        "/tokenize": {
            "vLLM": "add_generation_prompt add_special_tokens chat_template chat_template_kwargs "
            "continue_final_message media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools",
            "llama.cpp": "add_special content parse_special with_pieces",
        },
        "/detokenize": {"vLLM": "model tokens", "llama.cpp": "tokens"},
        "/v1/batches": {"OpenAI": "completion_window endpoint input_file_id metadata output_expires_after"},
    }.items()
}
"""By route and server, the fields that its clients may send."""

OWN: dict[str, tuple[str, ...]] = {"/v1/chat/completions": ("timeout",), "/v1/completions": ("timeout",)}
"""Fields that are this server's own."""

NOTES: dict[str, str] = {
    "user": "a label of the client's own",
    "metadata": "labels of the client's own",
    "safety_identifier": "a label of the client's own",
    "prompt_cache_key": "a label: the beginnings of all prompts are kept",
    "cache_control": "a hint: the beginnings of all prompts are kept",
    "service_tier": "there is one",
    "speed": "there is one",
    "best_of": "where it is `n`",
    "reasoning_effort": "where the chat template has levels of it, else `medium`, and `none` where it has a switch",
    "output_format": "as `output_config.format`",
    "output_config": "`effort` where the chat template has levels of it, else `high`",
    "reasoning": "`effort` as `reasoning_effort` of chats; `summary` may be `auto`",
    "thinking_token_budget": "of models whose reasoning ends with a tag",
    "store": "`false`: nothing is kept",
    "background": "`false`",
    "truncation": "`disabled`",
    "completion_window": "`24h`",
    "documents": "where the chat template takes them",
    "min_tokens": "not together with `allowed_token_ids`",
    "timeout": "seconds that the request may take",
}
"""Notes of the table beside "honoured"."""


@dataclass(frozen=True)
class Row:
    """One field of a route: which servers know it, whether the body has it, and values that ask for nothing."""

    name: str
    servers: tuple[str, ...]
    honoured: bool
    neutral: tuple[Any, ...]


def rows(path: str) -> Iterator[Row]:
    """The fields of a route, by name."""
    body = BODIES[path]
    own = {field.alias or name for name, field in body.model_fields.items()}
    names = {name for known in KNOWN[path].values() for name in known} | {*OWN.get(path, ())}
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL.get(body.__name__, {})
    for name in sorted(names):
        servers = tuple(server for server, known in KNOWN[path].items() if name in known)
        yield Row(name, servers, name in own, neutral.get(name, ()))
