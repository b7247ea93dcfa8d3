"""The training step: one batch of traces becomes one update of the weights, or several.

The loss, over the trained tokens of a step, with a token's weight m (they depend on
`loss_agg_mode`; 1/T with the default, `token-mean`) and its advantage A:

    L = sum_t m_t [ w_t * policy_loss(logp_t, old_t, A_t) + kl_coef * KL(logp_t, ref_t)
                    - entropy_coef * H_t ]

Advantage and policy loss are those of the algorithm (`tuner.algorithms.table`). Three policies may
have a part: the one that sampled (its log-probs are recorded), the one that the step began with,
`old`, and the one that is trained. Where the first two are the same, `old` is what was recorded and
w = 1; else w = min(old / recorded, cap). `ref` is the frozen start.

Left out on purpose: value functions. Recorded log-probs equal the trainer's own for the same
weights; the difference is reported each step (`logprob_mismatch_mean`, `_max`).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tuner.algorithms import row_weights
from tuner.engines.base import Engine
from tuner.engines.grammar import Grammars
from tuner.errors import TrainingError
from tuner.training.advantages import row_advantages
from tuner.training.batch import Batch, HasRows, Row
from tuner.training.forward import Forward
from tuner.training.loss import Tokens, micro_batch_loss
from tuner.training.schedule import lr_factor
from tuner.training.settings import TrainerSettings
from tuner.training.teacher import Teacher

logger = logging.getLogger("tuner")

# Engine and trainer differ by 1e-6 nat in float32 and by about 1e-2 in bfloat16; a mean beyond this
# is another distribution than the recorded one.
MISMATCH_ALARM = 0.05


@dataclass(frozen=True)
class ScoredBatch:
    """A batch with what the loss needs.

    Attributes:
        advantages: One tensor [T_row] for each of the N rows.
        ref_logp: N tensors of the reference's log-probs, one per row, of shape [T_row].
    """

    batch: Batch
    advantages: tuple[Tensor, ...]
    ref_logp: tuple[Tensor, ...] | None = None

    @property
    def advantages_N(self) -> Tensor:
        """The mean advantage of each row's tokens, shape [N]; most algorithms give all the same."""
        if not self.advantages:
            return self.batch.rewards_R.new_zeros(0)
        return torch.stack([advantage_T.mean() for advantage_T in self.advantages])


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
        teacher: Whose log-probs `on_policy_distill` trains on; any architecture with the policy's
            vocabulary.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainerSettings,
        *,
        reference: nn.Module | None = None,
        grammars: Grammars | None = None,
        teacher: nn.Module | None = None,
    ) -> None:
        self.model = model.eval()  # no dropout: sampling and training see the same function
        self.settings = settings
        self.step = 0
        self._alarmed = False
        self._forward = Forward.of(model, grammars, token_tree=settings.token_tree)
        self.reference: nn.Module | None = None
        if settings.uses_reference:
            self.reference = (reference or copy.deepcopy(model)).eval().requires_grad_(False)
        self.teacher: Teacher | None = None
        if teacher is not None:
            self.teacher = Teacher.of(teacher, grammars, settings)
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

    def compute_logp(self, batch: HasRows, *, model: nn.Module | None = None) -> tuple[Tensor, ...]:
        """Log-probs of each row's completion tokens under the current weights, no gradient.

        Args:
            batch: N rows.
            model: Another model of the policy's architecture, for example the reference.

        Returns:
            N tensors, one per row, of shape [T_row].
        """
        budget = self.settings.max_tokens_per_micro_batch
        return self._forward.all_logprobs(model or self.model, batch.rows, budget)

    def compute_ref_logp(self, scored: ScoredBatch) -> ScoredBatch:
        """Add the reference's log-probs where the KL term needs them."""
        if self.reference is None or scored.ref_logp is not None:
            return scored
        return replace(scored, ref_logp=self.compute_logp(scored.batch, model=self.reference))

    def compute_advantages(self, batch: Batch) -> ScoredBatch:
        """The algorithm's advantages (`tuner.training.advantages`).

        Where the distance to the reference is taken off the rewards, the reference's log-probs are
        computed first, and kept for the KL term.

        Raises:
            TrainingError: Calls have rewards of their own that the algorithm has no use for, or
                there is no teacher where it needs one.
        """
        ref_logp = None
        teacher_logp = self.teacher.logp(batch) if self.teacher is not None else None
        if self.settings.penalizes_kl and self.reference is not None and batch.rows:
            ref_logp = self.compute_logp(batch, model=self.reference)
        advantages = row_advantages(batch, self.settings, ref_logp, teacher_logp)
        return ScoredBatch(batch, advantages, ref_logp)

    def ppo_update(self, scored: ScoredBatch) -> dict[str, float]:
        """One optimizer step on the whole batch, or `settings.updates`; weights change in place.

        Returns:
            Metrics: loss and its parts, advantage spread, clip and rejected fraction, entropy,
            KL to behaviour and reference, effective sample size of the importance weights (1 on
            policy), gradient norm, learning rate; of the last update where there are several. The
            mismatch between recorded and recomputed log-probs is that before the first.

        Raises:
            TrainingError: The batch is empty, or loss or gradient is not finite; the weights
                are then as they were before that update.
        """
        if not scored.batch.rows:
            raise TrainingError("a batch without a single trainable token cannot be trained")
        proximal = self._proximal(scored.batch)
        metrics: dict[str, float] = {}
        for update in range(self.settings.updates):
            latest = self._update(scored, proximal)
            if update:
                latest |= {k: v for k, v in metrics.items() if k.startswith("logprob_mismatch")}
            metrics = latest
        advantages_T = torch.cat(scored.advantages)
        metrics["advantage_std"] = float(advantages_T.std(correction=0))
        metrics["advantage_max"] = float(advantages_T.abs().max())
        if self.settings.advantage == "on_policy_distill":
            # In the mean over the student's samples, the KL of student and teacher.
            metrics["kl_teacher"] = -float(advantages_T.mean()) / self.settings.distill_coef
        self._watch_mismatch(metrics)
        self.step += 1
        return metrics

    def _proximal(self, batch: Batch) -> tuple[Tensor, ...] | None:
        """Log-probs of the policy that the step begins with, where they are not those recorded."""
        settings = self.settings
        if settings.ratio_to != "proximal":
            return None
        stale = any(version != self.step for row in batch.rows for version in row.versions)
        if settings.proximal == "recompute" or (settings.proximal == "auto" and stale):
            return self.compute_logp(batch)
        return None

    def _update(self, scored: ScoredBatch, proximal: tuple[Tensor, ...] | None) -> dict[str, float]:
        settings, batch = self.settings, scored.batch
        self.optimizer.zero_grad(set_to_none=True)
        weights_N = row_weights(
            settings.aggregation,
            torch.tensor([len(row.completion_ids) for row in batch.rows]),
            torch.tensor([row.rollout for row in batch.rows]),
            longest=settings.max_completion,
        )
        totals: dict[str, Tensor] = {}
        largest: list[Tensor] = []
        for indices in self._micro_batches(batch):
            tokens = self._tokens(scored, proximal, weights_N, indices)
            loss, parts, sums = micro_batch_loss(settings, tokens)
            loss.backward()
            means = {name: value / batch.trained_tokens for name, value in sums.items()}
            for name, value in (parts | means).items():
                totals[name] = totals[name] + value if name in totals else value
            largest.append((tokens.logp_T.detach() - tokens.recorded_T).abs().max())
        metrics = {name: float(value) for name, value in totals.items()}
        # (sum w)^2 / (T sum w^2) over T tokens, from the means of w and w^2.
        metrics["effective_sample_size"] = metrics.pop("importance") ** 2 / metrics.pop(
            "importance_squared"
        )
        metrics["logprob_mismatch_max"] = float(torch.stack(largest).max())
        return metrics | self._apply_gradient(metrics["loss"])

    def likelihood_update(self, rows: Sequence[Row], weights_N: Tensor) -> dict[str, float]:
        """One optimizer step on `L = -sum_n weight_n * logp(completion_n)`.

        That is what imitating and comparing recorded answers come down to
        (`tuner.training.recorded`). It does not depend on where micro-batches are cut.

        Args:
            rows: N rows.
            weights_N: The weight of each row, a constant; negative to make it less likely.

        Returns:
            Loss, mean entropy of the tokens, gradient norm and learning rate.

        Raises:
            TrainingError: Loss or gradient is not finite; the weights are then as they were.
        """
        self.optimizer.zero_grad(set_to_none=True)
        total = entropy = 0.0
        for indices in self._forward.micro_batches(rows, self.settings.max_tokens_per_micro_batch):
            part = [rows[i] for i in indices]
            current = self._forward.logprobs(self.model, part, with_entropy=False)
            lengths = torch.tensor([len(row.completion_ids) for row in part])
            weights_T = weights_N[indices].repeat_interleave(lengths).to(current.logp_T)
            loss = -(current.logp_T * weights_T).sum()
            loss.backward()
            total += float(loss.detach())
            entropy += float(current.entropy_T.detach().sum())
        metrics = self._apply_gradient(total)
        self.step += 1
        tokens = sum(len(row.completion_ids) for row in rows)
        return {"loss": total, "entropy": entropy / tokens, **metrics}

    def _apply_gradient(self, loss: float) -> dict[str, float]:
        """Clip, check and take the optimizer's step; `loss` is for the check and its message."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)
        if not (torch.isfinite(norm) and math.isfinite(loss)):
            self.optimizer.zero_grad(set_to_none=True)
            raise TrainingError(
                f"step {self.step + 1}: loss {loss} with gradient norm {float(norm)} is "
                "not finite; lower algorithm.optimizer.lr or trainer.grad_clip"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": float(norm), "lr": self.lr}

    def _tokens(
        self,
        scored: ScoredBatch,
        proximal: tuple[Tensor, ...] | None,
        weights_N: Tensor,
        indices: list[int],
    ) -> Tokens:
        """What the loss of one micro-batch needs. Weights are those of the whole step, so the sum
        over micro-batches does not depend on where they were cut."""
        rows = [scored.batch.rows[i] for i in indices]
        current = self._forward.logprobs(
            self.model, rows, with_entropy=self.settings.entropy_coef != 0
        )
        logp_T = current.logp_T
        lengths = torch.tensor([len(row.completion_ids) for row in rows])

        def gathered(values: tuple[Tensor, ...] | None) -> Tensor | None:
            return None if values is None else torch.cat([values[i] for i in indices]).to(logp_T)

        return Tokens(
            logp_T=logp_T,
            entropy_T=current.entropy_T,
            recorded_T=torch.tensor(
                [p for row in rows for p in row.logprobs], dtype=logp_T.dtype
            ).to(logp_T.device),
            advantages_T=torch.cat([scored.advantages[i] for i in indices]).to(logp_T),
            weights_T=weights_N[indices].repeat_interleave(lengths).to(logp_T),
            row_T=torch.arange(len(rows)).repeat_interleave(lengths).to(logp_T.device),
            staleness_T=torch.tensor(
                [staleness for row in rows for staleness in _staleness(row, self.step)]
            ).to(logp_T.device),
            proximal_T=gathered(proximal),
            ref_T=gathered(scored.ref_logp),
        )

    def _watch_mismatch(self, metrics: dict[str, float]) -> None:
        """Say once that the recorded log-probs are not those of the weights that are trained."""
        mismatch = metrics["logprob_mismatch_mean"]
        if self._alarmed or metrics["stale_fraction"] or mismatch <= MISMATCH_ALARM:
            return
        self._alarmed = True
        logger.warning(
            "step %d: recorded and recomputed log-probs of the same weights differ by %.3g nat in "
            "the mean (more than %g), so updates are not those of the policy that sampled; is the "
            "engine's precision, chat template or sampling another? tuner.algorithm.proximal: "
            "recompute corrects for it",
            self.step + 1,
            mismatch,
            MISMATCH_ALARM,
        )

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


def _staleness(row: Row, step: int) -> list[int]:
    """Steps between the policy that sampled each token and the one of `step`."""
    if not row.versions:
        return [0] * len(row.completion_ids)
    return [step - version for version in row.versions]
