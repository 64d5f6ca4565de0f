"""Machines as a decode step sees them: cores, memory, and the link between NUMA nodes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

MACHINES = Path(__file__).with_name("machines.json")
STREAMED, LINKED = 0.85, 0.7
"""Assumptions: share of a memory's nominal rate that a stream of reads reaches on a server with many channels, and
share of a link's nominal rate that reads of another node's memory reach."""
HOP_NS = 100.0
"""Assumption: nanoseconds of an atomic operation on a word that another core of the node wrote last. Between nodes it
takes three times as long. On two nodes every second operation crosses them, so the mean is 2 * HOP_NS."""


@dataclass(frozen=True)
class Domain:
    """The workers of one process, and the memory that they read.

    Attributes:
        workers: of the process, one per physical core.
        streamed: GB/s that all workers together read from memory.
        alone: GB/s that one worker reads at most.
        hop_ns: time of one pop from the queue. Each further worker adds two such operations per layer, to enter and to
            leave.
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
    """A server with equal NUMA nodes.

    Attributes:
        nodes, cores: NUMA nodes; physical cores of each node.
        peak_gb_per_s: nominal rate of one node's memory.
        link_gb_per_s: nominal rate at which one node reads memory of other nodes; 0 if there is only one node.
        memory_gib: memory of the whole machine.
        source: where the numbers come from.
    """

    name: str
    nodes: int
    cores: int
    peak_gb_per_s: float
    link_gb_per_s: float
    memory_gib: float
    source: str

    def domain(self, ranks: int, alone: float) -> Domain:
        """The workers and memory of one of `ranks` ranks.

        Either each rank has one node, or a single process has all nodes. Its pool is interleaved over the nodes, so a
        worker reads the share of the other nodes over the link.

        Raises:
            ValueError: `ranks` is neither 1 nor the number of nodes.
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
