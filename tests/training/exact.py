"""Whether two ways of computing log-probs have the same gradient; and models that can tell.

What everything is compared with is one row per call: `ONE_ROW`, the model's own forward pass over
one row at a time and its own logits.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.engines.models import VOCABULARY, make_model
from tests.training.configured import changed
from tuner.config import RunConfig
from tuner.config.schema import Layout
from tuner.engines import SamplingParams
from tuner.engines.grammar import Grammars
from tuner.training.batch import Batch, Row
from tuner.training.forward import head
from tuner.training.forward import tree_pass as tree_blocks
from tuner.training.forward.layouts import Forward, exact_forward
from tuner.training.trainer import PolicyTrainer

KINDS = ["qwen3", "llama", "mistral", "gemma2", "gemma3"]
"""Shapes of models that can be computed on a token tree, with sliding windows and soft capping."""

SAMPLINGS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, temperature=0.7),
    SamplingParams(max_tokens=9, top_k=20),
    SamplingParams(max_tokens=9, top_p=0.9, temperature=1.3),
    SamplingParams(max_tokens=9, min_p=0.01, repetition_penalty=1.3, logit_bias=((5, 1.0),)),
    SamplingParams(
        max_tokens=9, presence_penalty=0.7, frequency_penalty=-0.4, bad_words=((298, 299),)
    ),
]

Cut = tuple[Layout, int]
"""A layout, and the tokens of its micro-batches."""


def model_of(kind: str, dtype: torch.dtype = torch.float32, **changed: object) -> PreTrainedModel:
    """A random model of one of KINDS, or any that `make_model` knows, with its configuration
    `changed`."""
    if kind == "gemma2":  # both kinds of layers, and both kinds of soft capping
        torch.manual_seed(0)
        config = Gemma2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            sliding_window=6,
            query_pre_attn_scalar=8,
            initializer_range=0.2,
            final_logit_softcapping=3.0,
            attn_logit_softcapping=2.0,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
        config.update(changed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        model.generation_config.eos_token_id = None
    else:
        model = make_model(kind, **changed)
    return all_float64(model) if dtype == torch.float64 else model


def precision(kind: str) -> tuple[torch.dtype, float]:
    """The dtype in which a model of this kind is compared, and how far gradients may differ."""
    # Eager attention, which gemma2 needs for its soft capping, is in float32 in any case.
    return (torch.float32, 1e-5) if kind == "gemma2" else (torch.float64, 1e-10)


def all_float64(model: PreTrainedModel) -> PreTrainedModel:
    """`model` in float64, its norms too, which transformers computes in float32.

    With those, a gradient depends by 1e-7 on the order in which it is added up.
    """
    model.double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_rms_norm, module)
    return model


def _rms_norm(self: nn.Module, states: Tensor) -> Tensor:
    epsilon = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    offset = 1.0 if type(self).__name__.startswith("Gemma") else 0.0
    scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + epsilon)
    return scaled * (offset + self.weight)


@contextlib.contextmanager
def small_parts(tokens: int = 3) -> Iterator[None]:
    """Trees of a few nodes have several blocks, and their logits are made in several parts."""
    with (
        mock.patch.multiple(tree_blocks, BLOCKS=(5, 5), RUNS=2),
        mock.patch.dict(head.LOGITS, cpu=tokens * VOCABULARY),
    ):
        yield


def row(
    prompt_ids: Iterable[int],
    completion_ids: Iterable[int],
    sampling: SamplingParams = SAMPLINGS[0],
) -> Row:
    completion = tuple(completion_ids)
    return Row("c", 0, tuple(prompt_ids), completion, (0.0,) * len(completion), sampling)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gradient(model: nn.Module) -> Tensor:
    """Of all parameters that are trained, in float64."""
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten().double()
            for p in model.parameters()
            if p.requires_grad
        ]
    )


def computed(
    model: nn.Module, rows: Sequence[Row], forward: Forward, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probs of the rows' completion tokens in micro-batches of so many tokens, and the gradient
    of a sum in which each token of each row and its entropy has a weight of its own."""
    model.zero_grad(set_to_none=True)
    logp: dict[int, Tensor] = {}
    for indices in forward.micro_batches(rows, max_tokens):
        found = forward.logprobs(model, [rows[i] for i in indices], with_entropy=True)
        lengths = [len(rows[i].completion_ids) for i in indices]
        weights = torch.cat([weights_of(i, n) for i, n in zip(indices, lengths, strict=True)])
        weighed(found.logp_T, found.entropy_T, weights.to(found.logp_T.device)).backward()
        logp.update(zip(indices, found.logp_T.detach().split(lengths), strict=True))
    return torch.cat([logp[i] for i in range(len(rows))]), gradient(model)


def weights_of(row: int, tokens: int) -> Tensor:
    return torch.randn(tokens, generator=seeded(row))


def weighed(logp_T: Tensor, entropy_T: Tensor, weights_T: Tensor) -> Tensor:
    return (logp_T * weights_T + 0.3 * entropy_T * weights_T**2).sum()


def assert_same_gradient(
    model: nn.Module,
    rows: Sequence[Row],
    *,
    cuts: Iterable[Cut],
    tolerance: float,
    grammars: Grammars | None = None,
) -> None:
    """What is `computed` is that of one row per call."""
    wanted_logp, wanted = computed(model, rows, Forward("padded", grammars), 1)
    for layout, max_tokens in cuts:
        forward = exact_forward(model, grammars, layout=layout)
        assert forward.layout == layout
        logp, found = computed(model, rows, forward, max_tokens)
        assert (logp - wanted_logp).abs().max() < tolerance * 10, (layout, max_tokens)
        assert (found - wanted).norm() < tolerance * wanted.norm(), (layout, max_tokens)


@dataclass(frozen=True)
class Update:
    """What one update hands to the optimizer, and what it reports."""

    gradient: Tensor
    metrics: dict[str, float]


def update_of(
    model: nn.Module,
    batch: Batch,
    settings: RunConfig,
    *,
    layout: Layout | None,
    max_tokens: int = 1,
    reference: nn.Module | None = None,
    grammars: Grammars | None = None,
    step: int = 0,
) -> Update:
    """One whole update that leaves the weights as they are.

    Args:
        layout: None for one row per call.
        step: Updates that the weights have seen; a row of older versions is stale.
    """
    settings = changed(
        settings,
        layout=layout or "padded",
        max_tokens_per_micro_batch=max_tokens,
        grad_clip=1e9,
        updates=1,
    )
    trainer = PolicyTrainer(model, settings, reference=reference, grammars=grammars)
    if layout is None:
        trainer._forward = Forward("padded", grammars)
    else:
        assert trainer._forward.layout == layout
    trainer.step = step
    gradients: list[Tensor] = []
    step_of = mock.Mock(side_effect=lambda: gradients.append(gradient(model)))
    with mock.patch.object(trainer.optimizer, "step", step_of):
        scored = trainer.compute_ref_logp(trainer.compute_advantages(batch))
        metrics = trainer.ppo_update(scored)
    return Update(gradients[0], metrics)


def assert_same_update(
    model: nn.Module,
    batch: Batch,
    settings: RunConfig,
    *,
    cuts: Iterable[Cut],
    tolerance: float,
    reference: nn.Module | None = None,
    grammars: Grammars | None = None,
    step: int = 0,
) -> Update:
    """Gradient, loss and entropy of an update are those of one row per call, which is returned."""
    given = {"reference": reference, "grammars": grammars, "step": step}
    wanted = update_of(model, batch, settings, layout=None, **given)
    for layout, max_tokens in cuts:
        found = update_of(model, batch, settings, layout=layout, max_tokens=max_tokens, **given)
        error = (found.gradient - wanted.gradient).norm()
        assert error <= tolerance * wanted.gradient.norm(), (layout, max_tokens)
        for name in ("loss", "policy_loss", "entropy", "grad_norm"):
            value = pytest.approx(wanted.metrics[name], rel=tolerance * 10, abs=tolerance)
            assert found.metrics[name] == value, (layout, max_tokens, name)
    return wanted
