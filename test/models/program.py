"""Start SGLang's engine and print its answers.

Stdin holds JSON: {"options": ..., "rounds": [[request, ...], ...]}: the engine's options, and arguments of
Engine.generate; requests of a round run together. {"backend": ..., "answers": [...]} goes to stdout after MARK.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "RESULT "


def answer(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    together: dict[str, Any] = {key: [request[key] for request in requests] for key in requests[0]}
    out = engine.generate(**together, return_logprob=True)
    return [
        {
            "ids": one["output_ids"],
            "cached": one["meta_info"]["cached_tokens"],
            "retractions": one["meta_info"]["num_retractions"],
            "finish": one["meta_info"]["finish_reason"],
            "logprobs": [item[0] for item in one["meta_info"]["output_token_logprobs"]],
            "text": one["text"],
        }
        for one in out
    ]


def main() -> None:
    work = json.load(sys.stdin)
    import sglang

    engine = sglang.Engine(**work["options"])
    try:
        answers = [one for requests in work["rounds"] for one in answer(engine, requests)]
        backend = engine.get_server_info()["attention_backend"]
    finally:
        engine.shutdown()
    print(MARK + json.dumps({"backend": backend, "answers": answers}))


if __name__ == "__main__":
    main()
