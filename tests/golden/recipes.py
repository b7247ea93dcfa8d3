"""Small deterministic runs of everything that the local backend trains, in public names alone.

A recipe fills a folder; what it returns is compared besides, as it is.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.kit.toy import ADD_TOOL, TEMPLATE, tokenizer
from tuner import JudgeOutput, TuneResult, WorkflowOutput, tune

REPOSITORY = Path(__file__).parents[2]
TRAIN = [{"question": f"train {i}", "input_ids": [40 + i, 41]} for i in range(7)]
EVAL = [{"question": f"eval {i}", "input_ids": [60 + i]} for i in range(2)]
CONVERSATIONS = [
    {"messages": [
        {"role": "user", "content": f"What is {i}?"},
        {"role": "assistant", "content": f"It is {i}.", "weight": i % 2},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "reasoning_content": "hm", "content": f"Yes, {i}."},
    ]}
    for i in range(7)
]  # fmt: skip
PAIRS = [{"prompt": f"What is {i}?", "chosen": f"{i}.", "rejected": "no" * i} for i in range(1, 8)]

RECIPES: dict[str, Callable[[Path], Any]] = {}


def recipe(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Enter a recipe under its name."""
    RECIPES[function.__name__] = function
    return function


def make_model(folder: Path, *, seed: int = 0) -> Path:
    """A Hugging Face folder: 60k random parameters, ChatML, one token per byte."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if (folder / "config.json").exists():
        return folder
    spoken = tokenizer()
    spoken.chat_template = TEMPLATE
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(spoken),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=spoken.eos_token_id,
        pad_token_id=spoken.pad_token_id,
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    spoken.save_pretrained(folder)
    return folder


async def ask(model: Any, text: str, **fields: Any) -> str:
    messages = [{"role": "user", "content": text}]
    completion = await model.client.chat.completions.create(
        model=model.model_name, messages=messages, **fields
    )
    return completion.choices[0].message.content or ""


async def workflow(task: Any, model: Any) -> WorkflowOutput:
    text = await ask(model, task["question"])
    if random.random() < 0.3:  # some rollouts make a second call
        text += await ask(model, text)
    return WorkflowOutput(response=text, metrics={"length": len(text)})


async def judge(task: Any, response: Any) -> JudgeOutput:
    return JudgeOutput(reward=sum(map(ord, response)) % 17 / 17)


def run(
    folder: Path,
    *overrides: str,
    workflow: Any = workflow,
    judge: Any = judge,
    rows: Any = TRAIN,
    evaluate: bool = False,
) -> TuneResult:
    """One run in `folder`; what `overrides` do not say is small."""
    base = [
        f"checkpoint_root_dir={folder}",
        "project=p",
        "name=run",
        f"model.model_path={make_model(folder / 'model')}",
        "model.max_response_tokens=6",
        "algorithm.optimizer.lr=0.01",
        "buffer.batch_size=2",
        "buffer.total_steps=2",
        "explorer.max_retry_times=0",
        "monitor.monitor_type=[]",
        "tuner.deterministic=true",
    ]
    if evaluate:
        base += ["explorer.eval_interval=2"]
    return tune(
        workflow,
        judge,
        rows,
        eval_dataset={"held-out": EVAL} if evaluate else None,
        overrides=[*base, *overrides],
    )


def run_rollouts(folder: Path, *overrides: str, **parts: Any) -> TuneResult:
    base = (
        "algorithm.repeat_times=3",
        "buffer.explorer_input.taskset.data_selector.selector_type=shuffle",
    )
    return run(folder, *base, *overrides, **parts)


def killed_and_resumed(start: Callable[..., Any], calls: int, *, ends: str) -> None:
    """Start a run whose workflow kills its process when it is called for the n-th time; go on.

    Args:
        start: Takes a workflow.
        calls: n.
        ends: The last checkpoint, which must not be there yet when the process dies.
    """
    left = [calls]

    @functools.wraps(workflow)
    async def killing(task: Any, model: Any) -> WorkflowOutput:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return await workflow(task, model)

    child = os.fork()
    if child == 0:
        try:
            start(killing)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise RuntimeError("the run that was to be killed ended by itself")
    result = start(workflow)
    if result.checkpoint is None or result.checkpoint.name != ends:
        raise RuntimeError(f"the last checkpoint is {result.checkpoint}, not {ends}")


SAVED = ("buffer.total_steps=4", "trainer.save_interval=2")
PPO = (
    "algorithm.algorithm_type=ppo",
    "algorithm.repeat_times=1",
    "algorithm.advantage_fn_args.lam=0.9",
    "tuner.critic.lr=0.01",
    "trainer.critic_warmup=1",
)
LORA = ("model.lora_configs=[{lora_rank: 4}]",)
SFT = (
    "algorithm.algorithm_type=sft",
    "model.max_model_len=200",
    "buffer.trainer_input.experience_buffer.data_selector.selector_type=shuffle",
    "buffer.trainer_input.experience_buffer.format.messages_key=messages",
)
DPO = (
    "algorithm.algorithm_type=dpo",
    "model.max_model_len=200",
    "buffer.trainer_input.experience_buffer.format.prompt_type=plaintext",
)


@recipe
def grpo(folder: Path) -> None:
    run_rollouts(folder, *SAVED, "monitor.monitor_type=tensorboard", evaluate=True)


@recipe
def grpo_resumed(folder: Path) -> None:
    # Evaluations before and after two steps of six rollouts make 16 calls of the workflow.
    def start(workflow: Any) -> TuneResult:
        return run_rollouts(folder, *SAVED, evaluate=True, workflow=workflow)

    killed_and_resumed(start, 19, ends="step_000004")


@recipe
def ppo(folder: Path) -> None:
    run_rollouts(folder, *PPO, "buffer.total_steps=3")


@recipe
def ppo_resumed(folder: Path) -> None:
    def start(workflow: Any) -> TuneResult:
        return run_rollouts(folder, *PPO, *SAVED, workflow=workflow)

    killed_and_resumed(start, 6, ends="step_000004")


@recipe
def lora(folder: Path) -> None:
    run_rollouts(folder, *LORA)


@recipe
def lora_resumed(folder: Path) -> None:
    def start(workflow: Any) -> TuneResult:
        return run_rollouts(folder, *LORA, *SAVED, workflow=workflow)

    killed_and_resumed(start, 15, ends="step_000004")


@recipe
def sft(folder: Path) -> None:
    run(folder, *SFT, "buffer.total_steps=4", workflow=None, judge=None, rows=CONVERSATIONS)


@recipe
def sft_resumed(folder: Path) -> None:
    # Killed in the evaluation after step 3, which no checkpoint has.
    def start(workflow: Any) -> TuneResult:
        settings = (*SFT, *SAVED, "explorer.eval_interval=3")
        return run(folder, *settings, workflow=workflow, rows=CONVERSATIONS, evaluate=True)

    killed_and_resumed(start, 4, ends="step_000004")


@recipe
def dpo(folder: Path) -> None:
    run(folder, *DPO, workflow=None, judge=None, rows=PAIRS)


@recipe
def roles(folder: Path) -> None:
    """Two agents; one has rewards of its own, and some of what it says is not trained."""

    async def two_agents(task: Any, model: Any) -> WorkflowOutput:
        planner, solver = model.role("planner"), model.role("solver")
        plan = await ask(planner, task["question"])
        planner.calls[-1].reward = len(plan) / 10
        answers = [await ask(solver, f"{plan} {part}", tools=[ADD_TOOL]) for part in "ab"]
        if len(solver.calls[0].call.completion_ids) > 3:
            solver.calls[0].mask(1, 3)
        if len(answers[1]) % 2:
            solver.calls[1].exclude()
        return WorkflowOutput(response="".join(answers), metrics={"plan": len(plan)})

    run_rollouts(folder, workflow=two_agents)


@recipe
def turn_discount(folder: Path) -> None:
    async def turns(task: Any, model: Any) -> WorkflowOutput:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        for _ in range(3):
            answer = await model.client.chat.completions.create(
                model=model.model_name, messages=messages
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "And?"}]
        model.calls[0].reward = 0.5
        return WorkflowOutput(response=answer.choices[0].message.content or "")

    run_rollouts(folder, "tuner.algorithm.turn_discount=0.9", workflow=turns)


@recipe
def branching(folder: Path) -> None:
    """Rollouts that begin inside others, and inside their answers."""

    async def turns(task: Any, model: Any) -> WorkflowOutput:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        for _ in range(random.randint(2, 4)):
            answer = await model.client.chat.completions.create(
                model=model.model_name, messages=messages
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "And?"}]
        return WorkflowOutput(response=answer.choices[0].message.content or "")

    run_rollouts(
        folder,
        "algorithm.algorithm_type=tree",
        "algorithm.repeat_times=6",
        "tuner.branching.trunks=3",
        "tuner.branching.ends=2",
        "tuner.branching.inside=true",
        "tuner.branching.rounds=2",
        workflow=turns,
    )


@recipe
def branching_best(folder: Path) -> None:
    """Rollouts that begin inside others where earlier steps have shown that it pays."""
    run_rollouts(
        folder,
        "algorithm.algorithm_type=tree",
        "algorithm.repeat_times=6",
        "buffer.total_steps=6",
        "tuner.branching.where=best",
        workflow=repeatable,
    )


@recipe
def branching_uncertain(folder: Path) -> None:
    """Rollouts that begin inside others at calls before which the model was unsure."""
    run_rollouts(
        folder,
        "algorithm.algorithm_type=tree",
        "algorithm.repeat_times=6",
        "tuner.branching.where=uncertain",
        "tuner.branching.trunks=2",
        "tuner.branching.ends=3",
        "tuner.branching.on_divergence=sample",
        workflow=repeatable,
    )


async def repeatable(task: Any, model: Any) -> WorkflowOutput:
    """Two to four turns, as the first answer has it."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    texts: list[str] = []
    while not texts or len(texts) < 2 + len(texts[0]) % 3:
        answer = await model.client.chat.completions.create(
            model=model.model_name, messages=messages
        )
        texts.append(answer.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": texts[-1]}]
        messages += [{"role": "user", "content": "More."}]
    return WorkflowOutput(response=texts[-1])


def run_ahead(folder: Path, *overrides: str, stalest: Sequence[int] = (0, 1, 1, 1)) -> None:
    """Four steps whose rollouts are collected while the step before is trained, in one order.

    Which weights sample a token depends on timing, so `tuner.deterministic` refuses
    `sync_offset`. Here one rollout runs at a time, and rollouts and updates wait for each other, by
    means that users have: the workflow, a hook of torch's optimizers and the metrics on disk.

        weights   0 ────────────────────── 1 ───────────────────── 2 ────
        rollouts  step 1 │ step 2: 1 ... 5, 6a, 6b │ step 3: 1 ... 5, 6a, 6b
        training         │ update 1, held until 6a │ update 2, held until 6a

    An update is held until the last rollout of the next step has made the first of its two calls.
    That rollout waits until the update is published and makes its second call with new weights, so
    it has tokens of two versions; all other tokens are one update older than the weights that they
    train. `stalest` is the age of the oldest token that each step trains.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    steps, each = 4, 6
    asked = {step: threading.Event() for step in range(1, steps + 1)}
    rollouts, updates = itertools.count(), itertools.count(1)
    metrics = folder / "p" / "run" / "metrics.jsonl"

    async def two_calls(task: Any, model: Any) -> WorkflowOutput:
        step, place = divmod(next(rollouts), each)  # from 0: updates that the next step waits for
        text = await ask(model, task["question"])
        if place == each - 1:
            asked[step + 1].set()
            while step and logged_steps(metrics) < step:  # noqa: ASYNC110  # a file
                await asyncio.sleep(0.001)
        return WorkflowOutput(response=text + await ask(model, text))

    def held(*_: Any) -> None:
        following = next(updates) + 1
        if following in asked and not asked[following].wait(60):
            raise RuntimeError(f"the rollouts of step {following} did not come within 60 s")

    hook = register_optimizer_step_pre_hook(held)
    try:
        run_rollouts(
            folder,
            "tuner.deterministic=false",
            "tuner.layout=tree",  # `auto` depends on timing
            "synchronizer.sync_offset=1",
            "explorer.runner_per_model=1",
            f"buffer.total_steps={steps}",
            *overrides,
            workflow=two_calls,
        )
    finally:
        hook.remove()
    rows = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    if [row["staleness/max"] for row in rows] != list(stalest):
        raise RuntimeError(f"the oldest tokens should be {stalest} updates old: {rows}")


def logged_steps(path: Path) -> int:
    """How many steps a file of metrics has."""
    return path.read_text("utf-8").count("\n") if path.exists() else 0


@recipe
def ahead(folder: Path) -> None:
    run_ahead(folder)


@recipe
def ahead_stale(folder: Path) -> None:
    """Tokens older than the weights are dropped: from step 2 on one answer a step is trained."""
    strategy = "algorithm.sample_strategy=staleness_control"
    limit = "algorithm.sample_strategy_args.max_staleness=0"
    run_ahead(folder, strategy, limit, stalest=(0, 0, 0, 0))


@recipe
def ahead_lora(folder: Path) -> None:
    run_ahead(folder, *LORA)


@recipe
def history(folder: Path) -> None:
    """Policy gradients on the rollouts of an earlier run; some tasks are held out."""
    learn(folder, "algorithm.algorithm_type=multi_step_grpo", "tuner.history.held_out=0.3", ANY)


@recipe
def history_filtered(folder: Path) -> None:
    """Filters of recorded rollouts, and an evaluation before and after."""
    learn(
        folder,
        "algorithm.algorithm_type=rloo",
        "tuner.history.min_reward=0.05",
        "tuner.history.max_reward=0.95",
        "tuner.history.min_step=2",
        "tuner.history.max_version=3",
        "tuner.history.outcomes=[completed]",
        ANY,
        workflow=workflow,
        evaluate=True,
    )


@recipe
def history_sft(folder: Path) -> None:
    learn(folder, "algorithm.algorithm_type=sft", "tuner.history.best=2")


@recipe
def history_dpo(folder: Path) -> None:
    learn(folder, "algorithm.algorithm_type=dpo", "tuner.history.pairs=all")


@recipe
def history_logs(folder: Path) -> None:
    """Logs of chats, without tokens."""
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(_unweighted(row)) + "\n" for row in CONVERSATIONS))
    settings = ("algorithm.algorithm_type=sft", "model.max_model_len=200")
    run(folder, *settings, f"tuner.history.sources=[{log}]", workflow=None, judge=None, rows=None)


ANY = "tuner.history.min_effective_samples=0"


def learn(folder: Path, *overrides: str, workflow: Any = None, evaluate: bool = False) -> None:
    """Two runs: one makes rollouts, the other learns from them."""
    recorded = run_rollouts(folder, "name=recorded", "buffer.total_steps=4")
    run(
        folder,
        f"tuner.history.sources=[{recorded.run_dir}]",
        "model.max_model_len=200",
        *overrides,
        workflow=workflow,
        judge=judge if evaluate else None,
        rows=None,
        evaluate=evaluate,
    )


def _unweighted(row: Any) -> Any:
    return {"messages": [{k: m[k] for k in m if k != "weight"} for m in row["messages"]]}


@recipe
def on_policy_distill(folder: Path) -> None:
    teacher = make_model(folder / "teacher", seed=1)
    run_rollouts(
        folder,
        "algorithm.algorithm_type=on_policy_distill",
        "algorithm.repeat_times=1",
        f"explorer.auxiliary_models=[{{name: teacher, model_path: {teacher}}}]",
        judge=None,
    )


@recipe
def dialects(folder: Path) -> None:
    """Every dialect, streams and forms in one rollout, and an auxiliary model."""
    helper = make_model(folder / "helper", seed=2)

    async def talk(task: Any, model: Any, auxiliary_models: Any) -> WorkflowOutput:
        client, name, question = model.client, model.model_name, task["question"]
        texts = [await ask(auxiliary_models["helper"], question)]
        chat = [{"role": "user", "content": question}]
        stream = await client.chat.completions.create(model=name, messages=chat, stream=True)
        async for chunk in stream:
            texts += [choice.delta.content or "" for choice in chunk.choices]
        forced = await client.chat.completions.create(
            model=name, messages=chat, n=2, tools=[ADD_TOOL], tool_choice="required", max_tokens=40
        )
        texts += [str(choice.message.tool_calls) for choice in forced.choices]
        texts.append((await client.completions.create(model=name, prompt=question)).choices[0].text)
        first = await client.responses.create(model=name, input=question, instructions="Be short.")
        second = await client.responses.create(
            model=name, input="And?", previous_response_id=first.id
        )
        texts.append(second.output_text)
        message = await model.anthropic_client.messages.create(
            model=name, max_tokens=5, system="Be short.", messages=chat
        )
        texts += [block.text for block in message.content if block.type == "text"]
        return WorkflowOutput(response="".join(texts))

    run_rollouts(
        folder,
        "model.max_response_tokens=8",
        "buffer.total_steps=1",
        f"explorer.auxiliary_models=[{{name: helper, model_path: {helper}}}]",
        workflow=talk,
    )


@recipe
def failures(folder: Path) -> None:
    """Rollouts and judgements that fail, retries, and a penalty for what failed in the end."""

    async def failing(task: Any, model: Any) -> WorkflowOutput:
        text = await ask(model, task["question"])
        if sum(map(ord, text)) % 3 == 0:
            raise LookupError("no tool")
        return WorkflowOutput(response=text)

    async def unsure(task: Any, response: Any) -> JudgeOutput:
        if len(response) % 4 == 0:
            raise ValueError("cannot say")
        return await judge(task, response)

    run_rollouts(
        folder,
        "explorer.max_retry_times=1",
        "tuner.on_failure={penalize: -1.0}",
        "tuner.max_tokens=9",
        workflow=failing,
        judge=unsure,
    )


@recipe
def tiny_math(folder: Path) -> None:
    """The shipped model, which reasons, with its reasoning kept."""

    async def two_questions(task: Any, model: Any) -> WorkflowOutput:
        messages: list[Any] = []
        for question in ("Tom has 3 apples and buys 4 more. How many apples?", "Are you sure?"):
            messages.append({"role": "user", "content": question})
            answer = await model.client.chat.completions.create(
                model=model.model_name, messages=messages, max_tokens=60
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        return WorkflowOutput(response=messages[-1]["content"] or "")

    run_rollouts(
        folder,
        f"model.model_path={REPOSITORY / 'models' / 'tiny_math'}",
        "model.max_response_tokens=60",
        "algorithm.optimizer.lr=1e-4",
        "tuner.reasoning=keep",
        workflow=two_questions,
    )


@recipe
def settings(folder: Path) -> None:
    """Much that may be set, at once."""
    run_rollouts(
        folder,
        "buffer.total_steps=3",
        "algorithm.repeat_times=4",
        "algorithm.optimizer.lr_scheduler_type=cosine",
        "algorithm.optimizer.lr_warmup_steps=1",
        "algorithm.advantage_fn_args.std_cal_level=batch",
        "algorithm.kl_penalty_fn=k3",
        "algorithm.kl_loss_fn=k1",
        "algorithm.entropy_loss_fn_args.entropy_coef=0.01",
        "algorithm.loss_agg_mode=rollout-mean",
        "model.temperature=0.8",
        "model.top_p=0.9",
        "model.top_k=50",
        "trainer.max_token_len_per_gpu=128",
        "trainer.grad_clip=0.3",
        "tuner.activation_checkpointing=true",
        "tuner.algorithm.updates=2",
        "tuner.algorithm.proximal=recompute",
        "tuner.algorithm.rejection_low=0.1",
        "tuner.algorithm.rejection_high=10",
        "tuner.algorithm.reward_scale=2",
        "tuner.algorithm.reward_bias=-0.1",
        "tuner.algorithm.overlong_buffer=3",
        "tuner.algorithm.success_rate_lb=0.2",
    )


def _other(name: str, *overrides: str) -> None:
    """A recipe of its own for a few settings."""

    def start(folder: Path) -> None:
        run_rollouts(folder, *overrides)

    RECIPES[name] = start


for algorithm in (
    *("grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforceplusplus", "opmd", "asymre"),
    *("topr", "raft"),
):
    # More than one update, so that ratios leave 1 and are clipped.
    _other(
        f"algorithm_{algorithm}",
        f"algorithm.algorithm_type={algorithm}",
        "tuner.algorithm.updates=3",
    )
for aggregation in ("seq-mean-token-sum-norm", "seq-mean-token-sum"):
    _other(f"aggregation_{aggregation}", f"algorithm.loss_agg_mode={aggregation}")
for layout in ("packed", "padded"):
    _other(f"layout_{layout}", f"tuner.layout={layout}", "trainer.max_token_len_per_gpu=100")
_other("bfloat16", "tuner.dtype=bfloat16")
