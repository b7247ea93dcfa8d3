"""Text that an encoding lacks, and text files of other systems, at every door of the package."""

import codecs
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from rich.console import Console

from tests.kit.builders import call, trace
from tests.kit.examples import few
from tests.kit.toy import tokenizer
from tuner import cli
from tuner.config import load_config
from tuner.config.source import read_yaml
from tuner.encoding import NotText, decoded, displayable, json_text, model_json
from tuner.errors import ConfigError, DatasetError
from tuner.runs.console import ConsoleMonitor
from tuner.runs.directory import write_atomically
from tuner.runs.history import found_in
from tuner.runs.stack import chat_renderer
from tuner.runs.trackers import open_trackers
from tuner.tasks import datasets
from tuner.tools.judge_check import read_labelled
from tuner.traces import Outcome
from tuner.traces.reading import JsonReader, Text
from tuner.traces.store import TRACES, trace_line, trace_to_json

ENCODINGS = ("utf-8", "ascii", "cp1251", "latin-1", "gbk")
# All code points, halves of pairs often; JSON cannot tell a high and a low half from the character.
HALVES = st.text(st.characters(exclude_categories=()) | st.sampled_from("\ud83d\udc00")).filter(
    lambda text: json.loads(json.dumps(text)) == text
)
VALUES = st.recursive(
    HALVES | st.none() | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HALVES, inner, max_size=3),
    max_leaves=8,
)


class Model(BaseModel):
    text: str
    any: Any
    texts: dict[str, Text]


@settings(max_examples=few(400), deadline=None)
@given(HALVES, st.sampled_from(ENCODINGS))
def test_a_displayed_text_is_the_same_but_for_what_the_encoding_lacks(text, encoding):
    shown = displayable(text, encoding)
    assert len(shown) == len(text)
    shown.encode(encoding)
    for one, given_ in zip(shown, text, strict=True):
        if one != given_:
            assert one == displayable("\ufffd", encoding)
            with pytest.raises(UnicodeEncodeError):
                given_.encode(encoding)


@settings(max_examples=few(400), deadline=None)
@given(VALUES)
def test_json_for_others_has_no_half_of_a_pair_and_ours_reads_back_equal(value):
    text = json_text(value)
    assert json.loads(text) == displayable(value)
    json.dumps(json.loads(text), ensure_ascii=False).encode()
    model = Model(text=json.dumps(value, ensure_ascii=False), any=value, texts={})
    for indent in (None, 2):
        written = model_json(model, indent).encode()
        assert JsonReader[Model](Model, "a model").parse(written) == model


@settings(max_examples=few(200), deadline=None)
@given(VALUES, HALVES)
def test_a_trace_of_any_text_reads_back_equal(value, text):
    said = {"role": "assistant", "content": text, "more": value}
    one = replace(call("c", [1], [2], [-1.0]), messages=[said], response=said)
    fields = {"response": text, "error": text, "feedback": text, "metrics": {text: 1.0}}
    whole = replace(trace(0, 0, [one], **fields), task={text: value})
    assert TRACES.parse(trace_line(trace_to_json(whole))) == whole


TEXT = "a\ud83d b \udc00 \u0416 \u4e2d \U0001f600 \u2501"


def stream_of(encoding: str, errors: str = "strict") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding, errors)


def content(stream: Any) -> str:
    stream.flush()
    return str(stream.buffer.getvalue().decode(stream.encoding))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_console_of_any_encoding_shows_every_line_of_a_run(encoding, terminal, errors):
    stream = stream_of(encoding, errors)
    console = Console(file=stream, force_terminal=terminal, width=300, soft_wrap=True)
    shown = replace(trace(0, 0, [], response=TEXT, error=TEXT), task={"question": TEXT})
    said = replace(call("c", [1], [2], [-1.0]), response={"role": "assistant", "content": TEXT})
    with ConsoleMonitor(2, console) as monitor:
        monitor.begin("step 1", 1, step=1)
        monitor.rollout_done(replace(shown, outcome=Outcome.JUDGE_ERROR))
        monitor.samples([replace(shown, reward=1.0, calls=(said,))], 1)
        monitor.say(TEXT)
    assert content(stream).count(displayable(TEXT, encoding)) == 4


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_command_line_writes_to_output_of_any_encoding(encoding, monkeypatch):
    streams = stream_of(encoding), stream_of(encoding, "backslashreplace")
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(sys, "argv", ["tuner", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    print(TEXT)
    print(TEXT, file=sys.stderr)
    assert content(streams[0]).endswith(f"{displayable(TEXT, encoding)}\n")


def test_pages_and_tensorboard_take_any_text(tmp_path):
    write_atomically(tmp_path / "page.html", TEXT)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == displayable(TEXT)
    (tracker,) = open_trackers(
        ["tensorboard"], project="p", folder=tmp_path, first_step=0, config={}, args={}
    )
    said = replace(call("c", [1], [2], [-1.0]), response={"role": "assistant", "content": TEXT})
    shown = replace(trace(0, 0, [said], response=TEXT), task={TEXT: TEXT})
    tracker.log({f"rollout/{TEXT}/reward": 1.0}, 1)
    tracker.show(1, "train", [shown])
    tracker.end(True)


def test_a_setting_that_utf8_cannot_hold_is_named(tmp_path):
    for setting in ("project", "model.model_path", "model.custom_chat_template"):
        section, _, key = setting.rpartition(".")
        given_ = {section: {key: "a\ud83d"}} if section else {key: "a\ud83d"}
        with pytest.raises(ConfigError, match=rf"{setting} is .*can be encoded in UTF-8"):
            load_config(settings=given_)


# Text files that people write. Each reader gets a path and a text, and returns what it read.

ROW = {"question": "Ж 中?", "answer": "é"}
LINE = f"{json.dumps(ROW, ensure_ascii=False)}\n"
LOG = {"messages": [{"role": "user", "content": "Ж"}, {"role": "assistant", "content": "é"}]}
TEMPLATE = "{% for m in messages %}{{ m.content }}é\n{% endfor %}"


def template_of(path: Path) -> str:
    config = load_config(settings={"model": {"chat_template_path": str(path)}})
    return chat_renderer(config, tokenizer()).render_text([{"role": "user", "content": "a"}], [])


def prompt_of(path: Path) -> Any:
    given_: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "run", lambda config, overrides: given_.extend(overrides))
        cli.distill_prompt(path.parent / "config.yaml", str(path))
    return yaml.safe_load(given_[1].partition("=")[2])


def large(path: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "IN_MEMORY", 0)
        return list(datasets.read_rows(str(path), None, None))


def rows(path: Path) -> Any:
    return list(datasets.read_rows(str(path), None, None))


LABELLED = '{"task": {"a": "Ж"}, "response": "é", "reward": 1}\n'
READERS: dict[str, tuple[str, str, Any]] = {
    "lines": ("d.jsonl", 2 * LINE, rows),
    "many lines": ("d.jsonl", 2 * LINE, large),
    "list": ("d.json", json.dumps([ROW, ROW], ensure_ascii=False, indent=1), rows),
    "table": ("d.csv", "question,answer\nЖ 中,é\n", rows),
    "labelled answers": ("labels.jsonl", LABELLED, read_labelled),
    "configuration": ("c.yaml", "project: é\n", lambda path: read_yaml(path).tree),
    "chat template": ("t.jinja", TEMPLATE, template_of),
    "prompt": ("p.txt", "Be brief, Ж é.\nAlways.\n", prompt_of),
    "history": (
        "h.jsonl",
        f"{json.dumps(LOG, ensure_ascii=False)}\n",
        lambda path: [one.row for one in found_in(path)],
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_text_file_may_begin_with_a_mark_and_end_its_lines_as_windows_does(reader, tmp_path):
    name, text, read = READERS[reader]
    path = tmp_path / name
    path.write_bytes(text.encode())
    plain = read(path)
    assert plain
    for data in (
        codecs.BOM_UTF8 + text.encode(),
        text.replace("\n", "\r\n").encode(),
        codecs.BOM_UTF8 + text.replace("\n", "\r\n").encode(),
    ):
        path.write_bytes(data)
        assert read(path) == plain, data


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "cp1251", "gb18030"])
@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_another_encoding_is_refused_with_its_name_and_line(reader, encoding, tmp_path):
    name, text, read = READERS[reader]
    words = "你好世界问题答案" if encoding == "gb18030" else "Сколько будет два плюс два"
    path = tmp_path / name
    text = text.replace("Ж", words).replace("é", words).replace("中", "")
    path.write_bytes(text.encode(encoding))
    with pytest.raises((ConfigError, DatasetError), match=re.escape(str(path))) as caught:
        read(path)
    looks = "UTF-(16|32)" if encoding.startswith("utf") else r"\w+"
    assert re.search(
        rf"line [123] has the byte .*it looks like {looks}[ )].*: save it as UTF-8",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1251", "Сколько будет два плюс два?"),
        ("gb18030", "你好世界。问题与答案都在这里。"),
        ("cp932", "これはテストです。日本語の文章を書きます。"),
        ("UTF-16", "2 + 2?"),
        ("UTF-32", "2 + 2?"),
    ],
)
def test_the_encoding_of_a_file_is_guessed(encoding, text):
    with pytest.raises(NotText, match=rf"it looks like {encoding}\)"):
        decoded(3 * f"{text}\n".encode(encoding))


@settings(max_examples=few(200), deadline=None)
@given(st.binary())
def test_bytes_are_text_in_utf8_or_refused_by_line(data):
    try:
        text = decoded(data)
    except NotText as error:
        text, said = None, str(error)
    if text is None:
        assert re.match(r"line \d+ has the byte 0x[0-9a-f]{2}, .*: save it as UTF-8$", said)
    else:
        assert text.encode() == data.removeprefix(codecs.BOM_UTF8)
