"""Runs the parts of a trial: fit, the server with the flag and without it, advice. Each part adds to the results."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from fluxion_sglang.commands.here import shell
from fluxion_sglang.commands.serving import (
    MEASURED,
    SMALL,
    RequestRefused,
    Server,
    ServerError,
    free_port,
    launch_command,
)
from fluxion_sglang.commands.trial import advice, facts, pace, runs
from fluxion_sglang.commands.trial.passages import Passage, Passages
from fluxion_sglang.commands.trial.results import (
    FULL,
    OFF,
    Decode,
    Effort,
    Fit,
    ModelFacts,
    Plan,
    Prefill,
    Reads,
    Results,
    TrialError,
)
from fluxion_sglang.openmp import SPINS
from fluxion_sglang.policy import check_spec
from fluxion_sglang.scoring.kl import Distribution, tokens_compared

SPARSE: Final = "sketch"
"""The sparse policy to try if no predictor fits."""

_PROBES = (1024, 2048)
_SLOW_PROBE_S = 20.0  # after a slower first probe there is no second
_SLACK = 1024  # tokens of the pool for the answers after a document
_STOP_S = 5.0
_LEAST_SHARE = 0.4  # of the time, for measurements
_OFF_PATIENCE = 1.5  # factor by which the part without the flag may exceed the time

_MODEL = "both servers serve the MODEL of `fluxion try MODEL`; name it there"
_KEY = "both servers listen on this machine alone and need no key; leave it out"
_OURS: Final = {
    "--model-path": _MODEL,
    "--model": _MODEL,
    "--port": "each server gets a port that is free; leave it out",
    "--host": "both servers are asked on this machine alone; leave it out",
    "--api-key": _KEY,
    "--admin-api-key": _KEY,
    "--dtype": "the trial sizes its pool by it; give it to `fluxion try` itself",
}
"""Options of a server that the trial sets, with the reason and what to do instead of `--server-args`."""


@dataclass(frozen=True)
class Request:
    """A user's request.

    Attributes:
        lengths, policies: []: the trial chooses.
        flags: further options for both servers.
        config: options of `--fluxion-config`.
    """

    model: ModelFacts
    lengths: list[int]
    policies: list[str]
    dtype: str
    flags: list[str]
    config: dict[str, Any]

    @property
    def served_dtype(self) -> str:
        known = self.dtype if self.dtype != "auto" else self.model.dtype
        return known if known in ("bfloat16", "float32") else "bfloat16"

    @property
    def on_cpu(self) -> bool:
        import torch

        return "cpu" in self.flags or "--device=cpu" in self.flags or not torch.cuda.is_available()


Save = Callable[[Results, bool], None]
"""Called after every part; the flag marks the last one."""


@dataclass
class Course:
    """One trial.

    Attributes:
        starts: starts a server, like `serving.running_server`.
    """

    request: Request
    passages: Passages
    results: Results
    save: Save
    clock: pace.Clock
    starts: Callable[..., Any]
    full_tokens: dict[int, list[list[int]]] = field(default_factory=dict)
    """Greedy tokens of policy `full`, by length."""
    fits: dict[bool, Fit | None] = field(default_factory=dict)
    """Capacity of the machine, with and without sketches of keys."""

    def run(self) -> None:
        """Run all parts.

        Raises:
            TrialError: the lengths do not fit the model or the machine.
        """
        try:
            self._fit()
            self._with_the_flag()
            self._without()
        except ServerError as error:
            # Only the first server shows whether the model is served.
            self.results.refusal = error.refusal if self.results.plan is None else ""
            self.results.stopped = "" if self.results.refusal else str(error)
        except RequestRefused as error:
            self.results.stopped = f"The server ended a request: {error}"
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, or a signal that ends the process (`exits_at_signals`)
            self.results.stopped = "Interrupted: what was measured before is here."
            raise
        finally:
            if not self.results.refusal:
                self.results.advice = advice.advise(self.results, self._flags(), self.request.config)
            self._part_done(last=True)

    def _part_done(self, last: bool = False) -> None:
        self.results.seconds = round(self.clock.elapsed, 1)
        self.save(self.results, last)

    # --- parts ---

    def _fit(self) -> None:
        busy, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if busy > cores / 2:
            self.results.notes.append(
                f"The machine had other work when the trial began (a load of {busy:.1f} on {cores} cores). So times "
                "are too long, and may differ from one run to the next."
            )
        request = self.request
        int8 = request.config.get("kv_dtype") == "int8" and request.served_dtype == "bfloat16"
        for sketched in (False, True):
            self.fits[sketched] = facts.fit(request.model, request.served_dtype, request.on_cpu, int8, sketched)
        self.results.fit = self.fits[self._sketched(self._tried)]
        self._part_done()

    @property
    def _tried(self) -> Sequence[str]:
        """Policies that may be tried. The first server must support all of them, because it tells which are legal."""
        return self.request.policies or [SPARSE]

    def _sketched(self, policies: Sequence[str]) -> bool:
        """Whether a server keeps sketches of keys: by the options, or because one of these policies needs them."""
        if isinstance(said := self.request.config.get("sketches"), bool):
            return said
        for spec in policies:
            with suppress(ValueError):  # the server will report the error
                if (policy := check_spec(spec)) is not None and policy.sketches:
                    return True
        return False

    def _with_the_flag(self) -> None:
        tokens = self._pool_tokens()
        config: dict[str, Any] = {"sketches": True} if self._sketched(self._tried) else {}
        config |= {**self.request.config, "policy": FULL, **({"host_tokens": tokens} if tokens else {})}
        began = self.clock.elapsed
        with self._server("with the flag", config, ["--enable-custom-logit-processor"]) as server:
            start = self.clock.elapsed - began
            self._warm_up(server, FULL)
            chosen = self.results.plan = self._plan(server, start)
            self.results.fit = self.fits[self._sketched(chosen.policies)]  # of a server with the tried policies
            self._part_done()
            effort = chosen.effort
            rounds = effort.rounds * len(effort.batches) + 1
            with _bar(len(chosen.lengths) * (effort.documents + len(chosen.policies) * rounds)) as bar:
                for length in chosen.lengths:
                    documents = self._documents(length, effort)
                    self.full_tokens[length] = self._times(
                        server, length, _prompts(documents), chosen.policies, chosen.steps, bar
                    )
                    self._part_done()
                    self._agree(server, length, documents, bar)
                    self._part_done()

    def _without(self) -> None:
        chosen = self.results.plan
        if chosen is None:
            return
        effort = chosen.effort
        pool = ["--max-total-tokens", str(_pool(effort.documents, max(chosen.lengths)))]
        try:
            with self._server("without the flag", None, pool) as server:
                self._warm_up(server, OFF)
                with _bar(len(chosen.lengths) * (effort.documents + effort.rounds * len(effort.batches))) as bar:
                    for length in chosen.lengths:
                        if self._too_long(length):
                            continue
                        prompts = _prompts(self._documents(length, effort))
                        tokens = self._times(server, length, prompts, [OFF], effort.steps, bar)
                        self.results.same += runs.compare(server, length, prompts, tokens, self.full_tokens[length])
                        self._part_done()
        except ServerError as error:
            # SGLang's limits without the flag are no error of the trial.
            self.results.notes.append(f"The part without the flag ended early. {error}")

    # --- steps of a part ---

    def _plan(self, server: Server, start: float) -> Plan:
        """Find the legal policies, the machine's speed, and the lengths that fit into the time."""
        refused: dict[str, str] = {}

        def legal(wanted: Sequence[str]) -> list[str]:
            refused.update({policy: reason for policy in wanted if (reason := self._refused(server, policy))})
            return [policy for policy in wanted if policy not in refused and policy != FULL]

        named = self.request.policies
        policies = [FULL, *(legal(named) if named else legal(["fluxion"]) or legal([SPARSE]))]
        probes: list[tuple[int, float]] = []
        step = 0.0
        longest = self._longest(1)
        for i, length in enumerate(size for size in _PROBES if size <= longest):
            run = runs.decode(server, [self._document(length, seed=2 + i).prompt], FULL, 8)
            probes.append((length, run.first))
            step = runs.median_ms(run.steps) / 1e3
            if run.first > _SLOW_PROBE_S:
                break
        if not probes:
            raise TrialError(
                (self.results.fit.problem if self.results.fit else "")
                or f"A trial needs prompts of {_PROBES[0]:,} tokens, and this model on this machine holds {longest:,}."
            )
        curve = pace.through(probes, step)
        # The server without the flag takes about as long to start. Even after slow starts something must be measured.
        seconds = max(self.clock.left - start - _STOP_S, _LEAST_SHARE * self.clock.limit)
        asked = sorted({min(length, longest) for length in self.request.lengths})
        if any(length > longest for length in self.request.lengths):
            self.results.notes.append(
                f"{max(self.request.lengths):,} tokens were asked for. This model on this machine holds {longest:,}."
            )
        lengths, effort = pace.choose(curve, seconds, self._longest, len(policies), asked)
        took = pace.cost(curve, lengths, effort, len(policies))
        return Plan(lengths, policies, refused, effort, pace.steps_of(curve, effort), round(took, 1))

    def _times(
        self,
        server: Server,
        length: int,
        prompts: list[tuple[int, ...]],
        policies: list[str],
        steps: int,
        bar: tqdm[Any],
    ) -> list[list[int]]:
        """Measure prefill, decode steps and reads of a length. Returns the first policy's tokens, largest batch."""
        chosen = self.results.plan
        assert chosen is not None
        effort = chosen.effort
        self.results.prefill.append(_prefill(server, length, prompts, policies[0], bar))
        times: dict[tuple[int, str], list[float]] = defaultdict(list)
        reads: dict[str, runs.Counters] = defaultdict(runs.Counters)
        tokens: list[list[int]] = []
        for _ in range(effort.rounds):
            for policy in policies:  # in turns, so that drifts of the machine affect all policies
                for batch in effort.batches:
                    bar.set_postfix_str(f"{length:,} tokens, {policy}, batch {batch}")
                    counted = batch == 1 and policy != OFF
                    before = server.settled() if counted else {}
                    run = runs.decode(server, prompts[:batch], policy, steps)
                    if counted:
                        reads[policy].add(before, server.settled())
                    times[batch, policy] += run.steps
                    if policy == policies[0]:
                        tokens = run.tokens
                    bar.update()
        self.results.decode += [
            Decode(length, batch, policy, runs.median_ms(mine), steps, effort.rounds)
            for (batch, policy), mine in times.items()
        ]
        layers = self.request.model.layers
        self.results.reads += [
            Reads(length, policy, mine.share, mine.bytes_per_token(layers)) for policy, mine in reads.items()
        ]
        return tokens

    def _agree(self, server: Server, length: int, documents: list[Passage], bar: tqdm[Any]) -> None:
        """Force the same tokens under every policy: those of the text, or the answer of `full`."""
        chosen = self.results.plan
        assert chosen is not None
        self.results.text = self.passages.what
        told = [
            each if each.following else Passage(each.prompt, tuple(said))
            for each, said in zip(documents, self.full_tokens[length], strict=True)
        ]
        full: list[list[Distribution]] = []
        for policy in chosen.policies:  # `full` is the first
            bar.set_postfix_str(f"{length:,} tokens, {policy}, forced tokens")
            found = runs.forced(server, told, policy, tokens_compared(self.request.model.vocabulary))
            full = full or found
            self.results.agreement.append(runs.agreement(length, policy, full, found))
            bar.update()

    def _refused(self, server: Server, policy: str) -> str:
        """Why the server refuses a policy; "" if it does not."""
        try:
            self._warm_up(server, policy)
        except RequestRefused as error:
            return str(error)
        return ""

    def _warm_up(self, server: Server, policy: str) -> None:
        runs.decode(server, [self._document(pace.SHORTEST, seed=1).prompt], policy, 8)

    def _too_long(self, length: int) -> bool:
        """Whether a length without the flag would exceed the time by far; False for lengths that the user asked for."""
        mine = [row.seconds * row.runs for row in self.results.prefill if (row.length, row.policy) == (length, FULL)]
        late = self.clock.elapsed + sum(mine) > self.clock.limit * _OFF_PATIENCE
        if late and not self.request.lengths:
            self.results.notes.append(f"{length:,} tokens were not measured without the flag: the time was over.")
        return late and not self.request.lengths

    # --- sizes ---

    def _longest(self, documents: int) -> int:
        """Tokens of the longest prompt and answer, if the pool holds `documents` of them."""
        longest = self.request.model.positions - pace.SPARE
        fit = self.results.fit
        return min(longest, fit.tokens // documents - _SLACK) if fit else longest

    def _pool_tokens(self) -> int | None:
        """Size of a pool with every document of the longest length that may be measured; None: the default."""
        wanted = max([*self.request.lengths, self._longest(pace.most_documents())])
        if self.results.fit is None or self.results.fit.problem:
            return None
        if self._longest(1) < pace.SHORTEST:
            raise TrialError(
                f"A trial needs prompts of {pace.SHORTEST:,} tokens, and {self.request.model.name} on this machine "
                f"holds {max(self._longest(1), 0):,}; free memory, or take a model with longer contexts."
            )
        return min(_pool(pace.most_documents(), wanted), self.results.fit.tokens)

    def _documents(self, length: int, effort: Effort) -> list[Passage]:
        return [self._document(length, 1000 * (i + 1) + length, effort.forced) for i in range(effort.documents)]

    def _document(self, length: int, seed: int, forced: int = 8) -> Passage:
        try:
            return self.passages.passage(length, forced, seed)
        except ValueError as error:
            raise TrialError(str(error)) from None

    # --- servers ---

    def _flags(self) -> list[str]:
        dtype = [] if self.request.dtype == "auto" else ["--dtype", self.request.dtype]
        return [*dtype, *SMALL, *self.request.flags]

    @contextmanager
    def _server(self, what: str, fluxion: dict[str, Any] | None, more: Sequence[str] = ()) -> Iterator[Server]:
        # Forced tokens depend on the previous tokens, which overlapped schedules know too late.
        flags = [*self._flags(), *MEASURED, "--disable-overlap-schedule", *more]
        port = free_port()
        command = launch_command(self.request.model.name, port, *flags, fluxion=fluxion)
        self.results.servers[what] = shell(command)
        # Both servers get the flag's OpenMP settings, so that they differ only in the flag.
        quiet = {} if "OMP_WAIT_POLICY" in os.environ else {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPINS}
        with self.starts(command, port, quiet, f"a server {what}") as server:
            yield server


def flags_and_config(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """`--server-args` without the flag and its options, which only one of the servers gets.

    The trial chooses the size of the host pool.

    Raises:
        TrialError: the options cannot be read, or the trial sets one of them itself.
    """
    flags: list[str] = []
    config: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--fluxion-config":
            text = value if equals else next(rest, "")
            try:
                config = dict(json.loads(Path(text[1:]).read_text() if text.startswith("@") else text))
            except (OSError, ValueError, TypeError):
                raise TrialError(
                    f"--server-args has --fluxion-config {text!r}, which is no JSON object and no @FILE with one; give "
                    'one such as {"predictor": "/models/llama/fluxion"}.'
                ) from None
        elif word != "--enable-fluxion":
            # SGLang accepts abbreviated options, and the last of repeated ones.
            for option, reason in _OURS.items():
                if len(name) > len("--") and option.startswith(name):
                    raise TrialError(f"--server-args has {word!r}, but {reason}.")
            flags.append(word)
    return flags, {
        key: value for key, value in config.items() if key not in ("policy", "host_tokens", "host_memory_gb")
    }


def _prefill(server: Server, length: int, prompts: Sequence[Sequence[int]], policy: str, bar: tqdm[Any]) -> Prefill:
    """Prefill each prompt alone, without cache hits; afterwards all of them are in the radix tree."""
    server.flush()
    seconds = []
    for prompt in prompts:
        bar.set_postfix_str(f"{length:,} tokens, {'no flag' if policy == OFF else 'with the flag'}, prefill")
        seconds.append(runs.decode(server, [prompt], policy, 1).first)
        bar.update()
    return Prefill(length, policy, runs.median_ms(seconds) / 1e3, len(seconds))


def _pool(documents: int, length: int) -> int:
    return documents * (length + _SLACK) // 16 * 16


def _prompts(documents: Sequence[Passage]) -> list[tuple[int, ...]]:
    return [document.prompt for document in documents]


def _bar(count: int) -> tqdm[Any]:
    # No bar without a terminal, because it would fill the log.
    return tqdm(total=count, desc="Measuring", unit="run", leave=False, disable=None)
