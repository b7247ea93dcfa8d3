"""Runs in which each role of an agent has its own adapter."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.kit import runs
from tests.kit.agents import answer
from tests.loop.test_resume import without_times
from tuner.config.schema import LoraSection
from tuner.errors import ConfigError
from tuner.loop import run_local
from tuner.runs.directory import TRAINER_STATE
from tuner.tasks.functions import WorkflowOutput
from tuner.tools.candidates import find_candidate, with_weights
from tuner.tools.export import export
from tuner.training.trainer import PolicyTrainer

BOTH = "model.adapters={writer: {lora_rank: 4}, critic: {lora_rank: 2}}"
WRITER = "model.adapters={writer: {lora_rank: 4}, critic: frozen}"
CRITIC = "model.adapters={writer: frozen, critic: {lora_rank: 2}}"
STEPS = "buffer.total_steps=4"


def score(text):
    return sum(map(ord, text)) % 17 / 17


async def write_and_check(task, model):
    """What a role reads and is rewarded for depends on no other role. Some tasks have no critic."""
    writer, critic = model.role("writer"), model.role("critic")
    text = await answer(writer, task["question"])
    writer.calls[-1].reward = score(text)
    if task["question"][-1] in "12345":
        said = await answer(critic, f"{task['question']}?")
        critic.calls[-1].reward = score(said)
    return WorkflowOutput(response=text, reward=0.0)


def run(model, root, *overrides, workflow=write_and_check, name="run"):
    return run_local(
        runs.config(
            model, root, STEPS, "buffer.explorer_input.eval_tasksets=[]", *overrides, name=name
        ),
        workflow=workflow,
        judge=None,
        train_tasks=runs.TRAIN,
        eval_tasks={},
    )


def weights(result, role, step=4):
    folder = result.checkpoint.with_name(f"step_{step:06}")
    return load_file(folder / role / "adapter_model.safetensors")


def state(result, role, step=4):
    folder = result.checkpoint.with_name(f"step_{step:06}")
    return torch.load(folder / TRAINER_STATE, weights_only=True)["roles"][role]


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def both(random_model_path, tmp_path_factory):
    return run(random_model_path, tmp_path_factory.mktemp("both"), BOTH, "trainer.save_interval=1")


@pytest.mark.long
@pytest.mark.parametrize("alone", [WRITER, CRITIC])
def test_a_role_learns_what_it_does_where_no_other_is_trained(
    alone, both, random_model_path, tmp_path
):
    """Bit for bit, at each step: weights, optimizer and metrics."""
    found = run(random_model_path, tmp_path, alone, "trainer.save_interval=1")
    role, other = ("writer", "critic") if alone == WRITER else ("critic", "writer")
    for step in range(1, 5):
        assert equal(weights(found, role, step), weights(both, role, step))
        one, two = state(found, role, step), state(both, role, step)
        assert one["step"] == two["step"]
        assert str(one["optimizer"]) == str(two["optimizer"])
    prefixes = f"train/{role}/", f"role/{role}/"
    for mine, theirs in zip(found.history, both.history, strict=True):
        assert not any(f"/{other}/" in name for name in mine)
        assert {
            name: value
            for name, value in without_times([mine])[0].items()
            if name.startswith(prefixes)
        } == {
            name: value
            for name, value in without_times([theirs])[0].items()
            if name.startswith(prefixes)
        }
        frozen = mine.get("tokens/dropped/frozen_role", 0)
        assert frozen == theirs.get(f"role/{other}/tokens/sampled", 0)


def test_every_token_is_trained_by_its_role_or_dropped_with_a_reason(both):
    trained = set()
    for row in both.history:
        if not row["step"]:
            continue
        dropped = sum(v for name, v in row.items() if name.startswith("tokens/dropped/"))
        assert row["tokens/sampled"] == row["tokens/trained"] + dropped
        of_roles = [row[f"role/{role}/tokens/trained"] for role in ("writer", "critic")]
        assert row["tokens/trained"] == sum(of_roles)
        trained.update(zip(("writer", "critic"), map(bool, of_roles), strict=True))
        for role in ("writer", "critic"):
            assert (f"train/{role}/loss" in row) == bool(row[f"role/{role}/tokens/trained"])
    assert trained >= {("writer", True), ("critic", True), ("critic", False)}
    mismatches = [v for row in both.history for name, v in row.items() if "mismatch_max" in name]
    assert max(mismatches) < 1e-4


def test_a_role_without_calls_is_untouched(both):
    quiet = [row["step"] for row in both.history if not row["role/critic/tokens/trained"]]
    assert quiet == [3]
    for role, changes in (("critic", False), ("writer", True)):
        assert (str(state(both, role, 2)) != str(state(both, role, 3))) == changes
        assert equal(weights(both, role, 2), weights(both, role, 3)) != changes
    assert state(both, "critic")["step"] == 3


@pytest.mark.long
def test_an_interrupted_run_ends_with_the_same_adapters(
    both, random_model_path, tmp_path, monkeypatch
):
    """Between the updates of two roles."""
    update = PolicyTrainer.ppo_update

    def stopped(self, scored):
        if self.step + self.others == 3 and self.model.active_adapter == "<critic>":
            raise InterruptedError
        return update(self, scored)

    with monkeypatch.context() as patched:
        patched.setattr(PolicyTrainer, "ppo_update", stopped)
        with pytest.raises(InterruptedError):
            run(random_model_path, tmp_path, BOTH)
    assert (tmp_path / "p/run/checkpoints/step_000002").exists()
    found = run(random_model_path, tmp_path, BOTH)
    for role in ("writer", "critic"):
        assert equal(weights(found, role), weights(both, role))
        assert str(state(found, role)) == str(state(both, role))
    assert without_times(found.history) == without_times(both.history)


def test_a_run_begins_with_stored_adapters_and_collects_ahead_of_training(
    both, random_model_path, tmp_path
):
    """Each role's reference is its own beginning, and the engine has a copy of all adapters."""
    roles = f"{{writer: {{path: {both.checkpoint / 'writer'}}}, critic: {{lora_rank: 2}}}}"
    found = run(
        random_model_path,
        tmp_path,
        f"model.adapters={roles}",
        "tuner.deterministic=false",
        "synchronizer.sync_offset=1",
        "buffer.total_steps=2",
    )
    first, second = found.history
    assert abs(first["train/writer/kl_loss"]) < 1e-6 < second["train/writer/kl_loss"]
    # Those of the second step were sampled before the first update.
    assert max(value for name, value in first.items() if "mismatch_max" in name) < 1e-4
    assert second["staleness/max"] == 1
    begun, ended = weights(both, "writer"), weights(found, "writer", 2)
    assert begun.keys() == ended.keys()
    assert not equal(begun, ended)


def test_an_export_has_an_adapter_for_each_role_and_one_can_be_merged(both, tmp_path):
    folder, _ = export(both.run_dir, tmp_path / "all")
    card = (folder / "README.md").read_text()
    assert "--lora-modules critic=FOLDER/critic writer=FOLDER/writer" in card
    for role in ("writer", "critic"):
        stored = load_file(folder / role / "adapter_model.safetensors")
        assert equal(stored, weights(both, role))
    with pytest.raises(ConfigError, match=r"merge one of them, such as .*critic"):
        export(both.run_dir, tmp_path / "merged", merge=True)
    merged, _ = export(both.checkpoint / "writer", tmp_path / "writer", merge=True)
    assert (merged / "model.safetensors").exists()


def test_a_checkpoint_is_evaluated_with_the_adapter_of_each_role(both, random_model_path):
    config = runs.config(random_model_path, "unused", WRITER)
    used = with_weights(config, find_candidate(both.run_dir)).model
    folder, base = both.checkpoint, str(random_model_path)
    assert used.adapters == {
        role: LoraSection(path=str(folder / role), base_model_name=base)
        for role in ("critic", "writer")
    }
    assert used.lora_configs == ()
    assert with_weights(config, find_candidate(base)).model.adapters == {}


def test_a_checkpoint_has_an_adapter_for_each_role(both, random_model_path):
    ids = torch.tensor([[5, 9, 40, 60, 80]])
    seen = []
    for role, rank in (("writer", 4), ("critic", 2)):
        folder = both.checkpoint / role
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == rank
        base = AutoModelForCausalLM.from_pretrained(random_model_path)
        with torch.no_grad():
            seen.append(PeftModel.from_pretrained(base, folder)(input_ids=ids).logits)
    assert not torch.allclose(*seen)
