"""A whole decode step: the model's matrices, attention, and what is around them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forecast.hardware import Domain
from forecast.layer import Kernel, Layer
from forecast.work import Model, Reading, layer_work


@dataclass(frozen=True)
class Rates:
    """What was measured on one machine, with all its workers.

    Attributes:
        workers: that it was measured with.
        streamed, alone: GB/s of memory that they get together, and one of them alone.
        kernels: of attention, by the shape of a group of heads (`shape_key`) and name.
        select_ns: of choosing among blocks, for a block and a head.
        linear: matrix products, by the number of rows.
        launch_us: one call of the worker pool that has next to nothing to do.
        step_us, layer_us: of a step and of each of its layers, what is neither matrix nor attention, as (for one row,
            for each further row).
        reduce_us: adding up among two ranks, as (for nothing, for each KiB).
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
        """The machine that it was measured on."""
        return Domain(self.workers, self.streamed, self.alone)

    def launch_ns(self, domain: Domain) -> float:
        """Every worker goes in and out by an atomic operation on one word."""
        return self.launch_us * 1e3 + 2 * domain.hop_ns * max(domain.workers - self.workers, 0)

    def linear_of(self, rows: int) -> Kernel:
        """Between two measured numbers of rows the time of computing grows linearly.

        Raises:
            ValueError: more rows than were measured: beyond them other code multiplies.
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
    """A decode step. ms: its time, and parts of it: matrices, attention, ranks that add up, the rest.

    Attributes:
        gb_per_s: of memory, on average over the step, of all ranks.
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
    """A step of `batch` requests of `context` tokens each, which have nothing in common.

    Args:
        domain: of one rank. reading: of a group's heads; ranks do not change it.

    Raises:
        ValueError: the rates have no kernels for the model's shape, or for so many rows.
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
    if ranks > 1:  # twice a layer, the embeddings, and the logits, which are put together
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
