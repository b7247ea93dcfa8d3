"""An agent with a tool for Tinker's service, and a configuration for it."""

from tests.integration.trinity.on_ray import ON_A_CPU
from tuner import WorkflowOutput

LOCAL_ONLY = ("cluster.", "explorer.rollout_model.", "trainer.", "synchronizer.sync_method")
SETTINGS = [
    *(setting for setting in ON_A_CPU if not setting.startswith(LOCAL_ONLY)),
    "algorithm.optimizer.lr=1e-3",
]
TOOL = {
    "type": "function",
    "function": {"name": "count_sheep", "description": "Counts.", "parameters": {}},
}


async def two_turns_with_a_tool(task, model):
    """Two calls, the second of which continues the first."""
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        answer = await model.client.chat.completions.create(
            model=model.model_name, messages=messages, tools=[TOOL]
        )
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "Are you sure?"})
    return WorkflowOutput(response=answer.choices[0].message.content or "")
