"""Refuses bad requests in the tokenizer process: the client gets status 400, and other requests are not affected.

Every route of SGLang's HTTP server passes here. SGLang's schema of its internal messages checks types; SGLang itself
applies it only to msgpack messages. `bounds.py` checks values.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NoReturn

import fastapi
import msgspec
import torch

from fluxion_sglang.config import ConfigError
from fluxion_sglang.executor import metrics
from fluxion_sglang.sglang.containment import bounds, budgets, counts
from fluxion_sglang.sglang.containment.ending import said
from fluxion_sglang.sglang.requests import asked
from fluxion_sglang.sglang.start.options import options_of

_INTERNAL = ("is_normalized", "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len")
"""Fields of SamplingParams that SGLang fills itself."""

_WHOLE = ("max_new_tokens", "min_new_tokens", "top_k", "n", "beam_width", "stream_interval", "sampling_seed")
"""Integer fields of SamplingParams. JSON does not distinguish 128 from 128.0, and some clients send the latter."""

_BY_PROCESS = ("input_ids", "time_stats", "mm_inputs", "input_embeds", "positional_embed_overrides")
"""Fields that are checked elsewhere, or are made by SGLang."""

_tables: weakref.WeakKeyDictionary[Any, Sequence[bounds.Bound]] = weakref.WeakKeyDictionary()


async def generate_request(
    original: Callable[..., Any], manager: Any, obj: Any, request: Any = None
) -> AsyncIterator[Any]:
    """AROUND TokenizerManager.generate_request: an exception before a request's first output is the request's fault.

    Raises:
        ValueError: one sentence for the client. SGLang's routes answer it with status 400, also for a stream.
    """
    begun = False
    try:
        async with aclosing(original(manager, obj, request)) as outputs:
            async for output in outputs:
                begun = True
                yield output
    except (ValueError, fastapi.HTTPException):
        raise
    except Exception as error:
        if begun:
            raise
        _refuse(f"this request cannot be read ({said(error)}); correct it.", error)


def normalize_batch_and_arguments(original: Callable[..., None], obj: Any) -> None:
    """AROUND GenerateReqInput.normalize_batch_and_arguments, which makes `n` copies of the request: check `n` first.

    Raises:
        ValueError: one sentence for the client.
    """
    params = obj.sampling_params
    for each in params if isinstance(params, list) else [params]:
        if each is not None:
            _check_n(each, _prompts(obj))
    original(obj)


def _prompts(obj: Any) -> int:
    if isinstance(obj.text, list):
        return len(obj.text)
    ids = obj.input_ids
    return len(ids) if isinstance(ids, list) and ids and isinstance(ids[0], list) else 1


def _check_n(params: object, prompts: int) -> None:
    if not isinstance(params, dict):
        _refuse("sampling_params takes a JSON object, or a list of one for each prompt.")
    _make_whole(params)
    if params.get("n", 1) is None:
        del params["n"]
    n = params.get("n", 1)
    if not (type(n) is int and 1 <= n <= bounds.SAMPLES):
        _refuse(f"n is {n!r:.60}, but takes numbers from 1 to {bounds.SAMPLES}.")
    if n > 1 and n * prompts > bounds.ANSWERS:
        _refuse(f"{prompts} prompts with n {n} have more than {bounds.ANSWERS} answers; send fewer prompts at once.")


def init_req_state(original: Callable[..., None], manager: Any, obj: Any, request: Any = None) -> None:
    """AROUND TokenizerManager._init_req_state: check names and times by which the tokenizer process tracks requests.

    Clients may not use the names of SGLang's own health checks. SGLang drops such a request while others run, and waits
    for it when it shuts down.

    Raises:
        ValueError: one sentence for the client.
    """
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    if not isinstance(obj.received_time, int | float | None):  # routes without a schema let clients set it
        _refuse(f"received_time is {obj.received_time!r:.60}, but takes seconds.")
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    path = "" if request is None else request.url.path.removeprefix(request.scope.get("root_path", ""))
    for rid in rids:
        if not isinstance(rid, str) or not rid:  # SGLang cannot abort a request without a name
            _refuse(f"rid is {rid!r:.60}, but takes a string that is not empty.")
        if rid.startswith(HEALTH_CHECK_RID_PREFIX) and request is not None and not path.startswith("/health"):
            _refuse(f"rid begins with {HEALTH_CHECK_RID_PREFIX}, which SGLang's health checks do; use another one.")
    original(manager, obj, request)


async def answer_ollama(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any) -> Any:
    """AROUND OllamaServing.handle_generate and .handle_chat: a refusal has status 400, also for a stream.

    Raises:
        HTTPException: the request is refused. Without this, SGLang answers 500, or begins a stream with status 200 and
            cuts it.
    """
    try:
        response = await original(serving, request, raw_request)
        if (chunks := getattr(response, "body_iterator", None)) is not None:
            response.body_iterator = _continued(await anext(chunks, b""), chunks)
    except ValueError as error:
        raise fastapi.HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error
    return response


async def _continued(first: Any, chunks: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield first
    async for chunk in chunks:
        yield chunk


def validate_one_request(
    original: Callable[..., None], manager: Any, obj: Any, input_ids: Sequence[int] | None
) -> None:
    """AROUND TokenizerManager._validate_one_request: SGLang's own checks, then the prompt and the policy.

    Raises:
        ValueError: one sentence for the client.
    """
    original(manager, obj, input_ids)
    _check_policy(manager.server_args, getattr(obj, "sampling_params", None))
    if input_ids is None:
        if (embeds := getattr(obj, "input_embeds", None)) is not None:
            _check_embeds(manager.model_config, obj, embeds)
        return
    if not len(input_ids):
        session = getattr(obj, "session_params", None)
        # The session's tokens may be the whole prompt; if it has none, the scheduler refuses the request.
        if not (isinstance(session, dict) and session.get("id")):
            raise ValueError("The prompt has no tokens, and a model has nothing to go on; give at least one token.")
        return
    vocabulary = int(manager.model_config.vocab_size)
    least, most = min(input_ids), max(input_ids)
    if least < 0 or most >= vocabulary:
        raise ValueError(
            f"The prompt has the token {least if least < 0 else most}, but this model has those from 0 to "
            f"{vocabulary - 1}; use the model's own tokenizer."
        )


def _check_embeds(model: Any, obj: Any, embeds: Any) -> None:
    problem = bounds.embedding_problem(embeds, int(model.hidden_size))
    if problem is not None:
        _refuse(problem)
    if getattr(obj, "session_params", None):
        _refuse("a session takes prompts of tokens, and this one has input_embeds; leave the session out.")
    if model.dtype != torch.bfloat16:
        _refuse("SGLang computes input_embeds in bfloat16 alone; send tokens, or start the server with that dtype.")


def create_tokenized_object(original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND TokenizerManager._create_tokenized_object: check types and bounds of the message to the scheduler.
    Multimodal models are served as language models, so it must be text.

    Raises:
        ValueError: one sentence for the client.
    """
    params = obj.sampling_params
    if obj.contains_mm_input():  # SGLang would ignore the media
        _refuse("this server has a language model alone; send text without images, video or audio.")
    if not isinstance(params, dict):
        _refuse("sampling_params takes a JSON object.")
    if given := [name for name in _INTERNAL if name in params]:
        _refuse(f"sampling_params has {given[0]}, which SGLang fills itself; leave it out.")
    if obj.lora_id is not None and obj.lora_path is None:
        _refuse("lora_id is SGLang's own; name the adapter as lora_path.")
    _make_whole(params)
    tokenized = original(manager, obj, *args, **kwargs)
    _check_types(tokenized)
    if type(tokenized).__name__ == "TokenizedGenerateReqInput":
        _check_values(manager, tokenized)
    return tokenized


def _make_whole(params: dict[str, Any]) -> None:
    """Convert values that SGLang accepts to the types that its schema requires."""
    if isinstance(bias := params.get("logit_bias"), dict):
        params["logit_bias"] = {str(token): value for token, value in bias.items()}
    for name in _WHOLE:
        value = params.get(name)
        if isinstance(value, float) and value.is_integer():
            params[name] = int(value)


def _check_types(tokenized: Any) -> None:
    from sglang.srt.managers.io_struct import msgpack_decode, msgpack_encode

    bare = copy.copy(tokenized)
    for name in _BY_PROCESS:
        if hasattr(bare, name):
            setattr(bare, name, None)
    bare.sampling_params = copy.copy(tokenized.sampling_params)
    if not isinstance(bare.sampling_params.custom_params, dict | None):
        _refuse("custom_params takes a JSON object.")
    bare.sampling_params.custom_params = None  # may contain lists, which the schema refuses
    try:
        msgpack_decode(msgpack_encode(bare))
    except (msgspec.MsgspecError, TypeError, UnicodeError, OverflowError, ValueError) as error:
        _refuse(f"this request has a field of a wrong type ({_field_of(error, tokenized)}); correct it.", error)


def _field_of(error: Exception, tokenized: Any) -> str:
    """The name of the wrong field. msgspec gives its index in the message, which means nothing to a client."""
    text = str(error)
    head, _, place = text.partition("`$[")
    head = head.removesuffix(" in ").removesuffix(" - at ")
    index = place.partition("]")[0]
    fields = msgspec.structs.fields(tokenized)
    if index.isdecimal() and 0 < int(index) <= len(fields):
        name = fields[int(index) - 1].name  # index 0 is the tag
        inner = place.partition("][")[2].partition("]")[0]
        if name == "sampling_params" and inner.isdecimal():
            name = msgspec.structs.fields(tokenized.sampling_params)[int(inner)].name
        return f"{name}: {head}"
    return text


def _check_values(manager: Any, tokenized: Any) -> None:
    vocabulary = int(manager.model_config.vocab_size)
    table = _tables.get(manager)
    if table is None:
        table = _tables[manager] = bounds.of_model(vocabulary)
    for problem in bounds.problems(tokenized, table):
        _refuse(problem)
    params = tokenized.sampling_params
    if params.top_k > vocabulary:
        from sglang.srt.sampling.sampling_params import TOP_K_ALL

        params.top_k = TOP_K_ALL
    overrides = tokenized.positional_embed_overrides
    if overrides is not None:
        _check_overrides(manager, tokenized, overrides)
    if manager.server_args.tp_size > 1:
        for pattern in params.stop_regex_strs:
            if not budgets.has_a_bound(pattern):
                _refuse(
                    "stop_regex has repeats that may match in many ways, which several ranks cannot give a time limit; "
                    "use at most one repeat, with no other and no alternative in it."
                )


def _check_overrides(manager: Any, tokenized: Any, overrides: Any) -> None:
    """Check embeddings that replace tokens; only SGLang's own scoring makes them."""
    width, tokens = int(manager.model_config.hidden_size), len(tokenized.input_ids or ())
    embeds, positions = getattr(overrides, "embeds", None), getattr(overrides, "positions", None)
    if embeds is None or positions is None:
        _refuse("positional_embed_overrides is SGLang's own; leave it out.")
    if any(not 0 <= int(position) < tokens for position in positions):
        _refuse(f"an embedding is to take the place of a token outside of the prompt, which has {tokens}.")
    if any(int(embed.shape[-1]) != width for embed in embeds):
        _refuse(f"an embedding that takes the place of a token has not the model's width, {width}.")
    chunk = manager.server_args.chunked_prefill_size or 0
    if 0 < chunk < tokens:
        _refuse(f"a prompt with embeddings in the place of tokens takes at most {chunk} tokens, which are one pass.")


def no_memory_saver(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND TokenizerManager.release_memory_occupation and .resume_memory_occupation. Raises ValueError."""
    raise ValueError(
        "memory cannot be released and resumed with --enable-fluxion, because the KV cache is in host memory; stop the "
        "server instead."
    )


def _check_policy(server_args: Any, sampling_params: Any) -> None:
    try:
        options = options_of(server_args)
    except ConfigError:  # the file has changed since the start; the scheduler's process has the old options
        return
    try:
        asked.check(sampling_params, options)
    except ValueError:
        if server_args.enable_metrics:
            metrics.count_refused_spec()
        raise


def _refuse(sentence: str, cause: Exception | None = None) -> NoReturn:
    counts.contained("door")
    raise ValueError(sentence) from cause
