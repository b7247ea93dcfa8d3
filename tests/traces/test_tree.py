"""The token tree holds every call exactly, whatever agents did and in whatever order."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces.agents import Ids, batches
from tuner.traces import TokenTree


def prefixes(calls):
    """Every distinct prefix that is not empty: a brute-force trie."""
    return {call.sequence[:n] for call in calls for n in range(1, len(call.sequence) + 1)}


def ancestors(tree, node):
    """The nodes on the way to the root, `node` included."""
    found = set()
    while node >= 0:
        found.add(node)
        node = int(tree.parent[node])
    return found


def spelled(tree, node):
    return tuple(int(tree.token[k]) for k in sorted(ancestors(tree, node)))


def test_the_drawn_example():
    tree = TokenTree.build([Ids((1, 2), (3,)), Ids((1, 2, 3, 4), (5,)), Ids((1, 2), (6,))])
    assert tree.token.tolist() == [1, 2, 3, 4, 5, 6]
    assert tree.depth.tolist() == [0, 1, 2, 3, 4, 2]
    assert tree.parent.tolist() == [-1, 0, 1, 2, 3, 1]
    assert tree.end.tolist() == [6, 6, 5, 5, 5, 6]
    assert tree.prompt_node.tolist() == [1, 3, 1]
    assert [tree.completion_nodes(i).tolist() for i in range(3)] == [[2], [4], [5]]
    assert (tree.row_tokens, tree.unique_tokens, tree.sampled_tokens) == (11, 6, 3)
    assert tree.merge_ratio == 11 / 6
    assert [row.ids.tolist() for row in tree.rows()] == [[1, 2, 3, 4, 5], [1, 2, 6]]
    assert [row.samples.tolist() for row in tree.rows()] == [[0, 0, 1, 0, 1], [0, 0, 1]]


@given(batches)
def test_every_call_s_path_is_its_prompt_and_completion(calls):
    tree = TokenTree.build(calls)
    for i, call in enumerate(calls):
        assert tree.path(i) == call.sequence
        nodes = tree.path_nodes(i).tolist()
        assert nodes[len(call.prompt_ids) :] == tree.completion_nodes(i).tolist()
        prompt_node = nodes[len(call.prompt_ids) - 1] if call.prompt_ids else -1
        assert tree.prompt_node[i] == prompt_node


@given(batches)
def test_each_distinct_prefix_is_one_node(calls):
    tree = TokenTree.build(calls)
    found = [spelled(tree, node) for node in range(tree.unique_tokens)]
    assert sorted(found) == sorted(prefixes(calls))
    assert found == sorted(found)  # depth first, siblings in order of their token
    assert tree.depth.tolist() == [len(path) - 1 for path in found]
    assert tree.row_tokens == sum(len(call.sequence) for call in calls)


@given(batches)
def test_the_interval_is_attention_to_ancestors(calls):
    tree = TokenTree.build(calls)
    for q in range(tree.unique_tokens):
        attended = {k for k in range(tree.unique_tokens) if k <= q < tree.end[k]}
        assert attended == ancestors(tree, q)


@given(batches, st.randoms(use_true_random=False))
def test_order_of_arrival_changes_nothing(calls, random):
    tree = TokenTree.build(calls)
    order = list(range(len(calls)))
    random.shuffle(order)
    other = TokenTree.build([calls[i] for i in order])
    for name in ("token", "depth", "parent", "end", "samples"):
        assert np.array_equal(getattr(tree, name), getattr(other, name)), name
    for here, i in enumerate(order):
        assert other.prompt_node[here] == tree.prompt_node[i]
        assert np.array_equal(other.completion_nodes(here), tree.completion_nodes(i))


@given(batches)
def test_a_token_counts_once_for_each_call_that_sampled_it(calls):
    tree = TokenTree.build(calls)
    for node in range(tree.unique_tokens):
        path = spelled(tree, node)
        samplers = [
            call
            for call in calls
            if len(call.prompt_ids) < len(path) and call.sequence[: len(path)] == path
        ]
        assert tree.samples[node] == len(samplers)
    assert tree.samples.sum() == tree.sampled_tokens == sum(len(c.completion_ids) for c in calls)


@given(batches)
def test_rows_are_the_longest_calls_and_count_each_sampled_token_once(calls):
    tree = TokenTree.build(calls)
    rows = list(tree.rows())
    every = {call.sequence for call in calls} - {()}
    ends = {s for s in every if not any(o != s and o[: len(s)] == s for o in every)}
    assert [tuple(row.ids.tolist()) for row in rows] == sorted(ends)
    counted = np.zeros(tree.unique_tokens, dtype=int)
    for row in rows:
        assert np.array_equal(tree.token[row.nodes], row.ids)
        np.add.at(counted, row.nodes, row.samples)
    assert np.array_equal(counted, tree.samples)


def test_equal_calls_share_nodes_and_count_separately():
    tree = TokenTree.build([Ids((1,), (2, 3))] * 3)
    assert tree.unique_tokens == 3
    assert tree.samples.tolist() == [0, 3, 3]
    assert tree.sampled_tokens == 6
    assert tree.merge_ratio == 3


def test_an_empty_batch_is_an_empty_tree():
    tree = TokenTree.build([])
    assert (tree.unique_tokens, tree.row_tokens, tree.sampled_tokens) == (0, 0, 0)
    assert tree.merge_ratio == 1
    assert list(tree.rows()) == []


@pytest.mark.parametrize("id_", [-1, 2**32])
def test_what_is_no_token_id_is_refused_by_name(id_):
    with pytest.raises(ValueError, match=f"{id_} is not a token id"):
        TokenTree.build([Ids((1, id_), (2,))])


def test_the_tree_needs_no_torch():
    code = "import sys, tuner.traces; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
