"""A client that asks a server one question at a time: it streams the answer, and measures its cost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx
from openai import APIConnectionError, APIStatusError
from openai.types import CompletionUsage

from fluxion_sglang import wishes
from fluxion_sglang.commands.document import AskError, Prompt
from fluxion_sglang.commands.serving import TPOT, TTFT, UNAUTHORIZED, RequestFailed, Server, added
from fluxion_sglang.config import FluxionConfig

# sglang/requests/requests.py and policy/ have it, too, but import torch, which would delay a question by seconds.
AUTO: Final = FluxionConfig.policy

_MIDDLE, _READ = "fluxion_middle_tokens_total", "fluxion_read_tokens_total"
_CACHED = "sglang:cached_tokens_total"


@dataclasses.dataclass(frozen=True)
class Answer:
    """The cost of one answer.

    Attributes:
        cached: prompt tokens that were cache hits; None if the server does not report it.
        ttft, tpot: seconds to the first token, and seconds per token after it: by the server's clock if /metrics has
            it, else by the client's. None for too few tokens.
        share: of the middle that the heads read; None if it is unknown or there was no middle; `why` gives the reason.
    """

    prompt_tokens: int
    cached: int | None
    ttft: float | None
    tpot: float | None
    share: float | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Asked:
    """A server's description of itself.

    Attributes:
        context: most tokens of a request; None if unknown.
        pool: most tokens of the whole pool; None if unknown.
        fluxion: whether it runs Fluxion.
        policy: the policy spec of its configuration.
        chat: whether the model has a chat template.
        metrics: whether it has a page /metrics of counters.
    """

    server: Server
    model: str
    context: int | None
    pool: int | None
    fluxion: bool
    policy: str
    chat: bool
    metrics: bool

    @staticmethod
    def of(server: Server, model: str | None = None) -> Asked:
        """Query the server.

        Args:
            model: one of the models that it serves; None: its first.

        Raises:
            AskError: no server answers, or it has no such model.
        """
        cards = _models(server)
        names = [str(card["id"]) for card in cards]
        if model is not None and model not in names:
            raise AskError(
                f"{server.url} serves {', '.join(names)}, not {model}; leave --model out, or name one of them."
            )
        card = cards[names.index(model)] if model is not None else cards[0]
        information: dict[str, Any] = {}
        with contextlib.suppress(RequestFailed, ValueError):  # not every server has this page
            information = json.loads(server.get("/server_info"))
        try:
            config = json.loads(information.get("fluxion_config") or "{}")
        except ValueError:  # it names a file on the server's machine
            config = {}
        name = str(card["id"])
        return Asked(
            server,
            name,
            card.get("max_model_len"),
            information.get("max_total_num_tokens"),
            bool(information.get("enable_fluxion")),
            str(config.get("policy") or AUTO),
            _works(lambda: _one_token_of_chat(server, name)),
            _works(server.metrics),
        )

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text on the server. Raises RequestFailed if it has no such endpoint."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return list(self.server.post("/v1/tokenize", body)["tokens"])

    def ask(
        self,
        prompt: Prompt,
        max_tokens: int,
        temperature: float,
        policy: str | None,
        write: Callable[[str, bool], None],
    ) -> Answer:
        """Send one prompt and stream the answer.

        Args:
            policy: spec for the request; None: the server's.
            write: called with each piece of the answer, and whether it is reasoning before the answer.

        Raises:
            APIError: the server refused.
            RequestFailed: the server ended.
        """
        before = self.server.metrics() if self.metrics else {}
        start = time.monotonic()
        arrivals: list[float] = []
        usage: CompletionUsage | None = None
        with _connected(), self._stream(prompt, max_tokens, temperature, policy) as stream:
            for chunk in stream:
                usage = chunk.usage or usage
                if not chunk.choices:
                    continue
                choice = chunk.choices[0]
                text = (choice.delta.content if prompt.chat else choice.text) or ""
                thought = (getattr(choice.delta, "reasoning_content", None) if prompt.chat else None) or ""
                if text or thought:
                    arrivals.append(time.monotonic())
                for piece, is_thought in ((thought, True), (text, False)):
                    if piece:
                        write(piece, is_thought)
        tokens = usage.completion_tokens if usage else len(arrivals)
        ttft = arrivals[0] - start if arrivals else None
        tpot = (arrivals[-1] - arrivals[0]) / (tokens - 1) if arrivals and tokens > 1 else None
        after = self.server.settled(before, f"{TPOT if tokens > 1 else TTFT}_count") if self.metrics else {}
        growth = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return Answer(
            usage.prompt_tokens if usage else 0,
            _cached(usage, growth),
            added(before, after, TTFT) or ttft,
            added(before, after, TPOT) or tpot,
            *self._reads(growth),
        )

    def policy_of(self, spec: str | None, share: float) -> str:
        """The policy to display for a request that named `spec` and read this share of the middle.

        A server's `auto` is `fluxion` or `full`, and only `full` reads everything.
        """
        named = spec or self.policy
        return named if named != AUTO else f"{AUTO}: {'full' if share >= 1 else 'fluxion'}"

    def _stream(self, prompt: Prompt, max_tokens: int, temperature: float, policy: str | None) -> Any:
        extra: dict[str, Any] = {}
        if policy is not None:
            extra["custom_params"] = {wishes.POLICY: policy}
        if prompt.keep_stop:
            extra["no_stop_trim"] = True
        options: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stop": list(prompt.stop) or None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": extra,
        }
        client = self.server.openai()
        if prompt.chat:
            return client.chat.completions.create(messages=[{"role": "user", "content": prompt.text}], **options)
        return client.completions.create(prompt=prompt.text, **options)

    def _reads(self, growth: dict[str, float]) -> tuple[float | None, str]:
        """The share that one answer read, or None and the reason."""
        if not self.fluxion:
            return None, "the server runs without --enable-fluxion"
        if not self.metrics:
            return None, "the server runs without --enable-metrics"
        if growth.get(f"{TTFT}_count", 0.0) > 1:
            return None, "the server had other requests at the same time"
        if growth.get(_MIDDLE, 0.0) <= 0:
            return None, "no decode step had a middle"
        return growth.get(_READ, 0.0) / growth[_MIDDLE], ""


def _cached(usage: CompletionUsage | None, growth: dict[str, float]) -> int | None:
    """Cached prompt tokens, from the answer or else from /metrics: answers need --enable-cache-report."""
    if usage is not None and usage.prompt_tokens_details is not None:
        return usage.prompt_tokens_details.cached_tokens
    return int(growth.get(_CACHED, 0.0)) if growth.get(f"{TTFT}_count") == 1 else None


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    """Convert connection errors of the openai client and of httpx to RequestFailed."""
    try:
        yield
    except (APIConnectionError, httpx.HTTPError) as error:
        raise RequestFailed(str(error)) from error


def _models(server: Server) -> list[dict[str, Any]]:
    try:
        cards: list[dict[str, Any]] = json.loads(server.get("/v1/models"))["data"]
        return cards
    except (RequestFailed, ValueError, KeyError, TypeError) as error:
        if isinstance(error, RequestFailed) and error.status == UNAUTHORIZED:
            raise AskError(str(error)) from None
        raise AskError(
            f"No OpenAI-style server answers at {server.url} ({error}); start one there, or give --model MODEL instead "
            "of --url, which starts one."
        ) from None


def _works(ask: Callable[[], object]) -> bool:
    """Whether a request to the server succeeds."""
    try:
        ask()
    except (APIStatusError, RequestFailed, ValueError):
        return False
    return True


def _one_token_of_chat(server: Server, model: str) -> None:
    """A chat request that every OpenAI-style server refuses if the model has no chat template."""
    hello: Any = [{"role": "user", "content": "Hello"}]
    with _connected():
        server.openai().chat.completions.create(model=model, messages=hello, max_tokens=1)
