"""The order of a trial: fit, the server with the flag, the server without it, advice. Results grow part by part."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tqdm import tqdm

from fluxion_sglang.commands.serving import (
    MEASURED,
    SMALL,
    RequestRefused,
    Server,
    ServerError,
    free_port,
    launch_command,
    shell,
)
from fluxion_sglang.commands.trial import advice, measure, model, plan, same
from fluxion_sglang.commands.trial.quiz import Document, Quiz
from fluxion_sglang.commands.trial.results import (
    FULL,
    OFF,
    Answers,
    Decode,
    Effort,
    ModelFacts,
    Plan,
    Prefill,
    Reads,
    Results,
    TrialError,
)
from fluxion_sglang.openmp import SPINS

SPARSE: Final = "fixed:16:0.10"
"""What is tried where no predictor fits."""

_PROBES = (1024, 2048)
_SLOW_PROBE_S = 20.0  # where the first probe takes longer, it is the only one
_SLACK = 1024  # tokens of the pool for the questions and answers of a document
_STOP_S = 5.0
_LEAST_SHARE = 0.4  # of the time, for measuring
_OFF_PATIENCE = 1.5  # how far the part without the flag may run past the time


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        lengths, policies: [] leaves them to the trial.
        flags: more words for both servers.
        config: options of `--fluxion-config`.
    """

    model: ModelFacts
    lengths: list[int]
    policies: list[str]
    dtype: str
    exact: bool
    flags: list[str]
    config: dict[str, Any]

    @property
    def served_dtype(self) -> str:
        known = self.dtype if self.dtype != "auto" else self.model.dtype
        return known if known in ("bfloat16", "float32") else "bfloat16"

    @property
    def on_cpu(self) -> bool:
        import torch

        return "cpu" in self.flags or not torch.cuda.is_available()


Save = Callable[[Results, bool], None]
"""Called after every part; the flag says whether it was the last one."""


@dataclass
class Course:
    """One trial.

    Attributes:
        starts: what starts a server, as `serving.running_server` does.
    """

    request: Request
    quiz: Quiz
    results: Results
    save: Save
    clock: plan.Clock
    starts: Callable[..., Any]
    full_tokens: dict[tuple[str, int], list[list[int]]] = field(default_factory=dict)
    """Greedy tokens of policy `full`, by dtype and length."""

    def run(self) -> None:
        """All parts.

        Raises:
            TrialError: the lengths do not fit the model or the machine.
        """
        try:
            self._fit()
            self._with_the_flag()
            self._without()
            if self.request.exact and self.request.served_dtype != "float32":
                self._in_float32()
        except ServerError as error:
            # Only the first server says whether the model is served.
            self.results.refusal = error.refusal if self.results.plan is None else ""
            self.results.stopped = "" if self.results.refusal else str(error)
        except RequestRefused as error:
            self.results.stopped = f"The server ended a request: {error}"
        except KeyboardInterrupt:
            self.results.stopped = "Interrupted: what was measured before is here."
            raise
        finally:
            if not self.results.refusal:
                self.results.advice = advice.advise(self.results, self._flags(), self.request.config)
            self._part_done(last=True)

    def _part_done(self, last: bool = False) -> None:
        self.results.seconds = round(self.clock.elapsed, 1)
        self.save(self.results, last)

    # Parts.

    def _fit(self) -> None:
        busy, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if busy > cores / 2:
            self.results.notes.append(
                f"The machine had other work when the trial began (a load of {busy:.1f} on {cores} cores). So times "
                "are too long, and may differ from one run to the next."
            )
        self.results.fit = model.fit(self.request.model, self.request.served_dtype, self.request.on_cpu)
        self._part_done()

    def _with_the_flag(self) -> None:
        tokens = self._pool_tokens()
        config = {**self.request.config, "policy": FULL, **({"host_tokens": tokens} if tokens else {})}
        began = self.clock.elapsed
        with self._server("with the flag", config) as server:
            start = self.clock.elapsed - began
            measure.decode(server, [self._document(plan.SHORTEST, 1, seed=1)[0].prompt], FULL, 8)  # warms up
            chosen = self._plan(server, start)
            self.results.plan = chosen
            self._part_done()
            runs = len(chosen.lengths) * _runs(chosen)
            with _bar(runs, "Measuring") as bar:
                for length in chosen.lengths:
                    self._length_with_the_flag(server, length, bar)
                    self._part_done()

    def _without(self) -> None:
        chosen = self.results.plan
        if chosen is None:
            return
        pool = ["--max-total-tokens", str(_pool(chosen.effort.documents, max(chosen.lengths)))]
        try:
            with self._server("without the flag", None, pool) as server:
                measure.decode(server, [self._document(plan.SHORTEST, 1, seed=1)[0].prompt], OFF, 8)
                effort = chosen.effort
                runs = effort.documents + effort.rounds * len(effort.batches)
                with _bar(runs * len(chosen.lengths), "Measuring") as bar:
                    for length in chosen.lengths:
                        if self._too_long(length):
                            continue
                        self._length_without(server, length, bar)
                        self._part_done()
        except ServerError as error:
            # What SGLang cannot do without the flag is no fault of the trial.
            self.results.notes.append(f"The part without the flag ended early. {error}")

    def _in_float32(self) -> None:
        """Tokens of the shortest length, from two more servers."""
        chosen = self.results.plan
        if chosen is None:
            return
        length = chosen.lengths[0]
        prompts = _prompts(self._documents(length, chosen.effort))
        pool = _pool(chosen.effort.documents, length)
        config = {**self.request.config, "policy": FULL, "host_tokens": pool}
        with self._server("with the flag, in float32", config, dtype="float32") as server:
            full = measure.decode(server, prompts, FULL, chosen.effort.steps).tokens
        with self._server(
            "without the flag, in float32", None, ["--max-total-tokens", str(pool)], dtype="float32"
        ) as server:
            off = measure.decode(server, prompts, OFF, chosen.effort.steps).tokens
            self.results.same += same.compare(server, length, "float32", prompts, off, full)

    # What parts are made of.

    def _plan(self, server: Server, start: float) -> Plan:
        """Which policies are legal, how fast the machine is, and what fits into the time."""
        wanted = self.request.policies or ["fluxion"]
        refused = {policy: reason for policy in wanted if (reason := self._refused(server, policy))}
        policies = [policy for policy in wanted if policy not in refused and policy != FULL]
        if not policies and not self.request.policies:
            policies = [SPARSE]
        policies = [FULL, *policies]
        probes: list[tuple[int, float]] = []
        step = 0.0
        longest = self._longest(1)
        for i, length in enumerate(size for size in _PROBES if size <= longest):
            run = measure.decode(server, [self._document(length, 1, seed=2 + i)[0].prompt], FULL, 8)
            probes.append((length, run.first))
            step = measure.median_ms(run.steps) / 1e3
            if run.first > _SLOW_PROBE_S:
                break
        pace = plan.pace(probes, step)
        # The server without the flag takes about as long to start. Slow starts must not leave nothing to measure.
        seconds = max(self.clock.left - start - _STOP_S, _LEAST_SHARE * self.clock.limit)
        asked = sorted({min(length, longest) for length in self.request.lengths})
        if any(length > longest for length in self.request.lengths):
            self.results.notes.append(
                f"{max(self.request.lengths):,} tokens were asked for. This model on this machine holds {longest:,}."
            )
        lengths, effort = plan.choose(pace, seconds, self._longest, len(policies), asked)
        took = plan.cost(pace, lengths, effort, len(policies))
        return Plan(lengths, policies, refused, effort, plan.steps_of(pace, effort), round(took, 1))

    def _length_with_the_flag(self, server: Server, length: int, bar: tqdm[Any]) -> None:
        chosen = self.results.plan
        assert chosen is not None
        effort, documents = chosen.effort, self._documents(length, chosen.effort)
        prompts = _prompts(documents)
        self.results.prefill.append(_prefill(server, length, prompts, FULL, bar))
        steps: dict[tuple[int, str], list[float]] = {}
        reads = {policy: measure.Counters() for policy in chosen.policies}
        for _ in range(effort.rounds):
            for policy in chosen.policies:  # in turns, so that the machine's moods are shared
                for batch in effort.batches:
                    bar.set_postfix_str(f"{length:,} tokens, {policy}, batch {batch}")
                    before = server.settled()
                    run = measure.decode(server, prompts[:batch], policy, chosen.steps)
                    if batch == 1:
                        reads[policy].add(before, server.settled())
                    steps.setdefault((batch, policy), []).extend(run.steps)
                    if policy == FULL:
                        self.full_tokens[self.request.served_dtype, length] = run.tokens
                    bar.update()
        self.results.decode += [
            Decode(length, batch, policy, measure.median_ms(mine), chosen.steps, effort.rounds)
            for (batch, policy), mine in steps.items()
        ]
        layers = self.request.model.layers
        self.results.reads += [
            Reads(length, policy, mine.share, mine.bytes_per_token(layers)) for policy, mine in reads.items()
        ]
        self._part_done()
        for policy in chosen.policies:
            self.results.answers.append(self._ask(server, length, policy, documents, bar))

    def _ask(self, server: Server, length: int, policy: str, documents: list[Document], bar: tqdm[Any]) -> Answers:
        """One question about every document at a time."""
        self.results.needles = self.quiz.what
        right = asked = 0
        for i in range(max(map(len, documents))):
            bar.set_postfix_str(f"{length:,} tokens, {policy}, needles")
            questions = [document[i] for document in documents if i < len(document)]
            prompts = [question.prompt for question in questions]
            run = measure.decode(server, prompts, policy, self.quiz.max_new, stop=True)
            right += sum(self.quiz.right(*pair) for pair in zip(questions, run.tokens, strict=True))
            asked += len(questions)
            bar.update()
        return Answers(length, policy, right, asked)

    def _length_without(self, server: Server, length: int, bar: tqdm[Any]) -> None:
        chosen = self.results.plan
        assert chosen is not None
        effort = chosen.effort
        prompts = _prompts(self._documents(length, effort))
        self.results.prefill.append(_prefill(server, length, prompts, OFF, bar))
        tokens: list[list[int]] = []
        steps: dict[int, list[float]] = {batch: [] for batch in effort.batches}
        for _ in range(effort.rounds):
            for batch in effort.batches:
                bar.set_postfix_str(f"{length:,} tokens, no flag, batch {batch}")
                run = measure.decode(server, prompts[:batch], OFF, effort.steps)
                steps[batch] += run.steps
                tokens = run.tokens
                bar.update()
        self.results.decode += [
            Decode(length, batch, OFF, measure.median_ms(mine), effort.steps, effort.rounds)
            for batch, mine in steps.items()
        ]
        dtype = self.request.served_dtype
        self.results.same += same.compare(server, length, dtype, prompts, tokens, self.full_tokens[dtype, length])

    def _refused(self, server: Server, policy: str) -> str:
        """Why the server does not take a policy; "" where it does."""
        try:
            measure.decode(server, [self._document(plan.SHORTEST, 1, seed=1)[0].prompt], policy, 3)
        except RequestRefused as error:
            return str(error)
        return ""

    def _too_long(self, length: int) -> bool:
        """Whether a length without the flag would go far past the time; wanted lengths never do."""
        mine = [row.seconds * row.runs for row in self.results.prefill if (row.length, row.policy) == (length, FULL)]
        late = self.clock.elapsed + sum(mine) > self.clock.limit * _OFF_PATIENCE
        if late and not self.request.lengths:
            self.results.notes.append(f"{length:,} tokens were not measured without the flag: the time was over.")
            return True
        return False

    # Sizes.

    def _longest(self, documents: int) -> int:
        """Tokens of the longest prompt and answer, with so many documents in the pool."""
        longest = self.request.model.positions - plan.SPARE
        fit = self.results.fit
        return min(longest, fit.tokens // documents - _SLACK) if fit else longest

    def _pool_tokens(self) -> int | None:
        """The pool holds every document of the longest length that may be measured."""
        wanted = max([*self.request.lengths, self._longest(plan.most_documents())])
        if self.results.fit is None or self.results.fit.problem:
            return None  # the server says what is wrong
        if self._longest(1) < plan.SHORTEST:
            raise TrialError(
                f"A trial needs prompts of {plan.SHORTEST:,} tokens, and {self.request.model.name} on this machine "
                f"holds {max(self._longest(1), 0):,}; free memory, or take a model with longer contexts."
            )
        return min(_pool(plan.most_documents(), wanted), self.results.fit.tokens)

    def _documents(self, length: int, effort: Effort) -> list[Document]:
        return [self._document(length, effort.questions, 1000 * (i + 1) + length) for i in range(effort.documents)]

    def _document(self, length: int, questions: int, seed: int) -> Document:
        try:
            return self.quiz.document(length, questions, seed)
        except ValueError as error:
            raise TrialError(str(error)) from None

    # Servers.

    def _flags(self) -> list[str]:
        dtype = [] if self.request.dtype == "auto" else ["--dtype", self.request.dtype]
        return [*dtype, *SMALL, *self.request.flags]

    @contextmanager
    def _server(
        self, what: str, fluxion: dict[str, Any] | None, more: Sequence[str] = (), dtype: str | None = None
    ) -> Iterator[Server]:
        flags = [*self._flags(), *MEASURED, *more, *(["--dtype", dtype] if dtype else [])]
        port = free_port()
        command = launch_command(self.request.model.name, port, *flags, fluxion=fluxion)
        self.results.servers[what] = shell(command)
        # Both servers get what the flag sets, so that they differ by the flag alone.
        quiet = {} if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPINS}
        with self.starts(command, port, quiet, f"a server {what}") as server:
            yield server


def flags_and_config(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """`--server-args` without those of ours: the flag and its options, which only one of the servers gets.

    Raises:
        TrialError: the options are no JSON object.
    """
    flags: list[str] = []
    config: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--fluxion-config":
            text = value if equals else next(rest, "")
            try:
                config = dict(json.loads(text))
            except (ValueError, TypeError):
                raise TrialError(
                    f"--server-args has --fluxion-config {text!r}, which is no JSON object; give one such as "
                    '{"predictor": "/models/llama/fluxion"}.'
                ) from None
        elif word != "--enable-fluxion":
            flags.append(word)
    return flags, {key: value for key, value in config.items() if key not in ("policy", "host_tokens")}


def _prefill(server: Server, length: int, prompts: Sequence[Sequence[int]], policy: str, bar: tqdm[Any]) -> Prefill:
    """Each prompt alone, none of it in the radix tree; afterwards all of them are."""
    server.flush()
    seconds = []
    for prompt in prompts:
        bar.set_postfix_str(f"{length:,} tokens, {'no flag' if policy == OFF else 'with the flag'}, prefill")
        seconds.append(measure.decode(server, [prompt], policy, 1).first)
        bar.update()
    return Prefill(length, policy, measure.median_ms(seconds) / 1e3, len(seconds))


def _runs(chosen: Plan) -> int:
    effort = chosen.effort
    return effort.documents + len(chosen.policies) * (effort.rounds * len(effort.batches) + effort.questions)


def _pool(documents: int, length: int) -> int:
    return documents * (length + _SLACK) // 16 * 16


def _prompts(documents: Sequence[Document]) -> list[tuple[int, ...]]:
    return [document[0].prompt for document in documents]


def _bar(runs: int, what: str) -> tqdm[Any]:
    # Where there is no terminal, no bar: it would fill the log with copies of itself.
    return tqdm(total=runs, desc=what, unit="run", leave=False, disable=None)
