"""The command, and what the server says of itself."""

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from miles_ext.capability import require
from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.report import from_json
from miles_ext.tensors import entries
from rollout.embedded.checkpoint import read_tensors
from rollout.server.__main__ import main
from rollout.server.running import bind
from tests.rollout.served import PROMPT, ROOT, TINY, Served, sc, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def test_the_command_serves_until_it_is_told_to_end() -> None:
    command = [sys.executable, "-m", "rollout.server", "--target", str(TINY / "target"), "--draft", str(TINY / "draft")]
    command += ["--arm", "dflash2", "--port", "0", "--threads", "1", "--served-model-name", "tiny"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("dflash2 engine embedded-") and "serves tiny at http://127.0.0.1:" in ready
            answer = httpx.post(
                f"{ready.split()[-1]}/generate",
                json={"text": PROMPT, "sampling_params": {"custom_params": sc(seed=1)}},
                timeout=60,
            )
            assert answer.status_code == 200 and "sc" in answer.json()["meta_info"]
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        finally:
            process.kill()
    assert process.returncode in (0, -signal.SIGTERM)


def test_two_servers_never_share_a_port() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(OSError, match="choose another"):
        bind("127.0.0.1", first.getsockname()[1])


def test_a_taken_port_is_one_clear_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--target", str(TINY / "target"), "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"127.0.0.1:{port}" in line and "choose another --port" in line


def test_a_model_that_cannot_be_loaded_is_one_clear_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", str(TINY / "target"), "--arm", "dflash2", "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs a draft" in line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "99999"], "from 0 to 65535"),
        (["--max-concurrency", "0"], "max_concurrency is 0"),
        (["--threads", "-1"], "threads -1"),
        (["--device", "cuda"], "torch sees no GPU"),
    ],
)
def test_an_option_that_cannot_be_is_one_clear_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--target", str(TINY / "target"), "--port", "0", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", '{"model_type": "qwen3"}', "says nothing of"),
        ("model.safetensors", "no tensors", "is no safetensors file"),
    ],
)
def test_a_damaged_checkpoint_is_one_clear_line(
    file: str, content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = shutil.copytree(TINY / "target", tmp_path / "target")
    (target / file).write_text(content)
    assert main(["--target", str(target), "--port", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_carries_the_capability_that_the_engine_reports(served: Served, path: str) -> None:
    (state,) = served.client.get(path).json()["internal_states"]
    (rank,) = state["sc"]["ranks"]
    capability = from_json(rank)  # the form that the sglang plugin reports in
    assert [capability] == served.engine.capability()
    require(capability, SamplingSpec(top_p=0.9), "dflash2")
    assert state["dflash_sampling_verify_available"] is True


def test_server_info_lists_what_is_accepted(served: Served) -> None:
    accepts = served.client.get("/server_info").json()["accepts"]
    assert "return_sampling_mask" in accepts["/generate"] and "min_p" not in accepts["/generate sampling_params"]
    assert "return_sampling_mask" in accepts["/v1/chat/completions"]
    assert "return_sampling_mask" not in accepts["/v1/completions"]


def test_model_endpoints_say_what_a_router_asks(served: Served) -> None:
    for path in ("/get_model_info", "/model_info"):
        info = served.client.get(path).json()
        assert info["model_path"] == str(TINY / "target") and info["is_generation"] and info["weight_version"] == "0"
    (card,) = served.client.get("/v1/models").json()["data"]
    assert card["id"] == "tiny" and card["max_model_len"] == served.engine.context_length
    assert served.client.post("/flush_cache").status_code == 200


def test_weights_checker_sums_the_bytes_in_memory_by_hugging_face_name(served: Served) -> None:
    def sums(**body: str) -> dict[str, str]:
        return served.post("/weights_checker", body)["ranks"][0]["checksums"]

    all_sums = sums(action="checksum")
    target = {name: tensor.float() for name, tensor in read_tensors(TINY / "target").items()}
    assert {name: one for name, one in all_sums.items() if not name.startswith("draft.")} == {
        name: entry.digest for name, entry in entries(target).items()
    }
    assert {name for name in all_sums if name.startswith("draft.")} == {
        f"draft.{name}" for name in [*read_tensors(TINY / "draft"), "mask_embedding"]
    }
    assert sums(selector="draft").keys() | sums(selector="target").keys() == all_sums.keys()

    whole = served.post("/weights_checker", {})["per_engine_checksum"]
    weight = served.engine.target.norm
    weight[0] += 1
    changed = {name for name, one in sums().items() if one != all_sums[name]}
    assert changed == {"model.norm.weight"}
    assert served.post("/weights_checker", {})["per_engine_checksum"] != whole
    weight[0] -= 1
    assert "snapshot" in served.refusal("/weights_checker", {"action": "snapshot"})


def test_metrics_count_requests_tokens_and_rows(served: Served) -> None:
    def read() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in served.client.get("/metrics").text.splitlines()]
        return {name: float(value) for name, value in lines if not name.startswith("#")}

    before = read()
    meta = served.post("/generate", {"text": PROMPT, "sampling_params": {"custom_params": sc(seed=1)}})["meta_info"]
    served.refusal("/generate", {"text": PROMPT, "zzz": 1})
    after = read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["sglang:num_requests_total"] == 1
    assert grown["sglang:generation_tokens_total"] == meta["completion_tokens"]
    assert grown['sc:support_rows_total{status="ok"}'] == meta["completion_tokens"]
    assert grown["sc:accepted_drafts_total"] == meta["spec_num_correct_drafts"]
    assert grown['sglang:http_responses_total{endpoint="/generate",status_code="400"}'] == 1
    assert after["sglang:num_running_reqs"] == after["sglang:num_queue_reqs"] == 0
