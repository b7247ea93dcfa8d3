"""What the page is given: escaped, exact, without secrets, with the text of its tokens."""

import base64
import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.kit.builders import call, trace
from tests.kit.models import png
from tests.tools.viewer.stored import read_data, small, store_run
from tuner.engines.images import ALBUM, ImageLimits, ImageSpan
from tuner.errors import TunerError
from tuner.tools.viewer import RunReader, write_report
from tuner.tools.viewer.page import BEGINS_CHARACTER, Vocabulary, page, selection, template, to_json
from tuner.traces import Outcome

TINY = Path(__file__).parents[3] / "models/tiny_math"
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!-- \u2028 %DATA% %NONCE%"


def test_what_a_model_wrote_cannot_become_html(tmp_path):
    said = dataclasses.replace(
        call("c", [1], [2], [-1.0]),
        messages=[{"role": HOSTILE, "content": HOSTILE}],
        response={"role": "assistant", "content": HOSTILE},
    )
    hostile = trace(
        0,
        0,
        [said],
        reward=1.0,
        response=HOSTILE,
        error=HOSTILE,
        outcome=Outcome.TIMEOUT,
        metrics={HOSTILE: 1.0},
    )
    run = store_run(tmp_path, [hostile], metrics=[{"step": 1, HOSTILE: 0.5}])
    html = write_report(run).read_text(encoding="utf-8")
    assert html.count("</script>") == template().count("</script>")
    assert html.count("<script") == template().count("<script")
    assert "onerror=alert" not in html.replace("\\u003cimg src=x onerror=alert", "")
    (body,) = read_data(html)["bodies"].values()
    assert body["trace"]["response"] == HOSTILE


def test_images_are_in_their_place_as_far_as_there_is_room(tmp_path):
    shown = [png(seed=seed) for seed in (1, 2)]
    names = [ALBUM.add(one, ImageLimits()) for one in shown]
    parts = [{"type": "image_url", "image_url": {"url": f"sha256:{name}"}} for name in names]
    vision = dataclasses.replace(
        call("c", [1, 5, 5], [2], [-1.0]),
        messages=[{"role": "user", "content": [{"type": "text", "text": "?"}, *parts]}],
        images=tuple(ImageSpan(place, 1, name) for place, name in enumerate(names, 1)),
    )
    run = store_run(tmp_path, [trace(0, 0, [vision], reward=1.0)])
    urls = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in shown]

    def found(room: int) -> list[str]:
        body = RunReader(run).trace("step_000001.jsonl", 0, room)
        (content,) = [m["content"] for m in body["trace"]["distinct"]["messages"][:1]]
        return [part["image_url"]["url"] for part in content[1:]]

    assert found(1 << 20) == urls
    assert found(len(urls[0])) == [urls[0], parts[1]["image_url"]["url"]]
    assert found(0) == [part["image_url"]["url"] for part in parts]
    html = write_report(run).read_text(encoding="utf-8")
    assert all(html.count(url.partition(",")[2]) == 1 for url in urls)


def test_the_page_writes_text_only_and_asks_nobody_else():
    html = template()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", html)
    without_namespace = html.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(", without_namespace)
    assert "default-src 'none'" in html


def test_each_page_has_a_nonce_of_its_own():
    nonces = [set(re.findall(r"nonce-([\w-]+)'", page({"mode": "live"}))) for _ in range(2)]
    assert all(len(found) == 1 for found in nonces)
    assert nonces[0] != nonces[1]


def test_numbers_that_javascript_would_round_or_refuse_are_text():
    value = {"a": [math.nan, -math.inf, 0.5, True, None], "seed": 2**62 + 1, "small": 2**53 - 1}
    assert json.loads(to_json(value)) == {
        "a": ["nan", "-inf", 0.5, True, None],
        "seed": str(2**62 + 1),
        "small": 2**53 - 1,
    }


def test_a_call_shows_settings_and_fields_that_are_not_their_defaults(tmp_path):
    asked = call("c", [1, 2], [3], [-0.5], temperature=0.5, seed=7, top_logprobs=2)
    asked = dataclasses.replace(
        asked, top_logprobs=(((3, -0.5), (4, -1.0)),), kept=("",), dialect="messages"
    )
    plain = dataclasses.replace(call("d", [9], [3], [-0.5]), id="d")
    run = store_run(tmp_path, [trace(0, 0, [asked, plain])])
    first, second = RunReader(run).trace("step_000001.jsonl", 0)["trace"]["calls"]
    assert first["sampling"] == {"max_tokens": 32, "temperature": 0.5, "seed": 7, "top_logprobs": 2}
    assert second["sampling"] == {"max_tokens": 32}
    assert first["dialect"] == "messages"
    needed = {"id", "prompt_ids", "completion_ids", "logprobs", "versions", "sampling", "messages"}
    needed |= {"finish_reason", "tools", "response", "started", "seconds"}
    assert second.keys() == needed
    assert first.keys() == needed | {"dialect"}


def test_tokens_have_their_text_spaces_and_special_tokens_included(tmp_path):
    run = store_run(tmp_path, [trace(0, 0, [call("c", [504, 505], [220], [-1.0])])], model=TINY)
    body = RunReader(run).trace("step_000001.jsonl", 0)
    assert body["no_text"] is None
    assert body["vocabulary"][504].startswith("<|")
    assert body["vocabulary"][220] == " "


def test_a_token_keeps_the_space_that_its_decoder_drops_at_the_start(tmp_path):
    spoken = Tokenizer(models.WordLevel({"a": 0, "▁a": 1, "▁the": 2, "▁": 3}, unk_token="a"))
    spoken.pre_tokenizer = pre_tokenizers.Metaspace()
    spoken.decoder = decoders.Metaspace()
    spoken.save(str(tmp_path / "tokenizer.json"))
    assert Vocabulary([tmp_path]).texts({0, 2}) == {0: "a", 2: " the"}


def test_a_character_of_several_tokens_is_shown_at_its_last():
    vocabulary = Vocabulary([TINY])
    ids = vocabulary._tokenizer.encode("1€2", add_special_tokens=False).ids
    shown = vocabulary.characters(ids)
    assert len(ids) == 5  # three bytes of the euro sign
    assert shown == {1: BEGINS_CHARACTER, 2: BEGINS_CHARACTER, 3: "€"}


def test_a_run_without_its_tokenizer_shows_ids_and_says_so(tmp_path):
    run = store_run(tmp_path, [small(0, 0, 1.0)], model="/gone/model")
    body = RunReader(run).trace("step_000001.jsonl", 0)
    assert body["vocabulary"] == {}
    assert "/gone/model" in body["no_text"]
    assert "shown as ids" in body["no_text"]


def test_the_checkpoint_s_tokenizer_is_taken_before_the_model_s(tmp_path):
    run = store_run(tmp_path, [small(0, 0, 1.0)], model="/gone/model")
    (run / "checkpoints").mkdir()
    (run / "checkpoints/step_000002").symlink_to(TINY)
    assert RunReader(run).vocabulary().problem is None


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(TunerError, match=r"is not a run: it contains neither metrics\.jsonl"):
        RunReader(tmp_path)


def test_the_report_holds_a_stated_part_of_the_traces(tmp_path):
    run = store_run(tmp_path, [small(t, 0, 1.0, step=s) for s in range(1, 10) for t in range(9)])
    size = (run / "traces/step_000001.jsonl").stat().st_size // 9
    data = read_data(write_report(run, trace_bytes=20 * size).read_text(encoding="utf-8"))
    assert data["total_traces"] == 81
    assert 18 <= len(data["traces"]) <= 20
    assert {row["step"] for row in data["traces"]} >= {1, 9}
    assert data["bodies"].keys() == {f"{row['file']}:{row['offset']}" for row in data["traces"]}
    assert [row["step"] for row in data["traces"]] == sorted(row["step"] for row in data["traces"])


def test_failures_and_both_ends_are_chosen_before_the_rest(tmp_path):
    traces = [small(t, 0, 1.0, step=s) for s in range(1, 6) for t in range(3)]
    traces.append(small(9, 0, None, step=3, outcome=Outcome.TIMEOUT))
    run = store_run(tmp_path, traces)
    reader = RunReader(run)
    reader.traces.refresh()
    chosen = list(selection(reader.traces.rows()))
    assert len(chosen) == len({row.key for row in chosen}) == 16
    assert {row.step for row in chosen[:7]} == {1, 3, 5}
    assert "timeout" in {row.outcome for row in chosen[:3]}
