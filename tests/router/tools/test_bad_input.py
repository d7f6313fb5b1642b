"""Any content of a file: every tool that reads one ends with status 0, 1 or 2, and an error names file, line
and reason.

``tests/data/corpus`` keeps files that could be read wrongly; hypothesis makes more from real ones.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvatlas.publisher.event_decoder import decode_batch
from kvatlas.publisher.events import EventDecodeError, encode_batch
from kvatlas.router.config.errors import ConfigError
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.tools.capture import CapturedFrame, read_capture
from kvatlas.router.tools.explain import ExplainOptions, run_explain
from kvatlas.router.tools.index import run_index_verify
from kvatlas.router.tools.record import resolve
from kvatlas.router.tools.redaction import redact
from kvatlas.router.tools.replay import ReplayOptions, run_replay
from kvatlas.router.tools.replay_player import Player
from kvatlas.router.tools.trace_file import RecordingError, read_trace
from kvatlas.router.tools.verify import run_verify
from tests.support.captures import BLOCK, CAPTURES, removed, stored, tokens, write
from tests.support.examples import CHANCE, examples
from tests.support.paths import DATA, TRACES

CORPUS = sorted(path for path in (DATA / "corpus").iterdir() if path.name != "README.md")
BODIES = [path for path in CORPUS if path.name.startswith("body")]
CAPTURED = [path for path in CORPUS if path not in BODIES]
QUICK = settings(
    max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture, *CHANCE]
)
LINE = {"source": "e", "recv_ts": 1.0, "topic": "", "seq": 0, "payload_b64": "kwGQAA=="}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*LINE, "header", "events", "probe", "state", "hit_tokens", "note"])
LINES = st.dictionaries(FIELDS, JSON | st.sampled_from(list(LINE.values())), max_size=6)


def first_lines(path: Path, count: int) -> bytes:
    with gzip.open(path) as lines:
        return b"".join(line for line, _ in zip(lines, range(count), strict=False))


SEEDS = [first_lines(path, 6) for path in (CAPTURES[0], TRACES[0])]


UNREACHABLE = "http://127.0.0.1:9"
"""A router's address where nothing listens."""


def readers(path: Path) -> None:
    """Every reader of capture files: a frame or an error with file and line, nothing else."""
    told = ""
    for reader, error in (
        (lambda: read_capture([path]), RecordingError),
        (lambda: read_trace(path), RecordingError),
    ):
        try:
            for _ in reader():
                pass
        except error as refused:
            told = str(refused)
        assert not told or re.match(rf"{re.escape(str(path))}:\d+: .", told)


def everything(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every tool on one capture file."""
    readers(path)
    for status in (
        run_replay(ReplayOptions((path,), samples=2), as_json=True),
        run_replay(ReplayOptions((path,), to_seq=0), as_json=False),
        run_verify([path], as_json=True),
    ):
        told = capsys.readouterr().err
        assert status in {0, 1, 2}
        assert "Traceback" not in told


@pytest.mark.parametrize("path", CAPTURED, ids=lambda path: path.name)
def test_corpus_of_captures(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    everything(copy, capsys)


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.name)
def test_corpus_of_requests(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = run_explain(ExplainOptions(path, UNREACHABLE), as_json=False)
    told = capsys.readouterr().err
    assert status == 2
    assert told.startswith((f"kvatlas explain: {path}: ", f"kvatlas explain: {UNREACHABLE}/"))


def test_errors_name_file_line_and_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path / "g.jsonl", [(0, []), (1, [])]).read_bytes()
    cases = {
        "broken.jsonl": (good + b"{\n", r"broken\.jsonl:3: Input data was truncated"),
        "field.jsonl": (good + b'{"source": 1}\n', r"field\.jsonl:3: Expected `str`, got `int`"),
        "seq.jsonl": (json.dumps({**LINE, "seq": -1}).encode(), r"seq\.jsonl:1: Expected `int` >= 0"),
        "b64.jsonl": (json.dumps({**LINE, "payload_b64": "?"}).encode(), r"b64\.jsonl:1: "),
        "empty.jsonl": (b"", r"empty\.jsonl:1: empty file"),
        "cut.jsonl.gz": (gzip.compress(good)[:-9], r"cut\.jsonl\.gz:\d: cannot be read"),
        "not.jsonl.gz": (good, r"not\.jsonl\.gz:1: cannot be read: Not a gzipped file"),
    }
    for name, (data, told) in cases.items():
        (tmp_path / name).write_bytes(data)
        assert run_replay(ReplayOptions((tmp_path / name,)), as_json=True) == 2
        assert re.search(told, capsys.readouterr().err), name
    for path in (tmp_path / "absent.jsonl", tmp_path):
        assert run_replay(ReplayOptions((path,)), as_json=True) == 2
        assert f"{path}:1: cannot be read" in capsys.readouterr().err


@QUICK
@given(data=st.binary(max_size=400), zipped=st.booleans())
def test_any_bytes(tmp_path: Path, data: bytes, zipped: bool) -> None:
    path = tmp_path / ("f.jsonl.gz" if zipped else "f.jsonl")
    path.write_bytes(data)
    readers(path)


@QUICK
@given(lines=st.lists(LINES, max_size=4))
def test_any_json_lines(tmp_path: Path, lines: list[dict[str, object]]) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    readers(path)


@QUICK
@given(
    seed=st.sampled_from(SEEDS),
    where=st.integers(0, 1 << 20),
    put=st.binary(max_size=4),
    cut=st.integers(0, 9),
)
def test_real_files_changed_somewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: bytes, where: int, put: bytes, cut: int
) -> None:
    at = where % len(seed)
    path = tmp_path / "f.jsonl"
    path.write_bytes(seed[:at] + put + seed[at + cut :])
    everything(path, capsys)


@QUICK
@given(where=st.integers(0, 1 << 20), put=st.binary(max_size=4), cut=st.integers(0, 9))
def test_batches_changed_somewhere(where: int, put: bytes, cut: int) -> None:
    """Every decodable batch is played, every other one counted; redaction gives a batch or none."""
    prompt = tokens(4 * BLOCK)
    payload = encode_batch(1.0, [stored(prompt), stored(prompt, blocks=[3], group=1), removed(prompt, 1)])
    at = where % len(payload)
    changed = payload[:at] + put + payload[at + cut :]
    player = Player(ModelFacts())
    player.play(CapturedFrame(Path("x"), 1, "e", 1.0, "", 0, changed))
    (run,) = player.runs
    try:
        decode_batch(changed)
        assert run.undecodable == 0
    except EventDecodeError:
        assert run.undecodable == 1
    blank = redact(changed)
    assert blank is None or len(blank) > 2


@QUICK
@given(body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_request(tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes) -> None:
    path = tmp_path / "body.json"
    path.write_bytes(body)
    assert run_explain(ExplainOptions(path, UNREACHABLE), as_json=True) == 2
    capsys.readouterr()


def test_a_server_that_does_not_speak_http_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            for _ in range(2):
                with listener.accept()[0] as client:
                    client.recv(100)
                    client.sendall(b"\xa9\x00\x01 no HTTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        (tmp_path / "body.json").write_text('{"model": "m", "prompt": [1, 2]}')
        assert run_explain(ExplainOptions(tmp_path / "body.json", router=url), as_json=False) == 2
        assert f"{url}/kvatlas/explain: not an HTTP answer" in capsys.readouterr().err
        with pytest.raises(ConfigError, match=f"{url}/kv_event_sources: not an HTTP answer"):
            resolve([url])
        thread.join()


def test_numbers_out_of_range_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "body.json").write_text('{"model": "m", "prompt": [1, 2]}')
    options = ExplainOptions(tmp_path / "body.json", router="http://127.0.0.1:9", slo_ttft_ms=-1.0)
    assert run_explain(options, as_json=False) == 2
    assert "--slo-ttft-ms: -1.0" in capsys.readouterr().err
    index = IndexSettings(url="redis://127.0.0.1:9")
    with pytest.raises(ConfigError, match="--settle: nan"):
        run_index_verify(index, model=None, engines=(), settle_s=math.nan, as_json=True)


def test_base64_of_a_corpus_line_is_what_it_claims() -> None:
    assert decode_batch(base64.b64decode(str(LINE["payload_b64"]))).events == []
