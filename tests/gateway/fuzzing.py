"""Request bodies that somebody got wrong: valid ones of every dialect, and what is done to them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.kit.toy import ADD_TOOL

USER: dict[str, Any] = {"role": "user", "content": "2+40?"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
FUNCTION = {"name": "add", "arguments": '{"a": 2, "b": 40}'}
TURN = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "why",
    "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}],
}
FLAT_TOOL = {"type": "function", **ADD_TOOL["function"], "strict": True}  # type: ignore[dict-item]
CLAUDE_TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {}}}}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", 1, None]}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
STRICT = {"type": "function", "function": {"name": "sub", "parameters": SCHEMA, "strict": True}}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}
# An answer as other services' clients send it back.
ECHOED = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "why"}, {"type": "refusal", "refusal": "no"}],
    "refusal": "never",
    "reasoning_details": [
        {"type": "reasoning.text", "text": "why"},
        {"type": "reasoning.encrypted"},
    ],
    "thinking_blocks": [{"type": "redacted_thinking", "data": "x"}],
    "parsed": {"a": 1},
    "tool_calls": [{"id": "c", "index": 0, "function": {**FUNCTION, "parsed_arguments": {}}}],
}
USED = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 2, "b": [40, None]}}

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": [{"role": "system", "content": "Add."}, USER], "max_tokens": 20},
        {
            "messages": [USER, TURN, {"role": "tool", "tool_call_id": "c", "content": "42"}],
            "tools": [ADD_TOOL],
            "tool_choice": "auto",
            "temperature": 0.5,
        },
        {"messages": [PARTS], "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["no", "\n"]},
        {
            "messages": [{"role": "developer", "content": "Add."}, USER],
            "top_p": 0.9,
            "top_k": 5,
            "seed": 3,
            "chat_template_kwargs": {"enable_thinking": False},
            "return_token_ids": True,
        },
        {"messages": [USER], "response_format": FORMAT},
        {
            "messages": [USER],
            "tools": [ADD_TOOL, STRICT],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        },
        {
            "messages": [USER],
            "tools": [STRICT, ADD_TOOL],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED},
        },
        {"messages": [USER], "user": "u", "metadata": {"a": "b"}, "store": False, "min_p": 0},
        {"messages": [USER, ECHOED, USER], "reasoning_effort": None},
    ],
    "/v1/completions": [
        {"prompt": "2+40=", "max_tokens": 9, "stop": "no"},
        {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "best_of": 2},
        {"prompt": [[1, 2, 3], [4]], "return_token_ids": True, "echo": False, "seed": -1},
        {"prompt": [5, 6, 7], "temperature": 0, "top_p": 1, "suffix": "", "user": "u"},
        {"prompt": "2+40=", "add_special_tokens": True, "bad_words": []},
    ],
    "/v1/responses": [
        {"input": "2+40?", "instructions": "Add.", "max_output_tokens": 20},
        {
            "input": [
                USER,
                {"type": "reasoning", "id": "rs_0", "summary": [], "content": []},
                {"type": "function_call", "call_id": "c", **FUNCTION},
                {"type": "function_call_output", "call_id": "c", "output": "42"},
                {"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]},
            ],
            "tools": [FLAT_TOOL],
            "tool_choice": "auto",
        },
        {
            "input": "hi",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "reasoning": {"effort": None},
            "text": {"format": {"type": "text"}},
        },
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        {"input": "go on", "previous_response_id": "resp_0", "store": True, "metadata": {"a": "b"}},
        {"input": [{"type": "item_reference", "id": "msg_0"}, USER], "temperature": 1, "seed": 3},
        {
            "input": [
                {"type": "reasoning", "encrypted_content": "x"},
                {
                    "role": "assistant",
                    "phase": "commentary",
                    "content": [{"type": "refusal", "refusal": "no"}],
                },
                {"type": "function_call", "call_id": "c", **FUNCTION, "parsed_arguments": {}},
                USER,
            ],
        },
    ],
    "/v1/messages": [
        {"messages": [USER], "max_tokens": 20, "system": "Add.", "stop_sequences": ["no"]},
        {
            "messages": [
                PARTS,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "a"},
                        USED,
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "42"}],
                },
            ],
            "max_tokens": 30,
            "tools": [CLAUDE_TOOL],
            "tool_choice": {"type": "auto"},
        },
        {
            "messages": [USER],
            "max_tokens": 30,
            "system": [{"type": "text", "text": "Add."}],
            "thinking": {"type": "disabled"},
            "top_k": 5,
            "temperature": 1,
            "metadata": {"user_id": "u"},
        },
        {
            "messages": [USER],
            "max_tokens": 30,
            "tools": [CLAUDE_TOOL, {"name": "sub", "input_schema": SCHEMA, "strict": True}],
            "tool_choice": {"type": "tool", "name": "sub", "disable_parallel_tool_use": True},
        },
        {
            "messages": [USER],
            "max_tokens": 30,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ],
}
BODIES["/v1/messages/count_tokens"] = [
    {
        key: value
        for key, value in body.items()
        if key in ("messages", "system", "tools", "tool_choice", "thinking", "output_config")
    }
    for body in BODIES["/v1/messages"]
]

_TAGS = [
    *("system", "developer", "user", "assistant", "tool", "function", "message", "reasoning"),
    *("text", "input_text", "output_text", "image_url", "refusal", "json_schema", "auto", "none"),
    *("function_call", "function_call_output", "item_reference", "tool_use", "tool_result"),
    *("thinking", "required", "any", "tiny"),
]
_TEXTS = [
    *("", " ", "\x00", "\ud800", "\udfff\ud800", "\u2028", "\ufeff", "e\u0301\u200d", "\U0001f600"),
    *("<|im_end|>", "<|im_start|>", "<tool_call>", "</think>", "<think>\n", "{{ x }}", "forbidden"),
    *("a" * 20_000, '"', "\\", "\r\n\r\n", "data: [DONE]\n\n", "\u202eabc"),
]
_ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 3.5, -0.0, 1e308, -1e-320, 2**31, 2**63, -(2**63) - 1, 2**64),
    *(10**400, 10**4200, {}, [], [[]], [None], {"": None}, {"type": None}, [{}], ["a", 1]),
    *(128, 129, float("nan"), float("inf"), "1", "null", "9" * 5000),
]
_DEEP = "\x01deep\x01"  # in the place of JSON that `json.dumps` could not write
_BIG = "\x01big\x01"
_DEPTHS = [2, 30, 100, 200, 300, 400, 500, 700, 900, 950, 990, 2_000, 100_000]


def body_of(path: str, rng: random.Random, known: list[str]) -> bytes:
    """A request body for `path`: valid, or wrong in one place or a few.

    Args:
        path: Whose valid bodies it is made of.
        rng: Decides all.
        known: Ids of earlier answers, which a body may name.
    """
    body = {"model": "tiny", **copy.deepcopy(rng.choice(BODIES[path]))}
    if rng.random() < 0.4:
        body["stream"] = True
    if known and "previous_response_id" in body and rng.random() < 0.8:
        body["previous_response_id"] = rng.choice(known)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        body = rng.choice(_SURGERY)(body, rng)
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    depth = rng.choice(_DEPTHS)
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}")))
    text = text.replace(json.dumps(_DEEP), opening * depth + "1" + closing * depth)
    text = text.replace(json.dumps(_BIG), rng.choice(("1e400", "-1e999", "1" + "0" * 5000)))
    data = text.encode(errors="surrogatepass")
    return rng.choice(_DAMAGE)(data, rng) if rng.random() < 0.1 else data


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys: Any = list(node) if isinstance(node, dict) else range(len(node))
    for key in keys:
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


def _place(body: Any, rng: random.Random) -> tuple[Any, Any]:
    return rng.choice(list(_places(body)) or [({"": None}, "")])


def _drop(body: Any, rng: random.Random) -> Any:
    holder, key = _place(body, rng)
    del holder[key]
    return body


def _repeat(body: Any, rng: random.Random) -> Any:
    """Say an element again, or a field under another name."""
    holder, key = _place(body, rng)
    value = copy.deepcopy(holder[key])
    if isinstance(holder, list):
        holder[key:key] = [value] * rng.choice((1, 1, 3, 70))
    else:
        name = str(key)
        holder[rng.choice((name.upper(), f"{name} ", "zzz", "", *_TEXTS, *_TAGS))] = value
    return body


def _retag(body: Any, rng: random.Random) -> Any:
    tagged = [
        place for place in _places(body) if place[1] in ("type", "role", "name", "tool_choice")
    ]
    if tagged:
        holder, key = rng.choice(tagged)
        holder[key] = rng.choice(_TAGS)
    return body


def _swap(body: Any, rng: random.Random) -> Any:
    """Put a part of the body in the place of another."""
    holder, key = _place(body, rng)
    other, its_key = _place(body, rng)
    holder[key] = copy.deepcopy(other[its_key])
    return body


def _odd(body: Any, rng: random.Random) -> Any:
    holder, key = _place(body, rng)
    value = rng.choice(rng.choice((_ODD, _ODD, _TEXTS, _TAGS, [_DEEP], [_BIG])))
    holder[key] = copy.deepcopy(value)  # later surgery must not change the list of odd values
    return body


def _odd_text(body: Any, rng: random.Random) -> Any:
    texts = [place for place in _places(body) if isinstance(place[0][place[1]], str)]
    if texts:
        holder, key = rng.choice(texts)
        old, new = holder[key], rng.choice(_TEXTS)
        holder[key] = rng.choice((new, old + new, new + old))
    return body


def _add(body: Any, rng: random.Random) -> Any:
    """A field that another body has, or that none has; or the like inside."""
    holder = rng.choice([body, *(h[k] for h, k in _places(body) if isinstance(h[k], dict))])
    other = rng.choice(rng.choice(list(BODIES.values())))
    name = rng.choice([*other, *other, "response_format", "metadata", "id", "annotations", "zzz"])
    value = other.get(name, rng.choice(rng.choice((_ODD, [_DEEP], [_BIG]))))
    holder[name] = copy.deepcopy(value)
    return body


_SURGERY: list[Callable[[Any, random.Random], Any]] = [
    *(_drop, _repeat, _retag, _swap, _odd, _odd, _odd_text, _odd_text, _add, _add)
]


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _noise(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]


def _twice(data: bytes, rng: random.Random) -> bytes:
    return rng.choice((data + data, data[:-1] + b"," + data[1:], b"[" + data + b"]"))


def _encoded(data: bytes, rng: random.Random) -> bytes:
    text = data.decode(errors="replace")
    return text.encode(rng.choice(("utf-16", "utf-8-sig", "utf-32", "utf-7")))


_DAMAGE: list[Callable[[bytes, random.Random], bytes]] = [_cut, _noise, _twice, _encoded]
