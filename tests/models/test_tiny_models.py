"""The tiny models beside `tiny_math`: they begin where there is something for RL to find."""

import re
from pathlib import Path

import pytest
import torch

from examples.gsm8k import make_data
from examples.vision import cards
from models.build import build, corpus_of, load
from models.tiny_prompt import corpus as prompt
from models.tiny_retry import corpus as retry
from models.tiny_search import corpus as search
from models.tiny_vision import corpus as vision

pytestmark = pytest.mark.long

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.parametrize("name", ["tiny_prompt", "tiny_retry", "tiny_search", "tiny_vision"])
def test_a_short_build_makes_the_shipped_files(name, tmp_path):
    losses = build(corpus_of(name), tmp_path, updates=2)
    assert len(losses) == 2
    files = {file.name for file in tmp_path.iterdir()}
    for file in files - {"model.safetensors"}:
        assert (tmp_path / file).read_bytes() == (MODELS / name / file).read_bytes(), file
    assert (MODELS / name / "model.safetensors").stat().st_size <= 4_000_000


def test_what_a_row_learns_is_what_the_agent_writes():
    """All else is the prompt or what a search found, and each search finds what it looks for."""
    rows = search.Rows().rows(64, search.ALWAYS)
    for row in rows:
        assert [learned for _, learned in row] == [bool(i % 2) for i in range(len(row))]
        for (written, _), (found, _) in zip(row[1::2], row[2::2], strict=False):
            assert f'<p title="{written.split("<search> ")[1].split(" <")[0]}">' in found
    assert {len(row) for row in rows} == {4, 6}


def test_no_supervised_question_of_a_second_answer_is_in_a_shipped_split():
    tokenizer, _ = load(MODELS / "tiny_retry")
    shipped = {p.question for split in make_data.make_splits().values() for p in split}
    rows = retry.Retries(tokenizer).rows(500, lambda problem: 0.5)
    asked = [re.search(r"user\n(.*?)<\|im_end\|>", row[0][0], re.DOTALL)[1] for row in rows]
    assert not shipped & set(asked)


def test_neither_a_held_out_question_nor_a_held_out_wording_is_among_the_supervised_prompts():
    tokenizer, _ = load(MODELS / "tiny_prompt")
    shipped = {p.question for split in make_data.make_splits().values() for p in split}
    texts = [row[0][0] for row in prompt.Answers(tokenizer).rows(2000)]
    asked = {re.search(r"user\n(.*?)<\|im_end\|>", text, re.DOTALL)[1] for text in texts}
    assert not shipped & asked
    for wording in prompt.HELD_OUT_ASKING + prompt.HELD_OUT_OTHERS:
        assert not [text for text in texts if wording in text]


@pytest.mark.parametrize(
    ("systems", "low", "high"),
    [
        ([None, *prompt.OTHERS[:2], *prompt.HELD_OUT_OTHERS[:2]], 0.0, 0.15),
        ([prompt.ASKING[0], *prompt.HELD_OUT_ASKING[-3:]], 0.93, 1.0),
    ],
    ids=["others", "asking"],
)
def test_the_prompt_model_is_right_if_its_system_prompt_asks_for_work(systems, low, high):
    tokenizer, model = load(MODELS / "tiny_prompt")
    problems = make_data.make_splits()["test"][:40]
    found = [prompt.accuracy(model, tokenizer, problems, system) for system in systems]
    assert low <= sum(found) / len(found) <= high, found


def test_the_search_model_can_look_up_and_often_guesses():
    tokenizer, model = load(MODELS / "tiny_search")
    torch.manual_seed(0)
    assert 0.1 <= search.accuracy(model, tokenizer) <= 0.6
    assert search.accuracy(model, tokenizer, first=" I think I know it.") <= 0.2


def test_no_supervised_image_is_in_a_shipped_split():
    shipped = {cards.Card.drawn(seed) for seeds in cards.SPLITS.values() for seed in seeds}
    rows = vision.Rows(tokenizer=None)
    assert not any(next(rows.cards) in shipped for _ in range(100_000))


def test_the_vision_model_reads_what_it_zooms_into_and_rarely_zooms():
    tokenizer, model = vision.load(MODELS / "tiny_vision")
    assert model.num_parameters() <= 2_000_000
    found = vision.accuracy(model, tokenizer)
    assert min(found["color"], found["part"], found["number"]) >= 0.9, found
    assert found["zooms"] <= 0.2, found
