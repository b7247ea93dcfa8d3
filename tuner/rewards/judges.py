"""Judges that compare a response with a field of its task, and combinations of judges.

Each is made by a function with its settings, gives a reward between 0 and 1, and explains it:

    judge = weighted({"right": exact_judge(field="answer"), "form": form_judge(r"<answer>.*")})
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal
from fractions import Fraction
from functools import cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tuner.errors import FunctionError, MissingDependencyError, RewardError, pip_install
from tuner.rewards.process import in_process
from tuner.tasks.functions import (
    JudgeOutput,
    JudgeType,
    TaskRow,
    call_judge,
    check_judge_function,
    judges_groups,
    response_text,
    shown,
)

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


# Scores of an answer as text: plain functions of texts, each between 0 and 1.


_QUOTES = str.maketrans("‘’‚‛′´“”„‟«»″。、", "'" * 6 + '"' * 7 + ".,")
_RAISED = re.compile("[⁰¹²³⁴-⁹⁺⁻]+")
# Forms of a code point that mean the same; ² and ½ are others, and have their own spelling.
_SAME = {"<wide>", "<narrow>", "<compat>", "<font>", "<noBreak>", "<square>", "<sub>"}


def _folded(text: str) -> str:
    """The text with one spelling for what Unicode has several of: composed and decomposed letters,
    widths, dashes, quotes, spaces, superscripts (^2) and fractions (1/2)."""
    if text.isascii():
        return text
    said = unicodedata.normalize("NFC", text).translate(_QUOTES)
    said = _RAISED.sub(lambda raised: "^" + unicodedata.normalize("NFKC", raised[0]), said)
    return unicodedata.normalize("NFC", "".join(map(_plain, said))).replace("−", "-")


@cache
def _plain(char: str) -> str:
    if char.isascii():
        return char
    category, form = unicodedata.category(char), unicodedata.decomposition(char).split(" ")[0]
    if form == "<fraction>":
        return " " + unicodedata.normalize("NFKC", char).replace("⁄", "/")
    if form in _SAME:
        return unicodedata.normalize("NFKC", char)
    if category == "Pd":
        return "-"
    if category == "Cf":  # zero-width characters
        return ""
    return " " if category[0] in "PZ" and char not in "‰‱" else char


_LETTER = r"[^\W\d_]"
_GROUPED = re.compile(r"(?<![\w.,])\d{1,3}(?:,\d{3})+(?![\w,]|\.\d+,\d)")
_DECIMAL = re.compile(r"(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d{1,9}))?|\.(\d+)(?:[eE]([+-]?\d{1,9}))?")
_IN_WORD = re.compile(rf"(?<![\w.])(?:{_DECIMAL.pattern})(?![\w]|\.\w)")
_MARKS_ALONE = ".-:;,?!\"'`()[]{}"
# Scripts without spaces between words: each character is compared as one.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
# Replacements around and between words, in order. Between numbers, single letters and signs
# punctuation counts and stays: 5-10, x>y, [0,1), f'(x), C++.
_STEPS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^(?:#+|\*) +", ""),  # a heading, an item of a list
        # Quotes, emphasis and formulas: pairs around something.
        *[(r"(?<!\w)(\*\*|__|[$*_`\"'])(?=[^\s$])(.{1,200}?)(?<=\S)\1(?!\w)", r"\2")] * 2,
        (r"^\(([^()]*)\)(?=[.!?]?$)", r"\1"),
        (r"(?<!\S)\((\w+)\)(?![^\s.,;:?!])", r"\1"),
        (rf"(?<!\S)({_LETTER})\)(?!\S)", r"\1"),
        (r"(?<!\w)\$ ?(?=\.?\d)|(?<![\w)\]])\+(?=\.?\d)", ""),
        # Spaces around operators; commas, and colons but in times and ratios; brackets of prose.
        (r"(?<=[\w)\]%]) *([=<>≤≥≠^*/+]|(?<= )-(?= )) *(?=[\w(\[.-])", r"\1"),
        (r"(?<=\d) +%", "%"),
        (r"[,;]|(?<!\d):|:(?!\d)", " "),
        (rf"[(\[{{](?={_LETTER}{{2}})|(?<={_LETTER}{_LETTER})[)\]}}]", " "),
        (rf"(?<={_LETTER})'(?={_LETTER})", ""),
        (rf"(?<!{_LETTER}{_LETTER})(?<={_LETTER})\.(?={_LETTER}(?!\w))", ""),  # U.S.
    )
)
_HYPHEN = re.compile(rf"(?<=[^\W_])-(?={_LETTER}{{2}})|(?<={_LETTER}{_LETTER})-(?=\w)")
_AROUND = re.compile(
    rf"^(?:\.\.+|[?:\"'`]+)|(?:[.:?`]|(?<={_LETTER}{_LETTER})[!'\"]|(?<=[.?!])[!'\"])+$"
)


def normalized(text: str) -> str:
    """The words of a text as `exact_match` compares them: one case, one spelling of numbers and
    Unicode, no articles and no punctuation around words."""
    return " ".join(_words(text, hyphen=""))


def _words(text: str, *, hyphen: str) -> list[str]:
    """The words, with this in place of a hyphen inside one."""
    folded = _folded(text).casefold().strip()
    said = _GROUPED.sub(lambda number: number[0].replace(",", ""), folded)
    for pattern, new in _STEPS:
        said = pattern.sub(new, said)
    said = _UNSPACED.sub(r" \g<0> ", _HYPHEN.sub(hyphen, said))
    words = [_IN_WORD.sub(_shortest, _AROUND.sub("", word)) for word in said.split()]
    words = [word for word in words if word.strip(_MARKS_ALONE)] or folded.split()
    # An article has a word after it; the answer "A", and "hepatitis A", have none.
    kept = [
        word
        for word, after in zip(words, [*words[1:], ""], strict=False)
        if word != "the" and not (word in ("a", "an") and len(after) > 1)
    ]
    return kept or words


def _shortest(number: re.Match[str]) -> str:
    """7 for 7.0, and 0.00001 for 1e-5; 007 is no number and stays."""
    if re.match(r"0\d", number[0]):
        return number[0]
    value = Decimal(number[0])
    exact = Context(prec=max(len(number[0]), 1), Emax=MAX_EMAX, Emin=MIN_EMIN)
    value = value.normalize(exact)
    return f"{value:f}" if abs(value.adjusted()) < 30 else str(value)


def exact_match(answer: str, truth: str) -> float:
    """1.0 if both are the same words, else 0.0; `exact_judge` says which are."""
    return float(any(_words(answer, hyphen=h) == _words(truth, hyphen=h) for h in ("", " ")))


def f1(answer: str, truth: str) -> float:
    """The harmonic mean of precision and recall of the answer's words, as `f1_judge` says."""
    return max(_f1(_words(answer, hyphen=h), _words(truth, hyphen=h)) for h in ("", " "))


def _f1(said: list[str], wanted: list[str]) -> float:
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(said), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def has_form(text: str, pattern: str) -> float:
    """1.0 if the whole text matches the regular expression (dots match newlines), else 0.0.

    Raises:
        re.error: The pattern is not a regular expression.
    """
    return float(re.fullmatch(pattern, text.strip(), re.DOTALL) is not None)


# The answer inside a solution, and whether two answers are equal.


_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+"
_TENS = r"\s?(?:\*|×|\\times|\\cdot)\s?10\s?\^\s?\{?(-?\d+)\}?"
_ONE = (
    rf"(?:\d+(?:_\d+)+|{_DIGITS})"
    rf"(?:[eE][+-]?\d+(?!\w|\.\d)|{_TENS.replace('(-', '(?:-')}|\^\{{?-?\d+\}}?)?"
)
# A number with what belongs to it: 1 1/2, 50%, 1e-5, 3*10^5, 12:30, 5-10, 1,2, 2023-05-01.
NUMBER = re.compile(
    rf"(?<![\^_])(?<![\^_]\{{)(?:(?<![\w)\]}}])-)?\$?(?:-(?=\.?\d))?(?:\d+\s(?=\d+/\d))?"
    rf"{_ONE}(?:[/:,.-](?:{_ONE}))*(?:\s?\\?%)?"
)
LONGEST_EXPRESSION = 100
LARGEST_POWER = 1000
"""Largest product of the exponents and factorials of an expression; a hundredth with variables."""
FEWEST_ROUNDED = 6
"""Significant digits from which a decimal may be a rounded fraction or root."""
FLOAT_DIGITS = 16
"""Significant digits from which a decimal may have the rounding error of binary numbers."""


def final_answer(text: str) -> str:
    r"""The final answer of a solution: after "####", in \boxed{}, or its last number."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if "\\boxed{" in text:
        return _in_braces(text.rpartition("\\boxed{")[2])
    found = NUMBER.findall(_folded(text))
    return str(found[-1]) if found else ""


def math_equal(answer: str, truth: str) -> float:
    """1.0 if two answers are the same number, expression or text, else 0.0; `math_judge` says which
    are.

    Algebra may take long: `in_process` gives it a time limit.

    Raises:
        MissingDependencyError: Expressions have to be compared, without math-verify.
    """
    said, wanted = _typed(answer), _typed(truth)
    if not said or not wanted:
        return 0.0
    if said.replace(" ", "") == wanted.replace(" ", ""):
        return 1.0
    (said, unit), (wanted, wanted_unit) = _without_unit(said), _without_unit(wanted)
    if unit and wanted_unit and not exact_match(unit, wanted_unit):
        return 0.0
    if _same(said, wanted):
        return 1.0
    # 50% is 0.5 as well.
    if "%" in (unit, wanted_unit) and not (unit and wanted_unit):
        share, other = (said, wanted) if unit else (wanted, said)
        return float(_same(f"{share}e-2" if _number(share) else rf"\frac{{{share}}}{{100}}", other))
    return 0.0


_WRITTEN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\s+", " "),
        (r"^\s*(?:\$\$?|\\[(\[])(.*?)(?:\$\$?|\\[)\]])[\s.]*$", r"\1"),
        (r"\{,\}", ","),
        (r"\\left\b|\\right\b|\\displaystyle\b|\\!|\\\$|(?<![\\\w])\$(?=[-\d.])|\s*\.\s*$", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad\b", " "),
        (r"\\[dt]frac\b", r"\\frac"),
        (r"\\frac\s?(\d)\s?(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"(?<=\d)\s?\\frac", r" \\frac"),
        (r"^\s*\\(?:text(?:bf|rm|it)?|mathrm|mathbf|mbox)\{([^{}]*)\}\s*$", r"\1"),
        (r"\*\*", "^"),
        (r"\\%|(?<=\d)\s+%|(?<=\d) ?per ?cent$", "%"),
        (r"\^\{?\\circ\}?|\\degree\b|°", r"\\text{degrees}"),
        (r"(?<=\d)\s*\bhundred$", "e2"),
        (r"(?<=\d)\s*\bthousand$", "e3"),
        (r"(?<=\d)\s*\bmillion$", "e6"),
        (r"(?<=\d)\s*\bbillion$", "e9"),
        (r"(?<=\d)\s*\btrillion$", "e12"),
        (r" +", " "),
    )
)
_SIGNS = str.maketrans(
    {"×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ",
     "≥": r"\ge ", "≠": r"\ne ", "√": r"\sqrt "}
)  # fmt: skip
_THOUSANDS = re.compile(
    rf"{_GROUPED.pattern}|(?<![\w.,])(?<!\d\s)\d{{1,3}}(?: \d{{3}})+(?![\s,]?\d)"
)
_UNIT = re.compile(
    r"(.*[\d})\]])\s*(?:(%)|\\(?:text|textrm|mathrm|mbox)\{([^{}]*\}(?:\^\{?\d\}?)?)|"
    r"(?<=\s)((?:[^\W\d_]{3,}|[mgslh]|[ckmn]m|[km]g|ml|ft|in|oz|lb|mi|yd|hr|ms|am|pm)\b"
    r"[^\d=+*<>]*))"
)


def _typed(text: str) -> str:
    """The answer as one would type it in a formula, without what only sets its type."""
    said = _folded(text.translate(_SIGNS)).strip()
    for pattern, new in _WRITTEN:
        said = pattern.sub(new, said)
    return _THOUSANDS.sub(lambda number: re.sub("[, ]", "", number[0]), said.strip())


def _without_unit(text: str) -> tuple[str, str]:
    """5 and "cm" of "5 cm"; a text without a unit, and ""."""
    found = _UNIT.fullmatch(text)
    if found is None:
        return text, ""
    return found[1].strip(), (found[2] or found[3] or found[4]).replace("}", "")


_FORM = re.compile(
    rf"([+-]?)\s?(?:(\d+) (?=\d+/))?({_DIGITS})(?:[eE]([+-]?\d+)|{_TENS})?(?:/(\d+))?"
)
_FRACTION = re.compile(r"\\frac\{([+-]?\d+)\}\{(\d+)\}")


def _number(text: str) -> Fraction | None:
    """The value of a decimal or a fraction; None of one beyond 1e400, which is compared as text."""
    found = _FORM.fullmatch(_FRACTION.sub(r"\1/\2", text))
    if found is None:
        return None
    sign, whole, digits, exponent, tens, below = found.groups()
    power = int(exponent or tens or 0) if len(exponent or tens or "") < 9 else 10**9
    if abs(power) > 400 or re.match(r"0\d", digits) or (below and not below.strip("0")):
        return None
    value = Fraction(Decimal(digits.replace(",", ""))) * Fraction(10) ** power
    value = Fraction(Decimal(whole or 0)) + value / Fraction(Decimal(below or 1))
    return -value if sign == "-" else value


def _same(answer: str, truth: str) -> bool:
    values = _number(answer), _number(truth)
    if values[0] is not None and values[1] is not None:
        # nearly always, and a thousand times faster than symbolic algebra
        return values[0] == values[1] or _rounded((answer, truth), (values[0], values[1]))
    math_both = _is_math(answer), _is_math(truth)
    if not any(math_both):
        return bool(exact_match(answer, truth))
    if not all(math_both) or (":" in answer) != (":" in truth):
        return _words(answer, hyphen="-") == _words(truth, hyphen="-")
    bounded = len(answer) <= LONGEST_EXPRESSION and _is_small(answer) and _is_small(truth)
    return bounded and _by_algebra(answer, truth)


def _rounded(texts: tuple[str, str], values: tuple[Fraction, Fraction]) -> bool:
    """Whether one is a decimal that the other was rounded to."""
    for text, value, other in zip(texts, values, values[::-1], strict=True):
        digits = re.fullmatch(r"[+-]?(\d*)\.(\d+)", text)
        if digits is None:
            continue
        known, near = len((digits[1] + digits[2]).lstrip("0")), abs(value - other)
        if known >= FLOAT_DIGITS and near <= abs(other) / 10 ** (FLOAT_DIGITS - 1):
            return True
        # A fraction that a decimal can state exactly is not rounded.
        below = other.denominator
        ends = below < 10**40 and pow(10, below.bit_length(), below) == 0
        if known >= FEWEST_ROUNDED and not ends and near < Fraction(1, 10 ** len(digits[2])):
            return True
    return False


_CODE = re.compile(
    r"^\d+-\d+$|(?<![\d.])0\d|(?<![\d.])0[a-z]|\d_|\d:\d+:\d|\d\.\d+\.\d|\d\s\d|[\d.]{3,}-\d+-|"
    r"\d([-/])\d+\1\d{2}"  # ranges, dates, times, versions
)
_NAMES = r"(?:arc)?(?:sin|cos|tan)h?|sqrt|log|ln|exp|pi|infinity|inf|sec|csc|cot"
_KNOWN = re.compile(rf"\\(?:begin|end)\{{\w+\}}|\\[A-Za-z]+|(?<![A-Za-z])(?:{_NAMES})(?![A-Za-z])")


def _is_math(text: str) -> bool:
    """Whether letters in it are variables: it has a digit, sign or command and no words."""
    if _CODE.search(text):
        return False
    bare = _KNOWN.sub("0", text)
    if not re.search(r"[\d+*/^=<>|!,;-]", bare):
        return re.fullmatch(_LETTER, text) is not None
    # Up to three letters beside a digit or sign are a product: 2xy, ab+1.
    product = rf"(?:(?<=[\d+*/^=<>|(){{}}-])|(?<=[+*/^=<>-]\s)){_LETTER}{{2,3}}(?![^\W_])"
    before = rf"(?<![^\W_]){_LETTER}{{2,3}}(?=\s?[+*/^=<>|(){{}}-])"
    return not re.search(rf"{_LETTER}{{2}}", re.sub(rf"{product}|{before}", "0", bare))


def _is_small(text: str) -> bool:
    """Whether its powers can be computed: towers of them keep symbolic algebra busy forever."""
    powers = re.findall(r"\^\{([^{}^]*)\}|\^\(([^()^]*)\)|\^([^{(^])", text)
    if len(powers) != text.count("^") or re.search(r"[^\d\w]!|!!|\d{4}!", text):
        return False
    letters = re.search(_LETTER, _KNOWN.sub("", text)) is not None
    exponents = [re.findall(r"\d+", "".join(one)) for one in powers]
    numbers = [n for one in exponents for n in one] + re.findall(r"(\d+)!", text)
    bound = LARGEST_POWER // 100 if letters else LARGEST_POWER
    return all(len(n) < 5 for n in numbers) and math.prod(int(n) or 1 for n in numbers) <= bound


_LATEX: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (rf"(?<![\\A-Za-z])({_NAMES})(?![A-Za-z])", r"\\\1"),
        (r"\\inf(?:inity)?(?![a-z])", r"\\infty"),
        (r"\\sqrt\s?\(([^()]*)\)|\\sqrt\s(\w+)", r"\\sqrt{\1\2}"),
        (r"(\d)[eE]([+-]?\d+)", r"\1\\cdot 10^{\2}"),
        (r"(?<![\\A-Za-z])([A-Za-z])(\d+)", r"\1_{\2}"),
        (r"\^\(([^()]*)\)|\^(-?\d+)", r"^{\1\2}"),
        (r"(\d+) (\d+)/(\d+)", r"(\1+\2/\3)"),
    )
)


def _by_algebra(answer: str, truth: str) -> bool:
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
        from sympy import Float, N, Rational
    except ImportError:
        raise MissingDependencyError(
            f"math-verify compares expressions and is not installed: {pip_install('math')}"
        ) from None

    # Its timeouts are signals, which only the main thread can receive; it warns without them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    spelling = NormalizationConfig(
        basic_latex=True, malformed_operators=True, nits=True, boxed="none"
    )
    sides = []
    for side in (truth, answer):
        for pattern, new in _LATEX:
            side = pattern.sub(new, side)
        found = parse(
            f"${side}$",
            [LatexExtractionConfig(normalization_config=spelling)],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )
        if not found:
            return False
        floats = found[0].atoms(Float)
        sides.append(found[0].xreplace({one: Rational(str(one)) for one in floats}))
    if all(getattr(side, "is_number", False) and side.is_real for side in sides):
        values = tuple(Fraction(str(N(side, 50))) for side in sides)
        near = abs(values[0] - values[1]) <= abs(values[0]) / 10**40
        return near or _rounded((truth, answer), (values[0], values[1]))
    return bool(verify(*sides, timeout_seconds=None))


def _in_braces(text: str) -> str:
    """The text up to the brace that closes one opened before it."""
    depth = 1
    for index, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:index]
    return text


T = TypeVar("T")
Extract = Callable[[str], str]
PlainJudge = Callable[[Mapping[str, Any], Any], JudgeOutput]

SHOWN_MISTAKES = 10
"""Number of mistakes in a JSON text that the feedback lists."""
FENCE = re.compile(r"\s*```[\w+-]*\n(.*?)\n?```\s*", re.DOTALL)
_MARKS = ("####", "\\boxed{")


def exact_judge(*, field: str = "answer", extract: Extract = str) -> PlainJudge:
    """A judge by `exact_match`: 1 for the same words, else 0.

    As in SQuAD's evaluation (arXiv 1606.05250), case, articles, spaces, quotes, emphasis and the
    punctuation around words do not count, nor do hyphens and apostrophes inside words. Unlike
    there, signs count where they tell answers apart, between and after numbers, single letters and
    symbols: 5-10 is not 510, C++ not C, 50% not 50, x>y not x<y. Numbers are equal by value (7 and
    7.0, 1,000 and 1000, 1e-5 and 0.00001, $5 and 5), unless they begin with a zero like 007. What
    Unicode spells in several ways is one: composed and decomposed letters, full width, minus signs,
    dashes and quotes. In scripts without spaces between words, spaces do not count.

    Args:
        field: Field of the task with the right answer, or a list of right answers, one of which is
            enough.
        extract: Extracts the answer from the response's text.
    """
    return _by_words(exact_match, field, extract)


def f1_judge(*, field: str = "answer", extract: Extract = str) -> PlainJudge:
    """A judge by `f1`, the harmonic mean of precision and recall of the answer's words (arXiv
    1606.05250), with the best of the right answers. Arguments as for `exact_judge`.

    Two words are the same as for `exact_judge`, and count as often as they occur. In scripts
    without spaces between words, such as Chinese, Japanese and Thai, each character is a word. An
    answer without words is right only if the truth has none.
    """
    return _by_words(f1, field, extract)


def form_judge(pattern: str) -> PlainJudge:
    """A judge by `has_form`: 1 if the whole response matches the regular expression, else 0.

    Raises:
        re.error: The pattern is not a regular expression.
    """
    re.compile(pattern)

    def judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
        score = has_form(response_text(response), pattern)
        wrong = f"The response does not have the form {pattern}"
        return JudgeOutput(reward=score, feedback="The form is right." if score else wrong)

    return judge


def math_judge(
    *, field: str = "answer", extract: Extract = final_answer, timeout: float = 15.0
) -> JudgeType:
    r"""A judge by `math_equal`: 1 for the same number, expression or text, else 0.

    Numbers are equal by value, however they are written: 1,200 and 1200.0, 1e-5 and 0.00001, 1/2
    and 0.5, 3\times 10^5 and 300000. A decimal of six or more digits may be a rounded fraction or
    root (0.333333 for 1/3), and one of 16 or more may have the error of binary arithmetic
    (0.30000000000000004 for 0.3). A unit or percent sign may be missing in one of the answers, but
    not differ: 5 cm is 5 and not 5 m; 50% is 50 and 0.5. Expressions are equal by algebra, which
    math-verify does (extra `math`): x+1 and 1+x. Words, dates, times and codes are text, compared
    as by `exact_judge`: "listen" is not "silent". An answer of more than 100 characters, or with
    powers of powers, is right only if it is written like the truth.

    If the right answer is a whole solution, the part after "####" or in \boxed{} counts.

    Args:
        field: Field of the task with the right answer, or a list of right answers, one of which is
            enough.
        extract: Extracts the answer from the response's text; `final_answer` unless set.
        timeout: Seconds for one comparison, after which the rollout is a `judge_timeout`.

    Raises:
        ValueError: `timeout` is not above 0.
    """
    equal = in_process(math_equal, timeout=timeout)

    async def judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
        answer, truths = extract(response_text(response)), _truths(task, field)
        for truth in truths:
            inside = final_answer(truth) if any(mark in truth for mark in _MARKS) else truth
            if await equal(answer, inside):
                return JudgeOutput(reward=1.0, feedback="The answer is right.")
        return JudgeOutput(reward=0.0, feedback=_not(answer, truths))

    return judge


def rouge_judge(
    *,
    field: str = "answer",
    kind: str = "rougeL",
    measure: Literal["fmeasure", "precision", "recall"] = "fmeasure",
    stemmer: bool = False,
    tokenizer: Callable[[str], list[str]] | None = None,
    extract: Extract = str,
) -> PlainJudge:
    """A judge by ROUGE, the overlap of word sequences (Lin 2004), as the library rouge-score
    computes it (extra `rewards`). The metrics are all three measures.

    Args:
        field: Field of the task with the right text, or a list of right texts, the best of which
            counts.
        kind: `rouge1`, `rouge2`, ... for sequences of as many words, `rougeL` for the longest
            common one, `rougeLsum` for that of each line.
        measure: The measure that is the reward.
        stemmer: Whether endings of English words are removed first.
        tokenizer: Splits a text into words. None: rouge-score's own, whose words consist of the
            letters a to z and digits only, so it is for English.
        extract: Extracts the compared text from the response's text.

    Raises:
        MissingDependencyError: rouge-score is not installed.
        ValueError: Unknown kind or measure.

    The judge raises RewardError if the right text has no word by this tokenizer.
    """
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise MissingDependencyError(
            f"rouge-score computes ROUGE and is not installed: {pip_install('rewards')}"
        ) from None
    if not re.fullmatch(r"rouge([1-9]|L|Lsum)", kind):
        raise ValueError(f"kind is {kind!r}: it must be rouge1 to rouge9, rougeL or rougeLsum")
    if measure not in ("fmeasure", "precision", "recall"):
        raise ValueError(f"measure is {measure!r}: it must be fmeasure, precision or recall")
    logging.getLogger("absl").setLevel(logging.WARNING)  # it logs which tokenizer is used
    own = None if tokenizer is None else _Tokenizer(tokenizer)
    scorer = RougeScorer([kind], use_stemmer=stemmer, tokenizer=own)

    def judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
        text, found = extract(response_text(response)), []
        for truth in _truths(task, field):
            # A text overlaps with itself completely, if it has any words.
            if not scorer.score(truth, truth)[kind].recall:
                raise RewardError(
                    f"{kind} of {shown(truth)}: there is nothing in it to compare; rouge-score's "
                    "own tokenizer supports only a to z and digits: pass another as tokenizer"
                )
            found.append((getattr(score := scorer.score(truth, text)[kind], measure), score, truth))
        reward, score, truth = max(found, key=lambda one: one[0])
        metrics = {f"{kind}_{name}": float(value) for name, value in score._asdict().items()}
        said = ", ".join(f"{name} {value:.3f}" for name, value in score._asdict().items())
        feedback = f"{kind} with {truth!r}: {said}."
        return JudgeOutput(reward=float(reward), metrics=metrics, feedback=feedback)

    return judge


class _Tokenizer:
    """Adapts a function to rouge-score's interface."""

    def __init__(self, function: Callable[[str], list[str]]) -> None:
        self.tokenize = function


def schema_judge(
    schema: Mapping[str, Any] | bool | None = None, *, field: str | None = None
) -> PlainJudge:
    """A judge of JSON: 1 if the response is a JSON text that satisfies a JSON Schema, else 0. The
    feedback lists each mistake with its place.

    Reasoning before `</think>`, and a code fence around all of the rest, are ignored.

    Args:
        schema: For all tasks; in the draft that its `$schema` names, else 2020-12.
        field: Instead, the field of the task that holds its schema, as an object or as JSON text.

    Raises:
        MissingDependencyError: jsonschema is not installed (extra `rewards`).
        ValueError: Both or neither is given, or the schema is invalid.

    The judge raises RewardError if the task's schema is invalid or refers to another document.
    """
    _require_jsonschema()
    if (schema is None) == (field is None):
        raise ValueError("give either a schema for all tasks, or the field that holds each task's")
    fixed = None if schema is None else _validator(schema)

    def judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
        validator = fixed if fixed is not None else _validator_of(task, field or "")
        try:
            value = _strict_json(response_text(response))
        except (ValueError, RecursionError) as error:
            return JudgeOutput(reward=0.0, feedback=f"The response is not JSON: {error}.")
        mistakes = _mistakes(validator, value)
        if not mistakes:
            return JudgeOutput(reward=1.0, feedback="The response satisfies the schema.")
        left = len(mistakes) - SHOWN_MISTAKES
        more = [f"and {left} more"] if left > 0 else []
        return JudgeOutput(
            reward=0.0,
            metrics={"mistakes": float(len(mistakes))},
            feedback="\n".join([*mistakes[:SHOWN_MISTAKES], *more]),
        )

    return judge


def weighted(
    judges: Mapping[str, Callable[..., Any]], weights: Mapping[str, float] | None = None
) -> JudgeType:
    """A judge made of several: the sum of their rewards by weight, or without weights their mean.

        weighted({"right": math_judge(), "form": form_judge(FORM)}, {"right": 0.8, "form": 0.2})

    Each reward is a metric by its name, with the metrics of that judge as `<name>/<metric>`;
    feedback is joined. The judges run concurrently. If one raises, so does this: a failed part is
    not a reward of 0.

    Args:
        judges: By name; judges of single responses, async or plain.
        weights: Weight of each.

    Raises:
        FunctionError: One of them cannot be called as a judge, or judges groups.
        ValueError: There are no judges, or the weights do not match them.
    """
    for name, one in judges.items():
        check_judge_function(one)
        if judges_groups(one):
            raise FunctionError(
                f"weighted: {name!r} judges the responses of a group together; pass judges of "
                "single responses"
            )
    if not judges or (weights is not None and weights.keys() != judges.keys()):
        raise ValueError(
            f"weighted: the judges are {', '.join(judges) or '(none)'} and the weights are for "
            f"{', '.join(weights or ()) or '(none)'}: give each judge one weight"
        )
    shares = weights if weights is not None else dict.fromkeys(judges, 1 / len(judges))

    async def judge(
        task: Mapping[str, Any],
        response: Any,
        auxiliary_models: Mapping[str, Any] | None = None,
        logger: Any = None,
    ) -> JudgeOutput:
        async def asked(name: str, one: Callable[..., Any]) -> JudgeOutput:
            try:
                return await call_judge(
                    one,
                    task=task,
                    response=response,
                    auxiliary_models=auxiliary_models or {},
                    logger=logger,
                )
            except RewardError as error:
                raise type(error)(f"{name}: {error}") from error

        found = await _together({name: asked(name, one) for name, one in judges.items()})
        metrics = {name: one.reward for name, one in found.items()}
        for name, one in found.items():
            metrics |= {f"{name}/{metric}": value for metric, value in (one.metrics or {}).items()}
        said = [f"{name}: {one.feedback}" for name, one in found.items() if one.feedback]
        return JudgeOutput(
            reward=sum(shares[name] * one.reward for name, one in found.items()),
            metrics=metrics,
            feedback="\n".join(said) or None,
        )

    return judge


async def _together(asked: Mapping[str, Coroutine[Any, Any, T]]) -> dict[str, T]:
    """The results by name; the first that raises cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {name: group.create_task(one) for name, one in asked.items()}
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {name: task.result() for name, task in tasks.items()}


def _by_words(score: Callable[[str, str], float], field: str, extract: Extract) -> PlainJudge:
    def judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
        answer, truths = extract(response_text(response)), _truths(task, field)
        reward = max(score(answer, truth) for truth in truths)
        right = "The answer is right."
        return JudgeOutput(reward=reward, feedback=right if reward == 1 else _not(answer, truths))

    return judge


def _truths(task: Mapping[str, Any], field: str) -> list[str]:
    """The right answers of a task, as texts; raises RewardError if there are none."""
    found = TaskRow(task)[field]
    several = found if isinstance(found, (list, tuple)) else [found]
    if not several or not all(map(_can_be_right, several)):
        raise RewardError(
            f"the task's {field!r} is {shown(found)}: it must be text, a finite number, or a list "
            "of them"
        )
    return [str(one) for one in several]


def _can_be_right(value: Any) -> bool:
    """Whether it is text or a finite number, also one of NumPy or a Decimal."""
    if isinstance(value, Decimal):
        return value.is_finite()
    return isinstance(value, (str, Integral)) or (isinstance(value, Real) and math.isfinite(value))


def _not(answer: str, truths: Iterable[str]) -> str:
    return f"The answer is {' or '.join(map(repr, truths))}, and not {answer!r}."


def _require_jsonschema() -> None:
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            f"jsonschema checks JSON and is not installed: {pip_install('rewards')}"
        ) from None


def _validator(schema: Any) -> Validator:
    """Raises ValueError for an invalid schema."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the schema is invalid at {_place(error)}: {error.message}") from None
    # Without a registry it would fetch what it refers to.
    found: Validator = kind(schema, registry=Registry())
    return found


def _validator_of(task: Mapping[str, Any], field: str) -> Validator:
    schema = TaskRow(task)[field]
    try:
        return _validator(json.loads(schema) if isinstance(schema, str) else schema)
    except (ValueError, TypeError, AttributeError) as error:
        raise RewardError(f"the task's {field!r} is {shown(schema)}: {error}") from error


def _mistakes(validator: Validator, value: Any) -> list[str]:
    from referencing.exceptions import Unresolvable

    try:
        errors = sorted(validator.iter_errors(value), key=lambda error: error.json_path)
    except Unresolvable as error:
        raise RewardError(f"the schema refers to something outside it: {error}") from error
    return [f"{_place(error)}: {error.message}" for error in errors]


def _place(error: Any) -> str:
    return str(error.json_path)


def _strict_json(text: str) -> Any:
    """The value of a JSON text, with or without a code fence; rejects NaN and Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    said = text.rpartition("</think>")[2]
    fenced = FENCE.fullmatch(said)
    return json.loads(fenced[1] if fenced else said, parse_constant=refuse)


# Judges of `select_model()` that choose the fastest candidate, and the one with the fewest tokens.
#
# They have the names, arguments and metrics of AgentScope 1.0.21's, and read the argument that
# `select_model()` passes to judges: `{"response": ..., "metrics": {"execution_time": ...,
# "total_tokens": ..., ...}}`.


async def avg_time_judge(_task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """The seconds that the workflow took, with a minus: the fastest is best.

    Returns:
        The reward, and the metric "avg_time_seconds".

    Raises:
        RewardError: `response` is not what `select_model()` hands to judges.
    """
    seconds = _measured(response, "execution_time")
    return JudgeOutput(reward=-seconds, metrics={"avg_time_seconds": seconds})


async def avg_token_consumption_judge(_task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """The negative number of tokens that the candidate read and wrote: the fewest is best.

    Returns:
        The reward, and the metric "token_consumed".

    Raises:
        RewardError: `response` does not come from `select_model()`, or the number of tokens is
            unknown: a candidate that does not report it is not the best.
    """
    tokens = _measured(response, "total_tokens")
    if not tokens:
        raise RewardError(
            "the number of tokens of this rollout is unknown: the workflow did not call `model` "
            "itself, or the API does not report usage"
        )
    return JudgeOutput(reward=-tokens, metrics={"token_consumed": tokens})


def _measured(response: Any, name: str) -> float:
    metrics = response.get("metrics") if isinstance(response, Mapping) else None
    if not isinstance(metrics, Mapping) or name not in metrics:
        raise RewardError(
            f"the response is {shown(response)}: this judge is for select_model(), which passes a "
            f"dict with metrics, including {name}"
        )
    return float(metrics[name])
