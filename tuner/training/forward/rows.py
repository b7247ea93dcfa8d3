"""Log-probs of sampled tokens by one forward pass over rows, one row per call.

Packed, one after another and unpadded:

    rows         1 2 3 [4]   1 2 [5 6]   7 [8]
    tokens       1 2 3 4 1 2 5 6 7 8
    positions    0 1 2 3 0 1 2 3 0 1        each row restarts at 0

Where positions restart, transformers keeps the rows apart: it masks other rows for `sdpa` and
`eager`, and gives flash attention the bounds of each row. Layers that keep a state (linear
attention, state space) do so only with special kernels, so whether packing is exact is determined
by comparison (`tuner.training.forward.layouts`).

With a mask attention costs the square of a pack, so packs for `sdpa` and `eager` are kept short.
Flash attention needs none and costs the same as the single rows; it is what packing is for.

Padded rows are padded on the right: a causal model never looks there, so no mask is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.engines.grammar import Grammars, to_device
from tuner.engines.transformers.passes import causal_model
from tuner.engines.transformers.vision import decoder_inputs, vision_of
from tuner.traces.tree import IntArray
from tuner.training.batch import Row
from tuner.training.forward.head import (
    OutputHead,
    TokenLogprobs,
    TokenTargets,
    body,
    logprobs_in_parts,
)
from tuner.training.forward.tree_pass import PASS_TOKENS, PassCost

MASKED_TOKENS = 8192
"""Maximum length of a pack whose attention takes a mask."""


def packed_logprobs(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    with_entropy: bool,
    grammars: Grammars | None = None,
    compiled: bool = False,
) -> TokenLogprobs:
    """Like `completion_logprobs`, for a model that keeps packed rows apart."""
    head = OutputHead(causal_model(model))
    sampled_T = TokenTargets.of(rows, head.vocabulary, grammars)
    return logprobs_in_parts(
        head, packed_states(model, rows), sampled_T, with_entropy=with_entropy, compiled=compiled
    )


def packed_states(model: nn.Module, rows: Sequence[Row]) -> Tensor:
    """Last hidden states before the completion tokens of `rows`, in row order, shape [T, D].

    Args:
        model: A transformers causal LM that keeps packed rows apart, or one without its output
            embedding.
        rows: B calls with a prompt each.
    """
    device = next(model.parameters()).device
    # In Python: a number of a tensor is something that Python waits for.
    ends = list(accumulate(map(len, rows)))
    bounds = to_device(torch.tensor([0, *ends], dtype=torch.int32), device)
    longest = max(map(len, rows))
    causal = causal_model(model)
    ids = np.array([[i for row in rows for i in row.prompt_ids + row.completion_ids]])
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    pieces = np.split(ids, ends[:-1], axis=1)
    shift = [found for piece in pieces if (found := row_shifts(causal, piece)) is not None]
    moved = np.concatenate(shift, axis=1) if shift else None
    output: Any = body(causal)(
        **_inputs(causal, ids, moved, device, positions),
        use_cache=False,
        # Flash attention would derive these from the positions in every layer; kernels of linear
        # attention start a new state where they say.
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=longest,
        max_length_k=longest,
    )
    # For each completion token the place in the pack before it.
    predicts_T = torch.cat(
        [
            torch.arange(end - len(row.completion_ids) - 1, end - 1)
            for row, end in zip(rows, ends, strict=True)
        ]
    )
    states_TD: Tensor = output.last_hidden_state[0][to_device(predicts_T, device)]
    return states_TD


def pack_tokens(model: PreTrainedModel, fixed: float = PASS_TOKENS) -> int | None:
    """The longest pack that is worth its mask, None if attention takes none.

    On a CPU that is where the cost per token is lowest: the fixed cost of a pass is spread over
    more tokens, and each is compared with more others. A model's own mask (GPT-Neo's) ends at its
    last position.

    Args:
        fixed: Cost of a pass (`PassCost`).
    """
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return None
    config = model.config.get_text_config(decoder=True)
    longest = min(MASKED_TOKENS, getattr(config, "max_position_embeddings", None) or MASKED_TOKENS)
    if model.device.type != "cpu":
        return longest
    return min(longest, replace(PassCost.of(model, dense=True), fixed=fixed).cheapest_tokens())


def packs(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """Cut row indices into few packs of at most `max_tokens` tokens each.

    First fit, longest rows first. A row longer than the limit is a pack of its own.
    """
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
    cuts: list[list[int]] = []
    room: list[int] = []
    for i in order:
        length = len(rows[i])
        place = next((at for at, left in enumerate(room) if length <= left), None)
        if place is None:
            cuts.append([i])
            room.append(max_tokens - length)
        else:
            cuts[place].append(i)
            room[place] -= length
    return cuts


def completion_logprobs(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    with_entropy: bool,
    grammars: Grammars | None = None,
    compiled: bool = False,
    in_parts: bool = False,
) -> TokenLogprobs:
    """Log-probs of every completion token of `rows`, of the distribution that was sampled.

    Args:
        model: A transformers causal LM.
        rows: B calls.
        with_entropy: Keep the graph of the entropy (otherwise it is detached, for metrics only).
        grammars: The engine's; required if a row was sampled with a grammar.
        compiled: Whether the computation on the logits is compiled.
        in_parts: Compute the logits of some tokens at a time, with `OutputHead` instead of the
            model's own `forward`.

    Returns:
        T = total completion tokens, float32 at least.

    Raises:
        TrainingError: A row has a grammar, and there are no `grammars` to replay it with.
        GrammarError: A row's completion does not follow its grammar.
    """
    device = next(model.parameters()).device
    if in_parts or vision_of(causal_model(model)) is not None:
        head = OutputHead(causal_model(model))
        sampled = TokenTargets.of(rows, head.vocabulary, grammars)
        states_TD = completion_states(model, rows)
        return logprobs_in_parts(
            head, states_TD, sampled, with_entropy=with_entropy, compiled=compiled
        )
    ids_BS, row_T, predicts_T = _padded(rows)
    width, first = ids_BS.shape[1], int(predicts_T.min())
    # Only the positions from the first completion on need logits; a model that does not support
    # `logits_to_keep` returns all of them.
    logits_BKV = model(
        input_ids=to_device(ids_BS, device), use_cache=False, logits_to_keep=width - first
    ).logits
    predicts_T -= width - logits_BKV.shape[1]
    logits_TV = logits_BKV[to_device(row_T, device), to_device(predicts_T, device)]
    sampled = TokenTargets.of(rows, logits_TV.shape[-1], grammars)
    return sampled.logprobs(logits_TV, with_entropy=with_entropy, compiled=compiled)


def completion_states(model: nn.Module, rows: Sequence[Row]) -> Tensor:
    """Last hidden states before the completion tokens of `rows`, in row order, shape [T, D].

    Args:
        model: A transformers causal LM, or one without its output embedding.
        rows: B calls.
    """
    device = next(model.parameters()).device
    ids_BS, row_T, predicts_T = _padded(rows)
    causal = causal_model(model)
    given = _inputs(causal, ids_BS, row_shifts(causal, ids_BS), device)
    output: Any = body(causal)(**given, use_cache=False)
    states_TD: Tensor = output.last_hidden_state[
        to_device(row_T, device), to_device(predicts_T, device)
    ]
    return states_TD


def row_shifts(model: PreTrainedModel, ids_BS: IntArray) -> IntArray | None:
    """See `Vision.shifts`; None for a model that reads text only."""
    vision = vision_of(model)
    return None if vision is None else vision.shifts(ids_BS)


def _inputs(
    model: PreTrainedModel,
    ids_BS: IntArray,
    shift_BS: IntArray | None,
    device: torch.device,
    positions_BS: Tensor | None = None,
) -> dict[str, Any]:
    places = None if positions_BS is None else to_device(positions_BS, device)
    shift = None if shift_BS is None else to_device(shift_BS, device)
    return decoder_inputs(model, to_device(ids_BS, device), places, shift)


def _padded(rows: Sequence[Row]) -> tuple[IntArray, IntArray, IntArray]:
    """Ids [B, S], padded on the right, and for each completion token its row and the position that
    predicts it, [T] each."""
    lengths = [len(row) for row in rows]
    ids_BS = np.zeros((len(rows), max(lengths)), dtype=np.int64)
    for b, row in enumerate(rows):
        ids_BS[b, : lengths[b]] = row.prompt_ids + row.completion_ids
    row_T = np.repeat(np.arange(len(rows)), [len(row.completion_ids) for row in rows])
    # The logits at position i - 1 predict the token at position i.
    predicts_T = np.concatenate(
        [
            np.arange(len(row.prompt_ids) - 1, length - 1)
            for row, length in zip(rows, lengths, strict=True)
        ]
    )
    return ids_BS, row_T, predicts_T


def padded_cuts(rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
    """Cut row indices into padded micro-batches of at most `max_tokens` tokens each.

    Rows of similar length go together to reduce padding. A row longer than the limit is a
    micro-batch of its own.
    """
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), i))
    cuts: list[list[int]] = []
    for i in order:
        # Sorted by decreasing length: the first row of a micro-batch is its width.
        if cuts and (len(cuts[-1]) + 1) * len(rows[cuts[-1][0]]) <= max_tokens:
            cuts[-1].append(i)
        else:
            cuts.append([i])
    return cuts
