import pytest

from tuner.errors import MissingDependencyError
from tuner.rewards import exact_match, f1, final_answer, has_form, math_equal, normalized


def test_case_punctuation_articles_and_spaces_do_not_count():
    assert normalized(" The  old-Bridge, an   answer. ") == "oldbridge answer"
    assert exact_match("the Old bridge.", "old bridge") == 1.0
    assert exact_match("old bridges", "old bridge") == 0.0


@pytest.mark.parametrize(
    ("answer", "truth", "same"),
    [
        ("a.", "A", True),  # of several choices
        ("", "A", False),
        ("the", "A", False),
        ("$1,000", "1000", True),
        ("-5", "5", False),
        ("1.5", "15", False),
        (".5", "5", False),
        ("3/4", "34", False),
        ("It is -5.", "it is -5", True),
        ("covid-19", "covid19", True),
    ],
)
def test_what_tells_answers_apart_counts(answer, truth, same):
    assert exact_match(answer, truth) == same
    assert (f1(answer, truth) == 1) is same


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("old bridge", "old bridge", 1.0),
        ("bridge", "old bridge", 2 / 3),
        ("the old stone bridge", "old bridge", 0.8),
        ("old old old", "old bridge", 0.4),  # a word counts as often as it occurs
        ("tower", "old bridge", 0.0),
        ("", "old bridge", 0.0),
        ("...", "the", 0.0),  # there are no words left of it, and it is no empty answer
    ],
)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(answer, truth, score):
    assert f1(answer, truth) == pytest.approx(score)


def test_a_form_is_that_of_the_whole_text():
    form = r"<think>.*</think>\s*<answer>.*</answer>"
    assert has_form("<think>\na\n</think>\n<answer> b </answer>\n", form) == 1.0
    assert has_form("Well: <think>a</think><answer>b</answer>", form) == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("4 + 5 = <<4+5=9>>9\n#### 9", "9"),
        ("so it is \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("First 3, then 1,200.", "1,200"),
        ("I do not know.", ""),
    ],
)
def test_the_final_answer_of_a_solution(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("1,200", "1200.0", 1.0),
        ("$18", "18", 1.0),
        ("17", "18", 0.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("x + 1", "1 + x", 1.0),
        ("", "18", 0.0),
        ("9**9**9", "2", 0.0),
    ],
)
def test_answers_are_compared_as_numbers_or_expressions(answer, truth, score):
    assert math_equal(answer, truth) == score


def test_without_math_verify_an_expression_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    assert math_equal("18", "18.0") == 1.0
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[math\]"):
        math_equal("x", "y")
