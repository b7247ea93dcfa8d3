"""How much memory an update takes beside weights and optimizer, from the shape of the model.

Bytes of one token in one layer of a decoder with norms before its parts and a gated MLP (Llama,
Qwen, Mistral and models built like them). D is the width of the hidden states, Q = heads x width of
a head, K the same of keys and values, F the width of the MLP, e the bytes of a number:

    two norms           2 x (4 + e) D + 8    their input in float32, what is multiplied with the
                                             weights, one number for the token
    their outputs       2 x e D              the input of queries, keys and values, and of the MLP
    norms of Q and K    (4 + e) (Q + K) + 4 for each head     where a model has them
    attention           4 e Q + 4 heads      queries; keys and values, one for each head of the
                                             queries; the output; one number for each head
    MLP                 4 e F                gate, its activation, the other half, their product

Padded rows need no mask, nor do packed ones with flash attention, and keys and values are kept as
they are: 2 e (Q + K) in place of 4 e Q. Other packed rows have a mask, of which each layer keeps a
copy: e N for a token in a pack of N. Compiled layers compute the activation and what is between a
norm's input and its output again: norms are 2 e D, those of Q and K e (Q + K), the MLP 3 e F.

Where an adapter is trained, what is multiplied with frozen weights is not kept: norms are 8 D and
4 (Q + K), their outputs 0, the MLP 3 e F. Each adapted matrix keeps its input, a copy in float32
where the model computes in less, and what is between the adapter's own two matrices.

With checkpoints a layer keeps its input, e D, until all of the above is computed again, one layer
at a time. Beside the layers there are the last norm and its output, (4 + 2 e) D.

Logits are made of some tokens at a time (`head.LOGITS`), which takes for each logit 21 bytes for
float32 logits, log-probs and their entropy, and 12 in the backward pass for log-probs and the
gradients of both; where the model computes in less, e more, and 4 + e in the backward pass. Where
compiled it is 10. An embedding of V tokens has a gradient of G = e V D. The most is at one of

    the end of the forward pass  layers, logits
    the logits' backward pass    layers, logits, 2 G: from these tokens, and from those before
    a layer's backward pass      with checkpoints: inputs, and the layer computed again
    its end                      3 G: from the output embedding, from that of the inputs where it is
                                 the same, and their sum; in float32 as well, 4 V D, where the model
                                 computes in less; the last is the gradient where none was before

with the gradients of all weights, which are there from the second micro-batch on.

Experts count with those that a token goes through. Other kinds of layers are taken for such ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.config.schema import Layout
from tuner.engines.transformers.model_shape import head_width, layer_configs
from tuner.traces import TokenTree
from tuner.training.batch import Row
from tuner.training.forward.head import LOGITS

_FLOAT32 = 4
_NORMS_OF_QUERIES = ("q_norm", "q_layernorm", "query_layernorm")


@dataclass(frozen=True)
class Activations:
    """Bytes that a pass keeps, by what they grow with.

    Attributes:
        depth: Layers.
        layers: Of one token in all layers.
        largest: Of one token in that layer which keeps most.
        input: Of one token before a layer.
        mask: Of one token in a layer, for each token of its pack.
        rest: Of one token outside the layers.
        logits: Of one token whose logits are made; in the forward pass and in the backward pass.
        at_once: Tokens whose logits are made at once, at most.
        embedding: Of an embedding's gradient; 0 where it is not trained.
        exact: Of the same in float32.
    """

    depth: int
    layers: int
    largest: int
    input: int
    mask: int
    rest: int
    logits: tuple[int, int]
    at_once: int
    embedding: int
    exact: int

    @staticmethod
    def of(
        model: PreTrainedModel, *, layout: Layout = "tree", compiled: bool = False
    ) -> Activations:
        """Those of a causal LM, with the adapter inside it where one is trained.

        Args:
            model: On whichever device; on `meta` it counts as on a GPU.
            layout: In which rows it is computed.
            compiled: Whether its layers are.
        """
        config = model.config.get_text_config(decoder=True)
        # Of a critic, which has no output embedding, this is too much by its logits.
        inputs: Any = model.get_input_embeddings()
        embedding: Tensor = inputs.weight
        (vocabulary, width), each = embedding.shape, embedding.element_size()
        attention = getattr(model.config, "_attn_implementation", None)
        masked = layout == "tree" or (layout == "packed" and attention in ("sdpa", "eager"))
        adapted = list(_adapted_matrices(model))
        settings = _Pass(each, masked, compiled, bool(adapted), _norms_queries(model))
        of_layers = [settings.layer(one) for one in layer_configs(config)]
        of_logits = (21, 12) if each >= _FLOAT32 else (21 + each, 12 + _FLOAT32 + each)
        of_logits = (10, 10) if compiled else of_logits
        adapter = _adapter_bytes(adapted, each)
        return Activations(
            depth=len(of_layers),
            layers=sum(of_layers) + adapter,
            largest=max(of_layers) + adapter // len(of_layers),
            input=each * width,
            mask=each * (masked and layout == "packed"),
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
            checkpointing: Whether layers keep their inputs alone.
        """
        if checkpointing:
            return tokens * (self.depth * self.input + self.rest)
        return tokens * (self.layers + self.depth * self.mask * tokens + self.rest)

    def peak(
        self,
        tokens: int,
        *,
        checkpointing: bool,
        gradients: int,
        sampled: int | None = None,
        alone: bool = False,
    ) -> int:
        """Most bytes at once in an update, beside weights and what the optimizer keeps.

        Args:
            tokens, checkpointing: Of its largest micro-batch, as `kept` takes them.
            gradients: Bytes of the gradients of all weights that are trained.
            sampled: Tokens of it whose logits are made; not given: all.
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
    """Tokens that go through the layers where these rows are one micro-batch."""
    if layout == "tree":
        return TokenTree.build(rows).unique_tokens
    if layout == "packed":
        return sum(map(len, rows))
    return max(map(len, rows)) * len(rows)


@dataclass(frozen=True)
class _Pass:
    """How layers are computed.

    Attributes:
        each: Bytes of a number.
        masked: Whether attention takes a mask, or the token tree.
        frozen: Whether their own weights are not trained.
        norms_queries: Whether queries and keys have norms of their own.
    """

    each: int
    masked: bool
    compiled: bool
    frozen: bool
    norms_queries: bool

    def layer(self, config: Any) -> int:
        """Bytes of one token in a layer of this configuration, without an adapter's."""
        heads = getattr(config, "num_attention_heads", None) or 1
        pairs = getattr(config, "num_key_value_heads", None) or heads
        width = head_width(config) if heads > 1 else config.hidden_size
        queries, keys = heads * width, pairs * width
        norms = 2 * self._norm(config.hidden_size)
        if not self.frozen:
            norms += 2 * self.each * config.hidden_size
        if self.norms_queries:
            norms += self._norm(queries, heads) + self._norm(keys, pairs)
        attention = self.each * (4 * queries if self.masked else 2 * (queries + keys))
        parts = 3 if self.compiled or self.frozen else 4
        return norms + attention + _FLOAT32 * heads + parts * self.each * _mlp_width(config)

    def _norm(self, width: int, rows: int = 1) -> int:
        """What norms keep of numbers in so many rows of the same width each."""
        if self.compiled:
            return self.each * width
        multiplied = 0 if self.frozen else self.each * width
        return _FLOAT32 * (width + rows) + multiplied


def _mlp_width(config: Any) -> int:
    """Numbers between the two matrices of an MLP, in all experts that a token goes through."""
    experts = getattr(config, "num_experts_per_tok", None) or 1
    width = getattr(config, "moe_intermediate_size", None) if experts > 1 else None
    return int(experts * (width or getattr(config, "intermediate_size", 4 * config.hidden_size)))


def _norms_queries(model: nn.Module) -> bool:
    return any(name.endswith(_NORMS_OF_QUERIES) for name, _ in model.named_modules())


def _adapted_matrices(model: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Of each matrix with a LoRA adapter: the module that it is in, its input's width, the rank."""
    for name, module in model.named_modules():
        for adapter in getattr(module, "lora_A", {}).values():
            yield name.rpartition(".")[0], adapter.in_features, adapter.out_features


def _adapter_bytes(matrices: Sequence[tuple[str, int, int]], each: int) -> int:
    """Of one token in all layers."""
    ranks = sum(rank for _, _, rank in matrices)
    if each < _FLOAT32:
        return _FLOAT32 * (ranks + sum(width for _, width, _ in matrices))
    # Matrices of one module that read the same keep it once.
    return _FLOAT32 * (ranks + sum(width for _, width in {one[:2] for one in matrices}))
