"""From HTTP bodies to engine requests: check limits, translate parameters, submit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

import torch
from fastapi import Request as HTTPRequest

from bigmodel.server.answers.parsers.formats import AnswerFormat
from bigmodel.server.answers.parsers.held_answers import held_answer, required_calls
from bigmodel.server.engine.engine import Engine, EngineStoppedError, QueueFullError
from bigmodel.server.engine.sampling.expressions import Expression, json_text
from bigmodel.server.engine.sampling.grammar import ANY_OBJECT, Grammar, GrammarError, GrammarGoneError, available
from bigmodel.server.engine.sampling.reasoning_budget import ReasoningBudget
from bigmodel.server.engine.scheduling.request import Request, SamplingParams, Sink
from bigmodel.server.http.bodies import Sampling
from bigmodel.server.http.chat_bodies import ChatBody
from bigmodel.server.http.client_limits import KEY, LATER, REQUEST_ID, in_whose_name
from bigmodel.server.http.errors import APIError, bad_value
from bigmodel.server.http.parsing import ANY_SIZE, OffLoop, in_thread, in_turn, turn
from bigmodel.server.http.state import state_of
from bigmodel.server.models.running import RunningModel
from bigmodel.server.text.codec import TextCodec, TooManyTokensError

DEFAULT_COMPLETION_TOKENS = 16

PROMPT_END = 16
"""Tokens at the end of a prompt that show whether the answer begins within the reasoning, or behind it."""


def engine_id(http: HTTPRequest) -> str:
    """A name for one of the requests that the engine gets for an HTTP request: its own, after that one's."""
    return f"{http.scope.get(REQUEST_ID, '')}/{uuid.uuid4().hex[:16]}"


def make_request(
    http: HTTPRequest,
    body: Sampling,
    prompt: list[int],
    params: SamplingParams,
    sink: Sink,
    media: Mapping[str, torch.Tensor] | None = None,
    adapter: str = "",
) -> Request:
    """An engine request with its deadline, in the name of the client's key or address."""
    limits = [t for t in (body.timeout, state_of(http).settings.request_timeout) if t is not None]
    deadline = time.monotonic() + min(limits) if limits else None
    made = Request(
        engine_id(http),
        prompt,
        params,
        sink,
        n=body.n or 1,
        deadline=deadline,
        client=in_whose_name(http.scope),
        key=http.scope.get(KEY, ""),
        priority=body.priority + http.scope.get(LATER, 0),
        media=media,
        adapter=adapter,
    )
    telemetry = state_of(http).telemetry
    if telemetry is not None:
        telemetry.begin(made)
    return made


async def encode_prompt(
    codec: TextCodec, text: str, special: bool, longest: int | None, field: str, run: OffLoop, size: int = 0
) -> list[int]:
    """Return the tokens of a text; 400 for more than `longest`. ``field`` is the body's name of it.

    ``size``: of all texts of which it is one, where they are tokenised one behind the other.
    """
    try:
        return await run(max(size, len(text)), lambda: codec.encode(text, add_special_tokens=special, longest=longest))
    except TooManyTokensError as error:
        assert longest is not None
        raise too_long(error.least, longest, field, "at least ") from error


def too_long(tokens: int, longest: int, field: str, least: str = "") -> APIError:
    """400: a prompt of the body's ``field`` has more tokens than fit; ``least`` is what is said before their number.

    Clients know this failure, and shorten the conversation, by its status, its code, or the words "prompt is too long".
    """
    return bad_value(
        field,
        f"the prompt is too long: it has {least}{tokens} tokens; at most {longest} fit, with those to generate",
        code="context_length_exceeded",
    )


def token_limit(
    asked: tuple[str, int | None], default: int | None, prompt: int, longest: int, field: str = "prompt"
) -> int:
    """Tokens to generate at most after ``prompt`` prompt tokens, with ``longest`` for both together.

    ``asked`` is :attr:`.bodies.Sampling.limit`; ``default`` replaces a missing value, None for as many as fit.
    ``field`` is the body's name of its prompt. Raises 400 when prompt and output do not fit.
    """
    name, wanted = asked
    if prompt == 0:
        raise bad_value(field, "the prompt has no tokens")
    if (prompt >= longest and wanted != 0) or prompt > longest:
        raise too_long(prompt, longest, field)
    if wanted is None:
        return longest - prompt if default is None else min(default, longest - prompt)
    if prompt + wanted > longest:
        raise bad_value(
            name,
            f"the prompt is too long for {name}={wanted}: with its {prompt} tokens they make {prompt + wanted}; "
            f"at most {longest} fit",
            code="context_length_exceeded",
        )
    return wanted


async def grammar_of(
    body: Sampling, model: RunningModel, http: HTTPRequest, form: AnswerFormat | None = None
) -> Grammar | None:
    """The compiled grammar of the answer; None for free text, 400 for one that cannot be enforced, 503 where what
    compiles it was ended.

    ``form``: how the answer is read, if it may have reasoning or calls beside its text.
    """
    field = held_to(body)
    if field is None:
        return None
    if not available():
        why = "this server cannot enforce a format: xgrammar is not installed"
        raise bad_value(field, why, code="unsupported_parameter")
    try:
        # Those that were compiled before do not wait for those that are compiled now.
        expression, known = await in_turn(http)(ANY_SIZE, lambda: _expression_and_grammar(body, model, form))
        if known is not None:
            return known
        async with turn(state_of(http).compiling, http):
            return await in_thread(lambda: model.grammar_compiler().compile(expression))
    except GrammarGoneError as error:
        raise APIError(503, str(error), code="grammar_gone", headers={"Retry-After": "1"}) from error
    except GrammarError as error:
        raise bad_value("tools" if field == "tool_choice" else field, str(error)) from error


def _expression_and_grammar(
    body: Sampling, model: RunningModel, form: AnswerFormat | None
) -> tuple[Expression, Grammar | None]:
    """What the answer may be, and its grammar if that is kept."""
    expression = _expression(body, form)
    return expression, model.grammar_compiler().kept(expression)


def held_to(body: Sampling) -> str | None:
    """The field that holds the answer to a schema: ``response_format``, ``tool_choice`` or none."""
    if isinstance(body, ChatBody) and body.call_required:
        return "tool_choice"
    wanted = body.response_format
    return None if wanted is None or wanted.type == "text" else "response_format"


def _expression(body: Sampling, form: AnswerFormat | None) -> Expression:
    """What the answer may be."""
    if form is not None and form.forced:
        return required_calls(form)
    wanted = body.response_format
    schema = None if wanted is None or wanted.json_schema is None else wanted.json_schema.schema_
    return held_answer(form, json_text(ANY_OBJECT if schema is None else schema))


def answer_format(body: ChatBody, model: RunningModel, prompt: list[int]) -> AnswerFormat | None:
    """How the answers to a chat are read; None where they are shown as the model writes them."""
    held, codec = held_to(body), model.codec
    formats = model.formats
    functions = {name: function.arguments for name, function in body.functions.items()}
    strict = frozenset(name for name, function in body.functions.items() if function.strict)
    if formats.reasoning is None and not (functions and (formats.tools is not None or held == "tool_choice")):
        return None
    end = codec.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
    return AnswerFormat(
        formats,
        codec.special_texts,
        functions,
        frozenset() if held == "tool_choice" else strict,  # a grammar holds them
        single=body.single_call,
        forced=held == "tool_choice",
        opened=formats.ends_within_reasoning(end),
        closed=formats.ends_behind_reasoning(end),
        streams=bool(body.stream),
        calls_before=sum(len(message.tool_calls or ()) for message in body.messages),
    )


def sampling_params(
    body: Sampling,
    codec: TextCodec,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: bool = False,
    grammar: Grammar | None = None,
    reasoning: ReasoningBudget | None = None,
    kept_special: Mapping[int, str] | None = None,
) -> SamplingParams:
    """The engine's sampling parameters; missing fields have OpenAI's defaults."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        stop=body.stops,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias, codec),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=body.ignore_eos,
        stop_token_ids=frozenset(_known_tokens(body.stop_token_ids or [], "stop_token_ids", codec)),
        min_tokens=body.min_tokens,
        allowed_token_ids=(
            None
            if body.allowed_token_ids is None
            else tuple(_known_tokens(body.allowed_token_ids, "allowed_token_ids", codec))
        ),
        grammar=grammar,
        reasoning=reasoning,
        kept_special=kept_special or {},
    )


def _known_tokens(tokens: list[int], field: str, codec: TextCodec) -> list[int]:
    highest = max(tokens, default=0)
    if highest >= codec.vocabulary_size:
        raise bad_value(field, f"token {highest} is not in the vocabulary of {codec.vocabulary_size}")
    return tokens


def _logit_bias(bias: dict[str, float] | None, codec: TextCodec) -> dict[int, float]:
    result = {}
    for key, value in (bias or {}).items():
        if not (key.isdecimal() and key.isascii() and len(key) < 10) or int(key) >= codec.vocabulary_size:
            raise bad_value("logit_bias", f"'{key}' is no token id; ids are 0 to {codec.vocabulary_size - 1}")
        result[int(key)] = value
    return result


def check_number(engine: Engine, prompts: int, choices: int) -> None:
    """400 for more sequences than the engine can ever hold: retrying would not help."""
    if prompts * choices > engine.max_requests:
        raise bad_value(
            "n" if prompts == 1 else "prompt",
            f"{prompts} prompts with n={choices} ask for {prompts * choices} answers; "
            f"this server holds at most {engine.max_requests} at once",
        )


def submit_all(engine: Engine, requests: list[Request]) -> None:
    """Submit requests to the engine, all or none; 429 when the queue is full, 503 when it has stopped."""
    submitted: list[Request] = []
    try:
        for request in requests:
            engine.submit(request)
            submitted.append(request)
    except QueueFullError as error:
        _take_back(engine, submitted)
        raise APIError(429, str(error), code="queue_full", headers={"Retry-After": "1"}) from error
    except EngineStoppedError as error:
        _take_back(engine, submitted)
        raise APIError(503, str(error), code="engine_stopped") from error


def _take_back(engine: Engine, submitted: list[Request]) -> None:
    for request in submitted:
        engine.cancel(request)
