"""The critic of PPO: a transformer of its own that says what a state is worth.

Its layers start as the policy's or as another model's, and a linear head on the last hidden state
gives one number. The value of the state in which a token was sampled is read where that token's
log-prob is read, before it, in the same layout:

    row       1 2 [3 4]      V(1 2)  V(1 2 3)
    row       1 2 3 4 5 [6]  V(1 2 3 4 5)

The loss, over the T trained tokens of a step, is `1/T sum_t L(V_t, V_old_t, R_t)` with PPO2's
clipped loss. The head starts at 0, so at first every state is worth nothing, and no random number
is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tuner.algorithms.losses import clipped_value_loss
from tuner.engines.transfer import to_device
from tuner.engines.transformers.weights import causal_model
from tuner.training.batch import Batch, Row
from tuner.training.forward.head import body
from tuner.training.forward.layouts import Forward
from tuner.training.forward.probing import exact_forward
from tuner.training.optimizer import make_optimizer
from tuner.training.trainer_settings import TrainerSettings


class Critic:
    """Layers, value head and their optimizer.

    Args:
        model: A transformers causal LM whose layers become the critic's; it is not copied, and its
            output embedding is left behind.
        settings: The numbers; `settings.critic` are those of the critic alone.
        forward: How the layers are computed, where that is known; else it is found out.
    """

    def __init__(
        self, model: nn.Module, settings: TrainerSettings, *, forward: Forward | None = None
    ) -> None:
        causal = causal_model(model)
        output: Any = causal.get_output_embeddings()
        self._forward = forward or exact_forward(
            causal,
            None,
            layout=settings.layout,
            checkpointing=settings.activation_checkpointing,
            compiled=settings.compile,
        )
        self._settings = settings
        parameter = next(causal.parameters())
        # Returns are learned in steps that lower precision would round away.
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        head = nn.Linear(output.weight.shape[1], 1, device=parameter.device, dtype=dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.model = nn.ModuleDict({"layers": body(causal), "head": head})
        self.model.eval().requires_grad_(True)
        own = settings.critic
        self.optimizer = make_optimizer(
            self.model.parameters(),
            lr=own.lr,
            betas=own.betas,
            weight_decay=own.weight_decay,
            state=settings.optimizer_state,
            offload=settings.optimizer_offload,
        )

    def values(self, batch: Batch) -> tuple[Tensor, ...]:
        """Values of the states in which tokens were sampled, N tensors [T_row], no gradient."""
        budget = self._settings.max_tokens_per_micro_batch
        return self._forward.by_row(batch.rows, budget, self._values)

    def update(
        self, batch: Batch, old: Sequence[Tensor], returns: Sequence[Tensor]
    ) -> dict[str, float]:
        """One optimizer step on the whole batch.

        Args:
            old: Values that the step began with, N tensors [T_row].
            returns: What values are trained towards, likewise.

        Returns:
            Metrics: value loss, share of tokens whose gradient the clip cut, explained variance of
            the old values (left out where all returns are equal), mean old value, mean return, and
            the norm of the gradient.

        Raises:
            TrainingError: Loss or gradient is not finite; the weights are as they were before.
        """
        losses, clips = self._forward.room.fitting(partial(self._gradients, batch, old, returns))
        norm = self.optimizer.clip_grad_norm(self._settings.grad_clip)
        # The one place where Python waits for the device before the step.
        total, clipped, grad_norm = (
            torch.stack([torch.stack(losses).sum(), torch.stack(clips).sum(), norm])
            .double()
            .tolist()
        )
        self.optimizer.step_if_finite(
            "the critic's loss", total, grad_norm, setting="tuner.critic.lr"
        )
        return {
            "value_loss": total,
            "value_clip_fraction": clipped / batch.trained_tokens,
            "critic_grad_norm": grad_norm,
            **_fit(torch.cat(list(old)).cpu().double(), torch.cat(list(returns)).cpu().double()),
        }

    def _gradients(
        self, batch: Batch, old: Sequence[Tensor], returns: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Of all micro-batches; loss and clipped tokens of each."""
        self.optimizer.zero_grad()
        losses, clips = [], []
        device = next(self.model.parameters()).device
        budget = self._settings.max_tokens_per_micro_batch
        for indices in self._forward.micro_batches(batch.rows, budget):
            values_T = self._values([batch.rows[i] for i in indices])
            loss_T, clipped_T = clipped_value_loss(
                values_T,
                to_device(torch.cat([old[i] for i in indices]).to(values_T.dtype), device),
                to_device(torch.cat([returns[i] for i in indices]).to(values_T.dtype), device),
                clip=self._settings.critic.clip,
            )
            loss = loss_T.sum() / batch.trained_tokens
            loss.backward()
            losses.append(loss.detach())
            clips.append(clipped_T.sum())
        return losses, clips

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on bit for bit: weights and the optimizer's state."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave. The learning rate follows the current settings."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = self._settings.critic.lr

    def _values(self, rows: Sequence[Row]) -> Tensor:
        """Values before the completion tokens of `rows`, in row order, shape [T]."""
        head = self.model["head"]
        states_TD = self._forward.states(self.model["layers"], rows)
        values_T1: Tensor = head(states_TD.to(next(head.parameters()).dtype))
        return values_T1[:, 0]


def _fit(old_T: Tensor, returns_T: Tensor) -> dict[str, float]:
    """How well the old values foretold the returns."""
    metrics = {"value_mean": float(old_T.mean()), "return_mean": float(returns_T.mean())}
    variance = float(returns_T.var(correction=0))
    if variance > 0:
        left = float((returns_T - old_T).var(correction=0))
        metrics["explained_variance"] = 1 - left / variance
    return metrics
