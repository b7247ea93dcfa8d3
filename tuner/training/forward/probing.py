"""In which layout a model's log-probs are exact, as comparison says before anything is trained.

For models whose code does something of its own with positions, masks or logits (ALiBi, for
example) or carries a state from one packed row to the next, and does not say so in its
configuration: each layout of a few short rows and a long one is compared with one row per pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.engines.base import SamplingParams
from tuner.engines.grammar import Grammars
from tuner.engines.transformers.model_shape import layer_windows, length_limit, probe_length
from tuner.engines.transformers.weights import causal_model
from tuner.errors import ConfigError
from tuner.training.batch import Row
from tuner.training.forward.head import TokenLogprobs
from tuner.training.forward.kernels import layers_of
from tuner.training.forward.layouts import Forward
from tuner.training.forward.plain_rows import completion_logprobs, pack_tokens, packed_logprobs
from tuner.training.forward.tree_pass import PassCost, tree_logprobs
from tuner.training.trainer_settings import Checkpointing, Layout

_log = logging.getLogger(__name__)

_PROBE = ((3, 10, 17), (24, 31)), ((3, 10, 17), (24, 38, 45)), ((3, 10), (52, 3)), ((24,), (10,))


def exact_forward(
    model: nn.Module,
    grammars: Grammars | None,
    *,
    layout: Layout = "tree",
    checkpointing: Checkpointing = False,
    compiled: bool | None = None,
) -> Forward:
    """`layout` if `model` can be computed on it exactly, else the next of token tree, packed
    rows and padded rows that it can; and the log says which and why.

    Each is compared with one row per call on a few tokens, so that this is measured.

    Args:
        checkpointing: Activation checkpointing; `auto`: where a GPU has no room without.
        compiled: Compile where that gives the same; None: on a GPU.

    Raises:
        ConfigError: `checkpointing`, and the model has no layers for it; or the model is not
            causal, or not exact on padded rows either.
    """
    if checkpointing is True and not any(layers_of(model)):
        raise ConfigError(
            f"tuner.activation_checkpointing is true, but {type(model).__name__} has no layers "
            "that transformers marks for it; set it to false"
        )
    found = _exact(model, grammars, layout, checkpointing)
    if compiled is None:
        compiled = next(model.parameters()).is_cuda
    return _compiled_if_exact(found, model) if compiled else found


def _exact(
    model: nn.Module, grammars: Grammars | None, layout: Layout, checkpointing: Checkpointing
) -> Forward:
    causal = causal_model(model)
    limit = length_limit(causal.config) if isinstance(causal, PreTrainedModel) else None
    common: Any = {"grammars": grammars, "checkpointing": checkpointing, "limit": limit}
    not_tree = None
    if layout == "tree":
        windows = _tree_windows(model)
        if not isinstance(windows, str):
            cost = PassCost.of(causal, dense=causal.config._attn_implementation != "sdpa")
            return Forward("tree", windows=windows, cost=cost, **common)
        not_tree = f"the model cannot be computed on a token tree: {windows}"
    if layout != "padded":
        not_packed = _inexact(model, partial(packed_logprobs, model, with_entropy=False))
        if not_packed is None:
            if not_tree is not None:
                _log.warning(
                    "training computes packed rows, one per call, instead of each distinct "
                    "token once, because %s",
                    not_tree,
                )
            return Forward("packed", pack_tokens=pack_tokens(causal), **common)
        not_packed = f"packed rows would not be exact: {not_packed}"
        _log.warning(
            "training computes padded rows, one per call, because %s",
            "; and ".join(filter(None, (not_tree, not_packed))),
        )
    not_in_parts = _inexact(
        model, partial(completion_logprobs, model, with_entropy=False, in_parts=True)
    )
    if not_in_parts is not None:
        inexact = _inexact(model, partial(completion_logprobs, model, with_entropy=False))
        if inexact is not None:
            raise ConfigError(
                f"{type(causal).__name__} cannot be trained: padded rows would not be exact "
                f"either: {inexact}"
            )
        _log.warning(
            "training makes the logits of all tokens of a micro-batch at once, because making "
            "them in parts would not be exact: %s",
            not_in_parts,
        )
    return Forward("padded", in_parts=not_in_parts is None, **common)


def _compiled_if_exact(plain: Forward, model: nn.Module) -> Forward:
    """The same with compiled layers, if log-probs and a gradient are the same."""
    found = replace(plain, compiled=True)
    allowed = _allowed(next(model.parameters()).dtype)
    try:
        wanted, got = (_probed(way, model) for way in (plain, found))
        for one, other in zip(got, wanted, strict=True):
            difference = float((one - other).norm() / other.norm().clamp(min=1e-30))
            if not difference <= allowed:
                raise ArithmeticError(f"results would differ by {difference:.2g}")
    except Exception as error:  # whatever a compiler makes of a model's own code
        _log.warning(
            "training takes more time and memory, because the layers cannot be compiled "
            "(%s: %s); tuner.compile: false says nothing of it",
            type(error).__name__,
            error,
        )
        return plain
    return found


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
    tree = partial(tree_logprobs, model, windows=windows, with_entropy=False)
    return _inexact(model, tree) or windows


def _probe_rows(model: nn.Module) -> list[Row]:
    """A few short rows and one that goes past what the layers attend to."""
    causal = causal_model(model)
    length, known = 6, 53
    if isinstance(causal, PreTrainedModel):
        length = probe_length(causal.config)
        known = causal.config.get_text_config(decoder=True).vocab_size
    long = tuple((3 + 7 * i) % 53 for i in range(max(5, length)))
    rows = []
    for i, parts in enumerate([*_PROBE, (long[:-4], long[-4:])]):
        prompt, completion = (tuple(id_ % known for id_ in part) for part in parts)
        recorded = (0.0,) * len(completion)
        rows.append(Row(str(i), 0, prompt, completion, recorded, SamplingParams(max_tokens=2)))
    return rows


def _allowed(dtype: torch.dtype) -> float:
    """How far two ways of computing the same may be apart."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 0.25


def _probed(forward: Forward, model: nn.Module) -> list[Tensor]:
    """Log-probs of a few rows, and of a model that is trained the gradient of some weights."""
    logp_T = forward.logprobs(model, _probe_rows(model), with_entropy=False).logp_T
    trained = [p for p in model.parameters() if p.requires_grad][:1]
    gradients = torch.autograd.grad(logp_T.sum(), trained) if trained else ()
    return [logp_T.detach(), *gradients]


@torch.no_grad()
def _inexact(model: nn.Module, layout: Callable[[list[Row]], TokenLogprobs]) -> str | None:
    """Compare a layout of the probe's rows with one row per pass; None if they agree, else what
    differs."""
    causal, rows = causal_model(model), _probe_rows(model)
    alone = [completion_logprobs(model, [row], with_entropy=False).logp_T for row in rows]
    allowed = _allowed(next(model.parameters()).dtype)
    # The first two rows begin alike.
    if abs(float(alone[0][0] - alone[1][0])) > allowed:
        raise ConfigError(
            f"{type(causal).__name__} is not causal: what it gives for a token depends on those "
            "behind it, so it has no log-probs of sampled text. If it is an encoder that can be a "
            "decoder, set is_decoder to true in its config.json"
        )
    try:
        found = layout(rows).logp_T
    except Exception as error:  # whatever a model's own code makes of masks and positions
        return f"its forward pass does not take them ({type(error).__name__}: {error})"
    difference = float((found - torch.cat(alone)).abs().max())
    # Written so that NaN counts as a difference.
    if difference <= allowed:
        return None
    return f"its log-probs would differ by {difference:.2g}"
