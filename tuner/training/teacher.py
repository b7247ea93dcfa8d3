"""The teacher of on-policy distillation: a frozen model that reads what the student wrote."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from tuner.engines.grammar import Grammars
from tuner.training.batch import HasRows
from tuner.training.forward import Forward
from tuner.training.settings import TrainerSettings


@dataclass(frozen=True)
class Teacher:
    """A model and how it is computed, which may be otherwise than the student."""

    model: nn.Module
    forward: Forward
    max_tokens: int

    @staticmethod
    def of(model: nn.Module, grammars: Grammars | None, settings: TrainerSettings) -> Teacher:
        """A teacher with the student's vocabulary; its weights are never changed."""
        frozen = model.eval().requires_grad_(False)
        forward = Forward.of(frozen, grammars, layout=settings.layout)
        return Teacher(frozen, forward, settings.max_tokens_per_micro_batch)

    def logp(self, batch: HasRows) -> tuple[Tensor, ...]:
        """The teacher's log-probs of each row's completion tokens, one tensor [T_row] for each.

        They are those of the distribution that the teacher would have sampled from with the
        student's settings: its temperature, top_k, top_p and grammar.
        """
        return self.forward.all_logprobs(self.model, batch.rows, self.max_tokens)
