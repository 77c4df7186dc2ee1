"""A model that writes what it is told to: each piece of a script is a token, and follows the one before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken

from bigmodel.server import EngineOptions, Settings, create_app
from tests.server.live import MODEL
from tests.server.tiny import fresh_tokenizer, tiny_model

_WIDTH = 320  # more than there are tokens: each has a direction of its own


def scripted_app(
    script: Sequence[str],
    *,
    special: Sequence[str] = (),
    template: str = "",
    after_tools: Sequence[str] = (),
    end: str | None = None,
    **settings: Any,
) -> Any:
    """The server over a model that answers every chat with the pieces of `script`, which are distinct.

    ``special``: those of them that are special tokens. ``template``: what the chat template has beside its messages,
    in a comment. ``after_tools``: pieces, other ones, of the answer to a chat whose last message is a tool's.
    ``end``: the token that ends a text, in the place of the tokenizer's own.
    """
    pieces = [*script, *after_tools]
    assert len(set(pieces)) == len(pieces)
    tokenizer = fresh_tokenizer()
    if end is not None:
        tokenizer.add_special_tokens({"eos_token": end})
    tokenizer.add_tokens([AddedToken(piece, special=piece in special, normalized=False) for piece in pieces])
    tokenizer.chat_template += "{# " + template + " #}"
    scripts = {">": script}  # by the last character of a prompt, which is a token
    if after_tools:
        tokenizer.chat_template += "{% if messages[-1]['role'] == 'tool' %}~{% endif %}"
        scripts["~"] = after_tools
    model = tiny_model(layers=1, vocab_size=len(tokenizer), hidden_size=_WIDTH, eos_token_id=tokenizer.eos_token_id)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), _WIDTH))
        model.lm_head.weight.zero_()
        for begin, pieces in scripts.items():
            ids = [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]
            for before, after in zip([tokenizer.encode(begin)[-1], *ids], [*ids, tokenizer.eos_token_id]):
                model.lm_head.weight[after, before] = 10.0
    options = EngineOptions(kv_bytes=64 << 20, max_sequences=4)
    return create_app(model, tokenizer, settings=Settings(MODEL, engine=options, **settings))
