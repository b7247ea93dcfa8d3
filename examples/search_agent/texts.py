"""What the agent reads, and how what it writes is read."""

import re

PROMPT_TEMPLATE = """A conversation between User and Assistant. The Assistant thinks between \
<think> and </think>, searches with <search> query </search>, is given the results between \
<information> and </information>, and answers with <answer> answer </answer>.

User:
{question}

Assistant:
<think>"""
STOP = ("</search>", "</answer>")


def information(results: list[dict[str, str]]) -> str:
    """The results of a search as the agent reads them."""
    pages = "\n\n".join(
        f'<p title="{result["wikipedia_title"]}">\n{result["contents"]}\n</p>' for result in results
    )
    return f"\n\n<information>\n{pages}\n</information>"


def parse_search_query(text: str) -> str | None:
    """The last query in a text."""
    return _last(r"<search>(.*?)</search>", text)


def parse_answer(text: str) -> str | None:
    """The last answer in a text."""
    return _last(r"<answer>(.*?)</answer>", text)


def _last(pattern: str, text: str) -> str | None:
    matches = re.findall(pattern, text, re.DOTALL)
    return matches[-1].strip() if matches else None
