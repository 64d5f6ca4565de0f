"""Load of the server: requests of every kind, a few at a time, and an operator who interferes."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from engine import cases
from engine.server import PATIENCE_S, Server

from fluxion_sglang.policy import examples

NEW = 24
"""Tokens of a canary's answer."""
CANARIES = ("full", "fixed:16:0.05", "fluxion", "anchor", "hgca", "psa", "lfps")
"""Policies of the canary prompt, one for each way in which the engine decides and remembers."""
CANARY = 900
"""Tokens of the canary's prompt."""
LEAST_MARGIN = 1e-3
"""Minimum margin, in nats, between the best and the second token of the canary's exact answer; rounding in another
batch then changes nothing."""

YARDSTICKS = ("oracle", "labels")
"""Policies that requests may not use on a server without an audit."""
HOSTILE = ("", "nosuch", "full:1", "fixed:16", "fixed:17:0.5", "fixed:16:nan", "fixed:16:1e-99", ":" * 200, "x" * 9000)
"""Illegal policy specs."""

Params = dict[str, Any]


class Load:
    """Drives one server.

    Args:
        most: tokens of the longest prompt; `pool`: tokens of the host pool.
        workers: concurrent requests, without forks.

    Attributes:
        counts: number of events by name.
        failures: messages about failed checks.
    """

    def __init__(self, server: Server, seed: int, *, pool: int, most: int = 1500, workers: int = 8) -> None:
        self.server, self.url = server, server.url
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._pool, self._most, self._workers = pool, most, workers
        self._lock = threading.Lock()
        self._seeds = random.Random(seed)
        self._specs = [spec for spec in examples() if spec.partition(":")[0] not in YARDSTICKS]
        self._documents = [cases.filler(most, 900 + i) for i in range(4)]
        self._canary = self._decided_prompt()
        self._answers: dict[str, list[int]] = {}

    # --- The canary ---

    def _decided_prompt(self) -> list[int]:
        """A prompt whose exact answer has no near tie between tokens."""
        for seed in range(2000, 2040):
            ids = cases.filler(CANARY, seed)
            got = self.server.generate(ids, NEW, top_logprobs_num=2)
            best = got.raw["meta_info"]["output_top_logprobs"]
            if min(first[0] - second[0] for first, second in best) >= LEAST_MARGIN:
                return ids
        raise RuntimeError("every prompt that was tried has a near tie in its answer")

    def ask_canary(self, spec: str) -> None:
        """Ask an idle server, and record an answer that differs from the first one."""
        self.server.flush()
        params = self._params(NEW, spec)
        self._check_canary(spec, self.server.generate(self._canary, NEW, sampling_params=params).tokens)

    def _check_canary(self, spec: str, tokens: list[int]) -> None:
        self._count("canary")
        if len(tokens) != NEW or tokens != self._answers.setdefault(spec, tokens):
            self._fail(f"the canary answered {tokens} under {spec}, and at first {self._answers.get(spec)}")

    # --- Storms ---

    def storm(self, seconds: float) -> None:
        """Requests for some time; returns when the last one has ended."""
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(self._workers + 2) as pool:
            jobs = [pool.submit(self._work, self._seeds.getrandbits(32), deadline) for _ in range(self._workers)]
            jobs += [pool.submit(self._operate, self._seeds.getrandbits(32), deadline)]
            jobs += [pool.submit(self._sing, deadline)]
        for job in jobs:
            job.result()

    def _work(self, seed: int, deadline: float) -> None:
        rng = random.Random(seed)
        kinds: dict[Callable[[random.Random, requests.Session], None], int] = {
            self._ask: 10, self._fork: 3, self._hang_up: 3, self._abort: 2, self._converse: 2, self._session: 2,
            self._refused: 2, self._too_long: 1,
        }  # fmt: skip
        with requests.Session() as http:
            while time.monotonic() < deadline:
                (kind,) = rng.choices(list(kinds), list(kinds.values()))
                try:
                    kind(rng, http)
                except (requests.RequestException, KeyError, TypeError, ValueError) as error:
                    self._fail(f"{kind.__name__.strip('_')}: {type(error).__name__}: {error}")

    def _operate(self, seed: int, deadline: float) -> None:
        """Pause and continue the server, and empty the cache, while requests run."""
        rng = random.Random(seed)
        while time.monotonic() < deadline:
            time.sleep(min(rng.uniform(1, 4), max(deadline - time.monotonic(), 0)))
            if rng.random() < 0.5:
                requests.post(self.url + "/flush_cache", timeout=PATIENCE_S)  # refused while anything runs
                self._count("flush")
                continue
            mode = rng.choice(["in_place", "retract", "retract", "abort"])
            self._post("/pause_generation", {"mode": mode})
            if mode == "retract" and rng.random() < 0.5:
                requests.post(self.url + "/flush_cache", timeout=PATIENCE_S)
            time.sleep(rng.uniform(0, 0.5))
            self._post("/continue_generation", {})
            self._count(f"pause {mode}")

    def _sing(self, deadline: float) -> None:
        """Ask the canary among other requests. Under `full` its answer does not depend on the batch."""
        while time.monotonic() < deadline:
            got = self.server.generate(self._canary, NEW, sampling_params=self._params(NEW, "full"))
            if got.finish.get("type") == "length":
                self._check_canary("full", got.tokens)
            time.sleep(0.5)

    # --- What a client does ---

    def _ask(self, rng: random.Random, http: requests.Session) -> None:
        new = rng.choice([1, 2, 17, 60, 150])
        params = self._params(new, rng.choice([None, *self._specs]))
        if rng.random() < 0.3:
            params |= {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5}
        body = {"input_ids": self._prompt(rng), "sampling_params": params, "return_logprob": rng.random() < 0.2}
        self._ended("ask", http.post(self.url + "/generate", json=body, timeout=PATIENCE_S), new)

    def _fork(self, rng: random.Random, http: requests.Session) -> None:
        n = rng.randint(2, 4)
        params = self._params(40, rng.choice([None, *self._specs])) | {"n": n, "temperature": 0.9}
        body = {"input_ids": self._prompt(rng), "sampling_params": params}
        reply = http.post(self.url + "/generate", json=body, timeout=PATIENCE_S)
        answers = reply.json()
        if isinstance(answers, list) and len(answers) != n:
            self._fail(f"fork: {len(answers)} answers, and {n} were asked for")
        self._ended("fork", reply, 40)

    def _hang_up(self, rng: random.Random, http: requests.Session) -> None:
        """Open a separate connection and close it during an answer."""
        with self._stream(rng, "") as reply:
            for _, _ in zip(reply.iter_lines(), range(rng.randint(0, 30)), strict=False):
                pass
        self._count("hang up")

    def _abort(self, rng: random.Random, http: requests.Session) -> None:
        rid = f"abort-{rng.getrandbits(64):x}"
        last = b""
        with self._stream(rng, rid) as reply:
            for i, line in enumerate(filter(None, reply.iter_lines())):
                if i == 3:
                    self._post("/abort_request", {"rid": rid})
                last = line if line.startswith(b"data: {") else last
        if reply.status_code == 200 and last:
            data = json.loads(last.removeprefix(b"data: "))
            finish = data.get("meta_info", {}).get("finish_reason") or data.get("error")
            if not finish:
                self._fail("abort: a stream ended without a reason")
        self._count("abort")

    def _converse(self, rng: random.Random, http: requests.Session) -> None:
        """Turns that each begin with all earlier ones."""
        ids, spec = self._prompt(rng)[: self._most // 2], rng.choice([None, *self._specs])
        for _ in range(3):
            body = {"input_ids": ids, "sampling_params": self._params(30, spec)}
            reply = http.post(self.url + "/generate", json=body, timeout=PATIENCE_S)
            self._ended("turn", reply, 30)
            if reply.status_code != 200:
                return
            ids = ids + (reply.json().get("output_ids") or []) + self._filler(rng, 60)

    def _session(self, rng: random.Random, http: requests.Session) -> None:
        """SGLang's own sessions: the server keeps the conversation."""
        session = http.post(self.url + "/open_session", json={"capacity_of_str_len": 20000}, timeout=PATIENCE_S).json()
        rid = None
        for _ in range(rng.randint(1, 3)):
            body = {
                "input_ids": self._filler(rng, rng.randint(30, 300)),
                "sampling_params": self._params(20, rng.choice([None, *self._specs])),
                "session_params": {"id": session, "rid": rid},
            }
            reply = http.post(self.url + "/generate", json=body, timeout=PATIENCE_S)
            self._ended("session turn", reply, 20)
            if reply.status_code != 200 or reply.json()["meta_info"]["finish_reason"]["type"] != "length":
                break  # an aborted node has no successor
            rid = reply.json()["meta_info"]["id"]
        http.post(self.url + "/close_session", json={"session_id": session}, timeout=PATIENCE_S)

    def _refused(self, rng: random.Random, http: requests.Session) -> None:
        params = self._params(20, None) | {"custom_params": {"fluxion_policy": rng.choice([*HOSTILE, 7, ["full"], {}])}}
        body = {"input_ids": self._prompt(rng), "sampling_params": params}
        reply = http.post(self.url + "/generate", json=body, timeout=PATIENCE_S)
        if reply.status_code == 400:
            self._count("refused policy")
        elif not _aborted(reply.json()):
            self._fail(f"a wrong policy got status {reply.status_code}: {reply.text[:200]}")

    def _too_long(self, rng: random.Random, http: requests.Session) -> None:
        body = {"input_ids": self._filler(rng, self._pool + 100), "sampling_params": self._params(5, None)}
        reply = http.post(self.url + "/generate", json=body, timeout=PATIENCE_S)
        self._count("too long")
        if reply.status_code != 400 and not _aborted(reply.json()):
            self._fail(f"a prompt longer than the pool got status {reply.status_code}: {reply.text[:200]}")

    # --- Parts ---

    def _prompt(self, rng: random.Random) -> list[int]:
        """Short and long prompts; half of them share a prefix with others."""
        length = round(self._most ** rng.uniform(0, 1))
        if rng.random() < 0.5:
            return self._filler(rng, length)
        return rng.choice(self._documents)[:length] + self._filler(rng, rng.randint(1, 80))

    @staticmethod
    def _filler(rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(208, 500) for _ in range(length)]

    @staticmethod
    def _params(new: int, spec: str | None) -> Params:
        params: Params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        return params | {"custom_params": {"fluxion_policy": spec}}

    def _stream(self, rng: random.Random, rid: str) -> requests.Response:
        params = self._params(200, rng.choice([None, *self._specs]))
        body = {"input_ids": self._prompt(rng), "sampling_params": params, "stream": True, "rid": rid or None}
        return requests.post(self.url + "/generate", json=body, stream=True, timeout=PATIENCE_S)

    def _post(self, path: str, body: Params) -> None:
        reply = requests.post(self.url + path, json=body, timeout=PATIENCE_S)
        if reply.status_code != 200:
            self._fail(f"{path} got status {reply.status_code}: {reply.text[:200]}")

    def _ended(self, name: str, reply: requests.Response, new: int) -> None:
        """Check that an answer is whole, or aborted by the operator."""
        answers = reply.json()
        for answer in answers if isinstance(answers, list) else [answers]:
            if _aborted(answer):
                self._count(f"{name} aborted")
            elif "meta_info" not in answer or answer["meta_info"]["completion_tokens"] != new:
                self._fail(f"{name}: status {reply.status_code}: {json.dumps(answer)[:300]}")
            else:
                self._count(name)

    def _count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def _fail(self, sentence: str) -> None:
        with self._lock:
            self.failures.append(sentence)


def _aborted(answer: Any) -> bool:
    """Whether the operator ended it: by SGLang's message, not by a failure's."""
    finish = (answer.get("meta_info", {}).get("finish_reason") if isinstance(answer, dict) else None) or {}
    return finish.get("type") == "abort" and "attention failed" not in str(finish.get("message"))
