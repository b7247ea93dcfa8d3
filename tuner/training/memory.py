"""Memory that an update takes in addition to weights and optimizer, from the shape of the model.

Bytes of one token in one layer of a decoder with norms before its parts and a gated MLP (Llama,
Qwen, Mistral and similar models). D is the width of the hidden states, Q = heads x width of a head,
K the same for keys and values, F the width of the MLP, e the bytes of a number:

    two norms           2 x (4 + e) D + 8    the input in float32, the normalised values before
                                             scaling, one number per token
    their outputs       2 x e D              the input of queries, keys and values, and of the MLP
    norms of Q and K    (4 + e) (Q + K) + 4 for each head     if the model has them
    attention           4 e Q + 4 heads      queries; keys and values, repeated for each query head;
                                             the output; one number for each head
    MLP                 4 e F                gate, its activation, the other half, their product

Trees and padded rows need no mask, nor do packed ones with flash attention, and keys and values
are not repeated: 2 e (Q + K) instead of 4 e Q. Other packed rows have a mask, of which each layer
keeps a copy: e N for a token in a pack of N. Compiled layers recompute the activation and the
intermediate values of norms: norms are 2 e D, those of Q and K e (Q + K), the MLP 3 e F.

Gemma's layers have norms after their parts as well, which add no outputs that are kept, and scale
in float32: 8 D for each, 8 (Q + K) + 4 for each head. LFM2's convolutions replace attention and its
norms: 6 e D for the three projections, the gated input, the result, and the gated result.

With LoRA, inputs of products with frozen weights are not kept: norms are 8 D and 4 (Q + K), their
outputs 0, the MLP 3 e F. Each adapted matrix keeps its input, a float32 copy if the model computes
in lower precision, and the values between the adapter's two matrices.

With checkpointing a layer keeps its input, e D, until all of the above is recomputed, one layer at
a time. Outside the layers there are the last norm and its output, (4 + 2 e) D.

Logits are computed for some tokens at a time (`head.LOGITS`), which takes for each logit 21 bytes
for float32 logits, log-probs and entropy, and 12 in the backward pass for log-probs and the
gradients of both; if the model computes in lower precision, e more, and 4 + e in the backward pass.
Compiled it is 10. An embedding of V tokens has a gradient of G = e V D. The peak is at one of

    the end of the forward pass  layers, logits
    the logits' backward pass    layers, logits, 2 G: from these tokens, and from those before
    a layer's backward pass      with checkpointing: inputs, and the recomputed layer
    its end                      3 G: from the output embedding, from the input embedding if it is
                                 the same, and their sum; in lower precision also 4 V D in float32;
                                 the last becomes the gradient if there was none before

with the gradients of all weights, which exist from the second micro-batch on.

Experts count with those that a token uses. Other kinds of layers are treated like these.
"""

from __future__ import annotations

import tracemalloc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from tuner.config.schema import Layout
from tuner.engines.images import ALBUM, IMAGE_IDS
from tuner.engines.transformers.model_shape import head_width, layer_configs
from tuner.engines.transformers.vision import KEPT, tensor_bytes, vision_of
from tuner.traces import TokenTree
from tuner.training.batch import Row
from tuner.training.forward.head import LOGITS

_FLOAT32 = 4
_COPIES = 7
"""Copies of an image during a request, those of a client in this process included: in base64 as an
argument, in the body that is sent, in that received, and as a string there; and decoded."""
_NORMS_OF_QUERIES = ("q_norm", "q_layernorm", "query_layernorm")


@dataclass(frozen=True)
class Activations:
    """Bytes that a pass keeps, by what they are proportional to.

    Attributes:
        depth: Number of layers.
        layers: Per token, in all layers.
        largest: Per token, in the layer that keeps most.
        input: Per token, input of a layer.
        mask: Per token in a layer with attention, for each token of its pack.
        masks: Number of layers that keep one.
        rest: Per token, outside the layers.
        logits: Per token with logits; in the forward pass and in the backward pass.
        at_once: Maximum number of tokens whose logits are computed at once.
        embedding: Of an embedding's gradient; 0 if it is not trained.
        exact: Of the same in float32.
    """

    depth: int
    layers: int
    largest: int
    input: int
    mask: int
    masks: int
    rest: int
    logits: tuple[int, int]
    at_once: int
    embedding: int
    exact: int

    @staticmethod
    def of(
        model: PreTrainedModel, *, layout: Layout = "tree", compiled: bool = False
    ) -> Activations:
        """The counts for a causal LM, including a trained adapter inside it.

        Args:
            model: On any device; `meta` counts as a GPU.
            layout: Layout in which it is computed.
            compiled: Whether its layers are compiled.
        """
        config = model.config.get_text_config(decoder=True)
        # Too much for a critic, which has no output embedding, by its logits.
        inputs: Any = model.get_input_embeddings()
        embedding: Tensor = inputs.weight
        (vocabulary, width), each = embedding.shape, embedding.element_size()
        attention = getattr(model.config, "_attn_implementation", None)
        masked = attention == "eager" if layout == "tree" else layout == "packed"
        masked &= attention in ("sdpa", "eager")
        by_name = _adapted_matrices(model)
        # Of several adapters, a pass has one.
        adapted = max(by_name.values(), key=lambda one: _adapter_bytes(one, each), default=[])
        settings = _Pass(each, masked, compiled, bool(adapted), *_norms(model, width))
        configs = layer_configs(config)
        kinds = list(getattr(config, "layer_types", None) or [""] * len(configs))
        mlp = _mlp_width(model, config)
        of_layers = [
            settings.layer(one, mlp(one), convolved=kind == "conv")
            for one, kind in zip(configs, kinds, strict=True)
        ]
        of_logits = (21, 12) if each >= _FLOAT32 else (21 + each, 12 + _FLOAT32 + each)
        of_logits = (10, 10) if compiled else of_logits
        adapter = _adapter_bytes(adapted, each)
        return Activations(
            depth=len(of_layers),
            layers=sum(of_layers) + adapter,
            largest=max(of_layers) + adapter // len(of_layers),
            input=each * width,
            mask=each * (masked and layout == "packed"),
            masks=len(kinds) - kinds.count("conv"),
            rest=(_FLOAT32 + 2 * each) * width,
            logits=(of_logits[0] * vocabulary, of_logits[1] * vocabulary),
            at_once=max(1, LOGITS.get(embedding.device.type, LOGITS["cuda"]) // vocabulary),
            embedding=each * vocabulary * width * embedding.requires_grad,
            exact=_FLOAT32 * vocabulary * width * embedding.requires_grad,
        )

    def kept(self, tokens: int, *, checkpointing: bool) -> int:
        """Bytes that a pass keeps for its backward pass, without logits.

        Args:
            tokens: Nodes of a tree, or tokens of padded rows or of one pack.
            checkpointing: Whether layers keep only their inputs.
        """
        if checkpointing:
            return tokens * (self.depth * self.input + self.rest)
        return tokens * (self.layers + self.masks * self.mask * tokens + self.rest)

    def peak(
        self,
        tokens: int,
        *,
        checkpointing: bool,
        gradients: int,
        sampled: int | None = None,
        alone: bool = False,
    ) -> int:
        """Peak bytes of an update, in addition to weights and optimizer state.

        Args:
            tokens, checkpointing: For its largest micro-batch, as in `kept`.
            gradients: Bytes of the gradients of all trained weights.
            sampled: Number of its tokens with logits; default: all.
            alone: Whether it is the only micro-batch.
        """
        there = 0 if alone else gradients
        kept = self.kept(tokens, checkpointing=checkpointing)
        logits = min(tokens if sampled is None else sampled, self.at_once)
        forward, backward = (logits * each for each in self.logits)
        again = tokens * (self.largest + self.mask * tokens) if checkpointing else 0
        embedding = 3 * self.embedding + (self.exact if self.embedding < self.exact else 0)
        return max(
            there + kept + forward,
            there + kept + backward + 2 * self.embedding,
            there + kept + again,
            gradients + again,
            gradients + embedding - (self.exact if alone else 0),
        )


def tokens_of_pass(rows: Sequence[Row], layout: Layout) -> int:
    """Number of tokens that go through the layers if these rows are one micro-batch."""
    if layout == "tree":
        return TokenTree.build(rows).unique_tokens
    if layout == "packed":
        return sum(map(len, rows))
    return max(map(len, rows)) * len(rows)


@dataclass(frozen=True)
class ImageMemory:
    """Bytes that the images of a step take, measured with the largest one of some rollouts.

    Attributes:
        count: Number of different ones in the step.
        in_prompt: Most of them in one rollout.
        each: What is kept of one: as it was sent, the tower's inputs, and its features.
        reading: Maximum while the processor makes the tower's inputs.
        computing: Maximum while features are computed.
        saved: Kept of one for the backward pass; 0 if the tower is frozen.
    """

    count: int
    in_prompt: int
    each: tuple[int, int, int]
    reading: int
    computing: int
    saved: int

    @staticmethod
    def of(model: Any, rows: Sequence[Row], *, tasks: int, group: int) -> ImageMemory | None:
        """The images of a step, or None if there are none in `rows`.

        Args:
            rows: Of some rollouts of one task.
            tasks: Tasks of the step.
            group: Rollouts of each.
        """
        by_rollout: defaultdict[int, set[str]] = defaultdict(set)
        for row in rows:
            by_rollout[row.rollout] |= _images((*row.prompt_ids, *row.completion_ids))
        every = set().union(*by_rollout.values())
        vision = vision_of(model)
        if vision is None or not every:
            return None
        shared = set[str].intersection(*by_rollout.values())
        own = len(every - shared) / len(by_rollout)
        largest = max(every, key=lambda sha256: len(vision.ids(sha256)))
        trained = vision.trained
        with torch.set_grad_enabled(trained), _LiveBytes() as live:
            tables = vision.compute(model, largest)
        pixels = sum(map(tensor_bytes, vision.pixels(largest).values()))
        return ImageMemory(
            count=round(tasks * (len(shared) + group * own)),
            in_prompt=max(map(len, by_rollout.values())),
            each=(len(ALBUM.content(largest)), pixels, sum(map(tensor_bytes, tables))),
            reading=_traced(lambda: vision.process(largest)),
            computing=live.peak,
            saved=live.now if trained else 0,
        )

    def generating(self, requests: int, readers: int) -> int:
        """Bytes that requests take at once with their images, beside their keys and values, while
        `readers` of them are read."""
        sent = requests * self.in_prompt * _COPIES * self.each[0]
        return self.kept + self.computing + sent + min(requests, readers) * self.reading

    @property
    def kept(self) -> int:
        """Bytes that are kept between passes."""
        return sum(
            min(self.count * each, most)
            for each, most in zip(self.each, (ALBUM.memory, KEPT, KEPT), strict=True)
        )


def _traced(work: Callable[[], object]) -> int:
    """Bytes that Python and NumPy allocate during `work`, at most."""
    already = tracemalloc.is_tracing()
    if not already:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not already:
            tracemalloc.stop()


def _images(ids: Iterable[int]) -> set[str]:
    return {ALBUM.image_at(id_).sha256 for id_ in ids if id_ >= IMAGE_IDS}


class _LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that are made in the block, now and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        if key and key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@dataclass(frozen=True)
class _Pass:
    """How layers are computed.

    Attributes:
        each: Bytes of a number.
        masked: Whether attention takes a mask.
        frozen: Whether their own weights are frozen.
        norms: Number of norms of the hidden states in a layer.
        norms_queries: Whether queries and keys have norms.
        exact_norms: Whether norms scale in float32.
    """

    each: int
    masked: bool
    compiled: bool
    frozen: bool
    norms: int
    norms_queries: bool
    exact_norms: bool

    def layer(self, config: Any, mlp: int, *, convolved: bool) -> int:
        """Bytes of one token in a layer, without an adapter's.

        Args:
            config: Its configuration.
            mlp: Width of its MLP.
            convolved: Whether a gated convolution replaces attention.
        """
        heads = getattr(config, "num_attention_heads", None) or 1
        pairs = getattr(config, "num_key_value_heads", None) or heads
        width = head_width(config) if heads > 1 else config.hidden_size
        queries, keys = heads * width, pairs * width
        norms = self.norms * self._norm(config.hidden_size)
        if not self.frozen:
            norms += 2 * self.each * config.hidden_size
        if self.norms_queries and not convolved:
            norms += self._norm(queries, heads) + self._norm(keys, pairs)
        attention = self.each * (4 * queries if self.masked else 2 * (queries + keys))
        mixing = attention + _FLOAT32 * heads
        if convolved:
            mixing = (5 if self.frozen else 6) * self.each * config.hidden_size
        parts = 3 if self.compiled or self.frozen else 4
        return norms + mixing + parts * self.each * mlp

    def _norm(self, width: int, rows: int = 1) -> int:
        if self.compiled:
            return self.each * width
        scaled = _FLOAT32 if self.exact_norms else self.each
        multiplied = 0 if self.frozen else scaled * width
        return _FLOAT32 * (width + rows) + multiplied


def _mlp_width(model: nn.Module, config: Any) -> Callable[[Any], int]:
    """Width of a layer's MLP by its configuration, summed over the experts that a token uses."""
    # LFM2 computes the width of its matrices from the configured one.
    gates = (
        module.out_features
        for name, module in model.named_modules()
        if name.endswith(".feed_forward.w1") and isinstance(module, nn.Linear)
    )
    adjusted = next(gates, None) if getattr(config, "block_auto_adjust_ff_dim", False) else None

    def of(layer: Any) -> int:
        experts = getattr(layer, "num_experts_per_tok", None) or 1
        width = getattr(layer, "moe_intermediate_size", None) if experts > 1 else adjusted
        width = width or getattr(layer, "intermediate_size", 4 * layer.hidden_size)
        return int(experts * width)

    return of


def _norms(model: PreTrainedModel, width: int) -> tuple[int, bool, bool]:
    """Number of norms of the hidden states in a layer, whether queries and keys have some, and
    whether they scale in float32 as Gemma's do."""
    found = [(name, one) for name, one in model.named_modules() if "norm" in name.split(".")[-1]]
    of_queries = [one for name, one in found if name.endswith(_NORMS_OF_QUERIES)]
    of_states = [
        one
        for name, one in found
        if not name.endswith(_NORMS_OF_QUERIES)
        and getattr(getattr(one, "weight", None), "shape", None) == (width,)
    ]
    depth = model.config.get_text_config(decoder=True).num_hidden_layers
    exact = any(type(one).__name__.startswith("Gemma") for one in of_states)
    return max(2, len(of_states) // depth), bool(of_queries), exact


def _adapted_matrices(model: nn.Module) -> dict[str, list[tuple[str, int, int]]]:
    """The matrices of each LoRA adapter: module, width of the input, rank."""
    found: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for name, module in model.named_modules():
        for adapter, one in getattr(module, "lora_A", {}).items():
            sizes = one.in_features, one.out_features
            found[adapter].append((name.rpartition(".")[0], *sizes))
    return found


def _adapter_bytes(matrices: Sequence[tuple[str, int, int]], each: int) -> int:
    """Bytes per token in all layers."""
    ranks = sum(rank for _, _, rank in matrices)
    if each < _FLOAT32:
        return _FLOAT32 * (ranks + sum(width for _, width, _ in matrices))
    # Matrices of one module that read the same input keep it once.
    return _FLOAT32 * (ranks + sum(width for _, width in {one[:2] for one in matrices}))
