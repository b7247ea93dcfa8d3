"""Agents whose rollouts are run again; what they do besides is noted in `DID`."""

import asyncio
import json
import random

import openai

import tuner
from tuner.tasks.functions import JudgeOutput, WorkflowOutput

DID: list[str] = []
"""What ran, in order: not a part of any rollout."""
CLOCK = ["10:41"]
"""The time, as a changed agent puts it into its prompt."""
PAIR = ["first", "second"]
"""What `pair` asks, in this order."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def call(a, b):
    """What a model says that wants two numbers added."""
    arguments = json.dumps({"a": a, "b": b})
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


async def ask(model, messages):
    answer = await model.client.chat.completions.create(model=model.model_name, messages=messages)
    return answer.choices[0].message.content


@tuner.recorded
def price(item):
    DID.append(f"price {item}")
    return {"price": 7}


async def workflow(task, model):
    """Three calls: one that calls a tool, one streamed, one that is asked about a price."""
    messages = [
        {"role": "system", "content": f"Be kind. It is {CLOCK[0]}."},
        {"role": "user", "content": task["question"]},
    ]
    create = model.client.chat.completions.create
    while True:
        answer = await create(model=model.model_name, messages=messages, tools=[ADD])
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for one in said.tool_calls:
            given = json.loads(one.function.arguments)
            DID.append(f"add {given['a']} {given['b']}")
            content = str(given["a"] + given["b"])
            messages.append({"role": "tool", "tool_call_id": one.id, "content": content})
    print("an answer came:", said.content)
    messages.append({"role": "user", "content": f"Is {price('pen')['price']} enough?"})
    stream = await create(model=model.model_name, messages=messages, stream=True)
    texts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
    return WorkflowOutput(response="".join(texts))


async def another_answer(task, model):
    output = await workflow(task, model)
    return WorkflowOutput(response=f"{output.response}!")


async def fails(task, model):
    await workflow(task, model)
    raise ValueError("the tool is broken")


async def impatient(task, model):
    """Leaves the last call out, and what goes wrong with one."""
    try:
        return await workflow(task, model)
    except openai.APIStatusError:
        return WorkflowOutput(response="sorry")


async def judge(task, response):
    return JudgeOutput(reward=float("yes" in response))


async def pair(task, model):
    """Two requests at once; which of them comes first is its own affair."""
    begun = []
    for name in PAIR:
        DID.append(f"asks {name}")
        question = [{"role": "user", "content": name}]
        begun.append(asyncio.ensure_future(ask(model, question)))
        for _ in range(20):
            await asyncio.sleep(0)
    return WorkflowOutput(response="".join(sorted(await asyncio.gather(*begun))))


async def dialects(task, model):
    """Each API once."""
    client, name = model.client, model.model_name
    first = await client.responses.create(model=name, input="hi")
    second = await client.completions.create(model=name, prompt="Once")
    claude = model.anthropic_client
    messages = [{"role": "user", "content": first.output_text + second.choices[0].text}]
    said = await claude.messages.create(model=name, max_tokens=50, messages=messages)
    return WorkflowOutput(response=said.content[0].text)


async def strict(task, response):
    return JudgeOutput(reward=0.0)


async def says_yes(task, model):
    return WorkflowOutput(response="yes")


async def draws(task, model):
    number = str(random.random())
    return WorkflowOutput(response=await ask(model, [{"role": "user", "content": number}]))


def shouts(task, model):
    return plain({"question": task["question"].upper()}, model)


def plain(task, model):
    """A blocking client over HTTP, in a thread."""
    client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0)
    with client:
        texts = []
        for question in (task["question"], "and then?"):
            answer = client.chat.completions.create(
                model=model.model_name, messages=[{"role": "user", "content": question}]
            )
            texts.append(answer.choices[0].message.content)
    DID.append("plain")
    return WorkflowOutput(response=" ".join(texts))


async def react(task, model):
    """AgentScope's ReActAgent with a tool."""
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Msg, TextBlock
    from agentscope.tool import Toolkit, ToolResponse

    def add(a: int, b: int) -> ToolResponse:
        """Adds.

        Args:
            a: One.
            b: Another.
        """
        DID.append(f"add {a} {b}")
        return ToolResponse(content=[TextBlock(type="text", text=str(a + b))])

    toolkit = Toolkit()
    toolkit.register_tool_function(add)
    agent = ReActAgent(
        name="agent",
        sys_prompt=f"You add. It is {CLOCK[0]}.",
        model=model,
        formatter=OpenAIChatFormatter(),
        toolkit=toolkit,
    )
    answer = await agent(Msg("user", task["question"], "user"))
    return WorkflowOutput(response=answer)


async def helped(task, model, auxiliary_models):
    """Asks an auxiliary model in a function that is recorded, and in one that is not."""

    @tuner.recorded
    async def hint(text):
        return await auxiliary_models["helper"](text)

    first = await hint(task["question"])
    await ask(model, [{"role": "user", "content": first}])
    if task["question"] == "twice":
        first = await auxiliary_models["helper"]("more")
    return WorkflowOutput(response=first)


async def prompted(task, model, system_prompt):
    """A workflow as `tune_prompt` has them."""
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": "hi"}]
    return WorkflowOutput(response=await ask(model, messages))
