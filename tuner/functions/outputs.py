"""What a workflow and a judge return, and what they raise and are given besides their models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tuner.errors import DatasetError, FunctionError, TunerError


def _no_text(value: Any) -> Any:
    """pydantic would read "1.0" as 1.0, and what else an agent wrote as its own score."""
    if isinstance(value, (str, bytes)):
        raise ValueError("a text is no number")
    return value


Number = Annotated[float, BeforeValidator(_no_text)]


class FunctionOutput(BaseModel):
    """Base of what functions return: mistakes in a field are `FunctionError`s."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    # Type checkers see pydantic's own constructor, with the fields as parameters.
    if not TYPE_CHECKING:

        def __init__(self, **data: Any) -> None:
            try:
                super().__init__(**data)
            except ValidationError as error:
                raise FunctionError(_field_mistakes(type(self), error)) from None


class WorkflowOutput(FunctionOutput):
    """What a workflow returns.

    Attributes:
        reward: The score, when there is no judge; the judge's wins over it. True is 1, False is 0;
            a text is refused.
        response: Handed to the judge as it is.
        metrics: Numbers to log besides the reward.
    """

    reward: Number | None = Field(default=None)
    response: Any | None = Field(default=None)
    metrics: dict[str, Number] | None = Field(default=None)


class JudgeOutput(FunctionOutput):
    """What a judge returns.

    Attributes:
        reward: The score; required. True is 1, False is 0; a text is refused.
        metrics: Numbers to log besides the reward.
        feedback: Why, in words: what was wrong, and what would have been right. It is in the trace
            and on the run's page, and what `tune_prompt` learns from.
    """

    reward: Number = Field()
    metrics: dict[str, Number] | None = Field(default=None)
    feedback: str | None = Field(default=None)


WorkflowType = Callable[..., Awaitable[WorkflowOutput]]


JudgeType = Callable[..., Awaitable[JudgeOutput]]


class Rejected(TunerError):
    """Raised by a workflow that does not want its rollout trained; no failure, and not retried."""


class MissingFieldError(DatasetError, FunctionError, KeyError):
    """A function asked for a field that the dataset's rows do not have."""

    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


class TaskRow(dict[str, Any]):
    """A row that says which fields it has when it is asked for another."""

    def __missing__(self, key: str) -> Any:
        raise MissingFieldError(
            f"the task has no field {key!r}; the fields of its dataset are: {', '.join(self)}"
        )


def text_of(value: Any, form: Callable[[Any], str] = repr) -> str:
    """`form(value)` of a user's object, whose own code may fail."""
    try:
        return form(value)
    except Exception as error:
        return f"<a {type(value).__name__} that cannot be shown: {type(error).__name__}>"


def response_text(response: Any) -> str:
    """A workflow's response as people read it; a framework's message as its text."""
    if response is None:
        return ""
    get_text = getattr(response, "get_text_content", None)
    if callable(get_text):
        return text_of(response, lambda _: get_text() or "")
    return response if isinstance(response, str) else text_of(response)


class StoredResponse(str):
    """The text of a response, for judges written for text and for those written for messages.

    It is a `str`, and like AgentScope's `Msg` it has `content` and `get_text_content()`. Whatever
    else the response was is not stored.
    """

    __slots__ = ()

    @property
    def content(self) -> str:
        return str(self)

    def get_text_content(self) -> str:
        return str(self)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the judge reads response.{name}, but a trace stores a response as text: use it as "
            "a str, or response.get_text_content()"
        )


def shown(value: Any) -> str:
    """A value and its type, shortened, for error messages."""
    text = text_of(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _field_mistakes(output: type[BaseModel], error: ValidationError) -> str:
    mistakes = []
    for detail in error.errors():
        name = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            known = ", ".join(output.model_fields)
            mistakes.append(f"it has no field {name!r} (fields: {known})")
        elif name == "reward" and (detail["type"] == "missing" or detail["input"] is None):
            mistakes.append("it needs a reward: a judge must score every response")
        elif name == "feedback":
            mistakes.append(f"feedback is {shown(detail['input'])}, expected a text")
        else:
            mistakes.append(f"{name} is {shown(detail['input'])}, expected a number")
    return f"{output.__name__}: {'; '.join(mistakes)}"
