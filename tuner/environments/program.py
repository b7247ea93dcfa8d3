"""A program as agent: it finds the model by environment variables, and works in a folder.

    environment = Program(["node", "agent.js"], template="agent", judge=judge, train_dataset=tasks)
    tune(environment=environment)

Each rollout starts it in a fresh folder with its own key; all requests with that key are the
rollout's trace. The judge sees how it ended, its output and its files.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

from tuner.config.schema import FEW_ROLLOUTS
from tuner.encoding import DISPLAY_ERRORS, displayable
from tuner.environments.containers import ContainerEngine, ContainerLimits, owned_folder
from tuner.errors import ConfigError, ProgramError
from tuner.rewards.sandbox import Limits, ProgramResult, finished, remove, run
from tuner.runs.directory import outside_event_loop
from tuner.runs.environment import Environment
from tuner.tasks.functions import WorkflowOutput, shown
from tuner.tasks.loading import load_function

T = TypeVar("T", Limits, ContainerLimits)
_SHOWN_BYTES = 1_000_000  # a larger file is not compared line by line


class Workspaces:
    """Creates folders from templates, below `within` if that exists, and removes them.

    A template is read once: changes to it during the run have no effect.
    """

    def __init__(self, within: Path | None = None) -> None:
        self._within = within
        self._lock = threading.Lock()
        self._root: Path | None = None
        self._templates: dict[tuple[str, str | None], Path] = {}
        self._numbers = count(1)
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="tuner-folders")

    def __reduce__(self) -> tuple[type[Workspaces], tuple[Path]]:
        """Another process gets its own folders, within ours, because it may be killed."""
        with self._lock:
            return Workspaces, (self._made(),)

    def _made(self) -> Path:
        if self._root is None:
            if self._within is not None and self._within.is_dir():
                self._root = Path(tempfile.mkdtemp(dir=self._within))
            else:
                self._root = owned_folder()
            weakref.finalize(self, remove, self._root)
        return self._root

    def new(self, template: str | None, commit: str | None) -> tuple[Path, Path | None]:
        """A folder for one rollout, and what it was made from: nothing, a folder, or a commit of a
        git repository. Raises ConfigError."""
        with self._lock:
            folder = self._made() / f"{next(self._numbers):06d}"
            before = None if template is None else self._read(template, commit)
        if before is None:
            folder.mkdir()
        else:
            shutil.copytree(before, folder, symlinks=True)
        return folder, before

    def _read(self, template: str, commit: str | None) -> Path:
        assert self._root is not None
        read = self._templates.get((template, commit))
        if read is None:
            read = self._root / f"template-{len(self._templates)}"
            if commit is None:
                check_template(template, None)
                shutil.copytree(template, read, symlinks=True)
            else:
                _check_out(template, commit, read)
            self._templates[template, commit] = read
        return read

    def remove(self, folder: Path) -> None:
        """Remove a folder, in a thread: it may hold many files."""
        with suppress(RuntimeError):  # all are being removed
            self._remover.submit(remove, folder)

    def close(self) -> None:
        """Remove all folders."""
        self._remover.shutdown()
        with self._lock:
            if self._root is not None:
                remove(self._root)
            self._root, self._templates = None, {}
            self._remover = ThreadPoolExecutor(1, thread_name_prefix="tuner-folders")


def check_template(template: str, commit: str | None) -> None:
    """Raise ConfigError if a template does not exist; other machines' are not checked."""
    if commit is not None and ("://" in template or "@" in template):
        return
    if not os.path.isdir(template):
        raise ConfigError(f"template is {template!r}: there is no such folder")
    if commit is not None:
        _git("-C", template, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")


def _check_out(repository: str, commit: str, folder: Path) -> None:
    """Clone one commit of a repository, without sharing anything with it."""
    check_template(repository, commit)
    asked, found = commit, repository
    if os.path.isdir(repository):
        asked = _git("-C", repository, "rev-parse", f"{commit}^{{commit}}").strip()
        found = Path(repository).resolve().as_uri()
    try:
        _git("init", "--quiet", str(folder))
        _git("-C", str(folder), "fetch", "--quiet", "--depth=1", found, asked)
        _git("-C", str(folder), "checkout", "--quiet", "--detach", "FETCH_HEAD")
    except ConfigError:
        remove(folder)
        raise


def _git(*arguments: str) -> str:
    """The output of git; raises ConfigError if it failed or is not installed."""
    asked = " ".join(("git", *arguments))
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", *arguments],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except FileNotFoundError:
        raise ConfigError("commit is set, and git is not installed") from None
    if done.returncode:
        raise ConfigError(f"{asked} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def files_in(folder: Path) -> Iterator[str]:
    """Names of the regular files below a folder, sorted, without those of git and links."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            found = Path(path, name)
            if found.is_file() and not found.is_symlink():
                yield found.relative_to(folder).as_posix()


def difference(before: Path | None, given: Mapping[str, str], after: Path) -> str:
    """The changes in a folder since its template and the files given by name, as a unified
    diff."""
    old = {name: before / name for name in files_in(before)} if before else {}
    new = {name: after / name for name in files_in(after)}
    compared = []
    for name in sorted({*old, *new, *given}):
        was = given[name].encode() if name in given else old.get(name)
        compared.append(_compared(name, _shown(was), _shown(new.get(name))))
    return "".join(compared)


def _shown(content: Path | bytes | None) -> bytes | None:
    """A content, or that of a file; of a large one only a digest, since a program may fill the
    disk."""
    if isinstance(content, Path):
        if content.stat().st_size > _SHOWN_BYTES:
            with content.open("rb") as file:
                return b"\0" + hashlib.file_digest(file, "sha256").digest()
        return content.read_bytes()
    if content is not None and len(content) > _SHOWN_BYTES:
        return b"\0" + hashlib.sha256(content).digest()
    return content


def _compared(name: str, old: bytes | None, new: bytes | None) -> str:
    if old == new:
        return ""
    titles = (
        "/dev/null" if old is None else f"a/{name}",
        "/dev/null" if new is None else f"b/{name}",
    )
    try:
        if b"\0" in (old or b"") or b"\0" in (new or b""):
            raise ValueError("it is no text")
        was, now = ((text or b"").decode().splitlines(keepends=True) for text in (old, new))
    except ValueError:
        return f"Binary files {titles[0]} and {titles[1]} differ\n"
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(was, now, *titles)
    )


LIMITS = Limits(seconds=300.0, memory_mb=4096, output_bytes=4_000_000, disk_mb=1024, processes=64)
_ENDED = {
    "timeout": "ran for longer than {0.seconds:g} s (limits.seconds)",
    "memory": "used more memory than {0.memory_mb} MiB (limits.memory_mb)",
    "output": "wrote more than {0.output_bytes} bytes (limits.output_bytes)",
    "disk": "filled more of the disk than {0.disk_mb} MiB (limits.disk_mb)",
    "processes": "ran more processes than {0.processes} (limits.processes)",
}
_PULL_SECONDS = 1800.0
_IDLE = 2  # processes of a container besides the program's
_CLIENT = {"memory_mb": 4096, "processes": 64}  # limits of the client, which is outside of it
_KILLED = 128 + signal.SIGKILL
_URLS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "LLM_BASE_URL")
_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "LLM_API_KEY")
_MODELS = (
    *("OPENAI_MODEL", "LLM_MODEL", "ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"),
    *("ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL"),
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
)


@dataclass(eq=False)
class ProgramOutput:
    """The result of a program: the response for the judge.

    Its folder exists until the judge has ended. As text it is the program's standard output.

    Attributes:
        status: Its exit status.
        stdout, stderr: Its output.
        seconds: How long it ran.
        isolation: "bubblewrap", "process", "docker" or "podman".
        folder: Its working folder.
    """

    status: int
    stdout: str
    stderr: str
    seconds: float
    isolation: str
    folder: Path
    _before: Path | None = field(repr=False)
    _given: Mapping[str, str] = field(repr=False)

    def files(self) -> list[str]:
        """Names of the files in its folder, sorted, without git's own and links."""
        return list(files_in(self.folder))

    def text(self, name: str) -> str | None:
        """The content of one of its files; None if there is no such file, or it is a link."""
        found = self.folder / name
        inside = found.resolve().is_relative_to(self.folder.resolve())
        return found.read_text("utf-8", "replace") if inside and found.is_file() else None

    def diff(self) -> str:
        """Its changes in its folder, as a unified diff."""
        return difference(self._before, self._given, self.folder)

    def get_text_content(self) -> str:
        """The text that the trace stores."""
        return self.stdout.strip()

    __str__ = get_text_content


class Program(Environment):
    """Runs a program once for each rollout.

    In `command`, `template`, `commit` and the values of `environment` the names {prompt},
    {base_url}, {api_key}, {model} and the fields of the task are filled in; other braces stay.

    Args:
        command: The program and its arguments, without a shell. A relative path is relative to its
            working folder.
        prompt: How it gets the task: "stdin", "file:NAME" in its folder, or "argument" if `command`
            contains {prompt}.
        prompt_key: The field of the task with the prompt.
        template: A folder that is copied for each rollout; with `commit`, a git repository.
        commit: The commit of the repository to check out.
        judge: A judge's function, or `path/file.py:name`; its response is a `ProgramOutput`.
        train_dataset, eval_dataset: As for `tune()`.
        environment: Its variables besides those by which it finds the model.
        limits: Its limits; a mapping replaces some of `LIMITS`.
        statuses: Exit statuses of success; None: any. With another one the rollout has failed, and
            is not judged.
        isolation: "bubblewrap", "process", or "auto".
        readable: Additional files and folders that it may read in bubblewrap.
        image: A container image to run it in, by podman or docker; pulled if it is missing.
        network: Its container's: "none", in which it reaches the model only, or "host".
        keep: Folder to which the folders of failed rollouts are moved; None: they are removed.

    Raises:
        ConfigError: Arguments do not fit together, or there is no such template.
        MissingDependencyError: The image cannot be run here.
    """

    settings: Mapping[str, Any] = {"explorer.runner_per_model": FEW_ROLLOUTS}

    def __init__(
        self,
        command: Sequence[str],
        *,
        prompt: str = "stdin",
        prompt_key: str = "question",
        template: str | Path | None = None,
        commit: str | None = None,
        judge: Callable[..., Any] | str | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        environment: Mapping[str, str] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        statuses: Collection[int] | None = (0,),
        isolation: Literal["auto", "bubblewrap", "process"] = "auto",
        readable: Sequence[str | Path] = (),
        image: str | None = None,
        network: Literal["none", "host"] = "none",
        keep: str | Path | None = None,
    ) -> None:
        _check_command(command, prompt)
        if isinstance(judge, str):
            judge = load_function(judge, setting="judge")
        self.judge, self.train_dataset, self.eval_dataset = judge, train_dataset, eval_dataset
        self.limits = limits_of(LIMITS, limits)
        self._command, self._prompt, self._prompt_key = list(command), prompt, prompt_key
        self._template = None if template is None else os.fspath(template)
        self._commit, self._statuses, self._isolation = commit, statuses, isolation
        self._environment = {name: str(value) for name, value in (environment or {}).items()}
        self._readable = [Path(path).resolve() for path in readable]
        self._keep = None if keep is None else Path(keep)
        if commit is not None and template is None:
            raise ConfigError("commit is set without template: name the repository there")
        if template is not None and "{" not in f"{self._template}{commit}":
            check_template(str(self._template), commit)
        if network not in ("none", "host"):
            raise ConfigError(f"network is {network!r}: expected 'none' or 'host'")
        self._workspaces = Workspaces()
        self._image, self._network = image, network
        limited = {"memory_mb": self.limits.memory_mb, "processes": self.limits.processes + _IDLE}
        self._engine = ContainerEngine(ContainerLimits(**limited))
        if image is not None:  # fails here if it cannot be run
            outside_event_loop(lambda: asyncio.run(self._try_image(image)))

    async def _try_image(self, image: str) -> None:
        await self._engine.need(image, lambda: self._engine.pull(image, seconds=_PULL_SECONDS))
        await self._engine.close()

    async def workflow(self, task: dict[str, Any], model: Any) -> WorkflowOutput:
        """Run the program on a task; raises ProgramError if it failed, or was ended at a limit."""
        values = values_of(task, task[self._prompt_key], model)
        given = (self._template, self._commit)
        template, commit = (text if text is None else filled(text, values) for text in given)
        folder, before = await asyncio.to_thread(self._workspaces.new, template, commit)
        try:
            ended = await self._run(folder, values)
            self._check(ended)
        except BaseException as error:
            kept = self._give_up(folder, model)
            if kept is not None and isinstance(error, ProgramError):
                raise type(error)(f"{error}; its folder is kept in {kept}") from None
            raise
        assert ended.status is not None
        output = ProgramOutput(
            status=ended.status,
            stdout=ended.stdout,
            stderr=ended.stderr,
            seconds=ended.seconds,
            isolation=ended.isolation,
            folder=folder,
            _before=before,
            _given=self._given(values),
        )
        weakref.finalize(output, self._workspaces.remove, folder).atexit = False
        return WorkflowOutput(response=output, metrics={"program_seconds": ended.seconds})

    async def close(self) -> None:
        """Remove the remaining folders and containers."""
        await self._engine.close()
        await asyncio.to_thread(self._workspaces.close)

    async def _run(self, folder: Path, values: Mapping[str, str]) -> ProgramResult:
        for name, text in self._given(values).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        command = [filled(word, values) for word in self._command]
        stdin = values["prompt"] if self._prompt == "stdin" else None
        environment = model_variables(values) | {
            name: filled(value, values) for name, value in self._environment.items()
        }
        given: dict[str, Any] = {"folder": folder, "stdin": stdin, "gateway": values["base_url"]}
        if self._image is not None:
            return await self._contained(command, environment=environment, **given)
        given |= {"isolation": self._isolation, "readable": self._readable}
        return await run(command, environment=environment, limits=self.limits, **given)

    async def _contained(
        self,
        command: list[str],
        environment: dict[str, str],
        folder: Path,
        stdin: Any,
        gateway: str,
    ) -> ProgramResult:
        """Run it in a new container, which is removed."""
        engine, image, size = self._engine, str(self._image), self.limits.disk_mb
        await engine.need(image, lambda: engine.pull(image, seconds=_PULL_SECONDS))
        options = [f"--network={self._network}", "--read-only", f"--tmpfs=/tmp:rw,size={size}m"]
        options += ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
        options += [f"--ulimit=fsize={size * 2**20}", f"--user={os.getuid()}:{os.getgid()}"]
        if engine.kind == "podman" and os.getuid():
            options.append("--userns=keep-id")
        # A file, since a client that passes on its own input loses output when that ends.
        with tempfile.NamedTemporaryFile(dir=folder.parent) as given:
            given.write((stdin or "").encode(errors=DISPLAY_ERRORS))
            given.flush()
            options += [f"--volume={folder}:{folder}", f"--volume={given.name}:{given.name}:ro"]
            name = await engine.create(image, engine.default, options=options)
            words = ["sh", "-c", 'exec "$@" <"$0"', given.name, *command]
            words, variables = engine.exec_words(
                name, words, environment={"HOME": "/tmp", **environment}, workdir=str(folder)
            )
            inside = self._network == "none"
            try:
                async with engine.reaching(name, gateway) if inside else nullcontext():
                    ended = await run(
                        [engine.program, *engine.options, *words],
                        folder=folder,
                        environment=os.environ | variables,
                        limits=replace(self.limits, **_CLIENT),
                        isolation="process",
                    )
                if ended.status == _KILLED and await engine.out_of_memory(name):
                    ended = replace(ended, status=None, ended="memory")
                return replace(ended, isolation=engine.kind)
            finally:
                await finished(engine.remove(name))

    def _given(self, values: Mapping[str, str]) -> dict[str, str]:
        """Files for the program besides those of its template."""
        kind, _, name = self._prompt.partition(":")
        return {os.path.normpath(name): values["prompt"]} if kind == "file" else {}

    def _check(self, ended: ProgramResult) -> None:
        """Raise ProgramError if it did not end as it should."""
        name = self._command[0]
        if ended.ended != "exited":
            raise ProgramError(f"{name} {_ENDED[ended.ended].format(self.limits)}")
        if self._statuses is not None and ended.status not in self._statuses:
            complaint = (ended.stderr or ended.stdout).strip()[-1000:]
            raise ProgramError(f"{name} ended with {ended.status}: {complaint}")

    def _give_up(self, folder: Path, model: Any) -> Path | None:
        """Remove the folder of a failed rollout, or keep it if configured; returns where it is
        kept."""
        if self._keep is None:
            self._workspaces.remove(folder)
            return None
        session = getattr(model, "session", None)
        name = re.sub(r"[^\w.-]+", "-", str(getattr(session, "id", folder.name)))
        self._keep.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._keep / name, ignore_errors=True)
        return Path(shutil.move(folder, self._keep / name))


def values_of(task: Mapping[str, Any], prompt: Any, model: Any) -> dict[str, str]:
    """Values for `filled`: the task's fields, its prompt, and the model."""
    return displayable({name: str(value) for name, value in task.items()}) | {
        "prompt": displayable(str(prompt)),
        "base_url": model.base_url,
        "api_key": model.api_key,
        "model": model.model_name,
    }


def model_variables(values: Mapping[str, str]) -> dict[str, str]:
    """The variables by which programs find the model: OpenAI's, Anthropic's and those of CLIs."""
    without_version = values["base_url"].removesuffix("/v1")  # Anthropic's clients add it
    return {
        **dict.fromkeys(_URLS, values["base_url"]),
        **dict.fromkeys(_KEYS, values["api_key"]),
        **dict.fromkeys(_MODELS, values["model"]),
        "ANTHROPIC_BASE_URL": without_version,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def filled(text: str, values: Mapping[str, str]) -> str:
    """A text with `{name}` replaced by its value, if there is one."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def _check_command(command: Any, prompt: str) -> None:
    words = not isinstance(command, str) and isinstance(command, Sequence)
    if not words or not command or not all(isinstance(word, str) for word in command):
        raise ConfigError(
            f"command is {shown(command)}: give a list, the program and its arguments; "
            "what needs a shell is ['sh', '-c', '...']"
        )
    given = any("{prompt}" in word for word in command)
    if prompt == "argument" and not given:
        raise ConfigError("prompt is 'argument', and no word of command has {prompt}")
    kind, _, name = prompt.partition(":")
    if kind == "file" and name and not os.path.isabs(name) and ".." not in Path(name).parts:
        return
    if prompt not in ("argument", "stdin"):
        raise ConfigError(
            f"prompt is {prompt!r}: expected 'stdin', 'argument' or 'file:NAME', in its folder"
        )


def limits_of(default: T, given: Any) -> T:
    """Limits with some replaced by a mapping, or those given instead; raises ConfigError."""
    if isinstance(given, type(default)):
        return given
    given, known = dict(given or {}), vars(default)
    if wrong := [name for name in given if name not in known]:
        raise ConfigError(f"limits has no {wrong[0]!r}; there are {', '.join(known)}")
    try:
        return replace(default, **given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"limits: {error}") from None
