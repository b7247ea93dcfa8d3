"""Log-probs of sampled tokens by one forward pass over the token tree of their rows.

Every distinct prefix of the rows goes through the model once, at the position id of its depth, and
attends to its ancestors (`tree_attention`). A sampled token's log-prob is read at the node before
it, so only these nodes' hidden states meet the vocabulary:

    rows     1 2 [3]   1 2 3 4 [5]   1 2 [6]       nodes through the layers   1 2 3 4 5 6
                                                   rows of logits             of 3, 5 and 6

Tokens that are the same node sampled with the same settings share one row of logits, and each call
still has its own log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.engines.grammar import Grammars
from tuner.engines.transfer import to_device
from tuner.traces.tree import IntArray, TokenTree
from tuner.training.batch import Row
from tuner.training.head import OutputHead, body, causal_model, logprobs_in_parts
from tuner.training.sampled import Sampled, TokenLogprobs
from tuner.training.tree_attention import TreeAttention


def tree_logprobs(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    windows: dict[str, int | None],
    with_entropy: bool,
    grammars: Grammars | None = None,
) -> TokenLogprobs:
    """Log-probs of every completion token of `rows`, of the distribution that was sampled.

    Args:
        model: A transformers causal LM whose layers attend to keys and values.
        rows: B calls with a prompt each.
        windows: For each kind of layer in the model its window, None for unlimited.
        with_entropy: Keep the graph of the entropy (else it is detached, for metrics only).
        grammars: The engine's; needed where a row was sampled within a grammar.

    Returns:
        T = total completion tokens, in row order, float32 at least.

    Raises:
        TrainingError: A row has a grammar, and there are no `grammars` to replay it with.
        GrammarError: A row's completion does not follow its grammar.
    """
    causal = causal_model(model)
    device = next(model.parameters()).device
    tree = TokenTree.build(rows)
    head = OutputHead(causal)
    hidden_ND = _hidden(causal, tree, windows, device)
    first_U, of_T = _distinct(tree, rows)
    sampled_U = Sampled.of(rows, head.vocabulary, grammars).take(first_U)
    predicts_U = to_device(tree.parent[tree.completion_node[first_U]], device)
    distinct = logprobs_in_parts(head, hidden_ND[predicts_U], sampled_U, with_entropy=with_entropy)
    back_T = to_device(of_T, device)
    return TokenLogprobs(distinct.logp_T[back_T], distinct.entropy_T[back_T])


def tree_states(model: nn.Module, rows: Sequence[Row], *, windows: dict[str, int | None]) -> Tensor:
    """Last hidden states at the nodes before the completion tokens of `rows`, in row order, [T, D].

    Args:
        model: A transformers causal LM whose layers attend to keys and values, or one without its
            output embedding.
        rows: B calls with a prompt each.
        windows: For each kind of layer in the model its window, None for unlimited.
    """
    device = next(model.parameters()).device
    tree = TokenTree.build(rows)
    hidden_ND = _hidden(causal_model(model), tree, windows, device)
    return hidden_ND[to_device(tree.parent[tree.completion_node], device)]


def _hidden(
    model: PreTrainedModel, tree: TokenTree, windows: dict[str, int | None], device: torch.device
) -> Tensor:
    """Last hidden states of all nodes, shape [N, D]."""
    attention = {kind: TreeAttention(tree, window, device) for kind, window in windows.items()}
    dense = model.config._attn_implementation != "sdpa"
    masks = {
        kind: one.dense(model.dtype) if dense else one.mask() for kind, one in attention.items()
    }
    output: Any = body(model)(
        input_ids=to_device(tree.token, device)[None],
        position_ids=to_device(tree.depth, device)[None],
        # Models with one kind of layer take a tensor, those with several a dict.
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        use_cache=False,
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _distinct(tree: TokenTree, rows: Sequence[Row]) -> tuple[IntArray, IntArray]:
    """The U of the T completion tokens that differ in node or settings.

    Returns:
        For each of the U a token that is like it, shape [U], in order of nodes; and for each token
        which of the U it is, shape [T].
    """
    kinds: dict[tuple[object, ...], int] = {}
    kind_B = []
    for row in rows:
        s = row.sampling
        # Within a grammar what may follow depends on the completion so far as well.
        start = len(row.prompt_ids) if s.grammar else -1
        key = (s.temperature, s.top_k, s.top_p, s.grammar, start)
        kind_B.append(kinds.setdefault(key, len(kinds)))
    kind_T = np.repeat(np.array(kind_B, dtype=np.int64), np.diff(tree.completion_start))
    _, first_U, of_T = np.unique(
        tree.completion_node * len(kinds) + kind_T, return_index=True, return_inverse=True
    )
    return first_U, of_T
