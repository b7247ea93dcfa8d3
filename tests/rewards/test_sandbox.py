"""A program keeps to its limits, and nothing of it is left when it has ended."""

import asyncio
import os
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from tuner.errors import MissingDependencyError, SandboxError
from tuner.rewards import sandbox
from tuner.rewards.sandbox import Limits, run

KINDS = ["process", "bubblewrap"]
FOREVER = "import signal; signal.pause()"


@pytest.fixture(params=KINDS)
def kind(request):
    """Each isolation that there is on this machine."""
    if request.param == "bubblewrap" and sandbox.available() != "bubblewrap":
        pytest.skip("bubblewrap is not installed, or does not work here")
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch, tmp_path):
    """Counts the processes that began in its folder, wherever they are now, and what is in the
    folder for temporary things."""
    with tempfile.TemporaryDirectory() as temporary:  # a socket's path must be short
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        yield
        assert not psutil.wait_procs(those_in(tmp_path), timeout=10)[1]
        assert os.listdir(temporary) == []


def those_in(folder):
    found = psutil.process_iter(["cwd"])
    return [process for process in found if str(folder) in (process.info["cwd"] or "")]


def python(code):
    return [sys.executable, "-c", code]


async def test_a_program_gets_what_it_is_given_and_nothing_else(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    code = "import os, sys; print(sys.stdin.read(), os.getcwd()); print(sorted(os.environ))"
    finished = await run(
        python(code), folder=tmp_path, stdin="hello", environment={"GIVEN": "1"}, isolation=kind
    )
    first, second = finished.stdout.splitlines()
    assert first == f"hello {tmp_path}"
    inherited = set(eval(second)) - {"PWD", "LC_CTYPE"}
    assert inherited == {"GIVEN", "HOME", "LANG", "PATH", "TMPDIR"}
    assert (finished.status, finished.ended, finished.stderr) == (0, "exited", "")
    assert finished.isolation == kind


@pytest.mark.parametrize(("code", "status"), [("exit 3", 3), ("kill -9 $$", 128 + 9)])
async def test_its_status_is_the_one_that_a_shell_has(kind, code, status, tmp_path):
    finished = await run(["sh", "-c", code], folder=tmp_path, isolation=kind)
    assert (finished.ended, finished.status) == ("exited", status)


async def test_what_it_writes_stays_in_its_folder(kind, tmp_path):
    code = "open('kept', 'w').write('x'); open(f'{__import__(\"os\").environ[\"HOME\"]}/y', 'w')"
    finished = await run(python(code), folder=tmp_path, isolation=kind)
    assert finished.status == 0, finished.stderr
    assert (tmp_path / "kept").read_text() == "x"


async def test_a_program_that_is_not_there_is_an_error_of_its_own(kind, tmp_path):
    with pytest.raises(SandboxError, match="no-such-program: No such file"):
        await run(["no-such-program"], folder=tmp_path, isolation=kind)


async def test_an_endless_program_ends_at_its_deadline(kind, tmp_path):
    finished = await run(
        ["sh", "-c", "echo begun; while :; do :; done"],  # begins sooner than Python does
        folder=tmp_path,
        limits=Limits(seconds=1),
        isolation=kind,
    )
    assert (finished.ended, finished.status, finished.stdout) == ("timeout", None, "begun\n")


async def test_it_ends_in_time_while_the_event_loop_is_kept(kind, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = f"open('pipe', 'w').write('begun')\n{FOREVER}"
    before = {*psutil.Process().children(recursive=True)}
    running = asyncio.ensure_future(
        run(python(code), folder=tmp_path, limits=Limits(seconds=0.5), isolation=kind)
    )
    assert await asyncio.to_thread((tmp_path / "pipe").read_text) == "begun"
    below = [one for one in psutil.Process().children(recursive=True) if one not in before]
    _, alive = psutil.wait_procs(below[-1:], timeout=20)
    assert not alive  # and nobody has run the loop meanwhile
    assert (await running).ended == "timeout"


DAEMON = """
import os, sys
if not os.fork():
    os.setsid()
    if not os.fork():
        for fd in range(3):
            os.close(fd)
        with open("daemon", "w") as file:
            file.write("here")
        os.rename("daemon", "begun")
        import signal
        signal.pause()
    os._exit(0)
os.wait()
while not os.path.exists("begun"):
    pass
"""


async def test_a_daemon_ends_with_the_program_that_left_it(kind, tmp_path):
    finished = await run(python(DAEMON), folder=tmp_path, isolation=kind)
    assert (finished.status, finished.stderr) == (0, "")
    assert (tmp_path / "begun").exists()


@pytest.mark.long
async def test_a_daemon_ends_at_the_deadline(kind, tmp_path):
    limits = Limits(seconds=1.5)
    code = f"{DAEMON}\n{FOREVER}"
    finished = await run(python(code), folder=tmp_path, limits=limits, isolation=kind)
    assert finished.ended == "timeout"
    assert (tmp_path / "begun").exists()


async def test_a_daemon_ends_where_the_program_killed_who_looks_after_it(tmp_path):
    code = f"{DAEMON}\nos.kill(os.getppid(), 9)\n{FOREVER}"
    with pytest.raises(SandboxError, match="broke with -9"):
        await run(python(code), folder=tmp_path, isolation="process")
    assert (tmp_path / "begun").exists()


BOMB = """
import os, time
end = time.monotonic() + 20  # on a machine that does not hold it, it still ends
while time.monotonic() < end:
    try:
        os.fork()
    except OSError:
        pass
"""


async def test_a_program_that_forks_without_end_is_ended(kind, tmp_path):
    limits = Limits(seconds=10, processes=8)
    finished = await run(python(BOMB), folder=tmp_path, limits=limits, isolation=kind)
    assert (finished.ended, finished.status) == ("processes", None)


async def test_a_program_that_fills_the_memory_is_ended(kind, tmp_path):
    code = "import time\nheld = []\nwhile True: held.append(bytearray(2**22)); time.sleep(0.005)"
    limits = Limits(memory_mb=128)
    finished = await run(python(code), folder=tmp_path, limits=limits, isolation=kind)
    assert finished.ended == "memory"


async def test_its_processes_share_the_memory(kind, tmp_path):
    code = f"import os\nos.fork(), os.fork()\nheld = bytearray(b'x' * 2**26)\n{FOREVER}"
    limits = Limits(memory_mb=160)
    finished = await run(python(code), folder=tmp_path, limits=limits, isolation=kind)
    assert finished.ended == "memory"


async def test_one_step_beyond_the_memory_is_refused_by_the_kernel(kind, tmp_path):
    finished = await run(
        python("bytearray(2**32)"), folder=tmp_path, limits=Limits(memory_mb=128), isolation=kind
    )
    assert finished.status == 1
    assert "MemoryError" in finished.stderr


async def test_a_program_that_writes_without_end_is_ended(kind, tmp_path):
    limits = Limits(output_bytes=10_000)
    finished = await run(["yes"], folder=tmp_path, limits=limits, isolation=kind)
    assert (finished.ended, finished.status) == ("output", None)
    assert len(finished.stdout) == 10_000


async def test_both_streams_count(kind, tmp_path):
    code = (
        "import sys; sys.stdout.write('x' * 600); sys.stdout.flush(); sys.stderr.write('y' * 600)"
    )
    limits = Limits(output_bytes=1000)
    finished = await run(python(code), folder=tmp_path, limits=limits, isolation=kind)
    assert finished.ended == "output"
    assert len(finished.stdout + finished.stderr) == 1000


@pytest.mark.parametrize(
    "code",
    [
        "open('x', 'wb').write(bytes(2**22))",
        f"for n in range(64): open(f'x{{n}}', 'wb').write(bytes(2**16))\n{FOREVER}",
        f"for n in range(600): open(f'x{{n}}', 'wb')\n{FOREVER}",
    ],
    ids=["one file", "many", "many empty ones"],
)
async def test_a_program_that_fills_the_disk_is_ended(kind, code, tmp_path):
    if "2**22" in code:
        code = f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n{code}"
    limits = Limits(disk_mb=2)
    finished = await run(python(code), folder=tmp_path, limits=limits, isolation=kind)
    assert (finished.ended, finished.status) == ("disk", None), finished


async def test_what_was_in_its_folder_does_not_count(kind, tmp_path):
    (tmp_path / "large").write_bytes(bytes(2**22))
    code = "import time; open('x', 'wb').write(bytes(2**16)); time.sleep(0.5)"
    limits = Limits(disk_mb=2)
    finished = await run(python(code), folder=tmp_path, limits=limits, isolation=kind)
    assert finished.status == 0, finished


async def test_cancelled_it_ends_at_once_with_all_that_it_started(kind, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = DAEMON + f"\nopen('pipe', 'w').write('begun')\n{FOREVER}"
    before = {*psutil.Process().children(recursive=True)}
    running = asyncio.ensure_future(run(python(code), folder=tmp_path, isolation=kind))
    assert await asyncio.to_thread((tmp_path / "pipe").read_text) == "begun"
    below = {*psutil.Process().children(recursive=True)} - before
    assert len(below) >= 3
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not any(process.is_running() for process in below)


STARTS = """
import asyncio, sys
from pathlib import Path
from tuner.rewards.sandbox import run
command = [sys.executable, "-c", sys.argv[1]]
asyncio.run(run(command, folder=Path(sys.argv[2]), isolation=sys.argv[3]))
"""


@pytest.mark.long
async def test_it_ends_where_we_are_killed(kind, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    code = DAEMON + f"\nopen('pipe', 'w').write('begun')\n{FOREVER}"
    ours = await asyncio.create_subprocess_exec(
        *python(STARTS),
        *(code, str(tmp_path), kind),
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    )
    assert await asyncio.to_thread((tmp_path / "pipe").read_text) == "begun"
    below = psutil.Process(ours.pid).children(recursive=True)
    assert len(below) >= 3
    ours.kill()
    await ours.wait()
    assert not psutil.wait_procs(below, timeout=10)[1]
    for name in os.listdir(tempfile.gettempdir()):  # which nobody was there to remove
        sandbox.remove(Path(tempfile.gettempdir(), name))


async def test_many_run_at_once(kind, tmp_path):
    def one(n):
        return run(["sh", "-c", f"echo {n}"], folder=tmp_path, isolation=kind)

    finished = await asyncio.gather(*map(one, range(8)))
    assert [int(f.stdout) for f in finished] == list(range(8))


@pytest.fixture
def server():
    """A server of this machine, as a gateway is one."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


ASKS = """
import os, urllib.request
from concurrent.futures import ThreadPoolExecutor
def ask(n):
    body = bytes([65 + n]) * 200_000
    return urllib.request.urlopen(os.environ["URL"] + "/echo", body, timeout=20).read() == body
with ThreadPoolExecutor(8) as pool:
    print(all(pool.map(ask, range(16))))
"""


async def test_the_gateway_is_reached_under_its_own_address(kind, server, tmp_path):
    finished = await run(
        python(ASKS), folder=tmp_path, environment={"URL": server}, gateway=server, isolation=kind
    )
    assert finished.stdout == "True\n", finished.stderr


needs_bubblewrap = pytest.mark.skipif(
    sandbox.available() != "bubblewrap", reason="bubblewrap does not work here"
)


@needs_bubblewrap
async def test_nothing_but_the_gateway_is_reached(server, tmp_path):
    environment = {"URL": server}
    finished = await run(
        python(ASKS), folder=tmp_path, environment=environment, isolation="bubblewrap"
    )
    assert finished.status == 1
    assert "Connection refused" in finished.stderr
    code = "import socket; print([n for _, n in socket.if_nameindex()])"
    finished = await run(python(code), folder=tmp_path, gateway=server, isolation="bubblewrap")
    assert finished.stdout == "['lo']\n"
    with pytest.raises(SandboxError, match="can reach only one on this"):
        await run(["true"], folder=tmp_path, gateway="http://far:80", isolation="bubblewrap")


@needs_bubblewrap
async def test_files_of_ours_are_not_seen_or_written(tmp_path):
    ours, inside = tmp_path / "ours", tmp_path / "inside"
    ours.mkdir(), inside.mkdir()
    (ours / "token").write_text("secret")
    read = ["cat", str(ours / "token")]
    hidden = await run(read, folder=inside, isolation="bubblewrap")
    assert hidden.status == 1
    shown = await run(read, folder=inside, isolation="bubblewrap", readable=[ours])
    assert shown.stdout == "secret"
    write = ["sh", "-c", f"echo > {ours}/token || echo > /usr/x || echo > {sys.prefix}/x"]
    written = await run(write, folder=inside, isolation="bubblewrap", readable=[ours])
    assert written.status != 0
    assert (ours / "token").read_text() == "secret"


@needs_bubblewrap
async def test_it_cannot_report_for_its_supervisor(tmp_path):
    code = """
import os
for fd in range(64):
    try:
        os.write(os.open(f"/proc/1/fd/{fd}", os.O_WRONLY), b'{"ended": "exited", "status": 0}\\n')
        print("wrote")
    except OSError:
        pass
raise SystemExit(5)
"""
    finished = await run(python(code), folder=tmp_path, isolation="bubblewrap")
    assert (finished.status, finished.stdout) == (5, "")


async def test_bubblewrap_that_does_not_work_is_refused_or_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sandbox, "bubblewrap", lambda: "bwrap is broken")
    with pytest.raises(MissingDependencyError, match="isolation is 'bubblewrap', and bwrap is"):
        await run(["true"], folder=tmp_path, isolation="bubblewrap")
    sandbox._say_once.cache_clear()
    for _ in range(2):
        finished = await run(["true"], folder=tmp_path)
    assert finished.isolation == "process"
    assert caplog.text.count("ordinary processes of this user") == 1


def test_a_limit_is_above_zero():
    with pytest.raises(ValueError, match="seconds is 0"):
        Limits(seconds=0)


def test_a_folder_that_was_closed_is_removed(tmp_path):
    folder = tmp_path / "outer"
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "file").write_text("x")
    (folder / "inner").chmod(0)
    folder.chmod(0)
    sandbox.remove(Path(folder))
    assert not folder.exists()
