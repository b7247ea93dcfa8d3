"""The forward pass of a decoder of the plain kind, with little around its matrix products.

For one token of a small model most of the time of transformers' own code goes into what is around
the products: norms and rotations of many small operations, keyword arguments handed from module to
module. Llama, Qwen 2 and 3, Mistral and their like are all the same few lines:

    h = h + o(attention(rotate(norm(q)), rotate(norm(k)), v))       q, k, v of norm(h)
    h = h + mlp(norm(h))

These lines stand here, over the model's own modules, so weights, adapters and experts are whatever
they are there. Which model is of this kind is seen by the names of its modules, and believed when
its logits are those of its own code (`row_pass`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.engines.transformers.cascade import RowAttention
from tuner.engines.transformers.kv_cache import Placement, SlotCache

Map = Callable[[Tensor], Tensor]

_MODEL = {"model", "lm_head"}
_DECODER = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}


@dataclass(frozen=True, slots=True)
class _Layer:
    kind: str
    scale: float
    before: Map
    q: Map
    k: Map
    v: Map
    q_norm: Map | None
    k_norm: Map | None
    o: Map
    behind: Map
    mlp: Map


class PlainDecoder:
    """A model's forward pass over rows whose attention is a `RowAttention`.

    Args:
        model: Of which `is_plain` holds.
        windows: By kind of layer; of one kind are all.
    """

    def __init__(self, model: PreTrainedModel, windows: Mapping[str, int | None]) -> None:
        inner: Any = model
        decoder = inner.model
        self._embed: Map = decoder.embed_tokens
        self._rotations: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = decoder.rotary_emb
        self._norm = _norm(decoder.norm)
        self._head: Map = inner.lm_head
        kinds = model.config.layer_types if len(windows) > 1 else None
        kinds = kinds or [*windows] * len(decoder.layers)
        self._layers = [
            _layer(layer, kind) for layer, kind in zip(decoder.layers, kinds, strict=True)
        ]
        self._width: int = decoder.layers[0].self_attn.head_dim
        # Those whose own code is not run.
        self._passed = [inner, decoder, decoder.norm]
        for layer in decoder.layers:
            self._passed += [layer, layer.self_attn, *_norms(layer)]

    @property
    def hooked(self) -> bool:
        """Whether somebody watches a module whose own code would not run."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._passed)

    def __call__(
        self,
        cache: SlotCache,
        attentions: Mapping[str, RowAttention],
        ids: Tensor,
        positions: Tensor,
        placement: Placement,
    ) -> Tensor:
        """Logits of the last column: ids and positions [m, C] -> [m, V]. What is padding is only
        attended with."""
        rows, columns = ids.shape
        source = placement.source
        if source is not None:
            ids, positions = ids.flatten()[source], positions.flatten()[source]
        x = self._embed(ids.view(1, -1))
        cos, sin = self._rotations(x, positions.view(1, -1))
        x = x[0]
        half = self._width // 2
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for place, layer in enumerate(self._layers):
            h = layer.before(x)
            q, k, v = (
                states.view(len(x), -1, self._width)
                for states in (layer.q(h), layer.k(h), layer.v(h))
            )
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = layer.q_norm(q), layer.k_norm(k)
            heads = q.shape[1]
            both = torch.cat([q, k], dim=1)
            both = both * cos + both.roll(half, -1) * sin
            q, k = both[:, :heads], both[:, heads:]
            stored = cache.rows[place]
            stored.write(k, v)
            if source is not None:
                q = q.new_zeros(rows * columns, *q.shape[1:]).index_copy_(0, source, q)
            found = (
                attentions[layer.kind]
                .attend(stored, q.reshape(rows, columns, heads, self._width), layer.scale)
                .reshape(rows * columns, -1)
            )
            x = x + layer.o(found if source is None else found[source])
            x = x + layer.mlp(layer.behind(x)[None])[0]
        if source is not None:
            last = x[(source + 1) % columns == 0]
        else:
            last = x.view(rows, columns, -1)[:, -1]
        return self._head(self._norm(last))


def is_plain(model: PreTrainedModel) -> bool:
    """Whether a model has the modules of a plain decoder, and no other."""
    inner: Any = model
    if not (_has(inner, _MODEL) and _has(inner.model, _DECODER)):
        return False
    return all(
        _has(layer, _LAYER)
        and _has(layer.self_attn, _ATTENTION, _NORMS)
        and all(_is_norm(norm) for norm in _norms(layer))
        for layer in inner.model.layers
    ) and _is_norm(inner.model.norm)


def _has(module: nn.Module, names: set[str], more: set[str] = frozenset()) -> bool:  # type: ignore[assignment]
    found = {name for name, _ in module.named_children()}
    own = any(True for _ in module.parameters(recurse=False))
    return not own and found in (names, names | more)


def _norms(layer: Any) -> list[nn.Module]:
    attention = layer.self_attn
    within = [getattr(attention, name) for name in sorted(_NORMS) if hasattr(attention, name)]
    return [layer.input_layernorm, layer.post_attention_layernorm, *within]


def _is_norm(module: Any) -> bool:
    return hasattr(module, "variance_epsilon") and set(module._parameters) == {"weight"}


def _layer(layer: Any, kind: str) -> _Layer:
    attention = layer.self_attn
    within = [
        _norm(getattr(attention, name)) if hasattr(attention, name) else None
        for name in ("q_norm", "k_norm")
    ]
    return _Layer(
        kind=kind,
        scale=attention.scaling,
        before=_norm(layer.input_layernorm),
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        q_norm=within[0],
        k_norm=within[1],
        o=attention.o_proj,
        behind=_norm(layer.post_attention_layernorm),
        mlp=layer.mlp,
    )


def _norm(module: Any) -> Map:
    """A root-mean-square norm in few operations. In half precision the module's own: it rounds in
    between."""
    weight = module.weight
    if weight.dtype not in (torch.float32, torch.float64):
        return module  # type: ignore[no-any-return]
    least = weight.new_tensor(module.variance_epsilon)
    share = 1 / weight.numel()

    def normed(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # The weight is looked up each time: it may be another one since.
        scale = torch.rsqrt(torch.addcmul(least, length, length, value=share))
        found: Tensor = x * scale * module._parameters["weight"]
        return found

    return normed
