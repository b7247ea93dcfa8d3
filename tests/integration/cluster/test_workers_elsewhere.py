"""A run whose workers are on other machines, of which one dies, one comes and one is cut off."""

import asyncio
import threading

import pytest
import ray

from tests.integration.cluster.conftest import Cluster
from tests.integration.trinity.conftest import TINY
from tuner import JudgeOutput, WorkflowOutput, tune
from tuner.traces import Outcome, TraceStore

FAR = '{"far": 4}'
ROWS = [{"question": f"{n} and 4"} for n in range(8)]
CUT_SECONDS = 30


async def workflow(task, model):
    """Two calls, between which a tool takes half a second."""
    said = []
    for _ in range(2):
        reply = await model.client.chat.completions.create(
            model=model.model_name, messages=[{"role": "user", "content": task["question"]}]
        )
        said.append(reply.choices[0].message.content or "")
        await asyncio.sleep(0.5)
    return WorkflowOutput(response=" ".join(said))


async def judge(task, response):
    return JudgeOutput(reward=len(response) % 5 / 5)


@pytest.fixture
def machines(first_machine, tmp_path):
    """The first one, on which no worker has room, and two others, which share no file with it."""
    made = Cluster(tmp_path)
    for number in (2, 3):
        made.add(number, shares=False, resources=FAR)
    yield made
    made.end()


def settings(cluster, root):
    return [
        f"checkpoint_root_dir={root}",
        f"model.model_path={TINY}",
        "model.max_response_tokens=8",
        "buffer.batch_size=4",
        "buffer.total_steps=6",
        "algorithm.repeat_times=4",
        "explorer.runner_per_model=16",
        "explorer.max_retry_times=4",
        "tuner.workers=ray",
        f"cluster.ray_address={cluster.address}",
        "tuner.ray.gateway=10.77.0.1",
        "tuner.ray.workers=8",
        "tuner.ray.resources={far: 1}",
    ]


def test_a_run_goes_on_while_its_machines_come_and_go(machines, tmp_path):
    root, ended, failed = tmp_path / "runs", threading.Event(), []
    metrics = root / "runs" / "elsewhere" / "metrics.jsonl"

    def steps():
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def until(step):
        while steps() < step and not ended.wait(0.1):
            pass

    def happen():
        try:
            until(1)
            machines.hosts[3].die()
            machines.add(4, shares=False, resources=FAR)
            until(3)
            machines.hosts[2].cut()
            ended.wait(CUT_SECONDS)
            machines.hosts[2].mend()
        except BaseException as error:
            failed.append(error)

    events = threading.Thread(target=happen)
    events.start()
    try:
        result = tune(
            workflow,
            judge,
            ROWS,
            experiment_name="elsewhere",
            overrides=settings(machines, root),
        )
    finally:
        ended.set()
        events.join()
    assert not failed
    assert not ray.is_initialized()
    assert result.steps == 6
    assert sum(result.outcomes.values()) == 6 * 16
    tokens = result.tokens
    assert tokens.sampled == tokens.trained + sum(tokens.dropped.values())
    store = TraceStore(result.traces)
    traces = [trace for step in range(1, 7) for trace in store.read("train", step)]
    lost = [trace for trace in traces if trace.outcome is Outcome.WORKER_DIED]
    assert lost
    assert all("worker " in trace.error and " on 10.77.0." in trace.error for trace in lost)
