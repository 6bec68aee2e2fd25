"""What finished sequences have in the KV cache, by their tokens: which shares the longest head with a prompt, and which
to give up first.

It receives and returns sequence ids and token ids. It does not touch the KV cache itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

import numpy as np
from numpy.typing import NDArray

__all__ = ["RadixTree", "RowCache", "Tokens", "shared_head"]

Tokens = NDArray[np.int32]


def shared_head(left: Tokens, right: Tokens) -> int:
    """Return how many leading tokens two arrays have in common."""
    size = min(left.size, right.size)
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


@dataclass(slots=True, eq=False)
class _Node:
    """A stretch of tokens that all sequences below it have in common; a leaf is the end of one sequence."""

    tokens: Tokens
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)
    sequence: int = -1
    """Of a leaf."""
    last_use: int = 0
    """Of a leaf: larger is later."""

    def leaves(self) -> Iterator[_Node]:
        """Yield the leaves at or below this node."""
        if not self.children:
            yield self
        for child in self.children.values():
            yield from child.leaves()


class RadixTree:
    """Sequences by their tokens, in namespaces that share nothing.

    A sequence stands at a leaf and holds all tokens on the way to it, so every node's tokens can be had from any leaf
    below it. A sequence of which another has all tokens is not kept.
    """

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._leaves: dict[int, tuple[str, _Node]] = {}
        self._clock = count(1)
        self.num_tokens = 0
        """Tokens of all nodes: the cells that the sequences take, shared ones counted once."""

    def __len__(self) -> int:
        return len(self._leaves)

    def add(self, sequence: int, tokens: Sequence[int] | Tokens, namespace: str = "") -> list[int]:
        """Keep a sequence as the most recently used; return those that are useless now, itself perhaps among them."""
        tokens = np.asarray(tokens, np.int32)
        node, rest = self._descend(tokens, namespace)
        if not rest.size:
            self._use(node)
            return [sequence]
        covered = []
        if node.sequence >= 0:
            covered.append(node.sequence)
            del self._leaves[node.sequence]
            node.sequence = -1
            node.tokens = np.concatenate([node.tokens, rest])
            leaf = node
        else:
            leaf = _Node(rest, node)
            node.children[int(rest[0])] = leaf
        leaf.sequence, leaf.last_use = sequence, next(self._clock)
        self._leaves[sequence] = (namespace, leaf)
        self.num_tokens += rest.size
        return covered

    def longest(self, tokens: Tokens, namespace: str = "") -> tuple[int, int]:
        """Return a sequence with the longest common head, now used, and the head's length; (-1, 0): none shares any."""
        node = self._roots.get(namespace)
        length = 0
        while node is not None:
            shared = shared_head(node.tokens, tokens[length:])
            length += shared
            child = node.children.get(int(tokens[length])) if length < tokens.size else None
            if shared < node.tokens.size or child is None:
                break
            node = child
        if node is None or not length:
            return -1, 0
        return self._use(node), length

    def remove(self, sequence: int) -> Tokens:
        """Keep a sequence no longer, and return its tokens."""
        namespace, leaf = self._leaves.pop(sequence)
        tokens = self._path(leaf)
        self.num_tokens -= leaf.tokens.size
        parent = leaf.parent
        assert parent is not None  # A root is no leaf.
        del parent.children[int(leaf.tokens[0])]
        if not parent.children:  # So it is a root: other nodes have at least two.
            del self._roots[namespace]
        elif len(parent.children) == 1 and parent.parent is not None:
            self._join(parent, parent.parent)
        return tokens

    def evict(self) -> tuple[int, Tokens, str] | None:
        """Give up the least recently used sequence; return it, its tokens and its namespace; None if there is none."""
        if not self._leaves:
            return None
        sequence = min(self._leaves, key=lambda sequence: self._leaves[sequence][1].last_use)
        namespace = self._leaves[sequence][0]
        return sequence, self.remove(sequence), namespace

    def newest_first(self) -> list[tuple[int, Tokens, str]]:
        """Return all sequences with their tokens and namespaces, the most recently used first."""
        leaves = sorted(self._leaves.items(), key=lambda item: -item[1][1].last_use)
        return [(sequence, self._path(leaf), namespace) for sequence, (namespace, leaf) in leaves]

    def _descend(self, tokens: Tokens, namespace: str) -> tuple[_Node, Tokens]:
        """Return the node that the tokens lead to, split off where they leave it, and the tokens behind it."""
        node = self._roots.setdefault(namespace, _Node(tokens[:0], None))
        while True:
            shared = shared_head(node.tokens, tokens)
            tokens = tokens[shared:]
            if shared < node.tokens.size and tokens.size:
                return self._split(node, shared), tokens
            if not tokens.size:
                return node, tokens
            child = node.children.get(int(tokens[0]))
            if child is None:
                return node, tokens
            node = child

    def _split(self, node: _Node, at: int) -> _Node:
        """Put a node before this one that takes its first `at` tokens, and return it."""
        head = _Node(node.tokens[:at], node.parent)
        assert node.parent is not None  # A root has no tokens to leave.
        node.parent.children[int(node.tokens[0])] = head
        node.tokens, node.parent = node.tokens[at:], head
        head.children[int(node.tokens[0])] = node
        return head

    def _join(self, node: _Node, parent: _Node) -> None:
        """Let a node's only child take its place."""
        (child,) = node.children.values()
        child.tokens = np.concatenate([node.tokens, child.tokens])
        child.parent = parent
        parent.children[int(child.tokens[0])] = child

    def _use(self, node: _Node) -> int:
        """Call the newest sequence at or below a node used, and return it."""
        leaf = max(node.leaves(), key=lambda leaf: leaf.last_use)
        leaf.last_use = next(self._clock)
        return leaf.sequence

    @staticmethod
    def _path(node: _Node) -> Tokens:
        parts = []
        at: _Node | None = node
        while at is not None:
            parts.append(at.tokens)
            at = at.parent
        return np.concatenate(parts[::-1])


class RowCache:
    """Rows of logits by the tokens they follow, the least recently used given up first.

    A text is often continued where another answer ended, or once more: its first choices then need no decode.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()
        self._num_bytes = 0

    @staticmethod
    def _key(tokens: Sequence[int], namespace: str) -> bytes:
        return blake2b(namespace.encode() + b"\0" + np.asarray(tokens, np.int32).tobytes(), digest_size=16).digest()

    def put(self, tokens: Sequence[int], row: NDArray[np.float32], namespace: str = "") -> NDArray[np.float32]:
        """Keep a copy of the row that follows the tokens, and return it."""
        key = self._key(tokens, namespace)
        if key in self._rows:
            self._num_bytes -= row.nbytes
        kept = self._rows[key] = row.copy()
        self._rows.move_to_end(key)
        self._num_bytes += row.nbytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self._num_bytes -= oldest.nbytes
        return kept

    def get(self, tokens: Sequence[int], namespace: str = "") -> NDArray[np.float32] | None:
        """Return the row that follows the tokens, if it is known. It is not to be changed."""
        key = self._key(tokens, namespace)
        row = self._rows.get(key)
        if row is not None:
            self._rows.move_to_end(key)
        return row
