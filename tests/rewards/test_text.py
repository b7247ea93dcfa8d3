import itertools
import string
import sys
import unicodedata
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rewards.tables import rows
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
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert math_equal("18", "18.0") == 1.0
    with pytest.raises(MissingDependencyError, match=r"pip install .*\[math\]"):
        math_equal("x", "y")


@pytest.mark.parametrize("judge", ["exact_judge", "math_judge"])
def test_the_table_of_a_judge_says_what_it_calls_equal(judge):
    equal = {"exact_judge": exact_match, "math_judge": math_equal}[judge]
    pairs = rows(judge)
    assert len(pairs) >= 150
    found = [[*pair, equal(*pair), equal(*reversed(pair))] for *pair, _ in pairs]
    assert found == [[*pair, float(same), float(same)] for *pair, same in pairs]


def test_the_table_of_f1_says_what_it_gives():
    for answer, truth, score in rows("f1_judge"):
        assert [f1(answer, truth), f1(truth, answer)] == pytest.approx([score] * 2), (answer, truth)


@pytest.mark.parametrize("around", ["5{}7", "x{}y", "5 {} 7"])
def test_no_sign_between_numbers_and_letters_is_lost(around):
    signs = ["", *sorted(set(string.punctuation) - set(",;?:.\"'`![](){}"))]
    for one, other in itertools.combinations(signs, 2):
        if "$" not in (one, other) or " " not in around:  # a currency's sign may be left out
            assert not exact_match(around.format(one), around.format(other)), (one, other)


FORMS = [
    "{:f}",
    "{:E}",
    "{:e}",
    "{:,f}",
    "{:f}.",
    "+{:f}",
    "{:f}0",
    "${:,f}",
]


@given(
    st.decimals(min_value=0, max_value=10**9, places=3),
    st.decimals(min_value=0, max_value=10**9, places=3),
    st.sampled_from(FORMS),
    st.sampled_from(FORMS),
)
@settings(max_examples=200, deadline=None)
def test_numbers_are_equal_by_value_however_they_are_written(one, other, form, other_form):
    for left, right in ((one, one), (one, other)):
        texts = form.format(left), other_form.format(right)
        assert math_equal(*texts) == float(left == right), texts
        assert exact_match(*texts) == float(left == right), texts


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_equal_to_its_decimal(number):
    for text in (repr(number), f"{Decimal(repr(number)):f}", f"{number!r}".upper()):
        assert math_equal(text, repr(number)) == 1.0


@given(st.text(string.ascii_letters, min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_letters_of_a_word_are_no_factors(word, random):
    letters = list(word)
    random.shuffle(letters)
    shuffled = "".join(letters)
    assert math_equal(shuffled, word) == float(shuffled.lower() == word.lower())


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_equal_to_itself_in_each_spelling_of_unicode(text):
    full = text.translate({code: code + 0xFEE0 for code in map(ord, string.digits)})
    for same in (text, unicodedata.normalize("NFD", text), full, f" {text}\n"):
        assert exact_match(same, text) == 1.0
        assert f1(same, text) == pytest.approx(1)
