"""The answer inside a solution, and whether two answers are the same."""

from __future__ import annotations

import logging
import re
from decimal import Decimal

from tuner.errors import MissingDependencyError, pip_install

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")
LONGEST_EXPRESSION = 50


def final_answer(text: str) -> str:
    """What a solution gives as its answer: after "####", in \\boxed{}, or its last number."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    if "\\boxed{" in text:
        return _in_braces(text.rpartition("\\boxed{")[2])
    numbers = NUMBER.findall(text)
    return numbers[-1] if numbers else ""


def math_equal(answer: str, truth: str) -> float:
    """1.0 if two answers are the same number or expression, else 0.0.

    Numbers are compared as decimals; anything else by math-verify, which may take long:
    `in_process` gives it a time limit.

    Raises:
        MissingDependencyError: There is more to compare than numbers, without math-verify.
    """
    if not truth or not answer:
        return 0.0
    numbers = _number(truth), _number(answer)
    if None not in numbers:  # nearly always, and a thousand times faster than symbolic algebra
        return float(numbers[0] == numbers[1])
    # Towers of powers can keep symbolic algebra busy for ever.
    if len(answer) > LONGEST_EXPRESSION or re.search(r"\^|\*\*|!", answer):
        return 0.0
    try:
        from math_verify import parse, verify
    except ImportError:
        raise MissingDependencyError(
            f"math-verify compares expressions and is not installed: {pip_install('math')}"
        ) from None

    # Its timeouts are signals, which only the main thread can receive; it warns without them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expressions = [parse(f"${side}$", parsing_timeout=None) for side in (truth, answer)]
    return float(verify(*expressions, timeout_seconds=None))


def _number(text: str) -> Decimal | None:
    plain = text.strip().rstrip(".").replace(",", "").replace("$", "")
    return Decimal(plain) if re.fullmatch(r"-?(?:\d+(?:\.\d+)?|\.\d+)", plain) else None


def _in_braces(text: str) -> str:
    """The text up to the brace that closes one opened before it."""
    depth = 1
    for index, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:index]
    return text
