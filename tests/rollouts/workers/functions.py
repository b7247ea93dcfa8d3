"""Functions that do what a row tells them, for rollouts here and in workers."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import openai

import tuner
from tuner.errors import RewardError, RewardTimeout
from tuner.tasks.functions import JudgeOutput, Rejected, WorkflowOutput
from tuner.traces import Outcome

MESSAGES = [{"role": "user", "content": "hi"}]


class Opaque:
    """What no pickle can hold, for a judge in the same process."""

    def __init__(self, score):
        self.score = score
        self.lock = threading.Lock()

    def get_text_content(self):
        return f"opaque {self.score}"


class Unheard(Exception):
    """An error of the user's own, whose constructor wants more than a text."""

    def __init__(self, what, code):
        super().__init__(f"{what} ({code})")


@tuner.recorded
def looked_up(query):
    return {"found": query.upper()}


async def workflow(task, model, auxiliary_models, logger, feedback=None):
    did = await DOES[task["do"]](task, model)
    if isinstance(did, WorkflowOutput):
        return did
    return WorkflowOutput(response=did, metrics={"turns": len(model.calls)})


async def judge(task, response):
    if task["do"] == "opaque":
        return JudgeOutput(reward=response.score)
    if task["do"].startswith("judge"):
        return JUDGES[task["do"]](task)
    return JudgeOutput(reward=len(str(response)) % 5 / 5, feedback="so so", metrics={"seen": 1})


async def ask(model, **options):
    return (await model(MESSAGES, **options)).content


async def _answers(task, model):
    return await ask(model)


async def _is_opaque(task, model):
    await ask(model)
    return Opaque(0.5)


async def _says_nothing(task, model):
    await ask(model)


async def _raises(task, model):
    await ask(model)
    raise KeyError("qestion")


async def _raises_own(task, model):
    raise Unheard("a thing", 7)


async def _rejects(task, model):
    raise Rejected("too easy")


async def _reward_error(task, model):
    raise RewardError("the reward function failed")


async def _reward_timeout(task, model):
    raise RewardTimeout("the reward function took too long")


async def _misses_a_field(task, model):
    try:
        task["nothing"]
    except KeyError as error:
        raise RuntimeError(str(error)) from None


async def _exits(task, model):
    sys.exit("enough")


async def _cancels_itself(task, model):
    raise asyncio.CancelledError


async def _never_calls(task, model):
    return "silence"


async def _awaits_nothing(task, model):
    return ask(model).content


async def _is_infinite(task, model):
    await ask(model)
    return WorkflowOutput(response="", metrics={"bad": float("nan")})


async def _asks_for_too_much(task, model):
    await model(MESSAGES, logit_bias={"1": 1})


async def _goes_over_limits(task, model):
    for _ in range(4):
        await ask(model)


async def _streams(task, model):
    stream = await model.client.chat.completions.create(
        model=model.model_name, messages=MESSAGES, stream=True
    )
    return "".join(
        [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    )


STOPPED_AT = 60


async def _stops_reading(task, model):
    await ask(model)
    stream = await model.client.chat.completions.create(
        model=model.model_name, messages=MESSAGES, stream=True, max_tokens=STOPPED_AT
    )
    async for one in stream:
        if one.choices and one.choices[0].delta.content:
            break
    await stream.close()


async def _gives_credit(task, model):
    for name in ("writer", "critic"):
        await ask(model.role(name))
    first, second = model.calls
    first.reward = 0.25
    second.mask(0, 1)
    assert [call.role for call in model.role("critic").calls] == ["critic"]
    try:
        first.reward = float("inf")
    except ValueError:
        return "credit"


async def _excludes(task, model):
    await ask(model)
    await ask(model, temperature=0)
    model.calls[0].exclude()


async def _uses_recorded(task, model):
    looked_up("a")
    await ask(model)
    found = [looked_up("a"), looked_up("b")]
    return str(found)


async def _over_http(task, model):
    client = openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
    async with client:
        answer = await client.chat.completions.create(model=model.model_name, messages=MESSAGES)
    return answer.choices[0].message.content


async def _other_dialects(task, model):
    async with httpx.AsyncClient(base_url=model.base_url.removesuffix("/v1")) as client:
        bad = await client.post("/v1/chat/completions", json={}, headers={"authorization": "no"})
    text = await model.client.completions.create(model=model.model_name, prompt="hi")
    return f"{bad.status_code} {text.choices[0].text}"


async def _in_a_loop_of_its_own(task, model):
    return await asyncio.to_thread(lambda: asyncio.run(ask(model)))


DOES = {
    "answers": _answers,
    "opaque": _is_opaque,
    "nothing": _says_nothing,
    "raises": _raises,
    "raises own": _raises_own,
    "rejects": _rejects,
    "reward error": _reward_error,
    "reward timeout": _reward_timeout,
    "misses a field": _misses_a_field,
    "exits": _exits,
    "cancels itself": _cancels_itself,
    "never calls": _never_calls,
    "awaits nothing": _awaits_nothing,
    "nan metric": _is_infinite,
    "too much": _asks_for_too_much,
    "over limits": _goes_over_limits,
    "streams": _streams,
    "stops reading": _stops_reading,
    "credit": _gives_credit,
    "excludes": _excludes,
    "recorded": _uses_recorded,
    "http": _over_http,
    "dialects": _other_dialects,
    "own loop": _in_a_loop_of_its_own,
    "judge raises": _answers,
    "judge times out": _answers,
    "judge is infinite": _answers,
    "judge exits": _answers,
    "judge cancels": _answers,
}


def _raise(error):
    raise error


JUDGES = {
    "judge raises": lambda task: _raise(ValueError("no verdict")),
    "judge times out": lambda task: _raise(RewardTimeout("too slow")),
    "judge is infinite": lambda task: JudgeOutput(reward=float("inf")),
    "judge exits": lambda task: _raise(SystemExit(3)),
    "judge cancels": lambda task: _raise(asyncio.CancelledError()),
}


def first(mark):
    """Whether nobody was here before, in whichever process."""
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def note(mark, text):
    """For who looks from another process."""
    Path(mark).write_text(text)


async def dying(task, model):
    """Dies, in the way that the row says, in the middle of an attempt."""
    await ask(model)
    how = task.get("dies")
    if how == "once" and first(task["mark"]):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exits":
        os._exit(3)
    if how == "crashes":
        import ctypes

        ctypes.string_at(0)
    if how == "waits":
        await asyncio.Event().wait()
    return WorkflowOutput(reward=1.0, response=how)


async def hanging(task, model):
    """Makes a call, and does what the row says until it is cancelled, or longer."""
    try:
        await ask(model)  # its time may end before the answer is here
        if task["does"] == "blocks":
            import ctypes

            note(task["mark"], "blocked")
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter: nothing in it can end this
        if task["does"] == "waits once" and model.session.id.endswith("-2"):
            return WorkflowOutput(reward=1.0)
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if task["does"] == "calls late":
            try:
                await ask(model)
            except openai.APIStatusError as error:
                note(task["mark"], str(error))
        elif task["does"] == "swallows":
            return WorkflowOutput(reward=1.0)
        raise


async def improving(task, model, feedback):
    await ask(model)
    return WorkflowOutput(response=feedback or "first")


async def critical(task, response):
    return JudgeOutput(reward=float(len(response)), feedback=f"better than {response}")


async def helped(task, model, auxiliary_models):
    text = await ask(model) + await ask(auxiliary_models["frozen"])
    return WorkflowOutput(response=text, metrics={"seen": len(auxiliary_models["frozen"].calls)})


async def helped_judge(task, response, auxiliary_models):
    text = await ask(auxiliary_models["frozen"])
    return JudgeOutput(reward=float(len(text + response)))


class DiesWhenLoaded:
    async def __call__(self, task, model):
        return WorkflowOutput(reward=1.0)

    def __reduce__(self):
        return os._exit, (4,)


class FailsWhenLoaded(DiesWhenLoaded):
    def __reduce__(self):
        return int, ("no number",)


async def says_what_is_imported(task, model):
    """Before its first call, and with that."""
    before = task["module"] in sys.modules
    await ask(model)
    return WorkflowOutput(reward=float(task["module"] in sys.modules), metrics={"before": before})


async def synchronous(task, model):
    """An agent with a client that blocks its event loop."""
    with openai.OpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        answer = client.chat.completions.create(model=model.model_name, messages=MESSAGES)
    return WorkflowOutput(reward=len(answer.choices[0].message.content) % 2)


async def computing(task, model):
    """Takes a fifth of a second of CPU in the first step, and next to none in others."""
    await ask(model)
    until = time.process_time() + 0.2 * model.session.id.startswith("train-1-")
    while time.process_time() < until:
        pass
    return WorkflowOutput(reward=float(len(model.calls)))


def plain(task, model):
    """A function that is not async, with Python's, NumPy's and the process's random states."""
    import random

    import numpy as np

    text = asyncio.run(ask(model))
    return WorkflowOutput(reward=len(text) % 3 + random.random() + np.random.rand())


async def group_judge(task, responses):
    if task.get("judge dies"):
        os._exit(1)
    return [JudgeOutput(reward=one.score / len(responses)) for one in responses]


async def rates(task, response):
    return JudgeOutput(reward=response.score)


async def scored(task, model):
    await ask(model)
    if task.get("dies"):
        os._exit(1)
    return WorkflowOutput(response=Opaque(float(time.monotonic() > 0)))


async def counts_responses(task, model):
    """Says how many responses of rollouts before are still there."""
    import gc

    alive = sum(isinstance(one, Opaque) for one in gc.get_objects())
    await ask(model)
    return WorkflowOutput(response=Opaque(1.0), metrics={"alive": alive})


async def names_its_process(task, model):
    """Two calls that name this process, so that a test can kill it."""
    for _ in range(2):
        await model([{"role": "user", "content": str(os.getpid())}])
    return WorkflowOutput(reward=float(os.getpid() % 2))


OUTCOMES = {
    "answers": Outcome.COMPLETED,
    "raises": Outcome.WORKFLOW_ERROR,
    "rejects": Outcome.REJECTED,
    "reward error": Outcome.JUDGE_ERROR,
    "reward timeout": Outcome.JUDGE_TIMEOUT,
    "exits": Outcome.WORKFLOW_ERROR,
    "cancels itself": Outcome.CANCELLED,
    "never calls": Outcome.NO_CALLS,
    "judge raises": Outcome.JUDGE_ERROR,
    "judge is infinite": Outcome.INVALID_REWARD,
}
