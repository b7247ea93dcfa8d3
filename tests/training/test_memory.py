"""What an update needs beyond parameters, gradients and optimizer state, in every layout."""

from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.engines.models import prompt
from tests.kit.builders import call, trace
from tests.kit.models import png, vision_model
from tests.training.configured import training
from tuner.config.algorithms import EntropyLoss, KLLoss
from tuner.engines import SamplingParams
from tuner.engines.images import ALBUM, ImageLimits
from tuner.engines.transformers.vision import KEPT, train_vision
from tuner.training.batch import Row, build_batch
from tuner.training.forward import head
from tuner.training.memory import ImageMemory
from tuner.training.trainer import PolicyTrainer

WIDTH = 8
LAYOUTS = ["tree", "packed", "padded"]


def trainer_of(layout, vocabulary, *, layers=1, **more):
    """With everything in the loss that needs logits: policy, KL to the reference, entropy."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    settings = training(
        total_steps=1,
        kl_args=KLLoss(kl_coef=0.1),
        entropy=EntropyLoss(entropy_coef=0.01),
        layout=layout,
        **more,
    )
    trainer = PolicyTrainer(Qwen3ForCausalLM(config), settings)
    assert trainer._forward.layout == layout
    return trainer


def batch_of(context, trained):
    return build_batch(
        [
            trace(
                0,
                i,
                [call(str(i), prompt(context), prompt(trained, seed=1 + i), [-9.0] * trained)],
                reward=float(i),
            )
            for i in (0, 1)
        ]
    )


def update(trainer, batch):
    trainer.ppo_update(trainer.compute_ref_logp(trainer.compute_advantages(batch)))


def peak_bytes(layout, vocabulary, **more):
    """Most bytes alive at once in an update of 300 trained tokens, beyond what was there before
    and all that has the size of the embedding: its gradient, what is added to it, AdamW's."""
    trainer, batch = trainer_of(layout, vocabulary, **more), batch_of(10, 150)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        update(trainer, batch)
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if abs(event.nbytes()) != 4 * vocabulary * WIDTH:
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_peak_memory_grows_by_less_than_a_tenth_from_8k_to_152k_tokens_of_vocabulary(layout):
    with mock.patch.dict(head.LOGITS, cpu=1 << 20):
        assert peak_bytes(layout, 151_936) < 1.1 * peak_bytes(layout, 8_192)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_times_the_context_adds_no_logits_to_an_update(layout):
    def logits(context):
        trainer, counts = trainer_of(layout, 512), []
        for model in (trainer.model, trainer.reference):
            model.get_output_embeddings().register_forward_hook(
                lambda module, inputs, output: counts.append(output.shape[:-1].numel())
            )
        update(trainer, batch_of(context, 30))
        return sum(counts)

    assert logits(100) == logits(20) == 2 * 2 * 30


def test_a_checkpointed_layer_adds_a_fifth_of_the_memory_that_a_kept_one_adds():
    added = [
        peak_bytes("tree", 300, layers=8, activation_checkpointing=checkpointed)
        - peak_bytes("tree", 300, layers=2, activation_checkpointing=checkpointed)
        for checkpointed in (True, False)
    ]
    assert added[0] < added[1] / 5


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_images_are_counted_and_one_of_them_is_measured(trained):
    model, _ = vision_model("qwen3_vl")
    if trained:
        train_vision(model)
    content = [png(16 * side, 16, seed=side) for side in (1, 2, 3)]
    shared, own, large = (ALBUM.add(one, ImageLimits()) for one in content)
    sampling = SamplingParams(max_tokens=2)
    rows = [
        Row(str(rollout), rollout, (1, *ids, 2), (3, 4), (0.0, 0.0), sampling)
        for rollout, ids in enumerate(
            (
                (*model.vision.ids(shared), *model.vision.ids(own)),
                (*model.vision.ids(shared), *model.vision.ids(large)),
            )
        )
    ]
    found = ImageMemory.of(model, rows, tasks=5, group=8)
    assert (found.count, found.in_prompt) == (5 * (1 + 8), 2)
    pixels = sum(t.nbytes for t in model.vision.pixels(large).values())
    tables = model.vision.compute(model, large)
    assert found.each == (len(content[2]), pixels, sum(table.nbytes for table in tables))
    assert found.kept == 45 * sum(found.each) < KEPT
    # Also what becomes of the pixels on the way.
    assert found.computing > found.each[1] + found.each[2]
    assert found.reading > found.each[1]
    assert (found.saved > found.each[2]) is trained
    assert (
        ImageMemory.of(model, [Row("t", 0, (1,), (2,), (0.0,), sampling)], tasks=1, group=2) is None
    )
