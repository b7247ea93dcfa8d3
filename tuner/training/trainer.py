"""The training step: one batch of traces becomes one update of the weights.

The loss, with m the T trained tokens of the step, A a token's advantage and ref the frozen start:

    L = 1/T * sum_t [ ppo_clip(logp_t, old_t, A_t) + kl_coef * KL(logp_t, ref_t)
                      - entropy_coef * H_t ]

Left out on purpose: value functions, several updates per batch, sequence-level ratios. `old` is
the log-prob the engine recorded; it equals the trainer's own for the same weights, and the
difference is reported each step (`logprob_mismatch`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tuner.algorithms import KL_ESTIMATORS, call_normalized, group_normalized, group_std, ppo_clip
from tuner.engines.base import Engine
from tuner.engines.grammar import Grammars
from tuner.errors import TrainingError
from tuner.training.batch import Batch
from tuner.training.forward import Forward
from tuner.training.schedule import Scheduler, lr_factor


@dataclass(frozen=True)
class TrainerSettings:
    """Every number of the training step, with `multi_step_grpo`'s defaults in Trinity-RFT.

    Attributes:
        total_steps: Length of the learning-rate schedule in updates.
        max_tokens_per_micro_batch: Tokens that one forward pass holds, of a token tree or of
            padded rows; a matter of memory and speed, not of the result.
        token_tree: Compute each distinct token of a micro-batch once, where the model can be
            computed so; False pads one row per call. The result is the same.
        std_threshold: Groups whose rewards' standard deviation is at or below it get advantage 0.
    """

    total_steps: int
    lr: float = 1e-6
    lr_scheduler: Scheduler = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_ratio_c: float = 3.0
    kl: str = "k2"
    kl_coef: float = 0.001
    entropy_coef: float = 0.0
    epsilon: float = 1e-6
    std_threshold: float | None = None
    std_over_batch: bool = False
    max_tokens_per_micro_batch: int = 16384
    token_tree: bool = True

    @property
    def uses_reference(self) -> bool:
        return self.kl != "none" and self.kl_coef != 0


@dataclass(frozen=True)
class ScoredBatch:
    """A batch with what the loss needs.

    Attributes:
        advantages_N: One for each of the N rows; all of a row's tokens share it.
        ref_logp: N tensors of the reference's log-probs, one per row, of shape [T_row].
    """

    batch: Batch
    advantages_N: Tensor
    ref_logp: tuple[Tensor, ...] | None = None


class PolicyTrainer:
    """Owns the optimizer and the reference; shares the model with the engine.

    The five verbs of a hand-written loop:

        scored = trainer.compute_advantages(batch)
        scored = trainer.compute_ref_logp(scored)
        metrics = trainer.ppo_update(scored)
        trainer.step_lr_scheduler()
        await trainer.update_weights(engine)

    Args:
        model: A transformers causal LM; its parameters are changed in place.
        settings: The numbers.
        reference: Frozen start of the policy for the KL term; by default a copy of `model` as it
            is now. Pass it when `model` already holds later weights.
        grammars: The engine's, with which calls that were held to a form are replayed; None where
            there are none.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainerSettings,
        *,
        reference: nn.Module | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.model = model.eval()  # no dropout: sampling and training see the same function
        self.settings = settings
        self.step = 0
        self._forward = Forward.of(model, grammars, token_tree=settings.token_tree)
        self.reference: nn.Module | None = None
        if settings.uses_reference:
            self.reference = (reference or copy.deepcopy(model)).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self._set_lr()

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def compute_logp(self, batch: Batch, *, model: nn.Module | None = None) -> tuple[Tensor, ...]:
        """Log-probs of each row's completion tokens under the current weights, no gradient.

        Args:
            batch: N rows.
            model: Another model of the policy's architecture, for example the reference.

        Returns:
            N tensors, one per row, of shape [T_row].
        """
        result: dict[int, Tensor] = {}
        with torch.no_grad():
            for indices in self._micro_batches(batch):
                rows = [batch.rows[i] for i in indices]
                logp_T = self._forward.logprobs(
                    model or self.model, rows, with_entropy=False
                ).logp_T
                pieces = logp_T.split([len(row.completion_ids) for row in rows])
                result.update(zip(indices, pieces, strict=True))
        return tuple(result[i] for i in range(len(batch.rows)))

    def compute_ref_logp(self, scored: ScoredBatch) -> ScoredBatch:
        """Add the reference's log-probs where the KL term needs them."""
        if self.reference is None:
            return scored
        return replace(scored, ref_logp=self.compute_logp(scored.batch, model=self.reference))

    def compute_advantages(self, batch: Batch) -> ScoredBatch:
        """Group-normalised reward of each rollout, shared by all of its calls.

        A call with a reward of its own is compared with its peers instead (`Row.peers`).
        """
        settings = self.settings
        if not batch.ids:
            return ScoredBatch(batch, batch.rewards_R.new_zeros(len(batch.rows)))
        advantages_R = group_normalized(
            batch.rewards_R,
            batch.group_R,
            epsilon=settings.epsilon,
            std_over_batch=settings.std_over_batch,
        )
        if settings.std_threshold is not None:
            quiet_G = group_std(batch.rewards_R, batch.group_R) <= settings.std_threshold
            advantages_R = advantages_R.masked_fill(quiet_G[batch.group_R], 0.0)
        rollout_N = torch.tensor([row.rollout for row in batch.rows], dtype=torch.long)
        advantages_N = advantages_R[rollout_N]
        own = [
            (i, row.reward, row.peers) for i, row in enumerate(batch.rows) if row.peers is not None
        ]
        if own:
            at_C, rewards, peers = zip(*own, strict=True)
            places_C = torch.tensor(at_C)
            advantages_N[places_C] = call_normalized(
                torch.tensor(rewards, dtype=advantages_N.dtype),
                rollout_N[places_C],
                torch.tensor(peers),
                epsilon=settings.epsilon,
            )
        return ScoredBatch(batch, advantages_N)

    def ppo_update(self, scored: ScoredBatch) -> dict[str, float]:
        """One optimizer step on the whole batch; weights change in place.

        Returns:
            Metrics: loss and its parts, clip fraction, entropy, gradient norm, learning rate,
            mismatch between recorded and recomputed log-probs.

        Raises:
            TrainingError: The batch is empty, or loss or gradient is not finite; the weights
                are then as they were.
        """
        settings, batch = self.settings, scored.batch
        if not batch.rows:
            raise TrainingError("a batch without a single trainable token cannot be trained")
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        largest_mismatch = 0.0
        for indices in self._micro_batches(batch):
            parts, mismatch = self._backward(scored, indices)
            for name, value in parts.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
            largest_mismatch = max(largest_mismatch, mismatch)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip)
        metrics = {name: float(value) for name, value in sums.items()}
        metrics |= {"grad_norm": float(norm), "lr": self.lr}
        metrics["logprob_mismatch_max"] = largest_mismatch
        if not (torch.isfinite(norm) and torch.isfinite(torch.tensor(metrics["loss"]))):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"step {self.step + 1}: loss {metrics['loss']} with gradient norm {float(norm)} is "
                "not finite; lower algorithm.optimizer.lr or trainer.grad_clip"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return metrics

    def _backward(self, scored: ScoredBatch, indices: list[int]) -> tuple[dict[str, Tensor], float]:
        """Add one micro-batch's gradient. The normaliser is the whole step's token count, so
        the sum over micro-batches does not depend on where they were cut."""
        settings, batch = self.settings, scored.batch
        rows = [batch.rows[i] for i in indices]
        current = self._forward.logprobs(self.model, rows, with_entropy=settings.entropy_coef != 0)
        logp_T = current.logp_T
        old_T = torch.tensor([p for row in rows for p in row.logprobs]).to(logp_T)
        lengths = torch.tensor([len(row.completion_ids) for row in rows])
        advantages_B = scored.advantages_N[indices]
        advantages_T = advantages_B.repeat_interleave(lengths).to(logp_T)
        weight = 1.0 / batch.trained_tokens

        policy = ppo_clip(
            logp_T,
            old_T,
            advantages_T,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            clip_ratio_c=settings.clip_ratio_c,
        )
        loss_T = policy.loss_T
        parts = {
            "policy_loss": policy.loss_T.detach().sum() * weight,
            "clip_fraction": policy.clipped_T.sum() * weight,
            "entropy": current.entropy_T.detach().sum() * weight,
            "ratio_mean": policy.ratio_T.sum() * weight,
        }
        if scored.ref_logp is not None:
            ref_T = torch.cat([scored.ref_logp[i] for i in indices])
            kl_T = KL_ESTIMATORS[settings.kl](logp_T, ref_T)
            loss_T = loss_T + settings.kl_coef * kl_T
            parts["kl_loss"] = kl_T.detach().sum() * weight
        if settings.entropy_coef:
            loss_T = loss_T - settings.entropy_coef * current.entropy_T
        loss = loss_T.sum() * weight
        loss.backward()
        parts["loss"] = loss.detach()
        difference_T = (logp_T.detach() - old_T).abs()
        parts["logprob_mismatch_mean"] = difference_T.sum() * weight
        return parts, float(difference_T.max())

    def _micro_batches(self, batch: Batch) -> list[list[int]]:
        return self._forward.micro_batches(batch.rows, self.settings.max_tokens_per_micro_batch)

    def step_lr_scheduler(self) -> None:
        """Set the learning rate of the next update."""
        self._set_lr()

    def _set_lr(self) -> None:
        settings = self.settings
        factor = lr_factor(
            self.step,
            kind=settings.lr_scheduler,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.total_steps,
            min_lr_ratio=settings.min_lr_ratio,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr * factor

    async def update_weights(self, engine: Engine) -> None:
        """Let the engine serve the current weights; they are shared, so nothing is copied."""
        await engine.update_weights(self.step)

    def save(self, path: Path) -> None:
        """Write the optimizer's state and the step to `path` (the weights are saved apart)."""
        torch.save({"optimizer": self.optimizer.state_dict(), "step": self.step}, path)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote. The learning rate follows the current settings."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = int(state["step"])
        self._set_lr()
