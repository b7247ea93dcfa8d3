"""A token that is also the padding (SmolLM2's end of a turn) is trained like any other."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.models import VOCABULARY
from tests.kit.builders import call, trace
from tests.kit.toy import tokenizer
from tests.training.configured import training
from tests.training.exact import all_float64, row, weights_of
from tests.training.test_critic import ALONE, PPO, with_head
from tuner.runs.models import load_model, stop_at_turns
from tuner.training.batch import build_batch
from tuner.training.forward.layouts import Forward, exact_forward
from tuner.training.trainer import Critic, PolicyTrainer

PAD = 2
ROWS = [
    row([5, PAD, 7], [9, 11, PAD]),
    row([5, PAD, 7, 9, 11, PAD, 8], [PAD, 30]),
    row([PAD], [PAD, PAD, 4, 40, 41, 42, PAD]),
    row([60, 61], [62]),
]


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=PAD,
        eos_token_id=PAD,
        bos_token_id=1,
        tie_word_embeddings=request.param,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


def loaded(folder):
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float64)


def plain(folder):
    """As transformers loads it, which takes the gradient from the row."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert model.model.embed_tokens.padding_idx == PAD
    return model


def row_gradient(model):
    return model.get_input_embeddings().weight.grad[PAD]


def plain_gradient(model):
    """Of weighed log-probs, one row after the other, by the model's own forward pass."""
    for index, one in enumerate(ROWS):
        ids = torch.tensor([one.prompt_ids + one.completion_ids])
        logp = model(ids).logits[0, :-1].log_softmax(-1)
        logp_T = logp.gather(1, ids[0, 1:, None])[len(one.prompt_ids) - 1 :, 0]
        (logp_T * weights_of(index, len(logp_T))).sum().backward()
    return row_gradient(model)


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_its_gradient_is_that_of_its_real_uses(folder, layout):
    expected = plain(folder)
    expected.model.embed_tokens.padding_idx = None
    wanted = plain_gradient(all_float64(expected))
    model = all_float64(loaded(folder))
    forward = exact_forward(model, None, layout=layout)
    assert forward.layout == layout
    for indices in forward.micro_batches(ROWS, 1000):
        logp_T = forward.logprobs(model, [ROWS[i] for i in indices], with_entropy=False).logp_T
        weights = [weights_of(i, len(ROWS[i].completion_ids)) for i in indices]
        (logp_T * torch.cat(weights)).sum().backward()
    assert wanted.norm() > 0.1
    assert (row_gradient(model) - wanted).norm() < 1e-8 * wanted.norm()


def test_transformers_gives_it_none(folder):
    """Else nothing here would be worth a test."""
    model = plain(folder)
    logp = Forward("padded", None).logprobs(model, ROWS, with_entropy=False).logp_T
    logp.sum().backward()
    untied = model.lm_head.weight is not model.model.embed_tokens.weight
    assert bool(row_gradient(model).any()) != untied


def test_an_update_and_a_critics_update_change_the_row(folder):
    """By more than another row, which weight decay alone may change."""
    calls = [call("a", [5, PAD, 7], [9, PAD], [-1, -1]), call("b", [PAD], [4], [-1])]
    batch = build_batch([trace(0, 0, calls, reward=1)], selection=ALONE)
    critic = with_head(Critic(loaded(folder), PPO))
    values = critic.values(batch)
    critic.update(batch, values, [v + 1 for v in values])
    settings = training(total_steps=1, advantage="reinforce", kl="none", lr=1e-2)
    trainer = PolicyTrainer(loaded(folder), settings)
    trainer.ppo_update(trainer.compute_advantages(batch))
    before = loaded(folder).get_input_embeddings().weight
    models = [critic.model["layers"]]
    if not trainer.model.config.tie_word_embeddings:  # else every row is an output's as well
        models.append(trainer.model)
    for model in models:
        change = (model.get_input_embeddings().weight - before).abs().amax(-1)
        assert change[PAD] > 2 * change[99]


def test_padding_that_ends_the_turns_of_a_template_is_trained(folder, tmp_path):
    config = LlamaConfig.from_pretrained(folder)
    config.eos_token_id = PAD + 1
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    model = loaded(str(tmp_path / "base"))
    assert model.get_input_embeddings().padding_idx == PAD
    said = stop_at_turns(model, tokenizer(), [PAD])
    assert said is not None
    assert model.get_input_embeddings().padding_idx is None
    ends = [PAD + 1, PAD, tokenizer().eos_token_id]
    assert model.generation_config.eos_token_id == ends
    assert stop_at_turns(model, tokenizer(), [PAD]) is None
