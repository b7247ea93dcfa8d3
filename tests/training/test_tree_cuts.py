"""Where rows are cut into trees: every row once, within the budget, at the least cost."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.models import make_model
from tests.kit.examples import few
from tests.traces.agents import Ids, batches
from tuner.traces import TokenTree
from tuner.training.forward.tree_pass import PassCost, tree_cuts

costs = st.builds(PassCost, st.sampled_from([0.0, 0.01, 1.0]), st.booleans())


def cost_of(rows, cost):
    tree = TokenTree.build(rows)
    return cost(tree.unique_tokens, int((tree.depth + 1).sum()))


@settings(deadline=None)
@given(rows=batches, max_tokens=st.integers(1, 60), cost=costs)
def test_every_row_is_in_one_tree_and_no_tree_is_over_the_budget(rows, max_tokens, cost):
    cuts = tree_cuts(rows, max_tokens, cost)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(rows)))
    for cut in cuts:
        nodes = TokenTree.build([rows[i] for i in cut]).unique_tokens
        assert nodes <= max_tokens or len(cut) == 1


@settings(deadline=None, max_examples=few(60))
@given(rows=batches.filter(lambda rows: 0 < len(rows) <= 7), cost=costs, data=st.data())
def test_no_other_cuts_of_the_sorted_rows_cost_less(rows, cost, data):
    max_tokens = data.draw(st.integers(1, 60))
    order = sorted(range(len(rows)), key=lambda i: rows[i].sequence)

    def total(cuts):
        return sum(cost_of([rows[i] for i in cut], cost) for cut in cuts)

    def within_budget(cut):
        nodes = TokenTree.build([rows[i] for i in cut]).unique_tokens
        return len(cut) == 1 or nodes <= max_tokens

    least = float("inf")
    for places in range(1 << (len(order) - 1)):
        bounds = [0, *(i + 1 for i in range(len(order) - 1) if places >> i & 1), len(order)]
        cuts = [order[a:b] for a, b in pairwise(bounds)]
        if all(map(within_budget, cuts)):
            least = min(least, total(cuts))
    assert abs(total(tree_cuts(rows, max_tokens, cost)) - least) < 1e-6


def test_cuts_are_between_tasks_and_not_within_their_groups():
    rows = [
        Ids(tuple(range(task, task + 50)), (100 + i,) * 10) for task in (0, 60) for i in range(4)
    ]
    cuts = tree_cuts(rows[::2] + rows[1::2], 120, PassCost(1e-3))
    assert [len(cut) for cut in cuts] == [4, 4]


def test_a_full_mask_is_cut_where_the_square_costs_more_than_the_repeated_prefix():
    rows = [Ids((1,) * 100, (2 + i,) * 400) for i in range(4)]
    assert len(tree_cuts(rows, 10_000, PassCost(1e-2, dense=False))) == 1
    assert len(tree_cuts(rows, 10_000, PassCost(1e-2, dense=True))) == 4


def test_attention_is_weighed_against_the_weights_of_the_layers():
    model = make_model("llama")
    layers = sum(p.numel() for p in model.model.layers.parameters())
    multiplications = 2 * 2 * 4 * 8  # scores and values, of 2 layers with 4 heads of width 8
    assert PassCost.of(model).pair == multiplications / (layers + model.model.norm.weight.numel())
