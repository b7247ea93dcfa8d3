"""Seconds to build the token tree of a million row tokens, beside a trie of Python dicts.

Both make the same arrays from the same calls, which is checked: token, depth, parent and subtree
end of every node in depth-first order, and the nodes of every completion. The target is one second
per million tokens; the dict trie says what the plain way costs. The median of the repeats counts.

    python benchmarks/token_tree.py [--tokens 1000000] [--repeats 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from _report import Row, report

from tuner.traces import TokenTree

VOCABULARY = 151_936
GROUP = 8
BUDGET = 1.0  # seconds per million row tokens


@dataclass(frozen=True)
class Ids:
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


def batch(
    dice: random.Random, tokens: int, *, system: int, turns: int, said: int, read: int
) -> list[Ids]:
    """Calls of at least `tokens` row tokens: groups of rollouts that talk for some turns.

    Args:
        dice: Where ids come from.
        tokens: Row tokens wanted.
        system: Tokens that all prompts begin with.
        turns: Calls of a rollout, each extending the one before.
        said: Tokens of a completion.
        read: Tokens of the question, and of what a tool answers.
    """

    def ids(count: int) -> tuple[int, ...]:
        return tuple(dice.choices(range(VOCABULARY), k=count))

    head = ids(system)
    calls: list[Ids] = []
    total = 0
    while total < tokens:
        question = head + ids(read)
        for _ in range(GROUP):
            prompt = question
            for _ in range(turns):
                call = Ids(prompt, ids(said))
                calls.append(call)
                total += len(prompt) + said
                prompt = prompt + call.completion_ids + ids(read)
    dice.shuffle(calls)
    return calls


Arrays = tuple[list[int], list[int], list[int], list[int], list[list[int]]]


def dict_trie(calls: list[Ids]) -> Arrays:
    """Token, depth, parent, end and completion nodes of a trie with a dict per node."""
    children: list[dict[int, int]] = [{}]
    sampled: list[list[int]] = []
    for call in calls:
        node = 0
        nodes = []
        for id_ in call.prompt_ids + call.completion_ids:
            below = children[node]
            if id_ in below:
                node = below[id_]
            else:
                node = below[id_] = len(children)
                children.append({})
            nodes.append(node)
        sampled.append(nodes[len(call.prompt_ids) :])

    size = len(children)
    rank, token, depth, parent, end = ([0] * size for _ in range(5))
    stack = [(id_, node, 0, -1) for id_, node in sorted(children[0].items(), reverse=True)]
    order: list[int] = []
    while stack:
        id_, node, at, above = stack.pop()
        here = rank[node] = len(order)
        order.append(node)
        token[here], depth[here], parent[here] = id_, at, above
        below = children[node]
        if below:
            stack += [(i, n, at + 1, here) for i, n in sorted(below.items(), reverse=True)]
    for here in reversed(range(len(order))):
        end[here] = max(end[here], here + 1)
        if parent[here] >= 0:
            end[parent[here]] = max(end[parent[here]], end[here])
    nodes_C = [[rank[node] for node in nodes] for nodes in sampled]
    return token[:-1], depth[:-1], parent[:-1], end[:-1], nodes_C


def check(tree: TokenTree, trie: Arrays) -> None:
    for name, ours, theirs in zip(
        ("token", "depth", "parent", "end"),
        (tree.token, tree.depth, tree.parent, tree.end),
        trie,
        strict=False,
    ):
        if not np.array_equal(ours, np.array(theirs)):
            raise AssertionError(f"{name} differs from the dict trie's: one of the two is wrong")
    for call, nodes in enumerate(trie[4]):
        if tree.completion_nodes(call).tolist() != nodes:
            raise AssertionError(f"completion nodes of call {call} differ from the dict trie's")


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    dice = random.Random(0)
    cases = {
        "tool agent, 6 turns": {"system": 600, "turns": 6, "said": 100, "read": 150},
        "tool agent, 30 turns": {"system": 2000, "turns": 30, "said": 150, "read": 350},
        "one short turn": {"system": 20, "turns": 1, "said": 20, "read": 40},
        "long answers, little shared": {"system": 0, "turns": 1, "said": 1000, "read": 50},
    }
    rows = []
    for name, shape in cases.items():
        calls = batch(dice, arguments.tokens, **shape)
        tree = TokenTree.build(calls)
        check(tree, dict_trie(calls))
        ours, theirs = [], []
        for _ in range(arguments.repeats):
            ours.append(seconds(partial(TokenTree.build, calls)))
            theirs.append(seconds(partial(dict_trie, calls)))
        per_million = tree.row_tokens / 1e6
        case = f"{name}: {len(calls):,} calls, merge ratio {tree.merge_ratio:.1f}"
        metric = "s per million row tokens"
        mine = statistics.median(ours) / per_million
        peer = statistics.median(theirs) / per_million
        rows += [
            Row(case, metric, mine, "budget", BUDGET, target=1.0, more_is_better=False),
            Row(case, metric, mine, "dict trie", peer, more_is_better=False),
        ]
    report("token_tree", rows, packages=["numpy"])


if __name__ == "__main__":
    main()
