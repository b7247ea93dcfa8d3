"""Images in requests of every dialect, by real clients, with an engine and a vision model."""

import base64
import io
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai
import psutil
import pytest
from anthropic import BadRequestError
from PIL import Image

from tests.kit.models import png, vision_model
from tests.kit.toy import StubEngine, gateway_of, tokenizer, vision_gateway
from tuner.engines.images import ALBUM, Album, ImageLimits
from tuner.gateway import ChatRenderer
from tuner.gateway.dialects.anthropic import read_messages_request
from tuner.gateway.dialects.chat import read_chat_request
from tuner.gateway.dialects.responses import read_responses_request
from tuner.gateway.families.renderer import _mark, _marked
from tuner.gateway.request_error import RequestError
from tuner.gateway.service import Service
from tuner.traces.store import TraceStore, read_traces
from tuner.traces.trace import Outcome, RolloutId, Trace


def url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def image(content: bytes | str) -> dict:
    sent = content if isinstance(content, str) else url(content)
    return {"type": "image_url", "image_url": {"url": sent}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def vision():
    return vision_model()


async def ask(session, messages: list, **fields):
    client = session.async_client()
    spoken = tokenizer().encode("a")[0]
    return await client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=4, logit_bias={str(spoken): 100}, **fields
    )


def processors_ids(model, spoken, messages: list, images: list[bytes]) -> list[int]:
    """The prompt as transformers' own processor writes it."""
    shaped = []
    for message in messages:
        parts = message["content"]
        if isinstance(parts, list):
            parts = [{"type": "image"} if p["type"] == "image_url" else p for p in parts]
        shaped.append({**message, "content": parts})
    written = spoken.apply_chat_template(shaped, tokenize=False, add_generation_prompt=True)
    images = [Image.open(io.BytesIO(one)).convert("RGB") for one in images]
    return model.vision.processor(images=images, text=written)["input_ids"][0]


async def test_prompts_are_those_of_the_models_own_processor_and_go_on(vision):
    """Over three turns, with equal words around other images, tool results and a stream."""
    model, spoken = vision
    one, two, three = png(20, 12, seed=1), png(12, 20, seed=2), png(12, 20, seed=3)
    called = {"name": "look", "arguments": "{}"}
    async with vision_gateway(*vision) as gateway:
        session = gateway.open_session("r")
        messages = [{"role": "user", "content": [text("What"), image(one), text("?")]}]
        said = (await ask(session, messages)).choices[0].message.content
        first = session.calls[0]
        assert list(first.prompt_ids) == processors_ids(model, spoken, messages, [one])
        kept = f"sha256:{ALBUM.add(one, ImageLimits())}"
        assert first.messages[0]["content"][1] == image(kept)
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": [image(two), image(one)]},
        ]
        seen = []
        for last in (two, three):
            messages[-1] = {"role": "user", "content": [image(last), image(one)]}
            stream = await ask(session, messages, stream=True)
            _ = [chunk async for chunk in stream]
            call = session.calls[-1]
            wanted = processors_ids(model, spoken, messages, [one, last, one])
            assert call.reused_ids == len(first.prompt_ids) + len(first.completion_ids)
            assert list(call.prompt_ids) == wanted
            seen.append(call)
        assert seen[0].prompt_ids == seen[1].prompt_ids
        assert seen[0].images != seen[1].images
        assert seen[0].compared.prompt_ids != seen[1].compared.prompt_ids
        # The second prompt shares all before its image with the first one, and no more.
        shared = seen[0].images[1].start
        assert seen[1].cached_tokens == shared
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": called}],
            },
            {"role": "tool", "tool_call_id": "c", "content": [text("zoomed"), image(two)]},
        ]
        await ask(session, messages)
        assert [one.sha256 for one in session.calls[-1].images][-1] == seen[0].images[1].sha256


async def test_the_other_dialects_read_the_same_prompt(vision):
    one = png(20, 12, seed=1)
    async with vision_gateway(*vision) as gateway:
        session = gateway.open_session("r")
        await ask(session, [{"role": "user", "content": [text("What?"), image(one)]}])
        data = base64.b64encode(one).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        client = session.async_anthropic()
        shown = [text("What?"), {"type": "image", "source": source}]
        asked = {"model": "tiny", "messages": [{"role": "user", "content": shown}]}
        await client.messages.create(max_tokens=4, **asked)
        counted = await client.messages.count_tokens(**asked)
        source["type"] = "file"
        with pytest.raises(BadRequestError, match=r'source\.type is "file"'):
            await client.messages.create(max_tokens=4, **asked)
        parts = [
            {"type": "input_text", "text": "What?"},
            {"type": "input_image", "image_url": url(one), "detail": "auto"},
        ]
        answer = await session.async_client().responses.create(
            model="tiny", input=[{"role": "user", "content": parts}], max_output_tokens=4
        )
        await session.async_client().responses.create(
            model="tiny", input="And now?", previous_response_id=answer.id, max_output_tokens=4
        )
        *equal, last = session.calls
        assert len({call.prompt_ids for call in equal}) == 1
        assert len({call.images for call in (*equal, last)}) == 1
        assert counted.input_tokens == len(equal[0].prompt_ids)


def saved(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def gif(frames: int) -> bytes:
    images = [Image.new("RGB", (8, 8), (80 * frame, 0, 0)) for frame in range(frames)]
    return saved(images[0], "GIF", save_all=True, append_images=images[1:])


REFUSED = {
    "empty": (b"", "is no data URL|is no image"),
    "not an image": (b"<svg></svg>", "is no image that can be read"),
    "cut off": (png(64, 64)[:900], "is no image that can be read"),
    "animated": (gif(3), "is animated: send one frame"),
    "another format": (saved(Image.new("RGB", (8, 8)), "BMP"), "send PNG, JPEG"),
    "a bomb": (saved(Image.new("1", (9000, 6000)), "PNG"), "has 9000 x 6000 pixels: at most"),
    "large": (png(100, 100), "has [0-9]+ bytes: at most 20000 are accepted"),
    "base64": ("data:image/png;base64,@@@@", "is not valid base64"),
    "no base64": ("data:image/png,abc", "encode the image in base64"),
    "the web": ("https://user:secret@example.com/a.png?key=secret", "nothing is fetched"),
    "a file": ("file:///etc/passwd", "set tuner.images.folder"),
    "unknown": ("sha256:" + "0" * 64, "was not sent before"),
    "words": ("image.png", "is no data URL"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_an_image_that_cannot_be_used_is_named(vision, case):
    content, why = REFUSED[case]
    async with vision_gateway(*vision, content=20_000) as gateway:
        session = gateway.open_session("r")
        with pytest.raises(openai.BadRequestError, match=why) as caught:
            await ask(session, [{"role": "user", "content": [text("?"), image(content)]}])
        place = "messages[0].content[1].image_url.url"
        assert caught.value.body["param"] == place
        assert "secret" not in str(caught.value)
        assert not session.calls


ODD = {
    "1x1": png(1, 1),
    "cmyk": saved(Image.new("CMYK", (20, 12), (0, 255, 255, 0)), "JPEG"),
    "palette": saved(Image.new("P", (20, 12)), "PNG", transparency=0),
    "grey and alpha": saved(Image.new("LA", (20, 12), (9, 0)), "PNG"),
    "16 bits": saved(Image.new("I;16", (20, 12), 40000), "PNG"),
    "webp": saved(Image.new("RGB", (20, 12)), "WEBP"),
    "one frame": gif(1),
}


@pytest.mark.parametrize("case", ODD)
async def test_odd_images_are_read(vision, case):
    async with vision_gateway(*vision) as gateway:
        session = gateway.open_session("r")
        await ask(session, [{"role": "user", "content": [image(ODD[case])]}])
        assert session.calls[0].images
    sha256 = ALBUM.add(ODD[case], ImageLimits())
    assert ALBUM.open(sha256).mode == "RGB"
    if case in ("palette", "grey and alpha"):
        assert ALBUM.open(sha256).getpixel((0, 0)) == (255, 255, 255)
    if case == "16 bits":
        assert ALBUM.open(sha256).getpixel((0, 0)) == (156, 156, 156)


def test_a_cameras_rotation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6
    sha256 = ALBUM.add(saved(Image.new("RGB", (20, 12)), "JPEG", exif=exif), ImageLimits())
    assert ALBUM.open(sha256).size == (12, 20)


async def test_other_refusals_name_the_field(vision, tmp_path):
    one = png()
    file = tmp_path / "allowed" / "a.png"
    file.parent.mkdir()
    file.write_bytes(one)
    (tmp_path / "secret.png").write_bytes(one)
    (tmp_path / "allowed" / "link.png").symlink_to(tmp_path / "secret.png")
    low = {"type": "image_url", "image_url": {"url": url(one), "detail": "low"}}
    cases = [
        ([{"role": "system", "content": [image(one)]}], "this model reads text parts only"),
        ([{"role": "user", "content": [low]}], 'image_url.detail is "low"'),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": [image(one)] * 3}], "send at most 2"),
        ([{"role": "user", "content": [image(one), text("<|image_pad|>")]}], "remove it"),
        ([{"role": "user", "content": [{"type": "video"}]}], "text and image_url parts only"),
        *(
            ([{"role": "user", "content": [image(f"file://{tmp_path}/{name}")]}], why)
            for name, why in (
                ("secret.png", "is not in tuner.images.folder"),
                ("allowed/../secret.png", "is not in tuner.images.folder"),
                ("allowed/link.png", "is not in tuner.images.folder"),
                ("allowed/none.png", "cannot be read"),
            )
        ),
    ]
    async with vision_gateway(*vision, count=2, folder=file.parent) as gateway:
        session = gateway.open_session("r")
        for messages, why in cases:
            with pytest.raises(openai.BadRequestError, match=why):
                await ask(session, messages)
        assert not session.calls
        await ask(session, [{"role": "user", "content": [image(f"file://{file}")]}])
        assert session.calls[0].images[0].sha256 == ALBUM.add(one, ImageLimits())
    async with gateway_of(StubEngine()) as gateway:
        session = gateway.open_session("r")
        with pytest.raises(openai.BadRequestError, match="this model reads text parts only"):
            await ask(session, [{"role": "user", "content": [image(one)]}])


class ImageHost(ThreadingHTTPServer):
    """A host of images, by path, that counts requests."""

    def __init__(self, replies: dict[str, tuple[int, bytes | str]]) -> None:
        seen = self.seen = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, content = replies[self.path]
                seen.append(self.path)
                self.send_response(status)
                if isinstance(content, str):
                    self.send_header("Location", content)
                self.end_headers()
                self.wfile.write(b"" if isinstance(content, str) else content)

            def log_message(self, *words: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


async def test_images_on_allowed_hosts_are_fetched_once(vision, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "*")
    one = png(20, 12, seed=9)
    replies = {"/a": (200, one), "/moved": (302, "/a"), "/none": (404, b""), "/text": (200, b"?")}
    replies["/large"] = (200, bytes(30_000))
    with ImageHost(replies) as host:
        threading.Thread(target=host.serve_forever, args=(0.01,), daemon=True).start()
        place = f"127.0.0.1:{host.server_port}"
        replies["/away"] = (302, f"http://localhost:{host.server_port}/a")
        limits = {"content": 20_000, "hosts": frozenset({"127.0.0.1"})}
        async with vision_gateway(*vision, **limits) as gateway:
            session = gateway.open_session("r")
            for path in ("a", "a", "moved"):
                shown = [text("?"), image(f"http://{place}/{path}")]
                await ask(session, [{"role": "user", "content": shown}])
            sha256 = ALBUM.add(one, ImageLimits())
            assert [call.images[0].sha256 for call in session.calls] == [sha256] * 3
            assert session.calls[0].messages[0]["content"][1] == image(f"sha256:{sha256}")
            assert host.seen == ["/a", "/moved", "/a"]
            refused = {
                f"{place}/away": "on the host 'localhost'",
                f"localhost:{host.server_port}/a": "tuner.images.hosts",
                f"127.0.0.1@localhost:{host.server_port}/a": "tuner.images.hosts",
                f"{place}/none": "its host answers 404",
                f"{place}/text": "is no image that can be read",
                f"{place}/large": "at most 20000 are accepted",
                "127.0.0.1:1/a": "ConnectError",
                "127.0.0.1:x": "cannot be fetched",
            }
            for address, why in refused.items():
                messages = [{"role": "user", "content": [image(f"http://{address}")]}]
                with pytest.raises(openai.BadRequestError, match=why) as caught:
                    await ask(session, messages)
                assert caught.value.body["param"] == "messages[0].content[0].image_url.url"
            assert host.seen[3:] == ["/away", "/none", "/text", "/large"]
            assert len(session.calls) == 3
        async with vision_gateway(*vision) as gateway:  # which has no hosts
            messages = [{"role": "user", "content": [image(f"http://{place}/a")]}]
            with pytest.raises(openai.BadRequestError, match=r"tuner\.images\.hosts"):
                await ask(gateway.open_session("r"), messages)
        host.shutdown()


async def test_a_trace_keeps_each_image_once(vision, tmp_path):
    one, two = png(20, 12, seed=5), png(20, 12, seed=6)
    async with vision_gateway(*vision) as gateway:
        session = gateway.open_session("r")
        for content in ([image(one), image(two)], [image(one), text("?")]):
            await ask(session, [{"role": "user", "content": content}])
        calls = tuple(session.calls)
    trace = Trace(
        id=RolloutId(1, 0, 0), task={}, calls=calls, outcome=Outcome.COMPLETED, reward=1.0
    )
    store = TraceStore(tmp_path, vocabulary=len(vision[1]))
    store.append(trace)
    store.append(trace)
    files = sorted((tmp_path / "images").iterdir())
    assert sorted(file.read_bytes() for file in files) == sorted([one, two])
    line = store.path("train", 1).read_text()
    assert base64.b64encode(one).decode()[:40] not in line
    (found,) = read_traces(store.path("train", 1))
    assert found == trace
    assert [call.compared for call in found.calls] == [call.compared for call in calls]
    assert ALBUM.content(calls[0].images[0].sha256) == one


def test_images_from_elsewhere_are_read_outside_the_event_loop(vision):
    renderer = ChatRenderer(vision[1], vision=vision[0].vision)
    service = Service(StubEngine(), renderer, "tiny", "template")
    for place, long in (("file:///a.png", True), ("https://h/a", True), (url(png()), False)):
        messages = [{"role": "user", "content": [image(place)]}]
        body = json.dumps({"model": "tiny", "messages": messages}).encode()
        assert read_chat_request(body, service).long is long


@pytest.mark.parametrize("bodies", [1500, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_fuzzed_parts_are_read_or_refused_by_name(vision, bodies):
    """No value in the place of a part, a URL, a source or an image raises anything else, and none
    takes memory."""
    draw = random.Random(bodies)
    pixels = Image.open(io.BytesIO(png(12, 12)))
    formats = [saved(pixels, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]
    before = psutil.Process().memory_info().rss
    renderer = ChatRenderer(vision[1], vision=vision[0].vision, image_limits=ImageLimits(2, 4000))
    service = Service(StubEngine(), renderer, "tiny", "template")
    odd = [None, "", 0, [], {}, "auto", "low", "\ud800", "data:image/png;base64,", "file://x", True]

    def content() -> str:
        raw = bytearray(draw.choice(formats))
        for _ in range(draw.randrange(4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        return url(bytes(raw[: draw.choice([len(raw), draw.randrange(len(raw))])]))

    def changed(value):
        if draw.random() < 0.1:
            return draw.choice(odd)
        if isinstance(value, dict):
            left = {key: changed(item) for key, item in value.items() if draw.random() < 0.95}
            return {**left, "extra": 1} if draw.random() < 0.05 else left
        if isinstance(value, list):
            return [changed(item) for item in value] * draw.choice([1, 1, 1, 2])
        return value

    readers = {
        "chat": lambda body: read_chat_request(body, service),
        "messages": lambda body: read_messages_request(body, service),
        "responses": lambda body: read_responses_request(body, {}, service).completion,
    }
    refused, served, statuses = 0, 0, set()
    for _ in range(bodies):
        sent = content()
        source = {"type": "base64", "media_type": "image/png", "data": sent.partition(",")[2]}
        shown_image = {"type": "input_image", "image_url": sent, "detail": "auto"}
        shown = {
            "chat": [text("?"), image(sent)],
            "messages": [text("?"), {"type": "image", "source": source}],
            "responses": [{"type": "input_text", "text": "?"}, shown_image],
        }
        dialect = draw.choice([*shown])
        messages = [{"role": "user", "content": changed(shown[dialect])}]
        name = "input" if dialect == "responses" else "messages"
        body = {"model": "tiny", name: messages}
        body |= {"max_tokens": 4} if dialect == "messages" else {}
        try:
            request = readers[dialect](json.dumps(body).encode())
            renderer.encode(renderer.render_text(renderer.received(request.messages), []))
            served += 1
        except RequestError as error:
            statuses.add(error.status)
            refused += 1
    assert statuses == {400}
    assert min(refused, served) > 100, (refused, served)
    assert psutil.Process().memory_info().rss - before < 512 << 20


def test_marks_are_never_in_a_text_from_outside():
    draw = random.Random(0)
    for _ in range(200):
        id_ = draw.randrange(1 << 32)
        mark = _mark(id_)
        assert _marked(mark[1:]) == id_
        with pytest.raises(UnicodeEncodeError):
            mark.encode()


async def test_agentscopes_image_blocks_are_read(vision, tmp_path):
    """Its formatter sends blocks of messages, and those of tool results in a message after them."""
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import Base64Source, ImageBlock, Msg, TextBlock, URLSource

    one, two = png(20, 12, seed=1), png(12, 20, seed=2)
    (tmp_path / "two.png").write_bytes(two)
    data = base64.b64encode(one).decode()
    inline = Base64Source(type="base64", media_type="image/png", data=data)
    shown = [TextBlock(type="text", text="?"), ImageBlock(type="image", source=inline)]
    stored = URLSource(type="url", url=str(tmp_path / "two.png"))
    result = {
        "type": "tool_result",
        "id": "c",
        "name": "look",
        "output": [ImageBlock(type="image", source=stored)],
    }
    asked = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    messages = await OpenAIChatFormatter(promote_tool_result_images=True).format(
        [Msg("user", shown, "user"), Msg("a", [asked], "assistant"), Msg("s", [result], "system")]
    )
    async with vision_gateway(*vision) as gateway:
        session = gateway.open_session("r")
        await ask(session, messages)
        names = [ALBUM.add(content, ImageLimits()) for content in (one, two)]
        assert [span.sha256 for span in session.calls[0].images] == names


def test_images_of_refused_requests_do_not_fill_memory(tmp_path):
    contents = [png(seed=seed) for seed in range(9)]
    album = Album(memory=2 * len(contents[0]))
    names = [album.add(content, ImageLimits()) for content in contents]
    in_memory = sum(len(known.content or b"") for known in album._content.values())
    assert in_memory <= 2 * len(contents[0])
    assert [album.content(name) for name in names] == contents
    for name in names:
        album.keep(name, tmp_path)
    assert sorted(file.stem for file in tmp_path.iterdir()) == sorted(names)
    assert [album.content(name) for name in names] == contents
