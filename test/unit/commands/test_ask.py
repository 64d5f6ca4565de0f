"""`fluxion ask` against a server that speaks OpenAI's and SGLang's protocols, without a model."""

from __future__ import annotations

import io
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from fluxion_sglang import cli
from fluxion_sglang.commands import conversation
from fluxion_sglang.commands.answers import Asked
from fluxion_sglang.commands.document import AskError, Document
from fluxion_sglang.commands.needle import needle_prompt, to_text
from fluxion_sglang.commands.serving import Server

NEEDLE = Path(__file__).resolve().parents[3] / "models" / "needle"
TEXT = "The ship left the harbour at nine.\nIts captain was Ada."


@dataclass
class World:
    """State of a server: its properties and the requests it got. Every answer has three tokens and reads `share` of the
    middle."""

    chat: bool = True
    fluxion: bool = True
    metrics: bool = True
    config: str = ""
    share: float = 0.25
    others: int = 0
    """Requests of other clients for each of ours."""
    refusal: str = ""
    reasoning: str = ""
    reports_cached: bool = True
    ends: str = ""
    """When the connection breaks: "before" or "in" an answer."""
    key: str = ""
    """API key; requests without it get status 401, except /metrics."""
    context: int = 1000
    pool: int = 100_000
    seen: list[dict[str, Any]] = field(default_factory=list)
    middle: int = 0
    asked: int = 0
    cached: int = 0
    url: str = ""

    def page(self) -> str:
        lines = []
        for name, value in (
            ("fluxion_middle_tokens_total", self.middle),
            ("fluxion_read_tokens_total", self.middle * self.share),
            ("sglang:cached_tokens_total", self.cached),
            ("sglang:time_to_first_token_seconds_sum", 2.5 * self.asked),
            ("sglang:time_to_first_token_seconds_count", self.asked),
            ("sglang:request_time_per_output_token_seconds_sum", 0.0125 * self.asked),
            ("sglang:request_time_per_output_token_seconds_count", self.asked),
        ):
            if name.endswith("_sum"):
                lines.append(f"# TYPE {name.removesuffix('_sum')} histogram")
            lines.append(f"{name} {value}")
        return "\n".join(lines) + "\n"


def handler(world: World) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def say(self, body: str, code: int = 200, kind: str = "application/json") -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def refused(self) -> bool:
            if not world.key or self.headers["Authorization"] == f"Bearer {world.key}":
                return False
            self.say('{"error": "Unauthorized"}', 401)
            return True

        def do_GET(self) -> None:
            if self.path != "/metrics" and self.refused():
                return
            if self.path == "/v1/models":
                self.say(json.dumps({"data": [{"id": "a-model", "max_model_len": world.context}]}))
            elif self.path == "/server_info":
                extra = {"enable_fluxion": True, "fluxion_config": world.config} if world.fluxion else {}
                self.say(json.dumps({"max_total_num_tokens": world.pool} | extra))
            elif self.path == "/metrics" and world.metrics:
                self.say(world.page(), kind="text/plain")
            else:
                self.say("{}", 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.refused():
                return
            if self.path == "/v1/tokenize":
                self.say(json.dumps({"tokens": [hash(word) for word in body["prompt"].split()]}))
                return
            chat = self.path == "/v1/chat/completions"
            if chat and not world.chat:
                self.say(json.dumps({"message": "there is no chat template"}), 400)
                return
            if not body.get("stream"):
                self.say(
                    json.dumps({"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []})
                )
                return
            world.seen.append(body)
            if world.ends:
                if world.ends == "in":
                    self.protocol_version = "HTTP/1.1"
                    self.send_response(200)
                    self.send_header("Content-Type", "text/event-stream")
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    piece = {"id": "1", "object": "x", "created": 1, "model": "m"}
                    piece |= {"choices": [{"index": 0, "delta": {"content": "Ad"}}]}
                    event = f"data: {json.dumps(piece)}\n\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                    self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            if world.refusal:
                self.events({"error": {"message": world.refusal, "code": 400}})
                return
            world.asked += 1 + world.others
            world.middle += 1000
            cached = 0 if len(world.seen) == 1 else 384
            world.cached += cached
            usage = {
                "prompt_tokens": 400,
                "completion_tokens": 3,
                "total_tokens": 403,
                "prompt_tokens_details": {"cached_tokens": cached} if world.reports_cached else None,
            }
            frame = {"id": "1", "object": "x", "created": 1, "model": "m"}
            pieces = [{"choices": [{"index": 0, "text": text, "delta": {"content": text}}]} for text in (" Ada", "!")]
            if world.reasoning:
                pieces.insert(0, {"choices": [{"index": 0, "delta": {"reasoning_content": world.reasoning}}]})
            self.events(*(frame | piece for piece in pieces), frame | {"choices": [], "usage": usage})

        def events(self, *events: dict[str, Any]) -> None:
            self.say(
                "".join(f"data: {json.dumps(e)}\n\n" for e in events) + "data: [DONE]\n\n", kind="text/event-stream"
            )

    return Handler


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(world))
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    world.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield world
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "log.txt"
    path.write_text(TEXT + "\n")
    return str(path)


def ask(*words: str) -> int:
    return cli.main(["ask", *words])


def test_a_chat_about_a_file(world: World, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every prompt is the file and one question; only answers go to standard output."""
    assert ask(file, "Who?", "When?", "--url", world.url) == 0
    said = capsys.readouterr()
    assert said.out == "Ada!\nAda!\n"
    assert [body["messages"] for body in world.seen] == [
        [{"role": "user", "content": f"{TEXT}\n\n{question}"}] for question in ("Who?", "When?")
    ]
    lines = said.err.splitlines()
    assert "11 tokens" in lines[0] and "a-model" in lines[0]
    assert "> Who?" in lines and "> When?" in lines
    first, second = (line for line in lines if "prompt tokens" in line)
    assert "400 prompt tokens, 0 cached (0.0%) · first token 2.50 s · 12.5 ms a token" in first
    assert "400 prompt tokens, 384 cached (96.0%)" in second
    assert "read 25.0% of the middle (policy auto: fluxion)" in second


def test_a_server_that_wants_a_key(
    world: World, file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.key = "the key"
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for how, options in (("without a key", []), ("with this key", ["--api-key", "another"])):
        assert ask(file, "Who?", "--url", world.url, *options) == 2
        said = capsys.readouterr().err
        assert f"{world.url} refuses requests {how}; pass its key with --api-key, or in OPENAI_API_KEY." in said
        assert len(said.splitlines()) == 1
    assert ask(file, "Who?", "--url", world.url, "--api-key", "the key") == 0
    monkeypatch.setenv("OPENAI_API_KEY", "the key")
    assert ask(file, "Who?", "--url", world.url) == 0
    assert capsys.readouterr().out == "Ada!\nAda!\n"


def test_a_proxy_is_not_asked_for_this_machine(
    world: World, file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    for url in (world.url, world.url.replace("127.0.0.1", "0.0.0.0")):
        assert ask(file, "Who?", "--url", url) == 0
        assert capsys.readouterr().out == "Ada!\n"


def test_a_model_without_a_chat_template_completes(world: World, file: str) -> None:
    world.chat = False
    assert ask(file, "Who?", "--url", world.url) == 0
    (body,) = world.seen
    assert body["prompt"] == f"{TEXT}\n\nQuestion: Who?\nAnswer:"
    assert body["stop"] == ["\n\nQuestion:"]


def test_what_is_asked_for_is_sent(world: World, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Questions may follow the options."""
    options = ["--policy", "fixed:16:0.05", "--max-tokens", "7", "--temperature", "0.5", "--stop", "x"]
    assert ask(file, "--url", world.url, *options, "Who?") == 0
    (body,) = world.seen
    assert body["custom_params"] == {"fluxion_policy": "fixed:16:0.05"}
    assert (body["max_tokens"], body["temperature"], body["stop"]) == (7, 0.5, ["x"])
    assert "(policy fixed:16:0.05)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"share": 1.0}, "read 100.0% of the middle (policy auto: full)"),
        ({"config": '{"policy": "anchor"}'}, "(policy anchor)"),
        ({"fluxion": False}, "reads unknown: the server runs without --enable-fluxion"),
        ({"metrics": False}, "reads unknown: the server runs without --enable-metrics"),
        ({"others": 1}, "reads unknown: the server had other requests at the same time"),
    ],
)
def test_what_is_said_of_reads(
    world: World, file: str, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in change.items():
        setattr(world, name, value)
    assert ask(file, "Who?", "--url", world.url) == 0
    said = capsys.readouterr()
    assert said.out == "Ada!\n"
    assert words in said.err
    assert "400 prompt tokens" in said.err


def test_a_policy_without_fluxion_has_no_effect(world: World, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    world.fluxion = False
    assert ask(file, "Who?", "--url", world.url, "--policy", "full") == 0
    assert "--policy has no effect" in capsys.readouterr().err


def test_a_refusal_is_said_and_the_next_question_asked(
    world: World, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    world.refusal = "policy 'x' is not one."
    assert ask(file, "Who?", "When?", "--url", world.url, "--policy", "x") == 1
    said = capsys.readouterr()
    assert len(world.seen) == 2
    assert said.out == ""
    assert said.err.splitlines().count("policy 'x' is not one.") == 2


@pytest.mark.parametrize("ends", ["before", "in"])
@pytest.mark.parametrize("metrics", [True, False])
def test_a_server_that_ends_is_one_sentence(
    world: World, file: str, ends: str, metrics: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    world.ends, world.metrics = ends, metrics
    assert ask(file, "Who?", "When?", "--url", world.url) == 2
    said = capsys.readouterr()
    assert said.out == ("Ad\n" if ends == "in" else "")
    assert said.err.splitlines()[-1].startswith("The server does not answer any more: ")
    assert len(world.seen) == 1


def test_answers_that_do_not_say_what_the_tree_had(world: World, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    world.reports_cached = False
    assert ask(file, "Who?", "When?", "--url", world.url) == 0
    assert ["384 cached" in line for line in capsys.readouterr().err.splitlines() if "prompt tokens" in line] == [
        False,
        True,
    ]
    world.metrics = False
    assert ask(file, "Who?", "--url", world.url) == 0
    assert " cached (" not in capsys.readouterr().err


def test_metrics_of_another_kind_of_server(
    world: World, file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(world, "page", lambda: '{"not": "counters"}')
    assert ask(file, "Who?", "--url", world.url) == 0
    said = capsys.readouterr()
    assert said.out == "Ada!\n"
    assert "400 prompt tokens" in said.err and "reads unknown" in said.err


def test_reasoning_is_not_the_answer(world: World, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    world.reasoning = "[who] could it be?"
    assert ask(file, "Who?", "--url", world.url) == 0
    said = capsys.readouterr()
    assert said.out == "Ada!\n"
    assert "[who] could it be?\n" in said.err


def test_questions_are_read_from_a_pipe(world: World, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n\n  When?\n"))
    assert ask(file, "--url", world.url) == 0
    assert [body["messages"][0]["content"].splitlines()[-1] for body in world.seen] == ["Who?", "When?"]


def test_the_file_may_come_from_a_pipe(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
    assert ask("-", "Who?", "--url", world.url) == 0
    assert world.seen[0]["messages"][0]["content"] == f"{TEXT}\n\nWho?"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context": 300}, "has 11 tokens, and a-model takes 300: nothing of the file fits"),
        ({"context": 275}, "cut the file, or take a model with a longer context."),
        ({"pool": 277}, "has 11 tokens, and the server takes 277: 5 tokens of the file fit beside 16 for the answer"),
    ],
)
def test_a_file_that_is_too_long(
    world: World, file: str, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in change.items():
        setattr(world, name, value)
    answer = "512" if "nothing" in words else "16"
    assert ask(file, "Who?", "--url", world.url, "--max-tokens", answer) == 2
    assert words in capsys.readouterr().err
    assert not world.seen


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"a\0b", "is a binary file"),
        (b"%PDF-1.7\n", "pdftotext"),
        (b"caf\xe9", "is not text in UTF-8 (byte 3); convert it: iconv"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_text(
    tmp_path: Path, data: bytes | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes before a server is contacted."""
    path = tmp_path / "file"
    if data is not None:
        path.write_bytes(data)
    assert ask(str(path), "Who?", "--url", "http://127.0.0.1:9") == 2
    said = capsys.readouterr()
    assert words in said.err and str(path) in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--url", "127.0.0.1:9"), "No OpenAI-style server answers at http://127.0.0.1:9"),
        ((), "Give --model MODEL to start a server for the file, or --url URL"),
        (("--model", "./nowhere"), "There is no folder ./nowhere"),
        (("--model", str(NEEDLE), "--policy", "fixed"), "policy 'fixed' is not one"),
    ],
)
def test_what_cannot_start_says_why(
    file: str, words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(file, "Who?", *words) == 2
    assert sentence in capsys.readouterr().err


def test_a_model_that_the_server_lacks(world: World, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(file, "Who?", "--url", world.url, "--model", "other") == 2
    assert "serves a-model, not other" in capsys.readouterr().err


def words(text: str) -> list[int]:
    """The bundled model's tokenizer: one token per symbol, 0 for every other word."""
    from fluxion_sglang.commands.needle import VOCABULARY

    return [VOCABULARY.index(word) if word in VOCABULARY else 0 for word in text.split()]


def test_the_bundled_model_s_language() -> None:
    """Its prompt is exactly the file and the question, and ends with the phrase."""
    needle = needle_prompt(1024, 2, 5)
    document = Document("f", to_text(needle.document)).counted(words, "m")
    assert document.tokens == len(needle.document) and document.own_language
    prompt = document.prompt(needle.questions[0].text, chat=False)
    assert prompt.text == needle.text(0)
    assert prompt.stop == (";",) and prompt.keep_stop
    assert document.prompt("Q", chat=False, stop=["x"]).stop == ("x",)


def test_english_is_not_the_bundled_model_s_language() -> None:
    with pytest.raises(AskError, match="does not know the words of f"):
        Document("f", TEXT).counted(words, "m")


def test_a_started_server_has_room_for_the_file_and_answers() -> None:
    for policy in (None, "sketch"):
        command = conversation.server_command("MODEL", 1, Document("f", TEXT, tokens=10_001), 100, policy)
        config = json.loads(command[command.index("--fluxion-config") + 1])
        assert config["host_tokens"] % 16 == 0 and 12_000 < config.pop("host_tokens") < 14_000
        assert config == ({} if policy is None else {"policy": policy}), "with what the policy needs of a server"
    assert {"--enable-metrics", "--enable-cache-report"} < set(command)


@pytest.mark.parametrize(("model", "last"), [((), "0 of 6"), (("--model", "a-model"), "0 of 3")])
def test_the_demo_judges_answers(
    world: World,
    model: tuple[str, ...],
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def running(arguments: Any, document: Document, news: Any) -> Any:
        return nullcontext((Asked.of(Server(world.url)), document))

    monkeypatch.setattr(conversation, "_server", running)
    assert ask("--demo", *model) == 1
    said = capsys.readouterr().err
    assert said.endswith(f"{last} answers are right.\n") and "Wrong: it is " in said
    monkeypatch.setattr(Document, "demo", lambda model: Document("f", TEXT, questions={"Who?": "Ada"}))
    assert ask("--demo", *model) == 0
    assert capsys.readouterr().err.endswith("1 of 1 answers are right.\n")


@pytest.mark.parametrize(("words", "sentence"), [((), "Give a FILE"), (("--demo", "x"), "leave FILE and --url out")])
def test_a_file_or_the_demo(words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(*words) == 2
    assert sentence in capsys.readouterr().err
