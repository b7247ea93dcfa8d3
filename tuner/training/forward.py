"""How a model's log-probs are computed: on the token tree of the rows, or on padded rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.engines.base import SamplingParams
from tuner.engines.grammar import Grammars
from tuner.engines.layer_kinds import layer_windows
from tuner.training.batch import Row, micro_batches
from tuner.training.logprobs import completion_logprobs
from tuner.training.sampled import TokenLogprobs
from tuner.training.tree_cuts import PassCost, tree_cuts
from tuner.training.tree_forward import causal_model, tree_logprobs

_log = logging.getLogger(__name__)

_PROBE = ((3, 10, 17), (24, 31)), ((3, 10, 17), (24, 38, 45)), ((3, 10), (52, 3)), ((24,), (10,))


@dataclass(frozen=True)
class Forward:
    """Log-probs of rows, and how rows are cut into micro-batches for it.

    Attributes:
        windows: For each kind of layer its window, where rows become a token tree; None where they
            are padded.
        cost: Of one pass over a tree.
        grammars: With which calls that were held to a form are replayed.
    """

    windows: dict[str, int | None] | None
    cost: PassCost | None
    grammars: Grammars | None

    @staticmethod
    def of(model: nn.Module, grammars: Grammars | None, *, token_tree: bool = True) -> Forward:
        """The token tree if `model` can be computed on it, else padded rows, and the log says why.

        Args:
            token_tree: False for padded rows in any case.
        """
        if not token_tree:
            return Forward(None, None, grammars)
        windows = _tree_windows(model)
        if isinstance(windows, str):
            _log.warning(
                "training computes one padded row per call instead of each distinct token once, "
                "because the model cannot be computed on a token tree: %s",
                windows,
            )
            return Forward(None, None, grammars)
        causal = causal_model(model)
        dense = causal.config._attn_implementation != "sdpa"
        return Forward(windows, PassCost.of(causal, dense=dense), grammars)

    def micro_batches(self, rows: Sequence[Row], max_tokens: int) -> list[list[int]]:
        """Cut row indices into what one pass computes: at most `max_tokens` tokens of a tree, or
        of padded rows. A row longer than that is a micro-batch of its own."""
        if self.cost is None:
            return micro_batches(rows, max_tokens)
        return tree_cuts(rows, max_tokens, self.cost)

    def logprobs(
        self, model: nn.Module, rows: Sequence[Row], *, with_entropy: bool
    ) -> TokenLogprobs:
        """Log-probs of every completion token of `rows`, in row order.

        Args:
            model: The one this was made for, or another of its architecture (the reference).
            with_entropy: Keep the graph of the entropy (else it is detached, for metrics only).

        Raises:
            TrainingError: A row has a grammar, and there are no `grammars` to replay it with.
            GrammarError: A row's completion does not follow its grammar.
        """
        if self.windows is None:
            return completion_logprobs(
                model, rows, pad_id=0, with_entropy=with_entropy, grammars=self.grammars
            )
        return tree_logprobs(
            model, rows, windows=self.windows, with_entropy=with_entropy, grammars=self.grammars
        )

    @torch.no_grad()
    def all_logprobs(
        self, model: nn.Module, rows: Sequence[Row], max_tokens: int
    ) -> tuple[Tensor, ...]:
        """Log-probs of each row's completion tokens without a gradient, in micro-batches.

        Returns:
            One tensor for each row, of shape [T_row].
        """
        result: dict[int, Tensor] = {}
        for indices in self.micro_batches(rows, max_tokens):
            part = [rows[i] for i in indices]
            logp_T = self.logprobs(model, part, with_entropy=False).logp_T
            pieces = logp_T.split([len(row.completion_ids) for row in part])
            result.update(zip(indices, pieces, strict=True))
        return tuple(result[i] for i in range(len(rows)))


def _tree_windows(model: nn.Module) -> dict[str, int | None] | str:
    """The window of each kind of layer, or why the model cannot be computed on a token tree."""
    causal = causal_model(model)
    if not isinstance(causal, PreTrainedModel):
        return f"{type(causal).__name__} is not a transformers model"
    windows = layer_windows(causal)
    if isinstance(windows, str):
        return windows
    attention = causal.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return (
            f"attn_implementation is {attention!r}, which takes no mask; load the model with "
            "attn_implementation='sdpa'"
        )
    return _difference(model, windows) or windows


@torch.no_grad()
def _difference(model: nn.Module, windows: dict[str, int | None]) -> str | None:
    """Compare a small tree with its rows; None if they agree, else what differs.

    For models whose code does something of its own with positions, masks or logits (ALiBi, for
    example) and does not say so in its configuration.
    """
    dtype = next(model.parameters()).dtype
    rows = [
        Row(str(i), 0, prompt, completion, (0.0,) * len(completion), SamplingParams(max_tokens=2))
        for i, (prompt, completion) in enumerate(_PROBE)
    ]
    try:
        found = tree_logprobs(model, rows, windows=windows, with_entropy=False).logp_T
    except Exception as error:  # whatever a model's own code makes of the mask
        return f"its forward pass does not take one ({type(error).__name__}: {error})"
    wanted = completion_logprobs(model, rows, pad_id=0, with_entropy=False).logp_T
    allowed = 1e-3 if dtype in (torch.float32, torch.float64) else 0.25
    difference = float((found - wanted).abs().max())
    # Written so that NaN counts as a difference.
    if difference <= allowed:
        return None
    return f"its log-probs would differ by {difference:.2g}"
