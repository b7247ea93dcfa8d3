"""The tiny model that ships with the SDK: its problems, its files, its template, what it can do."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.gsm8k import make_data
from models.build import build
from models.tiny_math import corpus

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny_math"
DATA = ROOT / "examples" / "gsm8k" / "data"
SYSTEM = {"role": "system", "content": "You are a helpful math problem solving agent."}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def read(split: str) -> list[dict[str, str]]:
    lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# The problems


def test_generator_reproduces_the_shipped_problems(tmp_path: Path) -> None:
    make_data.write(tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_no_question_occurs_twice() -> None:
    train, test = read("train"), read("test")
    assert len(train) >= 2000
    assert len(test) == 200
    questions = [row["question"] for row in train + test]
    assert len(set(questions)) == len(questions)


def test_every_calculation_in_the_solutions_is_right() -> None:
    for row in read("train") + read("test"):
        solution, answer = row["answer"].split("\n#### ")
        marked = re.findall(r"<<(\d+)([-+*/])(\d+)=(\d+)>>", solution)
        for left, op, right, result in marked:
            a, b, c = int(left), int(right), int(result)
            assert {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": a == b * c}[op], row
        assert marked[-1][3] == answer
        assert 1 <= len(marked) <= 3


def test_problems_load_as_a_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    loaded = datasets.load_dataset(str(DATA), split="train", cache_dir=str(tmp_path))
    assert loaded[0] == read("train")[0]


@pytest.mark.long
def test_supervised_problems_are_in_no_shipped_split(tokenizer: Any) -> None:
    shipped = {row["question"] for row in read("train") + read("test")}
    # In so many problems the generator does come back to shipped ones, so the check can fail.
    free = make_data.problems(corpus.SEED)
    assert any(next(free).question in shipped for _ in range(15_000))
    rows = corpus.Rows(tokenizer)
    assert not any(next(rows.problems).question in shipped for _ in range(15_000))


# The files


@pytest.mark.long
def test_short_build_makes_the_shipped_files(tmp_path: Path) -> None:
    losses = build(corpus.CORPUS, tmp_path, updates=12)
    assert losses[-1] < 0.8 * losses[0]
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        assert (tmp_path / name).read_bytes() == (MODEL / name).read_bytes(), name
    assert tensors(tmp_path) == tensors(MODEL)


def tensors(folder: Path) -> dict[str, tuple[list[int], str]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def test_model_is_small_and_in_float32() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 4_000_000
    assert {dtype for _, dtype in tensors(MODEL).values()} == {"F32"}
    assert "lm_head.weight" not in tensors(MODEL)  # tied
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "auto_map" not in config


@pytest.mark.long
def test_model_starts_between_terse_and_worked(tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    problems = make_data.make_splits()["test"]
    torch.manual_seed(0)
    assert 0.35 <= corpus.accuracy(model, tokenizer, problems) <= 0.60
    worked = corpus.accuracy(model, tokenizer, problems, answer_start="<think>\n")
    assert worked >= 0.85  # what RL can find


def test_a_cut_off_answer_has_no_number() -> None:
    work = "<think>\n1 + 2 = 3\n</think>\n\nThe answer is 3."
    assert corpus.final_number(work + "<|im_end|>") == 3
    assert corpus.final_number(work) is None
    assert corpus.final_number("<think>\n\n</think>\n\nNo idea.<|im_end|>") is None


# The tokenizer


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    for number in ("0", "7", "1234567890", "99 / 3 = 33", "x1y22"):
        pieces = [tokenizer.decode([token]) for token in tokenizer(number)["input_ids"]]
        digits = [piece for piece in pieces if any(c.isdigit() for c in piece)]
        assert digits == [c for c in number if c.isdigit()]


def test_any_text_round_trips(tokenizer: Any) -> None:
    rng = random.Random(0)
    texts = [
        "Zoë  paid 3 € for 日本 🙂\r\n\ttabs \n\n ends with spaces  ",
        '<tool_call>\n{"name": "add", "arguments": {"a": -1.5e3}}\n</tool_call>',
        "e\u0301 is not \u00e9",  # no normalisation
        *("".join(chr(rng.randint(32, 0xD7FF)) for _ in range(50)) for _ in range(50)),
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_markup_is_single_tokens_and_only_the_chat_tokens_are_special(tokenizer: Any) -> None:
    special = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    markup = ["tool_call", "tool_response", "think"]
    names = special + [f"<{slash}{name}>" for name in markup for slash in ("", "/")]
    for name in names:
        assert len(tokenizer(name)["input_ids"]) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    ids = tokenizer("<think>\n</think>hello<|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\n</think>hello"


# The chat template


def render(tokenizer: Any, *messages: dict[str, Any], **options: Any) -> str:
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    assert isinstance(text, str)
    return text


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def test_template_renders_the_agents_prompt(tokenizer: Any) -> None:
    expected = (
        "<|im_start|>system\nYou are a helpful math problem solving agent.<|im_end|>\n"
        "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(tokenizer, SYSTEM, user("1 + 2?"), add_generation_prompt=True) == expected
    parts = [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}
        for message in (SYSTEM, user("1 + 2?"))
    ]
    assert render(tokenizer, *parts, add_generation_prompt=True, tools=[]) == expected


def test_template_without_thinking_opens_with_an_empty_block(tokenizer: Any) -> None:
    thinking = render(tokenizer, user("hi"), add_generation_prompt=True, enable_thinking=True)
    assert thinking.endswith("<|im_start|>assistant\n")
    without = render(tokenizer, user("hi"), add_generation_prompt=True, enable_thinking=False)
    assert without == thinking + "<think>\n\n</think>\n\n"


def test_template_lists_the_tools_as_qwen3_does(tokenizer: Any) -> None:
    text = render(tokenizer, SYSTEM, user("hi"), tools=[TOOL])
    head = (
        f"<|im_start|>system\n{SYSTEM['content']}\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    )
    assert text.startswith(head)
    listed, _, rest = text.removeprefix(head).partition("\n</tools>\n\n")
    assert json.loads(listed) == TOOL
    assert rest == (
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nhi<|im_end|>\n"
    )


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["dict", "string"])
def test_template_renders_tool_calls_and_results(tokenizer: Any, arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    text = render(
        tokenizer,
        user("hi"),
        assistant("", tool_calls=[call, call], reasoning_content="Two calls."),
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": [{"type": "text", "text": "4"}]},
        add_generation_prompt=True,
    )
    one_call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert text == (
        "<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nTwo calls.\n</think>\n\n{one_call}\n{one_call}"
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>"
        "\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_copes_with_a_tool_call_without_content(tokenizer: Any) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = render(tokenizer, user("hi"), message, user("and?"))
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "add"' in text


@pytest.mark.parametrize("inline", [True, False], ids=["in the content", "as a field"])
def test_template_keeps_thinking_only_after_the_last_question(tokenizer: Any, inline: bool) -> None:
    def thought(thinking: str, text: str, **more: Any) -> dict[str, Any]:
        if inline:
            return assistant(f"<think>\n{thinking}\n</think>\n\n{text}", **more)
        return assistant(text, reasoning_content=thinking, **more)

    text = render(
        tokenizer,
        user("first"),
        thought("old", "one"),
        user("second"),
        thought("new", "", tool_calls=[CALL]),
        {"role": "tool", "content": "3"},
        thought("newest", "two"),
    )
    assert "old" not in text
    assert "<|im_start|>assistant\none<|im_end|>" in text
    assert "<think>\nnew\n</think>\n\n<tool_call>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\nnewest\n</think>\n\ntwo<|im_end|>\n")


def test_template_finds_the_last_question_in_a_list_of_parts(tokenizer: Any) -> None:
    question = {"role": "user", "content": [{"type": "text", "text": "second"}]}
    text = render(tokenizer, user("first"), assistant("<think>\nold\n</think>\n\none"), question)
    assert "old" not in text
