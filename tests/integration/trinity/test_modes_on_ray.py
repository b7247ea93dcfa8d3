"""Trinity-RFT's modes for real, on a CPU; what is replaced there is said in `test_on_ray.py`.

One run's leavings are the next one's start: `explore` fills a buffer, `train` trains on it and
saves checkpoints, `bench` evaluates them, and `serve` serves.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel, Field

from tests.integration.trinity.conftest import REPOSITORY, SHIM, TINY
from tests.integration.trinity.test_on_ray import (
    ON_A_CPU,
    ROWS,
    by_length,
    check_exact,
    handed_over,
    two_turns,
)
from tuner import TunerModelConfig, WorkflowOutput, tune
from tuner.engines.grammar import Grammars, unpacked
from tuner.errors import ConfigError
from tuner.runs.models import load_model, load_tokenizer
from tuner.traces import TraceStore

BUFFER = "buffer.trainer_input.experience_buffer"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def explored(root):
    """A run of mode `explore`: two steps of rollouts in a database."""
    return tune(
        two_turns,
        by_length,
        ROWS,
        backend="trinity",
        experiment_name="explored",
        overrides=["mode=explore", f"checkpoint_root_dir={root}", *ON_A_CPU],
    )


def test_exploring_hands_over_what_was_recorded(root, explored):
    assert explored.run_dir == root / "runs" / "explored"
    assert explored.outcomes == {"completed": 8}
    assert (explored.steps, explored.checkpoint) == (0, None)
    assert len(explored.rewards) == 2
    check_exact(explored.run_dir, steps=2)
    # A conversation whose second call, a streamed one, continues the first is one experience.
    assert [len(e.info["calls"]) for e in handed_over(explored.run_dir)] == [2] * 8
    store = TraceStore(explored.traces)
    calls = [call for step in (1, 2) for trace in store.read("train", step) for call in trace.calls]
    assert [sum(call.streamed for call in calls), len(calls)] == [8, 16]


def of_the_trainer(root, database):
    settings = [o for o in ON_A_CPU if not o.startswith(BUFFER)]
    return [
        "mode=train",
        f"checkpoint_root_dir={root}",
        f"{BUFFER}={{name: handed, storage_type: sql, path: 'sqlite:///{database}'}}",
        "trainer.save_interval=1",
        *settings,
    ]


@pytest.fixture(scope="module")
def trained(root, explored):
    """A run of mode `train` on what was explored."""
    return tune(
        backend="trinity",
        experiment_name="trained",
        overrides=of_the_trainer(root, explored.run_dir / "buffer" / "handed.db"),
    )


def test_train_does_every_step_that_the_buffer_has(trained):
    assert trained.steps == 2  # 8 experiences, 4 in a step
    updates = [row for row in trained.history if row["step"]]
    assert [row["trainer/actor/grad_norm"] > 0 for row in updates] == [True, True]
    # The first step trains the weights that sampled.
    assert abs(updates[0]["trainer/actor/ppo_kl"]) < 0.01
    assert any(trained.checkpoint.glob("*.safetensors"))
    assert (trained.rewards, trained.outcomes) == ([], {})


ANSWERS = [{"prompt": row["question"], "response": row["answer"]} for row in ROWS]
PAIRS = [
    {"prompt": row["question"], "chosen": row["answer"], "rejected": "I do not know."}
    for row in ROWS
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("algorithm", "rows", "loss"),
    [("sft", ANSWERS, "trainer/actor/sft_loss"), ("dpo", PAIRS, "trainer/actor/dpo_loss")],
)
def test_recorded_data_is_trained_on(algorithm, rows, loss, root, monkeypatch):
    # For these, Trinity-RFT's check imports verl in this process too.
    monkeypatch.syspath_prepend(str(SHIM))
    settings = [o for o in ON_A_CPU if not o.startswith((BUFFER, "buffer.", "algorithm."))]
    result = tune(
        train_dataset=rows,
        backend="trinity",
        experiment_name=algorithm,
        overrides=[
            f"checkpoint_root_dir={root}",
            f"algorithm.algorithm_type={algorithm}",
            "algorithm.optimizer.lr=1e-3",
            "buffer.batch_size=8",
            "buffer.total_steps=3",
            *settings,
        ],
    )
    assert result.steps == 3
    losses = [row[loss] for row in result.history if row["step"]]
    # Every step has the same eight rows.
    assert losses[0] > losses[1] > losses[2]
    assert any(result.checkpoint.glob("*.safetensors"))


@pytest.fixture(scope="module")
def judged(root, trained):
    """A run of mode `bench` on the checkpoints of the one that trained."""
    return tune(
        two_turns,
        by_length,
        eval_dataset={"held": ROWS[:3]},
        backend="trinity",
        experiment_name="trained",
        overrides=["mode=bench", f"checkpoint_root_dir={root}", *ON_A_CPU[:-1],
                   "explorer.eval_on_startup=true"],
    )  # fmt: skip


def test_bench_judges_every_row_with_every_checkpoint(trained, judged):
    assert judged.run_dir == trained.run_dir / "bench"
    store = TraceStore(judged.run_dir / "traces")
    traces = {step: store.read("held", step) for step in (0, 1, 2)}
    assert {step: len(found) for step, found in traces.items()} == {0: 3, 1: 3, 2: 3}
    rewards = {int(row["step"]): row["eval/held/reward"] for row in judged.history}
    assert rewards == {
        step: pytest.approx(sum(trace.reward for trace in found) / 3)
        for step, found in traces.items()
    }
    assert judged.eval_before == {"held": rewards[0]}
    assert judged.eval_after == {"held": rewards[2]}
    # Evaluations are greedy, and other weights answer otherwise.
    said = {
        step: [call.completion_ids for trace in sorted(found, key=lambda t: t.id)
               for call in trace.calls]
        for step, found in traces.items()
    }  # fmt: skip
    assert said[0] != said[2]
    assert (judged.steps, judged.outcomes) == (0, {})
    # The run whose checkpoints they are keeps its own files.
    assert json.loads((trained.run_dir / "result.json").read_text())["steps"] == 2


@pytest.mark.nightly
def test_a_server_answers_until_it_is_asked_to_stop(root, tmp_path):
    settings = [o for o in ON_A_CPU if not o.startswith("tuner.reasoning")]
    file = tmp_path / "serve.yaml"
    file.write_text(f"mode: serve\nname: served\ncheckpoint_root_dir: {root}\n")
    command = [sys.executable, "-m", "tuner.cli", "run", str(file), "tuner.backend=trinity",
               "explorer.listen_address=127.0.0.1", "explorer.proxy_port=18765",
               *settings]  # fmt: skip
    path = f"{REPOSITORY}{os.pathsep}{os.environ['PYTHONPATH']}"
    server = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        # What a shell starts in the background inherits that Ctrl-C is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        said = []
        for line in server.stdout:
            said.append(line)
            if line.startswith("serving "):
                break
        assert said[-1].startswith("serving http://127.0.0.1:18765/"), "".join(said)
        url = said[-1].split()[1]
        body = {
            "model": str(TINY),
            "messages": [{"role": "user", "content": ROWS[0]["question"]}],
            "max_tokens": 8,
        }
        open_to_all = "http://127.0.0.1:18765/v1/models"
        assert httpx.get(open_to_all, timeout=60, trust_env=False).status_code == 401
        answer = httpx.post(f"{url}/chat/completions", json=body, timeout=600, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["token_ids"]) <= 8
        server.send_signal(signal.SIGINT)
        output, _ = server.communicate(timeout=300)
    finally:
        server.kill()
    assert server.returncode == 0, output
    result = json.loads((root / "runs" / "served" / "result.json").read_text())
    assert result["steps"] == 0


class Digit(BaseModel):
    digit: int = Field(ge=0, le=9)


async def helped_and_formed(task, model, auxiliary_models):
    """A hint of a frozen model, a free answer of one agent, and JSON of another."""
    helper = auxiliary_models["helper"]
    messages = [{"role": "user", "content": task["question"]}]
    hint = await helper.client.chat.completions.create(model=helper.model_name, messages=messages)
    messages[0]["content"] += hint.choices[0].message.content or "?"
    solver = model.role("solver").client
    free = await solver.chat.completions.create(model=model.model_name, messages=messages)
    text = free.choices[0].message.content or ""
    formed = await model.role("writer").client.chat.completions.parse(
        model=model.model_name, messages=messages, response_format=Digit
    )
    model.calls[0].reward = float(len(text))
    return WorkflowOutput(reward=float(formed.choices[0].message.parsed.digit), response=text)


@pytest.mark.nightly
def test_forms_roles_rewards_of_calls_and_an_auxiliary_model(root):
    settings = [o for o in ON_A_CPU if not o.startswith(("tuner.reasoning", "cluster.gpu"))]
    result = tune(
        helped_and_formed,
        None,
        ROWS,
        auxiliary_models={
            "helper": TunerModelConfig(model_path=str(TINY), max_model_len=256, max_tokens=8)
        },
        backend="trinity",
        experiment_name="formed",
        overrides=["mode=explore", f"checkpoint_root_dir={root}", *settings,
                   "cluster.gpu_per_node=3", "buffer.total_steps=1",
                   "explorer.rollout_model.reasoning_parser=none"],
    )  # fmt: skip
    traces = TraceStore(result.run_dir / "traces").read("train", 1)
    assert result.outcomes == {"completed": 4}
    import torch

    model = load_model(str(TINY), device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = load_tokenizer(str(TINY))
    grammars = Grammars(tokenizer, [tokenizer.eos_token_id])
    for trace in traces:
        free, formed = trace.calls
        assert [call.role for call in trace.calls] == ["solver", "writer"]
        assert (free.constrained, formed.constrained) == (False, True)
        # The log-probs are those within the form: the mask is found again from the stored call.
        ids = torch.tensor([formed.prompt_ids + formed.completion_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(formed.prompt_ids) - 1 : -1]
        size = logits.shape[1]
        bits = grammars.replay(formed.sampling.grammar, formed.completion_ids, size)
        logits[~unpacked(bits, size, logits.device)] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, ids[0, len(formed.prompt_ids) :, None])[:, 0]
        assert list(formed.logprobs) == pytest.approx(expected.tolist(), abs=2e-3)
    # What was held to a form is recorded and not handed over; the others are, with their rewards.
    handed = handed_over(result.run_dir)
    ids = {call.id for trace in traces for call in trace.calls if not call.constrained}
    assert {id for e in handed for id in e.info["calls"]} == ids
    assert all(e.info["call_rewards"][0][3] == "solver" for e in handed)
    assert result.tokens.dropped["constrained_call"] > 0
    assert result.tokens.sampled == result.tokens.trained + sum(result.tokens.dropped.values())


@pytest.mark.nightly
def test_an_adapter_is_trained_and_sampled_from(root):
    """`ppo_kl` tells: rollouts of the second step that came from the base would be far off."""
    result = tune(
        two_turns,
        by_length,
        ROWS,
        backend="trinity",
        experiment_name="adapter",
        overrides=[f"checkpoint_root_dir={root}", *ON_A_CPU, "algorithm.optimizer.lr=5e-2",
                   "model.lora_configs=[{lora_rank: 8, lora_alpha: 16}]"],
    )  # fmt: skip
    assert result.steps == 2
    check_exact(result.run_dir, steps=2)
    rows = {int(row["step"]): row for row in result.history}
    assert rows[2]["trainer/actor/kl_loss"] > 0.001  # the policy has moved
    for step in (1, 2):
        assert abs(rows[step]["trainer/actor/ppo_kl"]) < 0.01
    assert (result.run_dir / "global_step_2" / "actor" / "lora_adapter").is_dir()


def test_a_benchmark_without_checkpoints_is_refused_before_ray_starts(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoint"):
        tune(
            two_turns,
            by_length,
            eval_dataset=ROWS,
            backend="trinity",
            experiment_name="nothing",
            overrides=["mode=bench", f"checkpoint_root_dir={tmp_path}", *ON_A_CPU],
        )


@pytest.mark.nightly
def test_a_saved_configuration_runs_again_from_the_command_line(root, explored, tmp_path):
    """By `tuner run`, functions included; the copy shows that nothing of the run is needed."""
    file = shutil.copy(explored.run_dir / "config.yaml", tmp_path)
    command = [sys.executable, "-m", "tuner.cli", "run", str(file), "name=again",
               "buffer.total_steps=1"]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ['PYTHONPATH']}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    again = Path(root) / "runs" / "again"
    assert len(TraceStore(again / "traces").read("train", 1)) == 4
    saved = json.loads((again / "result.json").read_text())
    assert saved["outcomes"] == {"completed": 4}
