"""A whole decode step: the model's matrices, attention, and the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forecast.hardware import Domain
from forecast.layer import Kernel, Layer
from forecast.work import Model, Reading, layer_work


@dataclass(frozen=True)
class Rates:
    """Rates measured on one machine with all its workers.

    Attributes:
        workers: number of workers in the measurement.
        streamed, alone: GB/s of memory for all workers together, and for one alone.
        kernels: attention kernels by shape of a group of heads (`shape_key`) and by name.
        select_ns: time to choose among blocks, per block and head.
        linear: kernels of matrix products, by number of rows.
        launch_us: one call of the worker pool with almost no work.
        step_us, layer_us: time of a step, and of each of its layers, outside matrices and attention: (one row, each
            further row).
        reduce_us: all-reduce between two ranks: (fixed, per KiB).
    """

    workers: int
    streamed: float
    alone: float
    kernels: Mapping[str, Mapping[str, Kernel]]
    select_ns: float
    linear: Mapping[int, Kernel]
    launch_us: float
    step_us: tuple[float, float]
    layer_us: tuple[float, float]
    reduce_us: tuple[float, float]

    @property
    def here(self) -> Domain:
        """The machine of the measurement."""
        return Domain(self.workers, self.streamed, self.alone)

    def launch_ns(self, domain: Domain) -> float:
        """Nanoseconds of a launch. Each worker enters and leaves with an atomic operation on one word."""
        return self.launch_us * 1e3 + 2 * domain.hop_ns * max(domain.workers - self.workers, 0)

    def linear_of(self, rows: int) -> Kernel:
        """Kernel of a matrix product with `rows` rows. Between measured numbers of rows, computing time is interpolated
        linearly.

        Raises:
            ValueError: more rows than measured; other code multiplies them.
        """
        known = sorted(self.linear)
        if rows > known[-1]:
            raise ValueError(f"batches of more than {known[-1]} requests cannot be forecast; say a smaller one")
        below = max(n for n in known if n <= rows)
        above = min(n for n in known if n >= rows)
        one = self.linear[below]
        if above == below:
            return one
        part = (rows - below) / (above - below)
        near = 1 / ((1 - part) / one.near + part / self.linear[above].near)
        return Kernel(near, one.overlap, one.scattered)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rates:
        kernels = {
            shape: {name: Kernel(**kernel) for name, kernel in found.items()}
            for shape, found in data["kernels"].items()
        }
        linear = {int(rows): Kernel(**kernel) for rows, kernel in data["linear"].items()}
        pairs = {name: tuple(data[name]) for name in ("step_us", "layer_us", "reduce_us")}
        return cls(**{**data, **pairs, "kernels": kernels, "linear": linear})


def shape_key(model: Model) -> str:
    return f"G={model.group} D={model.head_dim}"


@dataclass(frozen=True)
class Forecast:
    """Time of a decode step (ms) and its parts: matrices, attention, all-reduce between ranks, the rest.

    Attributes:
        gb_per_s: memory rate of all ranks, on average over the step.
    """

    ms: float
    matrices_ms: float
    attention_ms: float
    reduce_ms: float
    rest_ms: float
    gb_per_s: float


def forecast(
    model: Model, domain: Domain, rates: Rates, batch: int, context: int, reading: Reading, ranks: int = 1
) -> Forecast:
    """Forecast a step of `batch` requests of `context` tokens each, without a common prefix.

    Args:
        domain: of one rank. reading: of a group of heads; it does not depend on the ranks.

    Raises:
        ValueError: no kernels were measured for the model's shape or for this batch size.
    """
    own = model.rank(ranks)
    launch = rates.launch_ns(domain)
    linear = rates.linear_of(batch)
    rate = domain.workers * linear.rate(domain.offered(domain.workers))
    weights = model.layers * sum(own.matrices()) + own.head_bytes()
    matrices = weights / rate + (model.layers * len(own.matrices()) + 1) * launch
    items, tasks = layer_work(own, batch, context, reading, rates.select_ns)
    if (shape := shape_key(own)) not in rates.kernels:
        raise ValueError(f"models with {shape} cannot be forecast; measured are {', '.join(rates.kernels)}")
    layer = Layer(items, tasks, domain, rates.kernels[shape]).run()
    attention = model.layers * (layer.ns + launch)
    reduce = 0.0
    if ranks > 1:  # two per layer, one for the embeddings, and the gather of the logits
        base, kib = rates.reduce_us
        reduce = (2 * model.layers + 1) * (base + kib * batch * model.hidden * 2 / 1024) * 1e3
        reduce += (base + kib * batch * model.vocabulary * 2 / 1024) * 1e3
    rows = batch - 1
    rest = (rates.step_us[0] + rows * rates.step_us[1]) * 1e3
    rest += model.layers * (rates.layer_us[0] + rows * rates.layer_us[1]) * 1e3
    ns = matrices + attention + reduce + rest
    return Forecast(
        ms=ns / 1e6,
        matrices_ms=matrices / 1e6,
        attention_ms=attention / 1e6,
        reduce_ms=reduce / 1e6,
        rest_ms=rest / 1e6,
        gb_per_s=ranks * (weights + model.layers * layer.nbytes) / ns,
    )
