"""One forward pass over rows of keys and values, by the fastest exact method for a model."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from tuner.engines.base import EngineStats
from tuner.engines.grammar import to_device
from tuner.engines.request import Request, sample_next
from tuner.engines.sampling import SamplingBatch
from tuner.engines.transformers.cascade import (
    MASK_ELEMENTS,
    RowAttention,
    attention_mask,
    levels_of,
)
from tuner.engines.transformers.kv_cache import Placement, SlotCache
from tuner.engines.transformers.model_shape import layer_windows, probe_length
from tuner.engines.transformers.row_adapters import MergedAdapters, RowAdapters
from tuner.engines.transformers.vision import decoder_inputs, decoder_of, vision_of
from tuner.errors import ConfigError

# The forward pass of a plain decoder, with little overhead around its matrix products.
#
# For one token of a small model, transformers' own code spends most of its time around the
#     products:
# norms and rotations of many small operations, keyword arguments passed from module to module.
# Llama,
# Qwen 2 and 3, Mistral and similar models all compute the same few lines:
#
#     h = h + o(attention(rotate(norm(q)), rotate(norm(k)), v))       q, k, v of norm(h)
#     h = h + mlp(norm(h))
#
# These lines are here, over the model's own modules, so weights, adapters and experts are the
# model's. A model qualifies by the names of its modules, and only if the logits equal those of its
# own code (`row_pass`).


Map = Callable[[Tensor], Tensor]
Ints = NDArray[np.int64]

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
        model: `is_plain` must hold.
        windows: By kind of layer; covers all layers.
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
        # Modules whose own code is not run.
        self._passed = [inner, decoder, decoder.norm]
        for layer in decoder.layers:
            self._passed += [layer, layer.self_attn, *_norms(layer)]

    @contextmanager
    def shallow(self) -> Iterator[int]:
        """While the block runs, compute only one layer of each shape, and two at least; their
        number."""
        layers, shapes = self._layers, dict[Any, _Layer]()
        for layer in layers:
            parts = [layer.q, layer.k, layer.v, layer.o, layer.mlp]
            sizes = [
                str(p.shape) for m in parts if isinstance(m, nn.Module) for p in m.parameters()
            ]
            shapes.setdefault((layer.kind, *sizes), layer)
        self._layers = [*shapes.values()] if len(shapes) > 1 else layers[:2]
        try:
            yield len(self._layers)
        finally:
            self._layers = layers

    @property
    def hooked(self) -> bool:
        """Whether a module whose own code would not run has hooks."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._passed)

    def __call__(
        self,
        cache: SlotCache,
        attentions: Mapping[str, RowAttention],
        ids: Tensor,
        positions: Tensor,
        placement: Placement,
    ) -> Tensor:
        """Logits of the last column, or after every written token: ids and positions [m, C] ->
        [m, V] or [N, V]; with a fixed number of tokens, none of prompts (C > 1), whose last token
        is not among them."""
        rows, columns = ids.shape
        source = placement.source
        ids, positions = ids.flatten(), positions.flatten()
        if source is not None:
            ids, positions = ids[source], positions[source]
        count = len(ids)
        more = max(0, placement.tokens - count)
        if more:
            ids, positions = F.pad(ids, (0, more)), F.pad(positions, (0, more))
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
            stored.write(k[:count], v[:count])
            q = q[:count]
            if source is not None:
                q = q.new_zeros(rows * columns, *q.shape[1:]).index_copy_(0, source, q)
            found = (
                attentions[layer.kind]
                .attend(stored, q.reshape(rows, columns, heads, self._width), layer.scale)
                .reshape(rows * columns, -1)
            )
            if source is not None:
                found = found[source]
            x = x + layer.o(F.pad(found, (0, 0, 0, more)) if more else found)
            x = x + layer.mlp(layer.behind(x)[None])[0]
        if placement.tokens:
            return self._head(self._norm(x))[:count] if columns == 1 else x.new_empty(0)
        if placement.every:
            last = x
        elif source is not None:
            last = x[(source + 1) % columns == 0]
        else:
            last = x.view(rows, columns, -1)[:, -1]
        return self._head(self._norm(last))


def is_plain(model: PreTrainedModel) -> bool:
    """Whether a model has exactly the modules of a plain decoder."""
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
    """A root-mean-square norm in few operations. In half precision the module's own, which rounds
    in between."""
    weight = module.weight
    if weight.dtype not in (torch.float32, torch.float64):
        return module  # type: ignore[no-any-return]
    least = weight.new_tensor(module.variance_epsilon)
    share = 1 / weight.numel()

    def normed(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # The weight is looked up each time, since it may be replaced.
        scale = torch.rsqrt(torch.addcmul(least, length, length, value=share))
        found: Tensor = x * scale * module._parameters["weight"]
        return found

    return normed


# Passes over few tokens of each row, recorded as CUDA graphs for a few shapes and replayed.
#
# A step of one token per request is a thousand small kernels, and launching them from Python takes
# longer than they take on the GPU. A graph is launched at once, but has fixed shapes and addresses.
# So rows, columns and length are rounded up:
#
#     3 requests, the longest of 130 tokens      computed: 4 rows, 256 positions
#     the next turn of 3 agents, 20 tokens each            4 rows of 32 columns, 256 positions
#
# Nobody reads a padding token, and its keys and values go to the place behind the last position of
# the row, which nothing attends to. Decoding uses the first rows of the cache; prompts may be in
# any rows, whose keys and values a graph gathers.


_log = logging.getLogger(__name__)

_SHORTEST = 128
"""Minimum number of positions that a graph attends to."""
_PROMPTS = 4, 16
"""Minimum number of rows and columns of a graph over prompts."""
_TOKENS = 1 << 12
"""Maximum number of tokens of a graph; a larger pass takes the GPU longer than Python."""


@dataclass(frozen=True)
class _RecordedPass:
    """Attributes:
    inputs: Ids, positions, places and rows of the new tokens, shape [4, rows, columns].
    logits: Shape [rows, V], written by each replay.
    """

    inputs: Tensor
    logits: Tensor
    graph: torch.cuda.CUDAGraph


class PassGraphs:
    """One graph for each combination of rows, columns and positions in use.

    Args:
        compute: Ids and positions [m, C], and where they are -> logits [m, V].
        cache: Holds keys and values; call `forget` when it has grown.
        device: A GPU. On a CPU the same shapes are computed, and nothing is recorded.
    """

    def __init__(
        self,
        compute: Callable[[Tensor, Tensor, Placement], Tensor],
        cache: SlotCache,
        device: torch.device,
    ) -> None:
        self._compute = compute
        self._cache = cache
        self._device = device
        self._recorded: dict[tuple[int, ...], _RecordedPass] = {}
        self._holds: Hashable = None
        self._pool: Any = None
        self._usable = True

    def forget(self, holds: Hashable = None) -> None:
        """Drop the graphs, except those whose weights are still at the same address, as `holds`
        says."""
        if holds is None or holds != self._holds:
            self._recorded.clear()
            self._pool = None  # a pool that all graphs have left cannot be used again
        self._holds = holds or self._holds

    def logits(
        self,
        first: int,
        ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        real: NDArray[np.bool_],
    ) -> Tensor | None:
        """Logits after the last of C more tokens in each of m rows, [m, C] each -> [m, V].

        The next step overwrites them. None if there are too many tokens for a graph to pay, or the
        model's code cannot be recorded, which is found out at the first step.

        Args:
            first: First of the rows in the cache; 0 if C is 1.
            positions: 0 for tokens that are not `real`; those come first in a row.
        """
        cache, (count, width) = self._cache, ids.shape
        decodes = first == 0 and width == 1
        least = (1, 1) if decodes else _PROMPTS
        rows, columns = max(least[0], power_of_two(count)), max(least[1], power_of_two(width))
        rows = min(rows, cache.slots)
        length = min(max(_SHORTEST, power_of_two(int(positions.max()) + 1)), cache.capacity)
        few = rows * columns <= _TOKENS and rows * columns * length <= MASK_ELEMENTS
        if not (self._usable and (decodes or few)):
            return None
        inputs = np.zeros((4, rows, columns), dtype=np.int64)
        # Surplus rows are other rows of the cache.
        inputs[3] = (np.arange(first, first + rows) % cache.slots)[:, None]
        inputs[2] = inputs[3] * cache.width + cache.capacity
        inputs[:2, :count, -width:] = ids, positions
        inputs[2, :count, -width:] += np.where(real, positions - cache.capacity, 0)
        values = to_device(inputs, self._device)
        if self._device.type != "cuda":
            return self._step(values, length, decodes=decodes)[:count]
        shape = (rows, 0 if decodes else columns, length)
        recorded = self._recorded.get(shape)
        if recorded is None:
            try:
                recorded = self._record(values, length, decodes=decodes)
            except Exception as error:  # a model's own code may ask the GPU for anything
                _log.warning(
                    "generation is slower than possible: the model's pass cannot be "
                    "recorded as a CUDA graph (%s: %s)",
                    type(error).__name__,
                    error,
                )
                self._usable = False
                self._recover_generator()
                return None
            self._recorded[shape] = recorded
        recorded.inputs.copy_(values)
        recorded.graph.replay()
        return recorded.logits[:count]

    def _step(self, inputs: Tensor, length: int, *, decodes: bool) -> Tensor:
        ids, positions, target, row = inputs
        rows = slice(0, len(row)) if decodes else row[:, 0]
        placement = Placement(rows, length, target.flatten(), None)
        return self._compute(ids, positions, placement)

    def _record(self, inputs: Tensor, length: int, *, decodes: bool) -> _RecordedPass:
        # What libraries set up at first use must not be part of the graph. Running the step before
        # recording is safe: it writes the same values again.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(1 if self._pool else 2):
                self._step(inputs, length, decodes=decodes)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(inputs, length, decodes=decodes)
        return _RecordedPass(inputs, logits, graph)

    def _recover_generator(self) -> None:
        """A failed recording leaves torch's generator of the device unusable."""
        generator = torch.cuda.default_generators[self._device.index or 0]
        fresh = torch.Generator(self._device)
        fresh.manual_seed(generator.initial_seed())
        generator.graphsafe_set_state(fresh.graphsafe_get_state())


def power_of_two(number: int) -> int:
    """Round up to a power of two."""
    return 1 << (number - 1).bit_length()


# Detecting changes of the shared weights, so that no cached key or value outlives them.
#
# peft puts an adapter's layers inside the model, so the transformers model inside the wrapper
# already computes with the adapter; engine and trainer use that one and need no peft.
#
# The engine shares its weights with a trainer, which changes them in place. If the trainer forgets
# `update_weights`, keys and values of old weights must not be mixed with new ones, so the weights
# are
# checked before and after every forward pass. Which change is caught by what (tested):
#
# | change | caught by |
# |---|---|
# | `p.add_()`, `p.copy_()`, `load_state_dict`, AdamW (for-loop and foreach) | version counter |
# | `module.weight = new`, `load_state_dict(assign=True)` | identity |
# | `p.data = new` | address |
# | AdamW (fused), `p.data.add_()`, kernels writing through a pointer | probe of the values |
# | an adapter switched on or off, merged, scaled | the layers' switches |
#
# The probe is the first elements of every trained parameter: a change that leaves all of those
# alone and touches no version counter goes unnoticed.


def causal_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a LoRA wrapper, or the model itself."""
    inner: Any = model
    found: PreTrainedModel = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    return found


def served_model(model: nn.Module) -> PreTrainedModel:
    """Like `causal_model`, after checking that an engine can serve it.

    Raises:
        ConfigError: The adapter works outside the model's layers (learned prompts, or LoRA
            switched on by tokens), so the inner model would generate without it.
    """
    adapter: Any = getattr(model, "active_peft_config", None)
    if adapter is not None and (
        adapter.is_prompt_learning or getattr(adapter, "alora_invocation_tokens", None)
    ):
        raise ConfigError(
            f"the model's adapter, a {type(adapter).__name__}, changes prompts or is switched on "
            "by tokens, which the engine does not support; use LoRA without "
            "alora_invocation_tokens"
        )
    return causal_model(model)


_PROBE = 4
"""Number of elements checked in each trained parameter."""


class WeightsGuard:
    """Detects changes of `model`'s weights without copying them; about 20 us per check on a CPU."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = [
            (module._parameters, name)
            for module in model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._adapted: list[Any] = [
            module for module in model.modules() if hasattr(module, "_disable_adapters")
        ]
        self.remember()

    def remember(self) -> None:
        """Remember the current weights."""
        # Kept alive, so that no other parameter can get the same id.
        self._parameters = [place[name] for place, name in self._places]
        self._state = self._look()
        self._on = self._switches()
        trained = [p for p in self._parameters if p.requires_grad] or self._parameters
        self._views = [p.detach().view(-1)[:_PROBE] for p in trained if p.is_contiguous()]
        self._probe = self._values()

    def changed(self) -> bool:
        """Whether the weights differ from the remembered ones."""
        return (
            self._look() != self._state
            or self._switches() != self._on
            or not torch.equal(self._values(), self._probe)
        )

    def places(self) -> Hashable:
        """Equal as long as a recorded computation would read the same memory in the same way."""
        return tuple((id_, address) for id_, _, address in self._look()), tuple(self._switches())

    def _look(self) -> list[tuple[int, int, int]]:
        parameters = (place[name] for place, name in self._places)
        return [(id(p), p._version, p.data_ptr()) for p in parameters]

    def _switches(self) -> list[Hashable]:
        """Equal as long as the same adapters are on, with the same scale, merged or not; switching
        them changes no parameter."""
        return [
            (
                layer._disable_adapters,
                str(layer._active_adapter),
                tuple(getattr(layer, "merged_adapters", ())),
                tuple(getattr(layer, "scaling", {}).items()),
            )
            for layer in self._adapted
        ]

    def _values(self) -> Tensor:
        # Compared as bytes, because NaN is not equal to itself.
        return torch.cat(self._views).view(torch.uint8)


# Serving requests one at a time.


@functools.cache
def _arguments(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments; to find them takes as long as a layer."""
    return frozenset(inspect.signature(forward).parameters)


def forward_options(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments that make `model` compute the logits of the last position only, if it can."""
    return {"logits_to_keep": 1} if "logits_to_keep" in _arguments(type(model).forward) else {}


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache among the model's arguments and outputs.

    Models of transformers 5.24 and later call it `cache`. Older ones, and models whose code is not
    part of transformers, call it `past_key_values` or `cache_params`.
    """
    names = _arguments(type(model).forward)
    return next((name for name in ("cache", "cache_params") if name in names), "past_key_values")


def continued(
    model: PreTrainedModel,
    ids: Tensor,
    cache: Any,
    first: int | None,
    shift: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Logits [1, V] after the last of `ids` [1, C], which continue the cached tokens; and the
    updated cache, None if the model keeps none.

    Args:
        first: Position of the first id; None if the model knows it from the cache.
        shift: See `Vision.shifts`, [1, C].
    """
    name = cache_argument(model)
    places = None
    if first is not None:
        places = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    given = decoder_inputs(model, ids, places, shift) | {name: cache, "use_cache": True}
    if vision_of(model) is not None:
        output = decoder_of(model)(**given)
        return head_logits(model, output.last_hidden_state[:, -1]), getattr(output, name, None)
    output = model(**given, **forward_options(model))
    return output.logits[:, -1], getattr(output, name, None)


def head_logits(model: PreTrainedModel, states: Tensor) -> Tensor:
    """Logits [..., V] of a decoder's last hidden states [..., D]."""
    head: Any = model.get_output_embeddings()
    logits: Tensor = head(states)
    return logits


def whole_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [B, S, V] of a plain forward pass over ids [B, S]."""
    vision = vision_of(model)
    if vision is None:
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits
    shift = torch.from_numpy(vision.shifts(ids.cpu().numpy())).to(ids.device)
    given = decoder_inputs(model, ids, None, shift)
    return head_logits(model, decoder_of(model)(**given, use_cache=False).last_hidden_state)


def probe_ids(model: PreTrainedModel, length: int) -> Tensor:
    """Ids [S] for comparing passes, of at least this length: a vision model is shown
    an image."""
    ids = torch.arange(length, device=model.device) * 7 + 3
    ids %= model.config.get_text_config(decoder=True).vocab_size
    vision = vision_of(model)
    if vision is None:
        return ids
    image = torch.tensor(vision.probe_ids(), device=model.device)
    return torch.cat([ids[:2], image, ids[2:]])


@torch.no_grad()
def names_positions(model: PreTrainedModel, length: int) -> bool | str:
    """Compare generation with a plain forward pass over `length` tokens.

    Returns:
        Whether a pass that continues a cache needs explicit positions (Bamba otherwise starts at
        0); or a sentence about the difference if both ways differ.
    """
    ids = probe_ids(model, length)[None]
    length, why = ids.shape[1], ""
    shift = row_shift(model, ids)
    for told in (False, True):
        try:
            wanted = whole_logits(model, ids)[0, length - 3 :]
            got, cache = [], None
            for end in range(length - 2, length + 1):
                first = 0 if cache is None else end - 1
                part = slice(first, end)
                moved = None if shift is None else shift[:, part]
                at = first if told else None
                logits, cache = continued(model, ids[:, part], cache, at, moved)
                got.append(logits)
            found = differ(torch.cat(got), wanted)
        except Exception as error:  # a model's own code may fail in any way
            found = f"its forward pass fails ({type(error).__name__}: {error})"
        if found is None:
            return told
        why = why or found
    return why


def row_shift(model: PreTrainedModel, ids: Tensor) -> Tensor | None:
    """See `Vision.shifts`, for ids [B, S]; None if nothing is shifted."""
    vision = vision_of(model)
    if vision is None:
        return None
    shift = vision.shifts(ids.cpu().numpy())
    return torch.from_numpy(shift).to(ids.device) if shift.any() else None


def differ(got: Tensor, wanted: Tensor) -> str | None:
    """A sentence if logits [T, V] differ by more than rounding."""
    allowed = 1e-3 if got.dtype in (torch.float32, torch.float64) else 0.25
    difference = float((got.float() - wanted.float()).abs().max() / wanted.float().std())
    if difference > allowed:
        return f"its logits would differ by {difference:.2g} standard deviations"
    return None


class SoloRunner:
    """Serves requests in order, each alone from its first token to its last.

    Used for two purposes. Models whose layers keep something other than keys and values per token
    (linear attention, state spaces, shared or compressed caches) cannot be served from rows. And a
    deterministic run needs numbers that do not depend on other requests: every forward pass here
    has a batch of one and no reused prefix, so equal requests give bit-identical results. The cost
    is the throughput of batching and every shared prefix.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        guard: WeightsGuard,
        stats: EngineStats,
        *,
        names_positions: bool = False,
        adapters: RowAdapters | None = None,
    ) -> None:
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []
        self.no_drafts = "a cache that is not of rows cannot be cut back to the right tokens"
        self._model = model
        self._guard = guard
        self._stats = stats
        self._names_positions = names_positions
        self._adapters = adapters
        self._cache: Any = None

    def tokens_ahead(self) -> int:
        """Maximum of prompt tokens that the next step computes; 0 if it continues completions."""
        if self._cache is not None:
            return 0
        ahead = self.active or list(self.waiting)[:1]
        return sum(len(request.token_ids()) for request in ahead)

    def drop_abandoned(self) -> None:
        self.waiting = deque(request for request in self.waiting if not request.abandoned)
        if self.active and self.active[0].abandoned:
            self.active = []
            self._cache = None

    def evict(self) -> None:
        """Drop what was computed with earlier weights; a request in flight computes it again."""
        self._cache = None

    def step(self, version: int) -> list[Request]:
        """Run one forward pass and sample; returns the finished requests."""
        if not self.active:
            if not self.waiting:
                return []
            self.active = [self.waiting.popleft()]
            self._cache = None
        request = self.active[0]
        tokens = request.token_ids()
        new = tokens if self._cache is None else tokens[-1:]
        ids = torch.tensor([new], device=self._model.device)
        first = len(tokens) - len(new) if self._names_positions else None
        shift = row_shift(self._model, torch.tensor([tokens], device=ids.device))
        shift = None if shift is None else shift[:, -len(new) :]
        with nullcontext() if self._adapters is None else self._adapters.of_rows([request.adapter]):
            logits, cache = continued(self._model, ids, self._cache, first, shift)
        if self._guard.changed():
            return []
        if len(new) > 1 or not request.completion_ids:
            self._stats.prompt_tokens_computed += len(new)
        request.cached_tokens = 0
        self._cache = cache
        batch = SamplingBatch.of([request.sampling], ids.device)
        _, finished = sample_next([request], batch, logits, version)
        if finished:
            self.active = []
            self._cache = None
        self._stats.sampled_tokens += 1
        return [request] if finished else []


class RowPass:
    """A model's forward pass over rows of a cache.

    Args:
        windows: For each kind of layer ("full_attention", "sliding_attention") in the model its
            window, None for unlimited.
        shares: Rows may have prefixes, and we compute attention (`cascade`); otherwise the model
            does, over a view of the rows.
        plain: We run the model's layers ourselves (`PlainDecoder`).
        adapters: Chooses the adapter of each row; None: all rows have those that are on.

    Attributes:
        merged: Computes with merged weights; None without adapters that can be.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        windows: dict[str, int | None],
        *,
        shares: bool = False,
        plain: bool = False,
        adapters: RowAdapters | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self.merged: MergedAdapters | None = None
        self._windows = windows
        self._options = forward_options(model)
        self._cache_argument = cache_argument(model)
        self.plain = PlainDecoder(model, windows) if plain else None
        self._vision = vision_of(model)
        self.shares = shares
        self.layers: int = model.config.get_text_config(decoder=True).num_hidden_layers

    @property
    def reads_images(self) -> bool:
        """Whether prompts may have images."""
        return self._vision is not None

    def shift(self, tokens: Ints, positions: Ints) -> Ints | None:
        """By how much images shift the tokens at these positions [m, C] of rows [m, S]; None if
        they shift none."""
        if self._vision is None:
            return None
        shift = self._vision.shifts(tokens[:, : int(positions.max()) + 1])
        return np.take_along_axis(shift, positions, axis=1) if shift.any() else None

    def with_adapters(self, adapters: RowAdapters) -> RowPass | str:
        """The same pass for rows with different adapters, or a sentence why that cannot be."""
        found = copy.copy(self)
        found._adapters = adapters
        why = _adapters_agree(self._model, found, adapters)
        return found if why is None else why

    def merge_adapters(self) -> None:
        """Compute with merged weights from now on, where that is exact."""
        model = self._model
        merged = MergedAdapters(model, lambda: whole_logits(model, probe_ids(model, 16)[None]))
        self.merged = merged if merged.layers else None

    def logits(
        self,
        cache: SlotCache,
        ids: Tensor,
        positions: Tensor,
        placement: Placement,
        adapters: Sequence[str | None] = (),
    ) -> Tensor:
        """Logits of the last column, or after every written token: ids and positions [m, C] ->
        [m, V] or [N, V].

        Args:
            adapters: Of each row, if rows have different ones.
        """
        chosen: AbstractContextManager[None] = nullcontext()
        if self._adapters is not None:
            chosen = self._adapters.of_rows(adapters, ids.shape[1], placement)
        elif self.merged is not None:
            chosen = self.merged.in_use()
        with chosen:
            return self._logits(cache, ids, positions, placement)

    def _logits(
        self, cache: SlotCache, ids: Tensor, positions: Tensor, placement: Placement
    ) -> Tensor:
        cache.placement = placement
        dtype = self._model.dtype
        if placement.own is None:
            masks: dict[str, Any] = {
                kind: attention_mask(positions, placement.kv_length, window, dtype)
                for kind, window in self._windows.items()
            }
        else:
            attentions = {
                kind: RowAttention(cache, placement, positions, window, dtype)
                for kind, window in self._windows.items()
            }
            if self.plain is not None and not self.plain.hooked:
                return self.plain(cache, attentions, ids, positions, placement)
            masks = {kind: attention.mask() for kind, attention in attentions.items()}
        given = decoder_inputs(self._model, ids, positions, placement.shift) | {
            # Models with one kind of layer take a tensor, those with several a dict.
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            "use_cache": True,
            self._cache_argument: cache,
        }
        if self._vision is not None:
            states = decoder_of(self._model)(**given).last_hidden_state
            return head_logits(self._model, states[:, -1])
        if placement.every:
            every: Tensor = self._model(**given).logits.flatten(0, 1)
            return every if placement.source is None else every[placement.source]
        output = self._model(**given, **self._options)
        logits: Tensor = output.logits[:, -1]
        return logits


def row_pass_of(model: PreTrainedModel) -> RowPass | str:
    """The method to serve a model from rows of keys and values, or a sentence why it cannot be.

    Raises:
        ConfigError: Its attention implementation takes no mask.
    """
    windows = layer_windows(model)
    if isinstance(windows, str):
        return windows
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise ConfigError(
            f"attn_implementation is {attention!r}, but the engine needs one that takes a "
            "mask: load the model with attn_implementation='sdpa' or 'eager'"
        )
    why = ""
    for row_pass in _ways(model, windows, ours=attention == "sdpa"):
        found = rows_agree(model, row_pass)
        if found is None:
            return row_pass
        why = found
    return why


def _ways(
    model: PreTrainedModel, windows: dict[str, int | None], *, ours: bool
) -> Iterator[RowPass]:
    """Candidate methods, fastest first. Our attention needs a kernel of the CPU; on a GPU steps are
    recorded, which makes the overhead around the products cheap."""
    if ours and model.device.type == "cpu":
        if is_plain(model):
            yield RowPass(model, windows, shares=True, plain=True)
        yield RowPass(model, windows, shares=True)
    yield RowPass(model, windows)


@torch.no_grad()
def rows_agree(model: PreTrainedModel, row_pass: RowPass) -> str | None:
    """Compare passes over rows with a plain forward pass; None if they agree, else the difference.

    Needed for models whose code treats positions, masks or the cache in its own way (ALiBi, for
    example) without saying so in the configuration.
    """
    device = model.device
    ids = probe_ids(model, probe_length(model.config))
    length, rows_ids = len(ids), ids.cpu().numpy()
    try:
        # A row of one token, and a long row that continues next to it.
        alone = [whole_logits(model, row[None])[0] for row in (ids[:1], ids)]
        wanted = torch.cat([alone[1][-2:-1], alone[0], alone[1][-1:]])
        cache = SlotCache(row_pass.layers, 2, length)
        prefix = None
        got = []
        for first, places in ((1, [[*range(length - 1)]]), (0, [[0], [length - 1]])):
            positions = torch.tensor(places, device=device)
            own = positions.clone()
            if prefix is not None:
                own[1] -= prefix.end
            stop = int(own.max()) + 1
            rows = torch.arange(first, 2, device=device)[:, None]
            target = (rows * cache.width + own).flatten()
            placement = Placement(slice(first, 2), stop, target, None)
            if row_pass.shares:
                levels = levels_of((None, prefix)[first:], device)
                placement = Placement(slice(first, 2), stop, target, None, own, levels)
            tokens = np.stack([rows_ids] * len(places))
            if (shift := row_pass.shift(tokens, positions.cpu().numpy())) is not None:
                placement = replace(placement, shift=torch.from_numpy(shift).to(device))
            got.append(row_pass.logits(cache, ids[positions], positions, placement))
            if row_pass.shares:
                # The row's last two tokens remain.
                prefix = cache.seal(1, None, length - 3, 2)
    except Exception as error:  # a model's own code may do anything with the masks and the cache
        return f"its forward pass does not support them ({type(error).__name__}: {error})"
    return differ(torch.cat(got), wanted)


@torch.no_grad()
def _adapters_agree(model: PreTrainedModel, row_pass: RowPass, adapters: RowAdapters) -> str | None:
    """Compare a pass over two rows, of which one has an adapter, with a pass for each; None if
    they agree, else the difference."""
    device, length = model.device, probe_length(model.config)
    ids = torch.arange(2 * length, device=device) * 7 + 3
    ids = (ids % model.config.get_text_config().vocab_size).view(2, length)
    names = (None, min(adapters.names))
    try:
        alone = []
        for name, row in zip(names, ids, strict=True):
            with adapters.of_rows([name]):
                alone.append(model(input_ids=row[None], use_cache=False).logits[0, -1])
        cache = SlotCache(row_pass.layers, 2, length)
        positions = torch.arange(length, device=device).repeat(2, 1)
        rows = torch.arange(2, device=device)[:, None]
        place = Placement(slice(0, 2), length, (rows * cache.width + positions).flatten(), None)
        if row_pass.shares:
            place = replace(place, own=positions, levels=levels_of((None, None), device))
        got = row_pass.logits(cache, ids, positions, place, names)
    except Exception as error:  # a model's own code may give its layers any tokens
        return f"requests cannot have different adapters ({type(error).__name__}: {error})"
    return differ(got, torch.stack(alone))
