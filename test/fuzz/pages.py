"""Pages, tree and requests of a server without SGLang: ownership and eviction of pages."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch

from fluxion_sglang.kv.host_pool import HostPool
from fluxion_sglang.kv.placement import PAGE, Placement
from fluxion_sglang.kv.windows import Windows
from fluxion_sglang.policy import Policy

LAYERS, HEADS, GROUP, DIM = 2, 2, 2, 32
PLACEMENT = Placement(sinks=32, window=48)
ROWS = 7
PAGES = 120
"""Pages of the pool: room for three or four of the longest requests."""
LONGEST = 640
"""Maximum tokens of a request with its answer."""


@dataclass(eq=False)
class Node:
    """A page in the tree; a number identifies its contents."""

    content: int
    page: int
    parent: Node | None
    children: dict[int, Node] = field(default_factory=dict)
    users: int = 0
    used: int = 0


@dataclass(eq=False)
class Request:
    """A request; k, v [layers, LONGEST, H, D] are its full contents, more than the computed tokens.

    Attributes:
        contents: numbers of its full pages' contents, as far as known.
        prompt: tokens to prefill. stop: tokens at its end. length: tokens in the pool.
        tags: entry n - 1 holds the smallest and the largest first element of the values of its first n tokens.
        locked: last tree node that it uses.
    """

    k: torch.Tensor
    v: torch.Tensor
    policy: Policy | None
    contents: list[int]
    prompt: int
    stop: int
    tags: list[tuple[float, float]]
    row: int = 0
    generation: int = 0
    length: int = 0
    pages: list[int] = field(default_factory=list)
    locked: Node | None = None
    shared: int = 0  # number of its pages that belong to the tree

    def page_list(self) -> torch.Tensor:
        return torch.tensor(self.pages, dtype=torch.int32)


class Store:
    """Pages and rows, each of them free or owned; a radix tree of full pages. Free pages and rows hold NaN."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.free = list(range(1, PAGES))
        self.rows = list(range(1, ROWS))
        self.root = Node(-1, 0, None)
        self.clock, self.numbers = count(1), count(1)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.counts: Counter[str] = Counter()

    def take(self, pool: HostPool, windows: Windows) -> None:
        """Set the pool and windows, and poison everything that is free."""
        self.pool, self.windows = pool, windows
        for page in self.free:
            self._poison(page)
        for row in self.rows:
            self._poison_window(row)

    def _poison(self, page: int) -> None:
        for layer in range(LAYERS):
            self.pool.tiles(layer)[:, page] = torch.nan
            self.pool.tensor("sketches", layer)[:, page] = 255  # NaN scales

    def _poison_window(self, row: int) -> None:
        slots = PLACEMENT.slot_pages
        for layer in self.windows.layers:
            layer[:, row * slots : (row + 1) * slots] = torch.nan

    def _give_back(self, page: int) -> None:
        self._poison(page)
        self.free.append(page)

    def _nodes(self) -> Iterator[Node]:
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def _evict(self, pages: int) -> int:
        """Free at least `pages` pages of unused leaves, the least recently used first."""
        freed = 0
        while freed < pages:
            leaves = [node for node in self._nodes() if not node.children and not node.users]
            if not leaves:
                break
            leaf = min(leaves, key=lambda node: node.used)
            assert leaf.parent is not None
            del leaf.parent.children[leaf.content]
            self._give_back(leaf.page)
            freed += 1
            self.counts["evicted page"] += 1
        return freed

    def _lock(self, node: Node | None, by: int) -> None:
        while node is not None and node is not self.root:
            node.users += by
            node.used = next(self.clock)
            node = node.parent

    def _room(self, pages: int, for_whom: Request) -> bool:
        """Make room by eviction, then by retracting others. False: there is no room."""
        while len(self.free) < pages:
            if self._evict(pages - len(self.free)):
                continue
            others = [request for request in self.running if request is not for_whom]
            if not others:
                return False
            self._retract(self.rng.choice(others))
        return True

    def _grow(self, request: Request, tokens: int) -> bool:
        lacking = -(-tokens // PAGE) - len(request.pages)
        if lacking > 0:
            if not self._room(lacking, request):
                return False
            for _ in range(lacking):
                request.pages.append(self.free.pop(self.rng.randrange(len(self.free))))
        return True

    def _insert(self, request: Request, tokens: int) -> None:
        """Insert its full pages into the tree. A page that the tree already has replaces the request's own."""
        node = self.root
        full = tokens // PAGE
        while len(request.contents) < full:
            request.contents.append(next(self.numbers))
        for i in range(full):
            child = node.children.get(request.contents[i])
            if child is None:
                child = node.children[request.contents[i]] = Node(request.contents[i], request.pages[i], node)
            elif child.page != request.pages[i]:
                self._give_back(request.pages[i])
                request.pages[i] = child.page
                self.counts["twin's page"] += 1
            node = child
        self._lock(node, 1)
        self._lock(request.locked, -1)
        request.locked, request.shared = node, full

    def _release(self, request: Request) -> None:
        """Release its row and its own pages."""
        for page in request.pages[request.shared :]:
            self._give_back(page)
        self._lock(request.locked, -1)
        self._poison_window(request.row)
        self.rows.append(request.row)
        self.running.remove(request)
        request.pages, request.locked, request.shared, request.length, request.row = [], None, 0, 0, 0

    def _retract(self, request: Request) -> None:
        """All its tokens become its prompt."""
        request.prompt = max(request.prompt, request.length)
        self._release(request)
        self.waiting.append(request)
        self.counts["retracted"] += 1
