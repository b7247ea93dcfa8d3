"""AgentScope 1.0.21 (Apache-2.0), examples/tuner/model_selection/example_bleu.py.

Its code, with our imports, and `_task` for `task` in the judge.
"""

import logging
import os
from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter
from agentscope.message import Msg
from agentscope.model import DashScopeChatModel

from tuner import DatasetConfig, JudgeOutput, WorkflowOutput, select_model

logging.basicConfig(level=logging.INFO)
models = [
    DashScopeChatModel(
        "qwen3-max-2025-09-23", api_key=os.environ.get("DASHSCOPE_API_KEY", ""), max_tokens=1024
    ),
    DashScopeChatModel(
        "Moonshot-Kimi-K2-Instruct",
        api_key=os.environ.get("DASHSCOPE_API_KEY", ""),
        max_tokens=1024,
    ),
    DashScopeChatModel(
        "MiniMax-M2.1", api_key=os.environ.get("DASHSCOPE_API_KEY", ""), max_tokens=1024
    ),
    DashScopeChatModel(
        "deepseek-r1", api_key=os.environ.get("DASHSCOPE_API_KEY", ""), max_tokens=1024
    ),
    DashScopeChatModel("glm-4.7", api_key=os.environ.get("DASHSCOPE_API_KEY", ""), max_tokens=1024),
]


async def translation_workflow(task: dict[str, Any], model: Any) -> WorkflowOutput:
    agent = ReActAgent(
        name="translator",
        sys_prompt="You are a helpful translation agent.Only output the translated text.",
        model=model,
        formatter=OpenAIChatFormatter(),
    )
    source_text = task.get("question", "") if isinstance(task, dict) else str(task)
    prompt = f"Translate following text between English and Chinese: {source_text}"
    msg = Msg(name="user", content=prompt, role="user")
    response = await agent.reply(msg=msg)
    return WorkflowOutput(response=response)


async def bleu_judge(_task: dict[str, Any], response: Any) -> JudgeOutput:
    import sacrebleu

    response_str = ""
    if isinstance(response, dict) and "response" in response:
        response_content = response["response"]
        if hasattr(response_content, "content"):
            if isinstance(response_content.content, list):
                for content_item in response_content.content:
                    if isinstance(content_item, dict) and "text" in content_item:
                        response_str += content_item["text"]
                    elif hasattr(content_item, "text"):
                        response_str += content_item.text
            else:
                response_str = str(response_content.content)
    else:
        raise ValueError("Response must be a dict with 'response' key")
    reference_translation = _task.get("answer", "") if isinstance(_task, dict) else ""
    ref = reference_translation.strip()
    pred = response_str.strip()
    bleu_score = sacrebleu.sentence_bleu(pred, [ref])
    return JudgeOutput(
        reward=bleu_score.score,
        metrics={
            "bleu": bleu_score.score / 100,
            "brevity_penalty": bleu_score.bp,
            "ratio": bleu_score.ratio,
        },
    )


async def main() -> None:
    dataset_config = DatasetConfig(
        path=os.path.join(os.path.dirname(__file__), "translate_data"), split="test"
    )
    best_model, metrics = await select_model(
        workflow_func=translation_workflow,
        judge_func=bleu_judge,
        train_dataset=dataset_config,
        candidate_models=models,
    )
    print(f"Selected best model: {best_model.model_name}")
    print(f"Metrics: {metrics}")


if __name__ == "__main__":
    import asyncio

    asyncio.run(main())
