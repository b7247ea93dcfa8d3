"""`tune_prompt` with the real GEPA, a workflow of its own and a reflecting model over HTTP."""

from tests.chat_server import chat_server
from tuner import JudgeOutput, PromptTuneConfig, RemoteModel, WorkflowOutput, tune_prompt

ROWS = [{"number": n} for n in range(20)]
PROPOSALS = ["Be brief.", "Add one.", "Add one. Twice."]


def proposer(proposals=PROPOSALS):
    """Proposes what is on the list, one after the other."""
    left = list(proposals)

    def answer(body):
        return f"I propose:\n```\n{left.pop(0) if left else 'Nothing.'}\n```"

    return chat_server(answer)


async def workflow(task, system_prompt):
    return WorkflowOutput(response=str(task["number"] + system_prompt.count("one")))


async def judge(task, response):
    right = str(task["number"] + 1)
    said = "right" if response == right else f"it is {right}"
    return JudgeOutput(
        reward=float(response == right), feedback=f"The answer is {response}: {said}."
    )


def settings(server, **options):
    remote = RemoteModel(base_url=server.base_url, model_name="big")
    return PromptTuneConfig(reflection_model=remote, **{"max_rollouts": 60, **options})


def test_the_best_prompt_is_found_by_what_the_judge_says(tmp_path):
    with proposer() as server:
        prompt, metrics = tune_prompt(
            workflow,
            judge,
            ROWS,
            ROWS[:5],
            "Answer.",
            settings(server),
            overrides=[f"checkpoint_root_dir={tmp_path}"],
        )
    assert prompt == "Add one."
    assert (metrics["eval_before"], metrics["eval_after"]) == (0.0, 1.0)
    asked = server.requests[0]["messages"][0]["content"]
    assert "Answer." in asked
    assert "it is" in asked
