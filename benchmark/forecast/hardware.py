"""Machines by what a decode step meets there: cores, memory, and the link between NUMA nodes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

MACHINES = Path(__file__).with_name("machines.json")
STREAMED, LINKED = 0.85, 0.7
"""Assumptions: of a memory's nominal rate, what a stream of reads gets on a server of many channels; of a link's, what
reads of another node's memory get."""
HOP_NS = 100.0
"""An assumption: an atomic operation on a word that another core of the node wrote last. Between nodes it takes three
times as long, and on two nodes every other one is between them."""


@dataclass(frozen=True)
class Domain:
    """The workers of one process, and the memory that they read.

    Attributes:
        workers: of the process, one a physical core.
        streamed: GB/s that all of them together get from memory.
        alone: GB/s, the most that one of them gets.
        hop_ns: what a pop of the queue costs. A worker more costs two of them in every layer: it comes and goes.
    """

    workers: int
    streamed: float
    alone: float
    hop_ns: float = HOP_NS

    def offered(self, active: int) -> float:
        """GB/s of memory for each of `active` workers that read at once."""
        return min(self.alone, self.streamed / max(active, 1))


@dataclass(frozen=True)
class Machine:
    """A server whose NUMA nodes are alike.

    Attributes:
        nodes, cores: NUMA nodes; physical cores of each.
        peak_gb_per_s: nominal rate of one node's memory.
        link_gb_per_s: nominal rate at which one node reads the memory of the others; 0 if there are none.
        memory_gib: of the whole machine.
        source: what the numbers are made of.
    """

    name: str
    nodes: int
    cores: int
    peak_gb_per_s: float
    link_gb_per_s: float
    memory_gib: float
    source: str

    def domain(self, ranks: int, alone: float) -> Domain:
        """Of one of so many ranks.

        Either a rank has a node, or one process has all of them. That one's pool lies on all nodes in turn, so the
        others' part of what a worker reads comes over the link.

        Raises:
            ValueError: another number of ranks.
        """
        node = STREAMED * self.peak_gb_per_s
        if ranks == self.nodes:
            return Domain(self.cores, node, alone)
        if ranks != 1:
            raise ValueError(f"{ranks} ranks on {self.nodes} nodes cannot be forecast; say 1 or {self.nodes}")
        remote = (self.nodes - 1) / self.nodes
        over_link = self.nodes * LINKED * self.link_gb_per_s / remote
        return Domain(self.nodes * self.cores, min(self.nodes * node, over_link), alone, 2 * HOP_NS)


def machines(path: Path = MACHINES) -> dict[str, Machine]:
    """The machines of a file, by name."""
    return {row["name"]: Machine(**row) for row in json.loads(path.read_text())}
