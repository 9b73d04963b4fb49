"""The KV cache of one simulated engine: vLLM's prefix cache, counted in runs of blocks.

vLLM (0.32, ``v1/core/block_pool.py`` and ``kv_cache_manager.py``) keeps every block by itself: a
chained hash once it is full, a count of the requests that hold it, and, at zero, a place in the
queue of free blocks. Blocks that were freed together sit there in a row, and blocks that were
filled together are held by the same requests; so a whole row is one :class:`Run` here, a node of a
radix tree, split where requests part. Each call costs time by runs, not by blocks or tokens.

What is kept of vLLM's rules:

* A block is found by its chained key once a step that fills it has been *scheduled*, so siblings
  that start in the same step share it.
* Requests free their blocks from the tail to the head. What nobody holds stays findable until it
  is taken for something else, least recently freed first; a hit takes it back out of that queue.
* Blocks without a key (the last, partial one) are reused before any keyed one.

What is simplified: a request that recomputes the last block of a prompt that was cached whole has a
copy of its own, in vLLM as here. There both copies keep their keys; here one loses it, and is
reused first once nobody holds it, so that others stay cached for a block longer. Blocks of
generated tokens get their keys when the request ends or is preempted, rather than as they fill: no
other request asks for them before.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Run:
    """Blocks ``start`` to ``end`` of a prefix, all held by the same requests.

    Attributes:
        keys: A sequence that has the keys of these blocks at their positions, and those of all
            blocks before them.
        start: Position of the first block in the prefix.
        end: Position after the last.
        parent: The run before; None for a root.
        children: Runs that follow, by their first key.
        refs: Requests that hold these blocks, or copies of them.
        copiers: Those of them that hold copies, among their private blocks. There are always fewer
            than ``refs``: where the last one that held the run itself leaves, a copy takes its
            place.
    """

    __slots__ = ("children", "copiers", "end", "keys", "parent", "refs", "start")

    def __init__(self, keys: Sequence[int], start: int, end: int, parent: Run | None) -> None:
        self.keys = keys
        self.start = start
        self.end = end
        self.parent = parent
        self.children: dict[int, Run] = {}
        self.refs = 0
        self.copiers: list[Holding] = []


class Holding:
    """The blocks that one request holds.

    Attributes:
        keys: Chained keys of all full blocks that the request will ever have.
        leaf: The last shared run.
        depth: Blocks in shared runs, from the first block of the prompt on.
        private: Blocks held besides, without a key.
    """

    __slots__ = ("depth", "keys", "leaf", "private")

    def __init__(self, keys: Sequence[int], leaf: Run, depth: int) -> None:
        self.keys = keys
        self.leaf = leaf
        self.depth = depth
        self.private = 0


class PrefixCache:
    """Blocks of one engine.

    Lifecycle of a request: :meth:`match` its keys, :meth:`hold` what was found, :meth:`take` blocks
    and :meth:`register` them as they fill, :meth:`release` all.

    Args:
        num_blocks: Blocks that requests can hold.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        """Forgets everything; no request may hold blocks."""
        self._plain = self.num_blocks  # free and without a key
        self._keyed = 0  # free and findable: the sum of the sizes in _queue
        self._queue: OrderedDict[Run, None] = OrderedDict()  # held by nobody, next victim first
        self._roots: dict[int, Run] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return self._plain + self._keyed

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self._plain - self._keyed

    def match(self, salt: int, keys: Sequence[int], limit: int) -> tuple[Run, int, int]:
        """The longest cached prefix of ``keys``.

        Args:
            salt: Prefixes of different salts never match.
            keys: Chained keys: equal at one position only if equal at all before.
            limit: Most blocks wanted.

        Returns:
            The last run that has some of them, their number, and how many of them nobody holds.
        """
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Run((), 0, 0, None)
        depth = 0
        while depth < limit:
            child = node.children.get(keys[depth])
            if child is None:
                break
            node = child
            end = child.end
            theirs = child.keys
            if end <= limit and theirs[end - 1] == keys[end - 1]:
                depth = end
                continue
            low, high = depth + 1, min(end, limit)  # the first block matches
            while low < high:
                middle = (low + high + 1) // 2
                if theirs[middle - 1] == keys[middle - 1]:
                    low = middle
                else:
                    high = middle - 1
            depth = low
            break
        idle = 0
        above: Run | None = node
        end = depth
        while above is not None and above.refs == 0 and above.parent is not None:
            idle += end - above.start
            end = above.start
            above = above.parent
        return node, depth, idle

    def hold(self, keys: Sequence[int], leaf: Run, depth: int) -> Holding:
        """Holds what :meth:`match` has just found; only in the part that is wanted."""
        if depth < leaf.end:
            leaf = self._split(leaf, depth)
        node = leaf
        while node.parent is not None:
            if node.refs == 0:
                del self._queue[node]
                self._keyed -= node.end - node.start
            node.refs += 1
            node = node.parent
        return Holding(keys, leaf, depth)

    def take(self, count: int) -> None:
        """Takes free blocks for requests, which note them in ``private``.

        Raises:
            ValueError: There are not so many.
        """
        if count <= self._plain:
            self._plain -= count
            return
        missing = count - self._plain
        if missing > self._keyed:
            raise ValueError(f"{count} blocks were asked for, {self.num_free} are free")
        self._plain = 0
        self._keyed -= missing
        queue = self._queue
        while missing:
            victim = next(iter(queue))
            size = victim.end - victim.start
            if size > missing:
                victim.end -= missing
                return
            missing -= size
            del queue[victim]
            parent = victim.parent
            assert parent is not None
            assert not victim.children
            del parent.children[victim.keys[victim.start]]

    def register(self, holding: Holding, num_full: int) -> None:
        """Makes the first ``num_full`` blocks of a request findable."""
        depth = holding.depth
        if depth >= num_full:
            return
        leaf = holding.leaf
        keys = holding.keys
        if leaf.refs == 1 and not leaf.children and leaf.parent is not None:
            leaf.keys = keys
            leaf.end = num_full
            holding.private -= num_full - depth
            holding.depth = num_full
            return
        while depth < num_full:
            child = leaf.children.get(keys[depth])
            if child is None:
                child = Run(keys, depth, num_full, leaf)
                child.refs = 1
                leaf.children[keys[depth]] = child
                holding.private -= num_full - depth
                depth = num_full
            else:  # computed once more
                end = min(child.end, num_full)
                common = depth + 1
                while common < end and child.keys[common] == keys[common]:
                    common += 1
                if common < child.end:
                    child = self._split(child, common)
                size = child.end - child.start
                if child.refs == 0:  # takes the place of what nobody holds
                    del self._queue[child]
                    self._keyed -= size
                    self._plain += size
                    holding.private -= size
                else:
                    child.copiers.append(holding)
                child.refs += 1
                depth = common
            leaf = child
        holding.leaf = leaf
        holding.depth = depth

    def release(self, holding: Holding) -> None:
        """Frees all blocks of a request, the tail first."""
        node = holding.leaf
        while node.parent is not None:
            node.refs -= 1
            if node.copiers:
                self._leave_copies(node, holding)
            if node.refs == 0:
                self._queue[node] = None
                self._keyed += node.end - node.start
            node = node.parent
        self._plain += holding.private
        holding.leaf = node
        holding.depth = holding.private = 0

    def _leave_copies(self, run: Run, holding: Holding) -> None:
        """A request leaves a run of which there are copies."""
        if holding in run.copiers:
            run.copiers.remove(holding)
        elif run.refs == len(run.copiers):
            size = run.end - run.start
            run.copiers.pop().private -= size
            self._plain += size

    def forget(self) -> None:
        """Makes nothing findable, as ``reset_prefix_cache`` does; no request may hold blocks.

        Raises:
            ValueError: A request does.
        """
        if self.num_used:
            raise ValueError(f"requests hold {self.num_used} blocks")
        self.clear()

    def _split(self, run: Run, at: int) -> Run:
        """Cuts a run in two and returns the first part, which the caller holds at once.

        If nobody holds the run, the first part must not stay out of the queue.
        """
        parent = run.parent
        assert parent is not None
        assert run.start < at < run.end
        head = Run(run.keys, run.start, at, parent)
        head.refs = run.refs
        head.copiers = run.copiers.copy()
        head.children[run.keys[at]] = run
        parent.children[run.keys[run.start]] = head
        run.start = at
        run.parent = head
        if run.refs == 0:
            # A place in the queue for the caller to take; the run keeps its own, further ahead.
            self._queue[head] = None
        return head
