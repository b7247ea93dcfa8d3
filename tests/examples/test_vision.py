"""The agent that reads images learns to zoom."""

from pathlib import Path

import pytest

from examples.vision import cards

EXAMPLE = Path(__file__).parents[2] / "examples" / "vision"


def test_the_generator_writes_the_shipped_questions(tmp_path):
    cards.write(tmp_path)
    for split in cards.SPLITS:
        name = f"{split}.jsonl"
        assert (tmp_path / name).read_bytes() == (EXAMPLE / "data" / name).read_bytes()


def test_no_held_out_image_is_trained_on():
    train, test = ({cards.Card.drawn(seed) for seed in seeds} for seeds in cards.SPLITS.values())
    assert len(train) == len(cards.SPLITS["train"])
    assert not train & test


def test_a_part_of_an_image_has_the_card_or_only_the_desk():
    for card in map(cards.Card.drawn, range(20)):
        colors = {
            part: {color for _, color in cards.zoom(card.image(), part).getcolors()}
            for part in cards.PARTS
        }
        assert colors.pop(card.part) == {card.desk, cards.COLORS[card.color], (255, 255, 255)}
        assert list(colors.values()) == [{card.desk}] * 3


@pytest.mark.long
def test_it_raises_the_held_out_reward(main, tmp_path):
    result = main.main(["buffer.total_steps=7", f"checkpoint_root_dir={tmp_path}"])
    assert 0.25 <= result.eval_before["held-out"] <= 0.4
    assert result.eval_after["held-out"] >= 0.9
