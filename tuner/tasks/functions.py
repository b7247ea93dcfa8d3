"""How workflows and judges are checked and called: with the arguments that they name.

A function may be async or plain (then it runs in a thread), a `functools.partial`, or an object
with `__call__`. Additional parameters need defaults. `**kwargs` receives every argument that is not
named; `*args` is rejected, since nothing is passed by position.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dis
import functools
import inspect
import logging
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from tuner.errors import DatasetError, FunctionError, TunerError, debugging
from tuner.tasks.random_states import RandomStates
from tuner.traces.store import text_of

if TYPE_CHECKING:
    from tuner.config import RunConfig


# Return values, exceptions and arguments of workflows and judges, apart from their models.


def _no_text(value: Any) -> Any:
    """pydantic would read "1.0" as 1.0, and so any score that an agent wrote itself."""
    if isinstance(value, (str, bytes)):
        raise ValueError("text is not a number")
    return value


Number = Annotated[float, BeforeValidator(_no_text)]
_NUMBER = TypeAdapter[float](Number)


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
    """The result of a workflow, which may also return a plain value.

    A text or a message of AgentScope is the response, None an empty one, a dict has these fields,
    and a number is the response and the reward, which a judge replaces.

    Attributes:
        reward: The score if there is no judge; a judge's reward replaces it. True is 1, False is 0;
            text is rejected.
        response: Passed to the judge unchanged.
        metrics: Numbers to log besides the reward.
    """

    reward: Number | None = Field(default=None)
    response: Any | None = Field(default=None)
    metrics: dict[str, Number] | None = Field(default=None)


class JudgeOutput(FunctionOutput):
    """The result of a judge, which may also return a number, a bool or a dict of these fields.

    Attributes:
        reward: The score; required. True is 1, False is 0; text is rejected.
        metrics: Numbers to log besides the reward.
        feedback: The reason, in words: what was wrong, and what would have been right. It is in the
            trace and on the run's page, and `tune_prompt` learns from it.
    """

    reward: Number = Field()
    metrics: dict[str, Number] | None = Field(default=None)
    feedback: str | None = Field(default=None)


WorkflowType = Callable[..., Awaitable[Any]]


JudgeType = Callable[..., Awaitable[Any]]


class Rejected(TunerError):
    """Raised by a workflow whose rollout should not be trained; not a failure, and not retried."""


class MissingFieldError(DatasetError, FunctionError, KeyError):
    """A function asked for a field that the dataset's rows do not have."""

    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


class TaskRow(dict[str, Any]):
    """A row that lists its fields when a missing one is read."""

    def __missing__(self, key: str) -> Any:
        raise MissingFieldError(
            f"the task has no field {key!r}; the fields of its dataset are: {', '.join(self)}"
        )


def response_text(response: Any) -> str:
    """A workflow's response as readable text; a framework's message as its text."""
    if response is None:
        return ""
    get_text = getattr(response, "get_text_content", None)
    if callable(get_text):
        return text_of(response, lambda _: get_text() or "")
    return response if isinstance(response, str) else text_of(response)


class StoredResponse(str):
    """The text of a response, for judges written for text and for those written for messages.

    A `str` that has `content` and `get_text_content()` like AgentScope's `Msg`. Nothing else of the
    response is stored.
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


logger = logging.getLogger("tuner")


@dataclass(frozen=True)
class Signature:
    """Arguments of a function of some role.

    Attributes:
        role: "workflow" or "judge".
        required: Parameters that the function must have.
        optional: Parameters that it may have.
        output: Name of the class it returns.
        plain: Other values that it may return.
    """

    role: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    output: str
    plain: str = ""

    def __str__(self) -> str:
        parameters = ", ".join([*self.required, *(f"{name} (optional)" for name in self.optional)])
        return f"async def {self.role}({parameters}) -> {self.output}"


WORKFLOW_VALUES = "a text, a number, a message of AgentScope, or a dict of WorkflowOutput's fields"
WORKFLOW = Signature(
    "workflow",
    ("task", "model"),
    ("auxiliary_models", "logger", "feedback"),
    WorkflowOutput.__name__,
    WORKFLOW_VALUES,
)


JUDGE = Signature(
    "judge",
    ("task", "response"),
    ("auxiliary_models", "logger"),
    JudgeOutput.__name__,
    "a number, a bool, or a dict of JudgeOutput's fields",
)


GROUP_JUDGE = Signature(
    "judge", ("task", "responses"), ("auxiliary_models", "logger"), f"list[{JudgeOutput.__name__}]"
)


def judges_groups(func: Callable[..., Any]) -> bool:
    """Whether a judge takes the `responses` of a group together instead of each `response`."""
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError):  # the check reports it
        return False
    return "responses" in parameters and "response" not in parameters


def check_workflow_function(func: Callable[..., Any]) -> None:
    """Check that `func` can be called as a workflow; imports nothing and calls nothing.

    Raises:
        FunctionError: It is not a function, or its parameters do not fit.
    """
    check_function(func, WORKFLOW)


def check_judge_function(func: Callable[..., Any]) -> None:
    """Check that `func` can be called as a judge; imports nothing and calls nothing.

    A judge that takes `responses` instead of `response` judges a group together.

    Raises:
        FunctionError: It is not a function, or its parameters do not fit.
    """
    check_function(func, GROUP_JUDGE if judges_groups(func) else JUDGE)


def check_settings(func: Any, config: RunConfig) -> None:
    """Call `check_settings(config)` of the object that a workflow is, or is a method of, if it has
    one; it raises ConfigError for settings that do not fit."""
    if (check := _method(func, "check_settings")) is not None:
        check(config)


async def end_run(func: Callable[..., Any] | None) -> None:
    """Call `run_ended()` of the object that a workflow is, or is a method of, if it has one, to
    release its resources: in the event loop of its rollouts, after the last one."""
    if func is None or (ended := _method(func, "run_ended")) is None:
        return
    try:
        await ended()
    except Exception as error:
        logger.warning(
            "%s was not closed: %s: %s", where(func), type(error).__name__, error, exc_info=True
        )


def _method(func: Callable[..., Any], name: str) -> Any:
    """A method of the object that a function is, or is a method of; None if there is none."""
    inner = unwrapped(func)
    return getattr(getattr(inner, "__self__", inner), name, None)


def check_function(func: Callable[..., Any], signature: Signature) -> None:
    """Check that `func` can be called with the arguments of its role.

    Raises:
        FunctionError: It cannot; names its place, what was found and what is expected.
    """
    if not callable(func):
        called = (
            " (pass the function itself, without calling it)" if inspect.isawaitable(func) else ""
        )
        raise FunctionError(
            f"the {signature.role} is {shown(func)}, not a function{called}; expected: {signature}"
        )
    try:
        parameters = inspect.signature(func).parameters
    except (TypeError, ValueError) as error:
        raise FunctionError(f"{where(func)}: its parameters cannot be read: {error}") from None
    problems = list(_problems(parameters, signature))
    if isinstance(func, type):
        problems.append("it is a class: pass an instance with __call__, or a function")
    if inspect.isasyncgenfunction(unwrapped(func)) or inspect.isgeneratorfunction(unwrapped(func)):
        problems.append("it yields; it must return")
    if problems:
        found = ", ".join(str(parameter) for parameter in parameters.values())
        raise FunctionError(
            f"{where(func)} cannot be used as a {signature.role}: {'; '.join(problems)}\n"
            f"  found:    ({found})\n"
            f"  expected: {signature}"
        )


def _problems(parameters: Mapping[str, inspect.Parameter], signature: Signature) -> list[str]:
    passed = (*signature.required, *signature.optional)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    missing = [name for name in signature.required if name not in parameters and not takes_any]
    problems = [f"parameter {', '.join(missing)} is missing"] if missing else []
    for name, parameter in parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            problems.append(f"*{name} never receives anything, arguments are passed by name")
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            problems.append(f"{name} is positional-only, and arguments are passed by name")
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        elif name not in passed and parameter.default is inspect.Parameter.empty:
            problems.append(f"nothing is passed for {name}; give it a default or remove it")
    return problems


async def call_workflow(
    func: Callable[..., Any],
    *,
    task: Mapping[str, Any],
    model: Any,
    auxiliary_models: Mapping[str, Any],
    logger: Any,
    feedback: str | None = None,
    apart: Container[str] = (),
) -> WorkflowOutput:
    """Run a workflow with the arguments it takes.

    Args:
        feedback: The judge's feedback on the previous attempt, in the same rollout.
        apart: Roles whose functions run in a separate thread (`call_function`), evaluated at the
            start.

    Raises:
        FunctionError: It returned something that is not a workflow's output.
    """
    arguments = {
        "task": TaskRow(task),
        "model": model,
        "auxiliary_models": auxiliary_models,
        "logger": logger,
    }
    # a function that only passes arguments on may name none
    if feedback is not None or names(func, "feedback"):
        arguments["feedback"] = feedback
    value = await call_function(func, arguments, apart=WORKFLOW.role in apart)
    return as_workflow_output(value, func)


async def call_judge(
    func: Callable[..., Any],
    *,
    task: Mapping[str, Any],
    response: Any,
    auxiliary_models: Mapping[str, Any],
    logger: Any,
    apart: Container[str] = (),
) -> JudgeOutput:
    """Run a judge with the arguments it takes, `apart` as for a workflow.

    Raises:
        FunctionError: It returned something that is not a judge's output, or no reward.
    """
    arguments = {
        "task": TaskRow(task),
        "response": response,
        "auxiliary_models": auxiliary_models,
        "logger": logger,
    }
    value = await call_function(func, arguments, apart=JUDGE.role in apart)
    return as_judge_output(value, func)


async def call_group_judge(
    func: Callable[..., Any],
    *,
    task: Mapping[str, Any],
    responses: Sequence[Any],
    auxiliary_models: Mapping[str, Any],
    logger: Any,
    apart: Container[str] = (),
) -> list[JudgeOutput]:
    """Run a judge on the responses of a group, `apart` as for a workflow.

    Raises:
        FunctionError: It did not return a judge's output for each response, in their order.
    """
    arguments = {
        "task": TaskRow(task),
        "responses": list(responses),
        "auxiliary_models": auxiliary_models,
        "logger": logger,
    }
    value = await call_function(func, arguments, apart=JUDGE.role in apart)
    if not isinstance(value, (list, tuple)):
        raise wrong_return(value, func, GROUP_JUDGE)
    if len(value) != len(responses):
        raise FunctionError(
            f"{where(func)} returned {len(value)} outputs for {len(responses)} responses; a judge "
            "of groups returns one for each, in their order"
        )
    return [as_judge_output(one, func) for one in value]


async def call_function(
    func: Callable[..., Any], arguments: Mapping[str, Any], *, apart: bool = False
) -> Any:
    """Call `func` with those of `arguments` that it takes, in a thread unless it is async.

    Args:
        func: Async or plain. A plain one may return the coroutine of an async one:
            `lambda task, model: run(task, model)`.
        arguments: By name.
        apart: Run even an async one in a thread, in its own event loop, since it may block it.
    """
    parameters = inspect.signature(func).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    taken = {name: value for name, value in arguments.items() if takes_any or name in parameters}
    call = _timed(functools.partial(func, **taken))
    try:
        if apart:
            async with RandomStates.alone():
                return await in_thread(lambda: asyncio.run(_awaited(call)))
        if is_async(func):
            return await call()
        async with RandomStates.alone():
            value = await in_thread(call)
        return await value if inspect.isawaitable(value) else value
    except FunctionError as error:  # a mistake in an output's field, or a missing one of the task
        if (place := raised_in(error)) is not None and place not in str(error):
            error.args = (f"{place}: {error}",)
        raise


SPENT: contextvars.ContextVar[list[float] | None] = contextvars.ContextVar("spent", default=None)
"""Gets the seconds of each function called here, from its first line to its last."""


def _timed(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call, which adds its seconds to `SPENT`, without those until it has its turn."""

    async def awaited(value: Awaitable[Any], started: float) -> Any:
        try:
            return await value
        finally:
            add(started)

    def add(started: float) -> None:
        if (spent := SPENT.get()) is not None:
            spent.append(time.perf_counter() - started)

    def timed() -> Any:
        started = time.perf_counter()
        value = call()
        if inspect.isawaitable(value):
            return awaited(value, started)
        add(started)
        return value

    return timed


async def _awaited(call: Callable[[], Any]) -> Any:
    value = call()
    return await value if inspect.isawaitable(value) else value


async def in_thread(func: Callable[[], Any]) -> Any:
    """Run `func` in a new thread.

    Unlike `asyncio.to_thread` there are as many threads as calls, so that plain functions run as
    concurrently as async ones, and one that hangs does not keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(value: Any, error: BaseException | None) -> None:
        if future.done():  # the caller was cancelled
            return
        if error is None:
            future.set_result(value)
        elif isinstance(error, StopIteration):
            future.set_exception(RuntimeError("the function raised StopIteration"))
        else:
            future.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = context.run(func)
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    # The watchdog recognises a suspended call of this function by this name.
    thread = threading.Thread(target=run, daemon=True, name="tuner-function")
    thread.start()
    return await future


async def called(func: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """The result of a function: an async one runs here, a plain one in a thread."""
    call = functools.partial(func, *args, **given)
    value = call() if is_async(func) else await in_thread(call)
    return await value if inspect.isawaitable(value) else value


def as_workflow_output(value: Any, func: Callable[..., Any]) -> WorkflowOutput:
    """`value`, which `func` returned, as our `WorkflowOutput`; AgentScope's is accepted too.

    Raises:
        WrongReturnError: It is neither that nor one of the plain values.
    """
    try:
        return _workflow_output(value, func)
    except FunctionError as error:
        raise WrongReturnError(str(error), value) from None


def _workflow_output(value: Any, func: Callable[..., Any]) -> WorkflowOutput:
    if isinstance(value, WorkflowOutput):
        return value
    if type(value).__name__ == WorkflowOutput.__name__ and hasattr(value, "response"):
        fields = {name: getattr(value, name) for name in WorkflowOutput.model_fields}
        return _of_fields(WorkflowOutput, fields, func)
    if isinstance(value, str) or callable(getattr(value, "get_text_content", None)):
        return WorkflowOutput(response=value)
    if value is None and not _never_returns(func):  # the content of an answer without text
        return WorkflowOutput()
    if isinstance(value, Mapping):
        return _of_fields(WorkflowOutput, value, func)
    if _is_number(value):
        return WorkflowOutput(reward=value, response=value)
    raise wrong_return(value, func, WORKFLOW)


def as_judge_output(value: Any, func: Callable[..., Any]) -> JudgeOutput:
    """`value`, which `func` returned, as our `JudgeOutput`; AgentScope's is accepted too.

    Raises:
        FunctionError: It is neither that nor one of the plain values, or has no reward.
    """
    if isinstance(value, JudgeOutput):
        return value
    named_alike = type(value).__name__ == JudgeOutput.__name__
    if named_alike and hasattr(value, "reward") and hasattr(value, "metrics"):
        feedback = getattr(value, "feedback", None)  # AgentScope's has none
        fields = {"reward": value.reward, "metrics": value.metrics, "feedback": feedback}
        return _of_fields(JudgeOutput, fields, func)
    if isinstance(value, Mapping):
        return _of_fields(JudgeOutput, value, func)
    if _is_number(value):
        return JudgeOutput(reward=value)
    raise wrong_return(value, func, JUDGE)


Output = TypeVar("Output", bound=FunctionOutput)


def _of_fields(output: type[Output], fields: Mapping[Any, Any], func: Callable[..., Any]) -> Output:
    try:
        return output(**{str(name): value for name, value in fields.items()})
    except FunctionError as error:
        raise FunctionError(f"{where(func)} returned {shown(fields)}; {error}") from None


def _is_number(value: Any) -> bool:
    try:
        _NUMBER.validate_python(value)
    except ValidationError:
        return False
    return True


def names(func: Callable[..., Any], parameter: str) -> bool:
    """Whether a function has a parameter of this name; `**kwargs` does not count."""
    return parameter in inspect.signature(func).parameters


def is_async(func: Callable[..., Any]) -> bool:
    """Whether calling `func` returns an awaitable."""
    inner = unwrapped(func)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(
        getattr(inner, "__call__", None)  # noqa: B004
    )


def where(func: Callable[..., Any]) -> str:
    """`name (file:line)` of a function, for error messages."""
    inner = unwrapped(func)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    code = _code(func)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else str(name)


def _code(func: Callable[..., Any]) -> CodeType | None:
    inner = unwrapped(func)
    target = inner if inspect.isroutine(inner) else vars(type(inner)).get("__call__", inner)
    return getattr(inspect.unwrap(target), "__code__", None)


def uses_agentscope(func: Callable[..., Any]) -> bool:
    """Whether a function, or the module that it is in, imports AgentScope."""
    code = _code(func)
    imported = [] if code is None else list(code.co_names)
    module = sys.modules.get(unwrapped(func).__module__)
    for value in () if module is None else vars(module).values():
        if issubclass(type(value), ModuleType):  # `isinstance` would ask what a proxy stands for
            imported.append(value.__name__)
        elif issubclass(type(value), (type, FunctionType)):
            imported.append(str(value.__module__))
    return any(name.partition(".")[0] == "agentscope" for name in imported)


def _never_returns(func: Callable[..., Any]) -> bool:
    """Whether a function has no `return` with a value."""
    if (code := _code(func)) is None:
        return False
    before = None
    for one in dis.get_instructions(code):
        none = one.argval is None
        if one.opname == "RETURN_VALUE":
            none = before is not None and (before.opname, before.argval) == ("LOAD_CONST", None)
        if one.opname.startswith("RETURN_") and not none:
            return False
        before = one
    return True


class WrongReturnError(FunctionError):
    """A workflow returned something of the wrong type: `value`."""

    def __init__(self, message: str, value: Any = None) -> None:
        super().__init__(message)
        self.value = value


def wrong_return(value: Any, func: Callable[..., Any], signature: Signature) -> FunctionError:
    """The error for a function that returned something of the wrong type."""
    hint = " (is a return statement missing?)" if value is None else ""
    plain = f", or {signature.plain}" if signature.plain else ""
    return FunctionError(
        f"{where(func)} returned {shown(value)}{hint}; a {signature.role} returns "
        f"{signature.output}{plain}"
    )


def unwrapped(func: Callable[..., Any]) -> Any:
    """The function inside `functools.partial`s."""
    while isinstance(func, functools.partial):
        func = func.func
    return func


# Places in the user's own code, for messages.


OURS = str(Path(__file__).resolve().parents[1])
LIBRARIES = (
    OURS,
    "<frozen",
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
)
"""Path prefixes of code that is not the user's."""


def place_of(frame: FrameType, line: int | None = None) -> str:
    """`name (file:line)` of a frame."""
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line or frame.f_lineno})"


def raised_in(error: BaseException) -> str | None:
    """The place in the user's own code where an error was raised; None if there is none."""
    frames = [one for one in _frames(error.__traceback__) if _is_own(one)]
    return place_of(frames[-1].tb_frame, frames[-1].tb_lineno) if frames else None


def traceback_of(error: BaseException) -> str:
    """The frames of the user's own code as in a traceback; the whole one with TUNER_DEBUG=1."""
    if debugging():
        return "".join(traceback.format_exception(error))
    frames = [(one.tb_frame, one.tb_lineno) for one in _frames(error.__traceback__) if _is_own(one)]
    return "".join(traceback.StackSummary.extract(iter(frames)).format())


class OwnFrames(contextlib.ContextDecorator, contextlib.AbstractContextManager["OwnFrames"]):
    """While the block or the decorated function runs, the traceback of a `TunerError` or of Ctrl-C
    has the user's frames alone.

    TUNER_DEBUG=1 leaves it whole.
    """

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, (TunerError, KeyboardInterrupt)) or debugging():
            return
        kept = None
        for one in reversed([one for one in _frames(trace) if _is_own(one)]):
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
        error.__traceback__ = kept


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(one: TracebackType) -> bool:
    return not one.tb_frame.f_code.co_filename.startswith(LIBRARIES)
