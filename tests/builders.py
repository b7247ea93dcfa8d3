"""Small calls and traces for tests."""

from tuner.engines import SamplingParams
from tuner.traces import Call, Outcome, RolloutId, Trace


def call(id, prompt, completion, logprobs, **sampling):
    return Call(
        id=id,
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        logprobs=tuple(logprobs),
        versions=(0,) * len(completion),
        sampling=SamplingParams(max_tokens=32, **sampling),
        finish_reason="stop",
        messages=[{"role": "user", "content": "hi"}],
        tools=[],
        response={"role": "assistant", "content": "ho"},
        started=1.5,
        seconds=0.25,
    )


def trace(task, rollout, calls, *, outcome=Outcome.COMPLETED, reward=None, step=1, **fields):
    return Trace(
        id=RolloutId(step, task, rollout),
        task={"question": f"task {task}"},
        calls=tuple(calls),
        outcome=outcome,
        reward=reward,
        **fields,
    )
