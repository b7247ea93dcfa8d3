"""The training step: one or more weight updates from a batch of traces.

The loss, over the trained tokens of a step, with a token's weight m (depends on `loss_agg_mode`;
1/T with the default, `token-mean`) and its advantage A:

    L = sum_t m_t [ w_t * policy_loss(logp_t, old_t, A_t) + kl_coef * KL(logp_t, ref_t)
                    - entropy_coef * H_t ]

Advantage and policy loss are those of the algorithm (`tuner.config.algorithms`). Up to three
policies are involved: the one that sampled (its log-probs are recorded), the one at the start of
the step, `old`, and the one that is trained. If the first two are equal, `old` is the recorded
log-prob and w = 1; otherwise, as for samples of another run, w = min(old / recorded, cap). `ref` is
the frozen initial policy.

PPO's critic has its own loss (below). For the same weights, recorded log-probs equal the trainer's;
the difference is reported each step (`logprob_mismatch_mean`, `_max`).
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuner.config import RunConfig
from tuner.config.algorithms import DistillAdvantage
from tuner.engines.base import Engine
from tuner.engines.grammar import Grammars, to_device
from tuner.engines.transformers.model_shape import head_width, layer_windows
from tuner.engines.transformers.passes import causal_model
from tuner.errors import TrainingError
from tuner.traces import TokenTree
from tuner.training.batch import Batch, RoleBatches, Row
from tuner.training.forward.head import body
from tuner.training.forward.layouts import (
    Forward,
    HasRows,
    exact_forward,
    whole_calls,
)
from tuner.training.losses import clipped_value_loss, micro_batch_loss, raises_alarm, row_weights
from tuner.training.optimizer import lr_factor, make_optimizer
from tuner.training.references import Reference, Teacher, acting, frozen_start
from tuner.training.scoring import (
    ScoredBatch,
    critic_advantages,
    kl_penalties,
    row_advantages,
    tokens_of,
)

# PPO's critic: a separate transformer that estimates the value of a state.
#
# Its layers start as the policy's or another model's, and a linear head on the last hidden state
# gives one number. The value of the state in which a token was sampled is read at the same position
# as the token's log-prob, before the token, in the same layout:
#
#     row       1 2 [3 4]      V(1 2)  V(1 2 3)
#     row       1 2 3 4 5 [6]  V(1 2 3 4 5)
#
# The loss, over the T trained tokens of a step, is `1/T sum_t L(V_t, V_old_t, R_t)` with PPO2's
# clipped loss. The head is initialized with 0, so initial values are 0 and no random number is
# drawn.


class Critic:
    """Layers, value head and their optimizer.

    Args:
        model: A transformers causal LM whose layers become the critic's, without a copy; its output
            embedding is not used.
        config: The run's settings; the critic's are in `tuner.critic`.
        forward: How to compute the layers, if known; otherwise it is determined.
    """

    def __init__(
        self, model: nn.Module, config: RunConfig, *, forward: Forward | None = None
    ) -> None:
        causal = causal_model(model)
        output: Any = causal.get_output_embeddings()
        self._forward = forward or exact_forward(
            causal,
            None,
            layout=config.tuner.exact_layout,
            checkpointing=config.tuner.activation_checkpointing,
            compiled=config.tuner.compile,
        )
        self._config = config
        parameter = next(causal.parameters())
        # Lower precision would round away the small steps in which values are learned.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        head = nn.Linear(output.weight.shape[1], 1, device=parameter.device, dtype=dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.model = nn.ModuleDict({"layers": body(causal), "head": head})
        self.model.eval().requires_grad_(True)
        own = config.tuner.critic
        self.optimizer = make_optimizer(
            self.model.parameters(),
            lr=own.lr,
            betas=own.betas,
            weight_decay=own.weight_decay,
            state=config.tuner.optimizer_state,
            offload=config.trainer.optimizer_offload,
        )

    def values(self, batch: Batch) -> tuple[Tensor, ...]:
        """Values of the states in which tokens were sampled, N tensors [T_row], no gradient."""
        budget = self._config.trainer.micro_batch_tokens
        return self._forward.by_row(batch.rows, budget, self._values)

    def update(
        self,
        batch: Batch,
        old: Sequence[Tensor],
        returns: Sequence[Tensor],
        *,
        what: str = "the critic's loss",
    ) -> dict[str, float]:
        """One optimizer step on the whole batch.

        Args:
            what: Name of the loss, for messages.
            old: Values at the start of the step, N tensors [T_row].
            returns: Targets of the values, N tensors [T_row].

        Returns:
            Metrics: value loss, fraction of tokens with a clipped gradient, explained variance of
                the old
            values (omitted if all returns are equal), mean old value, mean return and gradient
                norm.

        Raises:
            TrainingError: See `MasterAdamW.step_if_finite`.
        """
        losses, clips = self._forward.room.fitting(partial(self._gradients, batch, old, returns))
        norm = self.optimizer.clip_grad_norm(self._config.trainer.grad_clip)
        # The only point before the step at which Python waits for the device.
        total, clipped, grad_norm = (
            torch.stack([torch.stack(losses).sum(), torch.stack(clips).sum(), norm])
            .double()
            .tolist()
        )
        self.optimizer.step_if_finite(what, total, grad_norm, setting="tuner.critic.lr")
        return {
            "value_loss": total,
            "value_clip_fraction": clipped / batch.trained_tokens,
            "critic_grad_norm": grad_norm,
            **_fit(torch.cat(list(old)).cpu().double(), torch.cat(list(returns)).cpu().double()),
        }

    def _gradients(
        self, batch: Batch, old: Sequence[Tensor], returns: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of all micro-batches; returns loss and clipped tokens of each."""
        self.optimizer.zero_grad()
        losses, clips = [], []
        device = next(self.model.parameters()).device
        budget = self._config.trainer.micro_batch_tokens
        forward, cuts = self._forward.planned(batch.rows, budget)
        for indices in cuts:
            values_T = self._values(forward, [batch.rows[i] for i in indices])
            loss_T, clipped_T = clipped_value_loss(
                values_T,
                to_device(torch.cat([old[i] for i in indices]).to(values_T.dtype), device),
                to_device(torch.cat([returns[i] for i in indices]).to(values_T.dtype), device),
                clip=self._config.tuner.critic.cliprange_value,
            )
            loss = loss_T.sum() / batch.trained_tokens
            loss.backward()
            losses.append(loss.detach())
            clips.append(clipped_T.sum())
        return losses, clips

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict` to resume bit for bit: weights and optimizer state."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. The learning rate follows the current settings."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self._config.tuner.critic.lr

    def _values(self, forward: Forward, rows: Sequence[Row]) -> Tensor:
        """Values before the completion tokens of `rows`, in row order, shape [T]."""
        head = self.model["head"]
        states_TD = forward.states(self.model["layers"], rows)
        values_T1: Tensor = head(states_TD.to(next(head.parameters()).dtype))
        return values_T1[:, 0]


def _fit(old_T: Tensor, returns_T: Tensor) -> dict[str, float]:
    """How well the old values predicted the returns."""
    metrics = {"value_mean": float(old_T.mean()), "return_mean": float(returns_T.mean())}
    variance = float(returns_T.var(correction=0))
    if variance > 0:
        left = float((returns_T - old_T).var(correction=0))
        metrics["explained_variance"] = 1 - left / variance
    return metrics


# Duration, memory and model FLOPs utilization (MFU) of an update.
#
# MFU counts only required computation, each once (PaLM, arXiv 2204.02311, appendix B). For a token
# tree that is each distinct token of the batch once, whatever the micro-batches, without recomputed
# activations:
#
#     FLOPs = nodes x (4 weights + 2 trained weights) + 12 heads head_dim x pairs x layers
#             + logits x (4 or 6) hidden vocabulary
#
# `weights` are those of the layers. A pair is a node with itself or an ancestor that it attends to.
# `logits` are the distinct trained positions.


T = TypeVar("T")
logger = logging.getLogger("tuner")

# Dense TFLOPS in bfloat16 with float32 accumulation, and in float32 without TF32, from NVIDIA's
# data sheets. A name comes before any other name that it contains.
_PEAK = (
    ("B200", 2250, 75),
    ("H100 PCIe", 756, 51),
    ("H100 NVL", 835, 60),
    ("H100", 989, 67),
    ("H200", 989, 67),
    ("GH200", 989, 67),
    ("A100", 312, 19.5),
    ("L40S", 362, 91.6),
    ("L40", 181, 90.5),
    ("L4", 121, 30.3),
    ("RTX 5090", 209.5, 104.8),
    ("RTX 4090", 165.2, 82.6),
    ("RTX 3090", 71, 35.6),
)


def peak_flops(device: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Peak FLOPs per second of a GPU; None if unknown.

    Args:
        device: Result of `torch.cuda.get_device_name`.
        dtype: Data type of the weights.
        tf32: Whether float32 products are computed in TF32.
    """
    words = f" {device.replace('-', ' ')} "
    for name, half, single in _PEAK:
        if f" {name} " in words:
            match dtype:
                case torch.bfloat16 | torch.float16:
                    return half * 1e12
                case torch.float32:
                    return (half / 2 if tf32 else single) * 1e12
    return None


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of a model's forward and backward pass.

    Attributes:
        node: One token through the layers, without attention.
        pair: One query with one key, in one layer.
        logits: One position at the output head.
        layers: Number of layers of each kind, with their attention windows.
    """

    node: float
    pair: float
    logits: float
    layers: tuple[tuple[int | None, int], ...]

    @staticmethod
    def of(model: PreTrainedModel) -> ModelFlops | str:
        """FLOPs from a model's sizes, or the reason that they are unknown."""
        config = model.config.get_text_config(decoder=True)
        windows = layer_windows(model)
        if isinstance(windows, str):
            return windows
        for key in ("num_experts", "num_local_experts", "n_routed_experts"):
            if getattr(config, key, None):
                return f"not every token passes all weights ({key})"
        if getattr(config, "is_heterogeneous", False):
            return f"its layers differ ({', '.join(sorted(config.per_layer_attributes or ()))})"
        head = model.get_output_embeddings().weight
        embeddings = {id(head), id(model.get_input_embeddings().weight)}
        matrices = [p for p in model.parameters() if p.ndim > 1 and id(p) not in embeddings]
        kinds = getattr(config, "layer_types", None) or list(windows) * config.num_hidden_layers
        return ModelFlops(
            node=sum(_both_passes(matrix) for matrix in matrices),
            pair=12 * config.num_attention_heads * head_width(config),
            logits=_both_passes(head),
            layers=tuple((windows[kind], count) for kind, count in Counter(kinds).items()),
        )

    def __call__(self, tree: TokenTree) -> float:
        """FLOPs of both passes over a tree, with logits before each distinct sampled token."""
        pairs = 0.0
        for window, layers in self.layers:
            seen = tree.depth + 1 if window is None else np.minimum(tree.depth + 1, window)
            pairs += layers * float(seen.sum())
        logits = np.count_nonzero(tree.samples)
        return self.node * tree.unique_tokens + self.pair * pairs + self.logits * logits


class Throughput:
    """Measures updates of one model; logs once if MFU is unknown."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._device = device
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._peak: float | None = None
        self._flops: ModelFlops | None = None
        if device.type != "cuda":
            return
        name = torch.cuda.get_device_name(device)
        tf32 = torch.get_float32_matmul_precision() != "highest"
        self._peak = peak_flops(name, model.dtype, tf32=tf32)
        found = ModelFlops.of(model)
        if self._peak is None:
            found = f"the peak of {name!r} in {model.dtype} is not known"
        if isinstance(found, str):
            logger.info("no MFU is reported: %s", found)
        else:
            self._flops = found

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the seconds of the block as those of a part of the next update reported."""
        started = time.perf_counter()
        yield
        self._parts[name] += time.perf_counter() - started

    @contextmanager
    def of(self, rows: Sequence[Row], passes: int, metrics: dict[str, float]) -> Iterator[None]:
        """Add to `metrics` the throughput of `passes` forward and backward passes over `rows`
        in the block, and the seconds of the update's parts so far.

        A GPU computes a part after its block has ended, so there the parts have no seconds.
        """
        on_gpu = self._device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        started = time.perf_counter()
        yield
        if on_gpu:
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            metrics["peak_memory_gib"] = peak / 2**30
        seconds = time.perf_counter() - started
        tree = TokenTree.build(rows)
        metrics["unique_tokens_per_second"] = passes * tree.unique_tokens / seconds
        metrics["row_tokens_per_second"] = passes * tree.row_tokens / seconds
        if self._flops is not None and self._peak is not None:
            metrics["mfu"] = passes * self._flops(tree) / seconds / self._peak
        if not on_gpu:
            metrics.update({f"{name}_seconds": spent for name, spent in self._parts.items()})
        self._parts.clear()


def _both_passes(matrix: nn.Parameter) -> int:
    """FLOPs of a row times a matrix, of the row's gradient and, if it is trained, the matrix's."""
    return (6 if matrix.requires_grad else 4) * matrix.numel()


class PolicyTrainer:
    """Owns the optimizer, the reference and the critic; shares the model with the engine.

    The five calls of a hand-written loop:

        scored = trainer.compute_advantages(batch)
        scored = trainer.compute_ref_logp(scored)
        metrics = trainer.ppo_update(scored)
        trainer.step_lr_scheduler()
        await trainer.update_weights(engine)

    Args:
        model: A transformers causal LM, or one wrapped by peft for LoRA; parameters that require a
            gradient are updated in place.
        config: The run's settings; `buffer.total_steps` must be set, since the learning rate's
            schedule ends there.
        reference: The frozen initial policy; by default the current `model`, copied unless only an
            adapter is trained. Required if `model` has later weights.
        grammars: The engine's, to replay calls that were constrained; None if there are none.
        critic: A causal LM whose layers become the critic's; by default a copy of the current
            `model`.
        teacher: The teacher of `on_policy_distill`; any architecture with the policy's vocabulary.

    Attributes:
        step: Number of updates.
        others: Number of versions of the model in which these weights had no update.
    """

    def __init__(
        self,
        model: nn.Module,
        config: RunConfig,
        *,
        reference: Reference | None = None,
        grammars: Grammars | None = None,
        critic: nn.Module | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        if config.buffer.total_steps is None:
            raise TrainingError("buffer.total_steps is not set: set it, for the learning rate")
        self.model = model.eval()  # no dropout: sampling and training compute the same function
        self.config = config
        self.step = 0
        self.others = 0
        self._alarmed = False  # logged once
        self._forward = exact_forward(
            model,
            grammars,
            layout=config.tuner.exact_layout,
            checkpointing=config.tuner.activation_checkpointing,
            compiled=config.tuner.compile,
        )
        self._throughput = Throughput(causal_model(model), next(model.parameters()).device)
        self.reference = frozen_start(model, reference) if config.uses_reference else None
        self.teacher = Teacher.of(teacher, grammars, config) if teacher is not None else None
        if config.algorithm.advantage_fn == "prompt_distill":
            self.teacher = Teacher.prompted(model, self.reference, self._forward, config)
        self.optimizer = make_optimizer(
            model.parameters(),
            lr=config.algorithm.optimizer.lr,
            betas=config.algorithm.optimizer.betas,
            weight_decay=config.algorithm.optimizer.weight_decay,
            state=config.tuner.optimizer_state,
            offload=config.trainer.optimizer_offload,
        )
        self.critic: Critic | None = None
        if config.algorithm.uses_critic:
            if critic is None and hasattr(model, "get_base_model"):
                raise TrainingError(
                    "a policy wrapped by peft needs a separate critic: give PolicyTrainer "
                    "one (critic=AutoModelForCausalLM.from_pretrained(...))"
                )
            forward = self._forward if critic is None else None
            self.critic = Critic(critic or copy.deepcopy(model), config, forward=forward)
        self._set_lr()

    @property
    def version(self) -> int:
        """Version of the weights, as calls record it."""
        return self.step + self.others

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def compute_logp(self, batch: HasRows, *, model: Reference | None = None) -> tuple[Tensor, ...]:
        """Log-probs of each row's completion tokens under the current weights, no gradient.

        Args:
            batch: N rows.
            model: Another model with the policy's architecture, such as the reference. With LoRA,
                an engine that serves the policy must be paused while the reference is computed.

        Returns:
            N tensors, one per row, of shape [T_row].
        """
        with acting(model or self.model) as network:
            tokens = self.config.trainer.micro_batch_tokens
            return self._forward.all_logprobs(network, batch.rows, tokens)

    def compute_ref_logp(self, scored: ScoredBatch) -> ScoredBatch:
        """Add the reference's log-probs if the KL term needs them."""
        if (
            self.reference is None
            or scored.ref_logp is not None
            or not self.config.algorithm.kl_in_loss
        ):
            return scored
        with self._throughput.part("scoring"):
            return replace(scored, ref_logp=self.compute_logp(scored.batch, model=self.reference))

    def compute_advantages(self, batch: Batch) -> ScoredBatch:
        """The algorithm's advantages (`tuner.training.scoring`).

        PPO's critic values are kept for its update. If the distance to the reference is subtracted
        from the rewards, the reference's log-probs are computed first and kept for the KL term.

        Raises:
            TrainingError: Calls have rewards that the algorithm does not support, or it needs a
                teacher and there is none.
        """
        with self._throughput.part("scoring"):
            ref_logp = None
            teacher_logp = self.teacher.logp(batch) if self.teacher is not None else None
            if self.config.algorithm.penalizes_kl and self.reference is not None and batch.rows:
                ref_logp = self.compute_logp(batch, model=self.reference)
            if self.critic is None or not batch.rows:
                advantages = row_advantages(batch, self.config, ref_logp, teacher_logp)
                return ScoredBatch(batch, advantages, ref_logp)
            values = self.compute_values(batch)
            penalties = kl_penalties(batch, self.config.algorithm, ref_logp)
            advantages, returns = critic_advantages(batch, self.config, values, penalties)
            return ScoredBatch(batch, advantages, ref_logp, values=values, returns=returns)

    def compute_values(self, batch: Batch) -> tuple[Tensor, ...]:
        """The critic's values of the states in which each row's tokens were sampled, no gradient.

        Returns:
            N tensors, one per row, of shape [T_row].

        Raises:
            TrainingError: The algorithm has no critic.
        """
        if self.critic is None:
            raise TrainingError(
                f"advantage {self.config.algorithm.advantage_fn} has no critic, only ppo has"
            )
        return self.critic.values(batch)

    def ppo_update(self, scored: ScoredBatch) -> dict[str, float]:
        """Update the weights in place, once or `tuner.algorithm.updates` times, on the whole batch.

        A critic first takes as many steps on its own loss; during its warmup the policy is not
        updated.

        Returns:
            Metrics: loss and its parts, advantage spread, clip and rejected fraction, entropy, KL
            to behaviour and reference, effective sample size of the importance weights (1 on
            policy), gradient norm, micro-batches and learning rate, all of the last update. The
            mismatch between recorded and recomputed log-probs is that before the first update.
            Tokens per second of all updates; on a CPU the seconds of their parts, on a GPU peak
            memory and MFU. The critic's metrics (`Critic.update`) are added; during its warmup
            there are no others.

        Raises:
            TrainingError: The batch is empty, or see `MasterAdamW.step_if_finite`.
        """
        if not scored.batch.rows:
            raise TrainingError("a batch without a trainable token cannot be trained")
        metrics: dict[str, float] = {}
        if self.critic is not None:
            what = f"step {self.step + 1}: the critic's loss"
            with self._throughput.part("critic"):
                for _ in range(self.config.tuner.algorithm.updates):
                    metrics = self.critic.update(
                        scored.batch, scored.values, scored.returns, what=what
                    )
        if self.critic is None or self.step >= self.config.trainer.critic_warmup:
            metrics |= self._update_policy(scored)
        self.step += 1
        return metrics

    def _update_policy(self, scored: ScoredBatch) -> dict[str, float]:
        """All updates of the policy in a step."""
        with self._throughput.part("scoring"):
            proximal = self._proximal(scored)
        metrics: dict[str, float] = {}
        speed: dict[str, float] = {}
        with self._throughput.of(scored.batch.rows, self.config.tuner.algorithm.updates, speed):
            for update in range(self.config.tuner.algorithm.updates):
                latest = self._update(scored, proximal)
                if update:
                    latest |= {k: v for k, v in metrics.items() if k.startswith("logprob_mismatch")}
                metrics = latest
        metrics |= speed
        advantages_T = torch.cat(scored.advantages)
        metrics["advantage_std"] = float(advantages_T.std(correction=0))
        metrics["advantage_max"] = float(advantages_T.abs().max())
        if isinstance(args := self.config.algorithm.advantage, DistillAdvantage):
            # Its mean over the student's samples is the KL of student and teacher.
            metrics["kl_teacher"] = -float(advantages_T.mean()) / args.kl_coef
        self._alarmed = self._alarmed or raises_alarm(metrics, self.step + 1)
        return metrics

    def _proximal(self, scored: ScoredBatch) -> tuple[Tensor, ...] | None:
        """Log-probs under the policy at the start of the step, if they are not the recorded
        ones."""
        config, batch = self.config, scored.batch
        if config.algorithm.policy_loss.ratio_to != "proximal":
            return None
        if scored.proximal is not None:
            return scored.proximal
        # The age of foreign weights is not a number of updates.
        wanted = {"auto": batch.stale(self.version), "loglinear": batch.foreign, "recompute": True}
        return (
            self.compute_logp(batch) if wanted.get(config.tuner.algorithm.proximal, False) else None
        )

    def _update(self, scored: ScoredBatch, proximal: tuple[Tensor, ...] | None) -> dict[str, float]:
        part = self._throughput.part
        totals, largest = self._forward.room.fitting(partial(self._gradients, scored, proximal))
        with part("optimizer"):
            norm = self.optimizer.clip_grad_norm(self.config.trainer.grad_clip)
            # The only point of an update at which Python waits for the device.
            totals |= {"grad_norm": norm, "logprob_mismatch_max": torch.stack(largest).max()}
            found = torch.stack([value.double() for value in totals.values()]).tolist()
        metrics = dict(zip(totals, found, strict=True))
        # (sum w)^2 / (T sum w^2) over T tokens, from the means of w and w^2.
        mean, of_squares = metrics.pop("importance"), metrics.pop("importance_squared")
        metrics["effective_sample_size"] = mean**2 / of_squares
        of_terms = math.isfinite(metrics["policy_loss"]) and not math.isfinite(metrics["loss"])
        with part("optimizer"):
            self._apply(metrics["loss"], metrics["grad_norm"], of_terms=of_terms)
        return {**metrics, "micro_batches": len(largest), "lr": self.lr}

    def _gradients(
        self, scored: ScoredBatch, proximal: tuple[Tensor, ...] | None
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Gradients of all micro-batches; returns their metrics, and the largest mismatch of
        each."""
        config, algorithm, batch = self.config, self.config.algorithm, scored.batch
        part = self._throughput.part
        self.optimizer.zero_grad()
        weights_N = row_weights(
            algorithm.loss_agg_mode,
            torch.tensor([len(row.completion_ids) for row in batch.rows]),
            torch.tensor([row.rollout for row in batch.rows]),
            batch.call_N,
            longest=config.longest_answer,
        )
        totals: dict[str, Tensor] = {}
        largest: list[Tensor] = []
        forward, cuts = self._planned(batch)
        for indices in cuts:
            with part("forward"):
                current = forward.logprobs(
                    self.model,
                    [batch.rows[i] for i in indices],
                    with_entropy=algorithm.entropy_loss.entropy_coef != 0,
                )
                tokens = tokens_of(
                    scored,
                    indices,
                    current,
                    weights_N=weights_N,
                    proximal=proximal,
                    step=self.version,
                )
                loss, parts, sums = micro_batch_loss(algorithm, config.tuner.algorithm, tokens)
            with part("backward"):
                loss.backward()
            means = {name: value / batch.trained_tokens for name, value in sums.items()}
            for name, value in (parts | means).items():
                totals[name] = totals[name] + value if name in totals else value
            largest.append((tokens.logp_T.detach() - tokens.recorded_T).abs().max())
        return totals, largest

    def likelihood_update(self, rows: Sequence[Row], weights_N: Tensor) -> dict[str, float]:
        """One optimizer step on `L = -sum_n weight_n * logp(completion_n)`.

        This is the update of imitation and preferences (`tuner.training.likelihood`). It does not
        depend on the micro-batches.

        Args:
            rows: N rows.
            weights_N: Constant weight of each row; negative to make it less likely.

        Returns:
            Loss, mean entropy of the tokens, gradient norm and learning rate.

        Raises:
            TrainingError: See `MasterAdamW.step_if_finite`.
        """
        sums = self._forward.room.fitting(partial(self._likelihood_gradients, rows, weights_N))
        norm = self.optimizer.clip_grad_norm(self.config.trainer.grad_clip)
        # The only point at which Python waits for the device.
        total, entropy, grad_norm = torch.cat(
            [torch.stack(sums).double().sum(0), norm.double()[None]]
        ).tolist()
        self._apply(total, grad_norm)
        self.step += 1
        entropy /= sum(len(row.completion_ids) for row in rows)
        return {"loss": total, "entropy": entropy, "grad_norm": grad_norm, "lr": self.lr}

    def _likelihood_gradients(self, rows: Sequence[Row], weights_N: Tensor) -> list[Tensor]:
        """Gradients of all micro-batches; returns loss and sum of entropies of each, [2]."""
        self.optimizer.zero_grad()
        sums: list[Tensor] = []
        forward, cuts = self._forward.planned(rows, self.config.trainer.micro_batch_tokens)
        for indices in cuts:
            part = [rows[i] for i in indices]
            current = forward.logprobs(self.model, part, with_entropy=False)
            logp_T = current.logp_T
            lengths = torch.tensor([len(row.completion_ids) for row in part])
            weights_T = weights_N[indices].repeat_interleave(lengths).to(logp_T.dtype)
            loss = -(logp_T * to_device(weights_T, logp_T.device)).sum()
            loss.backward()
            sums.append(torch.stack([loss.detach(), current.entropy_T.detach().sum()]))
        return sums

    def _apply(self, loss: float, grad_norm: float, *, of_terms: bool = False) -> None:
        """One optimizer step; with `of_terms` it is the KL or the entropy term that spoils it."""
        setting = "algorithm.optimizer.lr"
        if of_terms:
            setting = "algorithm.kl_loss_fn_args.kl_coef, entropy_loss_fn_args.entropy_coef"
        self.optimizer.step_if_finite(
            f"step {self.step + 1}: loss", loss, grad_norm, setting=setting
        )

    def _micro_batches(self, batch: Batch) -> list[list[int]]:
        return self._planned(batch)[1]

    def _planned(self, batch: Batch) -> tuple[Forward, list[list[int]]]:
        """The layout of an update and its micro-batches."""
        forward, cuts = self._forward.planned(batch.rows, self.config.trainer.micro_batch_tokens)
        # The only loss in which tokens depend on each other.
        if self.config.algorithm.policy_loss_fn == "gspo":
            cuts = whole_calls(cuts, batch.call_N.tolist())
        return forward, cuts

    def step_lr_scheduler(self) -> None:
        """Set the learning rate of the next update."""
        self._set_lr()

    def _set_lr(self) -> None:
        optimizer, steps = self.config.algorithm.optimizer, self.config.buffer.total_steps or 0
        factor = lr_factor(
            self.step,
            kind=optimizer.lr_scheduler_type,
            warmup_steps=optimizer.warmup_steps(steps),
            total_steps=steps,
            min_lr_ratio=optimizer.min_lr_ratio,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = optimizer.lr * factor

    async def update_weights(self, engine: Engine) -> None:
        """Let the engine serve the current weights; they are shared, so nothing is copied."""
        await engine.update_weights(self.step)

    def save(self, path: Path) -> None:
        """Write `state` to `path`; the policy's weights are saved separately."""
        torch.save(self.state(), path)

    def state(self) -> dict[str, Any]:
        """Optimizer state, critic and step.

        The optimizer state includes the master weights; weights of lower precision are rounded from
        them.

        Raises:
            TrainingError: A weight is not finite.
        """
        parts = (self.optimizer, self.critic.optimizer if self.critic is not None else None)
        if not all(part.finite() for part in parts if part is not None):
            raise TrainingError(
                f"the weights of step {self.step} are not finite, so they are not saved: start "
                "from an earlier checkpoint with a lower algorithm.optimizer.lr"
            )
        state = {"optimizer": self.optimizer.state_dict(), "step": self.step}
        if self.critic is not None:
            state["critic"] = self.critic.state_dict()
        return state

    def load(self, path: Path) -> None:
        """Restore the result of `save`. The learning rate follows the current settings.

        Raises:
            TrainingError: The file is missing or damaged, belongs to other weights, or lacks the
                critic that the algorithm needs.
        """
        self.restore(_stored(path, "optimizer", "step"), path)

    def restore(self, state: Mapping[str, Any], path: Path) -> None:
        """Restore the result of `state`, which is stored at `path`."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.critic is not None:
            if "critic" not in state:
                raise TrainingError(
                    f"{path} has no critic, but algorithm.advantage_fn ppo needs one: it was "
                    "saved with another algorithm; start a run with another name"
                )
            self.critic.load_state_dict(state["critic"])
        self.step = int(state["step"])
        self._set_lr()


class RoleTrainers:
    """A `PolicyTrainer` for the adapter of each role, all over one model.

    A role learns from its own calls, as in a run in which no other role is trained. A role without
    a trained call in a step is untouched: its weights, its optimizer and its learning rate.

    Args:
        make: Makes the trainer of each role, while its adapter is alone.
        alone: Lets the model compute with a role's adapter, and train no other.

    Attributes:
        step: Number of steps in which a role was updated; the version of the weights.
    """

    def __init__(
        self,
        make: Mapping[str, Callable[[], PolicyTrainer]],
        alone: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.step = 0
        self._alone = alone
        self._trainers: dict[str, PolicyTrainer] = {}
        for role, trainer in make.items():
            with alone(role):
                self._trainers[role] = trainer()

    def each(self, batches: RoleBatches, work: Callable[[PolicyTrainer, Batch], T]) -> dict[str, T]:
        """The result of `work` for each role that has something to train."""
        found = {}
        for role, batch in batches.of_roles.items():
            if batch.rows:
                trainer = self._trainers[role]
                trainer.others = self.step - trainer.step
                with self._alone(role):
                    found[role] = work(trainer, batch)
        return found

    def update(
        self, batches: RoleBatches, work: Callable[[PolicyTrainer, Batch], dict[str, float]]
    ) -> dict[str, float]:
        """Train each role on its batch by `work`; returns its metrics, after the role's name."""
        found = self.each(batches, work)
        self.step += bool(found)
        return {f"{role}/{name}": value for role, of in found.items() for name, value in of.items()}

    async def update_weights(self, engine: Engine) -> None:
        """See `PolicyTrainer.update_weights`."""
        await engine.update_weights(self.step)

    def save(self, path: Path) -> None:
        """See `PolicyTrainer.save`."""
        roles = {role: trainer.state() for role, trainer in self._trainers.items()}
        torch.save({"roles": roles, "step": self.step}, path)

    def load(self, path: Path) -> None:
        """See `PolicyTrainer.load`."""
        state = _stored(path, "roles", "step")
        self.step = int(state["step"])
        for role, trainer in self._trainers.items():
            trainer.restore(state["roles"][role], path)


def _stored(path: Path, *keys: str) -> dict[str, Any]:
    """The state of a trainer on disk, with these keys."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        for key in keys:
            state[key]
    # errors of pickle, zip and the disk; torch's messages recommend trusting the file
    except Exception as error:
        raise TrainingError(
            f"{path} is missing or damaged ({type(error).__name__}): move {path.parent} away, "
            "and the run resumes from the previous checkpoint"
        ) from error
    return state
