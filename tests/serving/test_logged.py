"""A candidate's weights on recorded traffic: of real runs of a small model."""

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
import torch

from tests.builders import call, trace
from tests.loop import runs
from tests.serving.served import QUESTION, say, served
from tuner.engines.sampling import packed_kept
from tuner.errors import ConfigError, ModelLoadError, ProofError
from tuner.loop import run_local
from tuner.run.directory import RunDirectory
from tuner.run.offpolicy import OffPolicy
from tuner.run.proof import Plan
from tuner.serving.logged import LoggedComparison, compare_logged, usable
from tuner.serving.serving_store import ServingStore
from tuner.traces import Origin, Outcome, RolloutId, TraceStore, read_traces
from tuner.tune import TINY_MODEL

PLAN = Plan(effect=0.1)


@pytest.fixture(scope="module")
def trained(random_model_path, tmp_path_factory):
    """Runs of two steps with a checkpoint after each, `whole` and `adapter`."""
    root = tmp_path_factory.mktemp("runs")
    for name, overrides in (
        ("whole", ("model.top_p=0.9",)),
        ("adapter", ("model.lora_configs=[{lora_rank: 2}]", "algorithm.optimizer.lr=0.1")),
    ):
        run_local(
            runs.config(
                random_model_path,
                root,
                "buffer.total_steps=2",
                "trainer.save_interval=1",
                "algorithm.repeat_times=6",
                *overrides,
                name=name,
            ),
            workflow=runs.workflow,
            judge=runs.judge,
            train_tasks=runs.TRAIN,
            eval_tasks={"held-out": runs.EVAL},
        )
    return root / "p"


def elsewhere(run, folder):
    """The traces of a run in a folder of their own: nobody knows what has learned from them."""
    folder.mkdir(exist_ok=True)
    shutil.copytree(run / "traces", folder / "traces")
    shutil.copy(run / "config.yaml", folder)
    return folder


@pytest.mark.parametrize("name", ["whole", "adapter"])
def test_the_weights_of_what_sampled_are_one_and_of_what_came_later_are_not(
    trained, name, tmp_path
):
    """Step 2 was sampled by the checkpoint of step 1."""
    run = trained / name
    same, later = (
        compare_logged(
            folder,
            RunDirectory(run).checkpoint(step),
            PLAN,
            steps=(2, 2),
            least_effective=1,
            clip=1.5,
            device="cpu",
        )
        for folder, step in ((run, 1), (elsewhere(run, tmp_path), 2))
    )
    assert same.versions == later.versions == (1, 1)
    assert same.found.sessions == 12
    assert same.cut_calls == (same.found.calls if name == "whole" else 0)
    assert (same.found.tasks, same.found.clip) == (2, 1.5)
    rewards = [one.reward for one in read_traces(run / "traces" / "step_000002.jsonl")]
    assert same.found.serving == pytest.approx(fmean(rewards)) != 0
    assert same.found.effective_sessions == pytest.approx(12, abs=1e-3)
    assert same.found.mean_weight == pytest.approx(1, abs=1e-4)
    assert same.found.estimate == pytest.approx(0, abs=1e-3)
    assert later.found.effective_sessions < 11.99
    assert later.candidate == f"{name} step 2"


def test_what_the_candidate_has_learned_from_says_nothing_of_it(trained, tmp_path):
    """Its own rewards made it: on them it looks better than it is."""
    run = trained / "whole"
    found = compare_logged(
        run, RunDirectory(run).checkpoint(1), PLAN, least_effective=1, device="cpu"
    ).found
    assert (found.sessions, found.left_out) == (12, {"trained_the_candidate": 12})
    with pytest.raises(ProofError, match=r"0 logged sessions .* 24 trained_the_candidate"):
        compare_logged(run, run, PLAN, device="cpu")
    copied = elsewhere(run, tmp_path)
    for steps, sessions, versions in ((None, 24, (0, 1)), ((1, 1), 12, (0, 0))):
        of_copy = compare_logged(
            copied, RunDirectory(run).checkpoint(1), PLAN, steps=steps, device="cpu"
        )
        assert (of_copy.found.sessions, of_copy.found.left_out) == (sessions, {})
        assert of_copy.versions == versions


def test_of_what_was_served_or_evaluated_a_candidate_has_learned_what_updates_took():
    of = trace(0, 0, [call("c", [1, 2], [3], [-0.5])], reward=1.0)
    ids = [RolloutId(step, 0, 0, "serve") for step in range(4)]
    ids.append(RolloutId(1, 0, 0, "held-out"))
    used, reasons = usable([replace(of, id=one) for one in ids], trained_by=2)
    assert [one.id for one in used] == [ids[0], ids[3], ids[4]]
    assert reasons == {"trained_the_candidate": 2}


@pytest.mark.parametrize("cut", [False, True])
def test_a_candidates_log_probs_are_those_of_its_own_forward_pass(trained, tmp_path, cut):
    """Of one call, with transformers alone: temperature 0.7, and of what a cut had left."""
    from transformers import AutoModelForCausalLM

    checkpoint = RunDirectory(trained / "whole").checkpoint(2)
    prompt, completion, others = [5, 9, 40, 7], [11, 30, 2], [12, 8, 4]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, 3:-1] / 0.7
    sampled = call("c", prompt, completion, [-1.0, -2.0, -0.5], temperature=0.7)
    if cut:
        left = list(zip(completion, others, strict=True))
        kept = tuple(packed_kept(np.array(two), logits.shape[1]) for two in left)
        cuts = replace(sampled.sampling, top_k=2)
        sampled = replace(sampled, sampling=cuts, kept=kept)
        logits = torch.stack([row[list(two)] for row, two in zip(logits, left, strict=True)])
    store = TraceStore(tmp_path / "traces")
    for rollout in range(2):
        store.append(trace(0, rollout, [sampled], reward=0.5, attempt=2))
    replaced = replace(sampled, logprobs=(-9.0,) * 3)
    store.append(trace(0, 0, [replaced], reward=0.5, final=False))
    found = compare_logged(tmp_path, checkpoint, PLAN, least_effective=1, device="cpu").found
    assert found.sessions == 2
    logp = logits.log_softmax(-1)[range(3), [0] * 3 if cut else completion].sum().item()
    assert found.mean_weight == pytest.approx(math.exp(logp + 3.5), rel=1e-4)


def test_sessions_whose_weight_is_not_known_are_left_out_by_reason():
    good = trace(0, 0, [call("c", [1, 2], [3], [-0.5])], reward=1.0)
    (of_good,) = good.calls
    spoilt = [
        ("no_reward", replace(good, reward=None)),
        ("timeout", replace(good, outcome=Outcome.TIMEOUT, reward=None)),
        ("branch", replace(good, origin=Origin(RolloutId(1, 0, 1), 1, 0))),
        ("greedy_call", replace(good, calls=(call("c", [1], [3], [0.0], temperature=0.0),))),
        ("undelivered_call", replace(good, calls=(of_good, replace(of_good, undelivered=True)))),
        ("invalid_call", replace(good, calls=(replace(of_good, invalid="no log-probs"),))),
        ("call_without_ids", replace(good, calls=(call("c", [], [3], [-0.5]),))),
        ("call_without_ids", replace(good, calls=(call("c", [1], [], []),))),
        ("replayed_call", replace(good, calls=(replace(of_good, replayed=1),))),
    ]
    used, reasons = usable([good, *(one for _, one in spoilt), good])
    assert used == [good, good]
    assert reasons == dict(sorted(Counter(reason for reason, _ in spoilt).items()))


def test_masked_and_excluded_tokens_were_sampled_and_count(trained, tmp_path):
    run = trained / "whole"
    stores = [TraceStore(tmp_path / name / "traces") for name in ("plain", "masked")]
    for one in read_traces(run / "traces" / "step_000002.jsonl"):
        hidden = tuple(replace(c, excluded=True, masked=((0, 1),)) for c in one.calls)
        stores[0].append(one)
        stores[1].append(replace(one, calls=hidden))
    plain, masked = (
        compare_logged(
            store.folder.parent,
            RunDirectory(run).checkpoint(2),
            PLAN,
            least_effective=1,
            device="cpu",
        )
        for store in stores
    )
    assert plain.found.mean_weight == pytest.approx(masked.found.mean_weight, rel=1e-12)


def test_the_judged_sessions_of_a_server_are_traffic_and_one_without_a_group_is_alone(
    trained, tmp_path
):
    recorded = list(read_traces(trained / "whole" / "traces" / "step_000002.jsonl"))
    checkpoint = RunDirectory(trained / "whole").checkpoint(2)
    store = ServingStore(tmp_path / "serving.sqlite")
    for number, one in enumerate([*recorded, recorded[0]]):
        session, group = f"s-{number:04}", "same" if number < 3 else None
        store.open(session, key=session.encode(), seed=1, group=group)
        store.add_calls(session, one.calls)
        if number < len(recorded):
            store.reward(session, one.reward)
    store.close()
    found = compare_logged(tmp_path, checkpoint, PLAN, least_effective=1, device="cpu").found
    run = compare_logged(
        elsewhere(trained / "whole", tmp_path / "run"),
        checkpoint,
        PLAN,
        steps=(2, 2),
        least_effective=1,
        device="cpu",
    ).found
    assert (found.sessions, found.tasks) == (12, 10)
    assert found.effective_sessions == pytest.approx(run.effective_sessions)
    assert found.left_out == {}


async def test_a_call_in_a_form_weighs_one_under_the_weights_that_sampled_it(tmp_path):
    form = {
        "type": "object",
        "properties": {"pens": {"type": "integer"}},
        "required": ["pens"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "pens", "schema": form}}
    async with served(tmp_path) as asking:
        for _ in range(2):
            id_, key = await asking.opened()
            await say(asking.client(key), [], QUESTION, temperature=1, response_format=asked)
            await asking.control("POST", f"/sessions/{id_}/reward", json={"reward": 1})
            assert asking.calls(id_)[0].call.constrained
    run = tmp_path / "p/served"
    found = compare_logged(run, TINY_MODEL, PLAN, least_effective=1, device="cpu").found
    assert found.sessions == 2
    assert found.mean_weight == pytest.approx(1, abs=1e-3)


def test_the_command_prints_estimates_or_refuses_and_says_what_is_missing(trained, said):
    run = trained / "whole"
    checkpoint = RunDirectory(run).checkpoint(1)
    arguments = ("compare", run, "--candidate", checkpoint, "--effect", "0.1", "--steps", "2")
    status, output, error = said(*arguments, "--least-effective", "5")
    assert not status, error
    for text in (
        "whole step 1 on the traffic of whole, weights of version 1",
        "12 sessions of 2 tasks",
        "calls were cut by top_k, top_p or min_p",
        "candidate, doubly robust",
        "sure); effective sample size 12 of 12 sessions",
    ):
        assert text in output, output
    status, output, _ = said(*arguments)
    assert not status
    assert "candidate, plain" not in output
    assert output.splitlines()[-1] == (
        "not yet: the weights say nothing: effective sample size 12 of 12, and 20 are wanted; "
        "collect live sessions"
    )
    _, output, _ = said(*arguments[:-2])
    assert "left out: 12 trained_the_candidate" in output
    _, output, _ = said(*arguments, "--json")
    assert json.loads(output)["found"]["refused"].startswith("the weights say nothing")


def test_each_estimate_stands_behind_its_name():
    estimates = {
        "serving": 0.1,
        "plain": 0.2,
        "self_normalised": 0.3,
        "clipped": 0.4,
        "doubly_robust": 0.5,
    }
    counts = dict.fromkeys(("sessions", "tasks", "calls"), 2)
    weights = dict.fromkeys(
        ("effective_sessions", "effective_calls", "mean_weight", "log_ratio"), 1.0
    )
    found = OffPolicy(
        **counts, **weights, **estimates, left_out={}, refused=None, clip=1.5, lost=0.25
    )
    shown = LoggedComparison(run="r", candidate="c", versions=(0, 1), cut_calls=0, found=found)
    lines = shown.text().splitlines()
    assert lines[0] == "c on the traffic of r, weights of version 0 to 1"
    for name, value in (
        ("serving", "0.1000"),
        ("candidate, plain", "0.2000"),
        ("candidate, self-normalised", "0.3000"),
        ("candidate, clipped at 1.5", "0.4000"),
        ("candidate, doubly robust", "0.5000"),
    ):
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert value in line
    assert "25.00% of its sessions" in shown.text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--candidate", "{checkpoint}"), "--effect is not given"),
        (("--proof",), "--effect is not given"),
        (("--effect", "0.1"), "--effect is for --proof or --candidate"),
        (("--steps", "1"), "--steps is for --proof or --candidate"),
        (("--proof", "--effect", "0.1", "--steps", "1"), "are for --candidate"),
        (("--candidate", "{checkpoint}", "--proof", "--effect", "0.1"), "name one run, no --proof"),
        (("--candidate", "{checkpoint}", "--effect", "2"), "effect 2.0 and margin 0.0"),
        (
            ("--candidate", "{checkpoint}", "--effect", "0.05", "--rewards", "0.9", "1"),
            "range [0.9, 1]",
        ),
        (
            ("--candidate", "{checkpoint}", "--effect", "0.1", "--split", "other"),
            "has no traces of 'other'",
        ),
        (
            ("--candidate", "{checkpoint}", "--effect", "0.1", "--split", "held-out"),
            "0 logged sessions say nothing (left out: 4 greedy_call)",
        ),
        (("--candidate", "./no/such", "--effect", "0.1"), "./no/such"),
    ],
)
def test_what_cannot_be_compared_is_said(trained, said, arguments, message):
    run = trained / "whole"
    checkpoint = str(RunDirectory(run).checkpoint(1))
    given = [checkpoint if one == "{checkpoint}" else one for one in arguments]
    status, _, error = said("compare", run, *given)
    assert status == 2
    assert message in error, error


def test_a_candidate_with_another_vocabulary_is_refused(trained):
    with pytest.raises((ConfigError, ModelLoadError), match="another vocabulary"):
        compare_logged(trained / "whole", "models/tiny_math", PLAN, device="cpu")


@pytest.mark.parametrize(
    ("reward", "message"),
    [(7.0, "reward 7.0 of session train-1-0-0"), (0.5, "1 logged sessions say nothing")],
)
def test_sessions_that_cannot_be_compared_are_refused_before_a_model_is_loaded(
    tmp_path, reward, message
):
    store = TraceStore(tmp_path / "traces")
    store.append(trace(0, 0, [call("c", [1], [2], [-1.0])], reward=reward))
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(ProofError, match=message):
        compare_logged(tmp_path, broken, PLAN)
