"""A radix tree over prompts that several replicas own together, as SGLang's and Ray's routers keep.

Every node is a run of blocks and says which replicas have served a prompt that goes through it. The
trees of SGLang (``sgl-model-gateway/src/policies/tree.rs``) and Ray
(``prefix_aware/prefix_tree.py``) have the same shape and differ in when they note the time, in
whose node a lookup follows, and in how they forget.

Simplified: both real trees are made of characters of text, this one of named blocks of tokens (see
``blocks``), with the tokens after the last full block as a shorter block. Two prompts that part in
the middle of a block part at its beginning here.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.blocks import shared_length

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Node", "TenantTree"]


class Node:
    """A run of blocks below its parent.

    Attributes:
        names: Names of its blocks.
        num_tokens: Tokens in them.
        parent: The node before it; None for the root, and for a node that was taken out.
        children: The nodes after it by their first block.
        times: When each replica that owns the node used it last.
        maker: The replica that made the node, or part of which it was split off.
    """

    __slots__ = ("children", "maker", "names", "num_tokens", "parent", "times")

    def __init__(self, names: list[int], num_tokens: int, parent: Node | None, maker: int) -> None:
        self.names = names
        self.num_tokens = num_tokens
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.times: dict[int, float] = {}
        self.maker = maker

    def is_leaf_of(self, tenant: int) -> bool:
        """Whether the replica owns the node and nothing below it."""
        return tenant in self.times and not any(
            tenant in child.times for child in self.children.values()
        )


class TenantTree:
    """Prompts by replica.

    Args:
        block_size: Tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node([], 0, None, -1)
        self.sizes: dict[int, int] = {}

    def add_tenant(self, tenant: int) -> None:
        """A replica is there, and owns nothing."""
        self.sizes.setdefault(tenant, 0)
        self.root.times.setdefault(tenant, 0)

    def insert(self, names: list[int], num_tokens: int, tenant: int) -> list[Node]:
        """Makes the replica an owner of a prompt, and returns the nodes on its path below the root.

        Nodes that it did not own get the time 0.

        Args:
            names: The prompt's blocks, its tail included.
            num_tokens: The prompt's tokens.
            tenant: The replica.
        """
        self.add_tenant(tenant)
        node, position, path = self.root, 0, []
        while position < len(names):
            child = node.children.get(names[position])
            if child is None:
                rest = num_tokens - position * self.block_size
                child = Node(names[position:], rest, node, tenant)
                node.children[names[position]] = child
                position = len(names)
            else:
                shared = shared_length(names, position, child.names)
                if shared < len(child.names):
                    child = self._split(child, shared)
                position += shared
            if tenant not in child.times:
                child.times[tenant] = 0
                self.sizes[tenant] += child.num_tokens
            path.append(child)
            node = child
        return path

    def _split(self, node: Node, length: int) -> Node:
        """Puts a new node before ``node`` that has its first blocks, and returns it."""
        parent = node.parent
        assert parent is not None
        upper = Node(node.names[:length], length * self.block_size, parent, node.maker)
        upper.times = dict(node.times)
        parent.children[node.names[0]] = upper
        node.names = node.names[length:]
        node.num_tokens -= upper.num_tokens
        node.parent = upper
        upper.children[node.names[0]] = node
        return upper

    def match(
        self, names: list[int], num_tokens: int, tenants: Iterable[int] | None = None
    ) -> tuple[Node, int]:
        """Follows a prompt as far as the tree goes.

        Args:
            names: The prompt's blocks, its tail included.
            num_tokens: The prompt's tokens.
            tenants: Only nodes are entered that one of these owns; all if None.

        Returns:
            The last node that shares a block, the root if none does, and the tokens shared.
        """
        wanted = None if tenants is None else set(tenants)
        node, position = self.root, 0
        while position < len(names):
            child = node.children.get(names[position])
            if child is None or (wanted is not None and wanted.isdisjoint(child.times)):
                break
            shared = shared_length(names, position, child.names)
            position += shared
            node = child
            if shared < len(child.names):
                break
        return node, min(position * self.block_size, num_tokens)

    def shrink(self, tenant: int, max_tokens: int) -> None:
        """Takes a replica's leaves from it, oldest first, until it owns ``max_tokens`` at most."""
        leaves = [
            (node.times[tenant], order, node)
            for order, node in enumerate(self._nodes_of(tenant))
            if node.is_leaf_of(tenant)
        ]
        heapq.heapify(leaves)
        order = len(self.sizes) + self._count()
        while leaves and self.sizes[tenant] > max_tokens:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            self._disown(node, tenant)
            if parent is not None and parent is not self.root and parent.is_leaf_of(tenant):
                order += 1
                heapq.heappush(leaves, (parent.times[tenant], order, parent))

    def shrink_by_age(self, tenant: int, num_tokens: int) -> None:
        """Takes nodes from a replica, oldest first, those of a time together: ``num_tokens``.

        A node was used whenever one below it was, so nothing is left hanging.
        """
        by_time: dict[float, list[Node]] = {}
        for node in self._nodes_of(tenant):
            by_time.setdefault(node.times[tenant], []).append(node)
        goal = self.sizes[tenant] - num_tokens
        for time in sorted(by_time):
            if self.sizes[tenant] <= goal:
                break
            for node in reversed(by_time[time]):  # the deepest first
                self._disown(node, tenant)

    def remove_tenant(self, tenant: int) -> None:
        """Forgets a replica."""
        for node in reversed(list(self._nodes_of(tenant))):
            self._disown(node, tenant)
        self.root.times.pop(tenant, None)
        self.sizes.pop(tenant, None)

    def _nodes_of(self, tenant: int) -> Iterable[Node]:
        """All nodes of a replica below the root, parents before children."""
        stack = [child for child in self.root.children.values() if tenant in child.times]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(child for child in node.children.values() if tenant in child.times)

    def _count(self) -> int:
        stack, count = [self.root], 0
        while stack:
            count += 1
            stack.extend(stack.pop().children.values())
        return count

    def _disown(self, node: Node, tenant: int) -> None:
        del node.times[tenant]
        self.sizes[tenant] -= node.num_tokens
        if not node.times and not node.children and node.parent is not None:
            del node.parent.children[node.names[0]]
            node.parent = None
