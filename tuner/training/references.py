"""The models next to the policy: its frozen start, the reference of the KL term, and a teacher.

If all weights are trained the start is a copy of the model. If only an adapter is trained, the
weights below it never change, so nothing is copied: the reference is the same model with another
adapter, or with none. While it is active, everybody who computes with the model computes with the
reference, so an engine that shares it must be paused (`engine.pause()`); one that is not notices
the change and drops its cached prefixes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tuner.config import RunConfig
from tuner.engines.grammar import Grammars
from tuner.training.forward.layouts import Forward, HasRows, exact_forward

if TYPE_CHECKING:
    from peft import PeftModel

_FROZEN = "reference"


class AdapterReference:
    """The trained model, with the adapter that it started from.

    Args:
        model: A model wrapped by peft, whose active adapter is being trained.
        adapter: Name of a second, frozen adapter in it, the start of the trained one. None for no
            adapter, which is the start of a new one.
    """

    def __init__(self, model: PeftModel, adapter: str | None = None) -> None:
        self._model = model
        self._adapter = adapter

    @staticmethod
    def of_weights(model: PeftModel, weights: Mapping[str, Tensor]) -> AdapterReference:
        """The model with a second adapter like the trained one, with the given weights.

        Args:
            weights: As `peft.get_peft_model_state_dict` returns them.
        """
        from peft import set_peft_model_state_dict

        config: Any = copy.deepcopy(model.peft_config[model.active_adapter])
        config.inference_mode = True
        if hasattr(config, "init_lora_weights"):
            config.init_lora_weights = True  # other methods also change the weights of the model
        # Not with the whole name: peft looks for names inside names.
        role = model.active_adapter.strip("<>") if model.active_adapter.startswith("<") else ""
        name = f"{_FROZEN} {role}".strip()
        with torch.random.fork_rng(devices=[]):  # it is created with random weights first
            model.add_adapter(name, config)
        set_peft_model_state_dict(model, dict(weights), adapter_name=name)
        model.set_adapter(model.active_adapter)  # peft 0.20 has frozen it
        return AdapterReference(model, name)

    @contextmanager
    def active(self) -> Iterator[nn.Module]:
        """Activate the reference while the block runs."""
        if self._adapter is None:
            with self._model.disable_adapter():
                yield self._model
            return
        trained = self._model.active_adapter
        self._model.set_adapter(self._adapter, inference_mode=True)
        try:
            yield self._model
        finally:
            self._model.set_adapter(trained)


Reference = nn.Module | AdapterReference


def frozen_start(model: nn.Module, reference: Reference | None = None) -> Reference:
    """The reference of a policy.

    Args:
        model: The policy.
        reference: Its start, if that differs from its current state.

    Returns:
        `reference`, or without one the current policy: a copy of it, or only of its adapter if it
        has one, or no copy if that adapter has no effect yet.
    """
    if isinstance(reference, AdapterReference):
        return reference
    if reference is None and hasattr(model, "get_base_model"):
        wrapped: Any = model
        if _changes_nothing(model):
            return AdapterReference(wrapped)
        from peft import get_peft_model_state_dict

        weights = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        return AdapterReference.of_weights(wrapped, weights)
    frozen = copy.deepcopy(model) if reference is None else reference
    return frozen.eval().requires_grad_(False)


def acting(model: Reference) -> AbstractContextManager[nn.Module]:
    """The module to compute with: a module as it is, an `AdapterReference` while the block runs."""
    return model.active() if isinstance(model, AdapterReference) else nullcontext(model)


def _changes_nothing(model: nn.Module) -> bool:
    """Whether only LoRA is trained and its second factor is still zero."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    zero = ("lora_B", "lora_embedding_A")
    return all(
        "lora_A" in name
        or "lora_embedding_B" in name
        or (any(part in name for part in zero) and not p.any())
        for name, p in trained
    )


@dataclass(frozen=True)
class Teacher:
    """A model and how it is computed, which may differ from the student."""

    model: Reference
    forward: Forward
    max_tokens: int

    @staticmethod
    def of(model: nn.Module, grammars: Grammars | None, config: RunConfig) -> Teacher:
        """A teacher with the student's vocabulary; its weights never change."""
        frozen = model.eval().requires_grad_(False)
        how = config.tuner
        forward = exact_forward(frozen, grammars, layout=how.exact_layout, compiled=how.compile)
        return Teacher(frozen, forward, config.trainer.micro_batch_tokens)

    @staticmethod
    def prompted(
        policy: nn.Module, start: Reference | None, forward: Forward, config: RunConfig
    ) -> Teacher:
        """The policy or its start, with a system prompt; computed like the policy."""
        reads = start if config.tuner.algorithm.prompt_teacher == "start" else policy
        assert reads is not None, "config.uses_reference has it"
        return Teacher(reads, forward, config.trainer.micro_batch_tokens)

    def logp(self, batch: HasRows) -> tuple[Tensor, ...]:
        """The teacher's log-probs of each row's completion tokens, one tensor [T_row] for each.

        They belong to the distribution that the teacher would have sampled from with the student's
        settings, over the tokens kept by the student's cuts.
        """
        rows = [row.of_teacher for row in batch.rows]
        with acting(self.model) as network:
            return self.forward.all_logprobs(network, rows, self.max_tokens)
