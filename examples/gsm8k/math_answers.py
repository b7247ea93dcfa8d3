"""The answer inside a solution, and whether two answers are the same."""

import logging
import re
from decimal import Decimal

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


def is_equal(truth: str, answer: str) -> bool:
    """Whether two answers are the same number or expression."""
    if not truth or not answer:
        return False
    numbers = _number(truth), _number(answer)
    if None not in numbers:  # nearly always, and a thousand times faster than symbolic algebra
        return numbers[0] == numbers[1]
    # Towers of powers can keep symbolic algebra busy for ever.
    if len(answer) > LONGEST_EXPRESSION or re.search(r"\^|\*\*|!", answer):
        return False
    from math_verify import parse, verify

    # Its timeouts are signals, which only the main thread can receive; it warns without them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expressions = [parse(f"${side}$", parsing_timeout=None) for side in (truth, answer)]
    return bool(verify(*expressions, timeout_seconds=None))


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
