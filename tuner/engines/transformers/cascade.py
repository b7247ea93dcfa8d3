"""Attention over rows with shared prefixes, each prefix attended to once.

Decoding is bound by memory: a step computes little and reads every key and value that a request
attends to. Keys of tokens that n requests share (a system prompt, a task) are read once for all n,
whose queries form one matrix product with them. Each row attends to its own tokens separately, and
the two outputs are combined exactly by their log-sum-exps L:

    output = w * output_shared + (1 - w) * output_own        w = sigmoid(L_shared - L_own)

(Hydragen, Juravsky et al. 2024, arXiv 2402.05099; the trainer's trees are computed likewise.)
Prefixes nest in levels, which are joined one after the other:

    row 0   ─┐            ┌─ task A ─┐  own tokens 0
    row 1   ─┤            │          └  own tokens 1
    row 2   ─┼── system ──┤          ┌  own tokens 2
    row 3   ─┘            └─ task B ─┘  own tokens 3
              level 0        level 1

It reaches any model with "sdpa" attention as a mask: a `PrefixMask` takes the place of a 4-D mask,
passes unchanged through transformers' code, and takes over when `scaled_dot_product_attention`
receives it.

In a deterministic engine the same numbers must come out wherever keys and values are stored, so
attention is divided at fixed positions, and its parts are joined in the order of the positions:

    positions   0 ....... BLOCK ....... 2 BLOCK ...
    row 0       prefix A  | prefix B  | own tokens
    row 1       prefix A  | own tokens  own tokens        all: ((A + block 1) + block 2) ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tuner.engines.transformers.kv_cache import Level, Placement, Prefix, SlotCache, SlotLayer

flash: Callable[..., tuple[Tensor, Tensor]] = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
)
"""Output and log-sum-exps of the scores: [B, heads, C, width] each, [B, heads, C]. Supports grouped
heads."""
BLOCK = 128
"""Positions of one part of attention in a deterministic engine."""
_QUERIES = 32
"""Queries that the kernel computes together. With fewer it may use another product; `_FEW` of them
are as good where it multiplies them by a row's own keys."""
_FEW = 8
LANES = 32
"""The number of keys is a multiple of this: sums over the rest of a vector have another order."""


def rounded(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


def chain(leaf: Prefix | None) -> list[Prefix]:
    """A prefix and all its ancestors, the prefix first."""
    found = []
    while leaf is not None:
        found.append(leaf)
        leaf = leaf.parent
    return found


def levels_of(leaves: Sequence[Prefix | None], device: torch.device) -> tuple[Level, ...]:
    """The levels of rows, each row given by its last prefix."""
    chains = [chain(leaf)[::-1] for leaf in leaves]
    levels = []
    for depth in range(max(map(len, chains), default=0)):
        users: dict[Prefix, list[int]] = {}
        for row, prefixes in enumerate(chains):
            if depth < len(prefixes):
                users.setdefault(prefixes[depth], []).append(row)
        rows = [row for having in users.values() for row in having]
        parts, first = [], 0
        for prefix, having in users.items():
            parts.append((first, first + len(having), prefix))
            first += len(having)
        ordered = rows == list(range(len(leaves)))
        levels.append(Level(None if ordered else torch.tensor(rows, device=device), tuple(parts)))
    return tuple(levels)


class RowAttention:
    """Attention of the tokens of one pass, for one kind of layer.

    Args:
        cache: Holds keys and values.
        placement: Placement of the pass, with `own`.
        positions: Shape [m, C].
        window: A query sees the last `window` positions up to its own; None is all of them.
        dtype: Of the attention scores.
    """

    def __init__(
        self,
        cache: SlotCache,
        placement: Placement,
        positions: Tensor,
        window: int | None,
        dtype: torch.dtype,
    ) -> None:
        assert placement.own is not None
        self._cache = cache
        self._placement = placement
        self._dtype = dtype
        length, own = placement.kv_length, placement.own
        self._columns = columns = own.shape[1]
        near = window is None or length <= window
        self._fixed = placement.tokens > 0
        # Whole prompts of one length need causal attention only, half the work of a mask.
        self._causal = (
            near and columns == length > 1 and placement.source is None and not self._fixed
        )
        alike = near and columns == 1 and not self._fixed and bool((own == length - 1).all())
        self._own: list[tuple[slice, Tensor | None]] = [(slice(length), None)]
        if not (self._causal or alike):
            mask = attention_mask(own, length, window, dtype)
            size = BLOCK if self._fixed else length
            parts = [slice(at, min(at + size, length)) for at in range(0, length, size)]
            self._own = [(part, mask[..., part].contiguous()) for part in parts]
        self._prefixes = [
            [self._hidden(level, part, positions, window) for part in level.parts]
            for level in placement.levels
        ]

    def _hidden(
        self, level: Level, part: tuple[int, int, Prefix], positions: Tensor, window: int | None
    ) -> Tensor | None:
        """Values added to the scores of a prefix, [n, C, 1, L]; None if all of it is visible."""
        if window is None:
            return None
        first, last, prefix = part
        query = (positions if level.rows is None else positions[level.rows])[first:last]
        key = torch.arange(prefix.start, prefix.end, device=positions.device)
        hidden = key <= query[:, :, None, None] - window
        return _additive(hidden, self._dtype) if bool(hidden.any()) else None

    def mask(self) -> PrefixMask:
        """The mask that carries this object through the model's code."""
        assert self._placement.own is not None
        rows, columns = self._placement.own.shape
        # One number expanded to the shape of a mask: models look at the shape and at no value.
        one = torch.zeros((), dtype=self._dtype, device=self._placement.own.device)
        stand_in = one.expand(rows, 1, columns, columns).as_subclass(PrefixMask)
        stand_in.attention = self
        return stand_in

    def of_written(self, query: Tensor, scale: float) -> Tensor:
        """Attention of the layer written last: [m, heads, C, width], or if C is 1 with the heads of
        one key side by side, [m, kv_heads, heads / kv_heads, width]."""
        assert self._placement.own is not None
        rows, columns = self._placement.own.shape
        heads = query.shape[1] * query.shape[2] // columns
        found = self.attend(
            self._cache.written, query.reshape(rows, heads, columns, -1).transpose(1, 2), scale
        )
        return found.transpose(1, 2).reshape(query.shape)

    def attend(self, layer: SlotLayer, query: Tensor, scale: float) -> Tensor:
        """Attention of all tokens: [m, C, heads, width] -> [m, C, heads, width]."""
        rows, columns, heads, width = query.shape
        keys, values = layer.attended(self._placement)
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        if columns == 1:
            # Heads of one key as rows of one product.
            own = query.view(rows, kv_heads, group, width)
            if self._fixed and group < _FEW:
                own = F.pad(own, (0, 0, 0, _FEW - group))
        else:
            own = query.transpose(1, 2)
        if self._fixed:
            # Nothing, which changes no bit of what is joined with it.
            dtype = torch.promote_types(query.dtype, torch.float32)
            output = query.new_zeros(query.shape, dtype=dtype)
            total = output.new_full(query.shape[:-1], -torch.inf)
        else:
            output, total = self._of_rows(0, own, keys, values, group, scale)
            if not self._placement.levels:
                return output
            output = output.to(total.dtype)
        together = query.view(rows, columns, kv_heads, group, width).permute(2, 0, 1, 3, 4)
        for level, hidden in zip(self._placement.levels, self._prefixes, strict=True):
            chosen = together if level.rows is None else together[:, level.rows]
            other, sums = self._shared(level, hidden, chosen.contiguous(), layer.place, scale)
            if level.rows is None:
                output, total = joined(output, total, other, sums, fixed=self._fixed)
            else:
                found = joined(
                    output[level.rows], total[level.rows], other, sums, fixed=self._fixed
                )
                output, total = (
                    all_.index_copy(0, level.rows, part)
                    for all_, part in zip((output, total), found, strict=True)
                )
        for place in range(len(self._own) if self._fixed else 0):
            other, sums = self._of_rows(place, own, keys, values, group, scale)
            output, total = joined(output, total, other, sums, fixed=True)
        return output.to(query.dtype)

    def _of_rows(
        self, place: int, query: Tensor, keys: Tensor, values: Tensor, group: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attention to one part of the rows' own tokens: outputs [m, C, heads, width] and the
        log-sum-exps [m, C, heads]."""
        part, mask = self._own[place]
        rows, kv_heads, count, width = len(query), keys.shape[1], query.shape[2], query.shape[3]
        if self._columns == 1 and mask is not None and mask.shape[2] != count:
            # Materialised once for all layers: the kernel takes a fifth longer with an expanded
            # view.
            mask = mask[:, :, :1].repeat(1, 1, count, 1)
            self._own[place] = part, mask
        output, total = flash(
            query,
            keys[:, :, part],
            values[:, :, part],
            is_causal=self._causal,
            attn_mask=mask,
            scale=scale,
        )
        if self._columns > 1:
            return output.transpose(1, 2), total.transpose(1, 2)
        output, total = output[:, :, :group], total[:, :, :group]
        return (
            output.reshape(rows, 1, kv_heads * group, width),
            total.reshape(rows, 1, kv_heads * group),
        )

    def _shared(
        self,
        level: Level,
        hidden: Sequence[Tensor | None],
        query: Tensor,
        place: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attention of a level's rows to their prefixes: queries [kv_heads, n, C, group, width] ->
        [n, C, heads, width] and the log-sum-exps [n, C, heads]."""
        kv_heads, count, columns, group, width = query.shape
        outputs, sums = [], []
        for (first, last, prefix), mask in zip(level.parts, hidden, strict=True):
            of_part = query[:, first:last].reshape(1, kv_heads, -1, width)
            if mask is not None:
                mask = mask.expand(-1, -1, group, -1).reshape(1, 1, -1, mask.shape[-1])
            queries = of_part.shape[2]
            if self._fixed and (more := -queries % _QUERIES):
                of_part = F.pad(of_part, (0, 0, 0, more))
                mask = mask if mask is None else F.pad(mask, (0, 0, 0, more))
            output, total = flash(
                of_part, prefix.keys[place], prefix.values[place], attn_mask=mask, scale=scale
            )
            outputs.append(output[0, :, :queries].transpose(0, 1))
            sums.append(total[0, :, :queries].transpose(0, 1))
        shape = (count, columns, group, kv_heads)
        output, total = (
            (parts[0] if len(parts) == 1 else torch.cat(parts)) for parts in (outputs, sums)
        )
        return (
            output.reshape(*shape, width).transpose(2, 3).reshape(count, columns, -1, width),
            total.reshape(shape).transpose(2, 3).reshape(count, columns, -1),
        )


def joined(
    output: Tensor, total: Tensor, other: Tensor, sums: Tensor, *, fixed: bool = False
) -> tuple[Tensor, Tensor]:
    """Combine outputs [..., width] over two sets of keys, by their log-sum-exps [...].

    Args:
        fixed: The bits of an element do not depend on its place. On a CPU elements behind the last
            whole vector are computed by other code, so they are padded to whole vectors.
    """
    shape = total.shape
    if fixed:
        more = -total.numel() % LANES
        total, sums = (F.pad(all_.reshape(-1), (0, more)) for all_ in (total, sums))
    # Share of the other set in the sum of exponentials: exp(L') / (exp(L) + exp(L')).
    share, total = torch.sigmoid(sums - total), torch.logaddexp(total, sums)
    if fixed:
        share, total = (all_[: shape.numel()].view(shape) for all_ in (share, total))
    share = share[..., None]
    return output.to(share.dtype).lerp(other.to(share.dtype), share), total


class PrefixMask(Tensor):
    """A tensor that looks like a 4-D attention mask [m, 1, C, C] and holds no numbers."""

    attention: RowAttention | None = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product_attention(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: PrefixMask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Replaces torch's function of this name when its mask is a `PrefixMask`."""
    if attn_mask is None or attn_mask.attention is None or dropout_p or is_causal:
        raise ValueError("it changes the mask that it is given")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attn_mask.attention.of_written(query, scale)


MASK_ELEMENTS = 1 << 24
"""Upper limit of the elements of one mask over prompts."""


def attention_mask(
    positions: Tensor, kv_length: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Additive mask of the tokens that each token may attend to (for eager and sdpa alike).

    Args:
        positions: Position of each query token in its row, shape [m, C].
        kv_length: Number of key positions, K.
        window: A query sees the last `window` positions up to its own; None is all of them.
        dtype: Of the attention scores.

    Returns:
        Shape [m, 1, C, K]: 0 where attention is allowed, the dtype's lowest number elsewhere.
    """
    query = positions[:, None, :, None]
    key = torch.arange(kv_length, device=positions.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return _additive(hidden, dtype)


def _additive(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)
