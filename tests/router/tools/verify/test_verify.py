"""``kvatlas verify``: exact on recorded truth, honest about anything else, and fed by events alone."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.tools import index as index_commands
from kvatlas.router.tools.verify import run_verify
from tests.support.paths import ROOT
from tests.support.redis_servers import Server, any_program

RECORDED = ROOT / "tests" / "data" / "traces"
MORE = ROOT.parent / "shared" / "traces"
TRACES = sorted(RECORDED.glob("*.jsonl.gz"))
FIELDS = ["trace", "family", "probes", "exact", "over", "under", "truth_tokens", "abs_error_tokens"]

Lines = list[dict[str, Any]]


def read(path: Path) -> Lines:
    with gzip.open(path, "rt") as text:
        return [json.loads(line) for line in text]


def write(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_json(paths: list[Path], capsys: pytest.CaptureFixture[str]) -> tuple[int, Lines, dict[str, Any]]:
    status = run_verify(paths, as_json=True)
    *traces, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert list(last) == ["total"]
    return status, traces, last["total"]


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_further_recorded_truth_is_predicted_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    if not MORE.is_dir():
        pytest.skip("no ../shared/traces beside this repository")
    _, traces, _ = run_json([MORE], capsys)
    assert [trace["trace"] for trace in traces if trace["exact"] != trace["probes"]] == []


def test_a_cold_run_counts_what_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verify([RECORDED / "duplicates.1.jsonl.gz"], as_json=True, cold=True) == 0
    trace, total = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert trace["unknown"] == total["total"]["unknown"] > 0
    assert trace["exact"] + trace["unknown"] == trace["probes"]


def test_a_cold_run_is_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    shared = IndexSettings(url="redis://127.0.0.1:1/0")
    assert run_verify(TRACES[:1], as_json=True, cold=True, index=shared) == 2
    assert "--cold" in capsys.readouterr().err


def test_the_command_line(kvatlas: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = kvatlas("verify", "--json", str(TRACES[0]), str(TRACES[1]))
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line.get("trace") for line in lines] == [TRACES[0].name, TRACES[1].name, None]


def test_the_json_output(capsys: pytest.CaptureFixture[str]) -> None:
    status, traces, total = run_json(TRACES[:3], capsys)
    assert status == 0
    for trace in traces:
        assert list(trace)[: len(FIELDS)] == FIELDS
        assert {"mode", "scheme", "groups", "alignment"} <= set(trace["detected"])
        assert trace["detected"]["mode"] == "native"
    for name in FIELDS[2:]:
        assert total[name] == sum(trace[name] for trace in traces)
    assert total["traces"] == 3


def test_the_table_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verify(TRACES[:2], as_json=False) == 0
    printed = capsys.readouterr().out
    assert "total" in printed
    assert "sha256" in printed


def test_a_folder_is_searched_and_sorted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for place in ("z.jsonl", "deep/b.jsonl", "deep/er/a.jsonl"):
        write(tmp_path / place, read(TRACES[0])[:40])
    (tmp_path / "notes.txt").write_text("not a trace")
    _, traces, _ = run_json([tmp_path], capsys)
    assert [trace["trace"] for trace in traces] == ["b.jsonl", "a.jsonl", "z.jsonl"]


@pytest.mark.parametrize("error", [16, -16, 1])
def test_a_falsified_probe_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str], error: int) -> None:
    lines = read(RECORDED / "full_attn.1.jsonl.gz")
    probe = next(line for line in lines if line.get("hit_tokens", 0) >= 32)
    probe["hit_tokens"] += error
    status, (trace,), total = run_json([write(tmp_path / "false.jsonl", lines)], capsys)
    assert status == 1
    assert (trace["over"], trace["under"]) == ((0, 1) if error > 0 else (1, 0))
    assert trace["abs_error_tokens"] == total["abs_error_tokens"] == abs(error)


def test_a_left_out_batch_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read(RECORDED / "full_attn_evict.1.jsonl.gz")
    batches = [number for number, line in enumerate(lines) if "events" in line]
    del lines[batches[len(batches) // 2]]
    status, _, _ = run_json([write(tmp_path / "gap.jsonl", lines)], capsys)
    assert status == 1


def test_a_falsified_count_of_blocks_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read(RECORDED / "full_attn.1.jsonl.gz")
    state = next(line for line in lines if "state" in line)
    state["state"]["keys"][0] += 1
    status, _, total = run_json([write(tmp_path / "false.jsonl", lines)], capsys)
    assert status == 1
    assert total["probes"] == total["exact"]
    assert total["states_exact"] == total["states"] - 1


WRONG = {
    "hash_algo": "sha512",
    "none_hash_seed": "wrong",
    "int_hashes": None,
    "hash_block_size": 7,
    "scheduler_block_size": 7,
    "block_size": 7,
    "kind": "mamba",
    "sliding_window": 7,
    "num_blocks": 1,
    "retention_interval": 7,
    "unitary": "?",
    "hash_lookahead_tokens": 9,
    "vllm": "0.1",
    "seed": 12345,
}


@pytest.mark.parametrize(
    "name",
    [
        "gemma3_5swa_1full.1",
        "mixed_bs.1",
        "sha256_cbor.1",
        "pythonhashseed.1",
        "v033_lookahead_hybrid.3",
        "eagle_hybrid.1",
    ],
)
def test_only_what_an_operator_configures_is_read_from_the_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    lines = read(RECORDED / f"{name}.jsonl.gz")
    header = lines[0]["header"]
    for field, value in WRONG.items():
        header[field] = value
    for group in header["groups"]:
        group.update({field: WRONG[field] for field in ("block_size", "kind", "sliding_window")})
    status, (trace,), _ = run_json([write(tmp_path / "wrong.jsonl", lines)], capsys)
    assert status == 0
    assert trace["exact"] == trace["probes"] > 0


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("chunked_local.1", "attention_chunk_size", 32), ("eagle_full.1", "is_eagle", False)],
)
def test_configured_facts_change_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, field: str, value: Any
) -> None:
    lines = read(RECORDED / f"{name}.jsonl.gz")
    for group in lines[0]["header"]["groups"]:
        group[field] = value
    assert run_json([write(tmp_path / "wrong.jsonl", lines)], capsys)[0] == 1


def header_of(lines: Lines) -> str:
    return json.dumps(lines[0]) + "\n"


BROKEN: dict[str, tuple[Callable[[Lines], bytes], int, str]] = {
    "empty": (lambda _: b"", 1, "expected a header"),
    "not JSON": (lambda lines: (header_of(lines) + "{oops\n").encode(), 2, ""),
    "not UTF-8": (lambda lines: header_of(lines).encode() + b'{"note": "\xff\xfe"}\n', 2, ""),
    "blank line": (lambda lines: (header_of(lines) + "\n").encode(), 2, ""),
    "no header": (lambda lines: json.dumps(lines[1]).encode(), 1, "header"),
    "another header": (lambda lines: (header_of(lines) * 2).encode(), 2, "header"),
    "not a trace": (lambda _: b'{"messages": [], "model": "m"}\n', 1, "header"),
    "a list": (lambda _: b"[1, 2]\n", 1, ""),
    "bad base64": (lambda lines: (header_of(lines) + '{"events": "a*b"}\n').encode(), 2, ""),
    "base64 beyond ASCII": (lambda lines: (header_of(lines) + '{"events": "ää"}\n').encode(), 2, "ASCII"),
    "no batch": (lambda lines: (header_of(lines) + '{"events": "AAAA"}\n').encode(), 2, "batch is not"),
    "probe without truth": (
        lambda lines: (header_of(lines) + '{"probe": {"token_ids": [1]}}\n').encode(),
        2,
        "hit_tokens",
    ),
    "probe of wrong types": (
        lambda lines: (header_of(lines) + '{"probe": {"token_ids": ["a"]}, "hit_tokens": 0}\n').encode(),
        2,
        "token_ids",
    ),
    "deep note": (lambda lines: (header_of(lines) + '{"note": ' + "[" * 100_000 + "\n").encode(), 2, ""),
}


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, as_json: bool
) -> None:
    content, line, reason = BROKEN[name]
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content(read(TRACES[0])))
    assert run_verify([path], as_json=as_json) == 2
    said = capsys.readouterr().err
    assert f"{path}:{line}: " in said
    assert reason in said
    assert "Traceback" not in said


@pytest.mark.parametrize("keep", [30, 0.5, 0.99])
def test_a_truncated_gzip_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keep: float
) -> None:
    whole = TRACES[0].read_bytes()
    path = tmp_path / "short.jsonl.gz"
    path.write_bytes(whole[: int(keep if keep >= 1 else len(whole) * keep)])
    assert run_verify([path], as_json=True) == 2
    assert f"{path}:" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"plain text", b"\x1f\x8b\x08\x00" + b"\xff" * 60])
def test_a_false_gzip_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "fake.jsonl.gz"
    path.write_bytes(content)
    assert run_verify([path], as_json=True) == 2
    assert f"{path}:1: " in capsys.readouterr().err


def test_no_such_path_and_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verify([tmp_path / "nowhere"], as_json=True) == 2
    assert "no such file" in capsys.readouterr().err
    assert run_verify([tmp_path], as_json=True) == 2
    assert "no .jsonl" in capsys.readouterr().err
    assert run_verify([], as_json=True) == 2
    assert "at least one" in capsys.readouterr().err


def test_a_folder_named_like_a_trace_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    write(tmp_path / "good.jsonl", read(TRACES[0])[:40])
    status, traces, _ = run_json([tmp_path], capsys)
    assert (status, len(traces)) == (0, 1)


def test_events_that_cannot_be_read_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = read(TRACES[0])
    odd = msgspec.msgpack.encode([0.0, [{"type": "BlockMoved"}, {"type": "BlockRemoved"}], 0])
    lines.insert(1, {"events": base64.b64encode(odd).decode(), "seq": 99})
    status, (trace,), _ = run_json([write(tmp_path / "odd.jsonl", lines)], capsys)
    assert status == 0
    assert trace["detected"]["rejected"]["undecodable"] == 2  # once while it learns
    assert trace["detected"]["unknown_types"] == {"BlockMoved": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(any_program())
    yield made
    made.close()


def test_through_a_shared_index_a_run_leaves_other_namespaces_alone(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    before, index = set(server.all_keys()), IndexSettings(url=server.url)
    for _ in range(2):
        assert run_verify([RECORDED / "full_attn_evict.1.jsonl.gz"], as_json=True, index=index) == 0
    trace, *_ = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert trace["exact"] == trace["probes"] > 0
    assert trace["states_exact"] == trace["states"]
    made = set(server.all_keys()) - before
    assert len({key.split(b":")[0] for key in made}) == 2
    assert all(key.startswith(b"verify-") for key in made)
    assert all(server.command("PTTL", key) > 0 for key in made)


def test_through_a_shared_index_what_is_false_is_noticed(
    tmp_path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = read(RECORDED / "full_attn.1.jsonl.gz")
    next(line for line in lines if "state" in line)["state"]["keys"][0] += 1
    next(line for line in lines if line.get("hit_tokens", 0) >= 32)["hit_tokens"] -= 16
    false = write(tmp_path / "false.jsonl", lines)
    assert run_verify([false], as_json=True, index=IndexSettings(url=server.url)) == 1
    trace, _ = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (trace["over"], trace["states"] - trace["states_exact"]) == (1, 1)


def test_the_url_of_the_shared_index_may_lie_in_a_file(
    tmp_path: Path, server: Server, kvatlas: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    where = tmp_path / "url"
    where.write_text(server.url)
    told = kvatlas("verify", str(TRACES[0]), "--index-file", str(where))
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://router:hunter2@127.0.0.1:1/0", "password on the command line"),
        ("redis://127.0.0.1:1/0", "connection"),
    ],
)
def test_a_shared_index_that_cannot_be_used_ends_with_status_2(
    url: str,
    why: str,
    kvatlas: Callable[..., subprocess.CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_commands, "_CONNECT_S", 0.5)  # a server that refuses is asked again until then
    told = kvatlas("verify", str(TRACES[0]), "--index", url)
    assert told.returncode == 2
    assert why in told.stderr
    assert "hunter2" not in told.stderr + told.stdout
    assert "Traceback" not in told.stderr
