"""The API key: wanted on every route but liveness, sent by the client, and in no command line, setting or log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import ValidationError

from miles_ext import api_key
from miles_ext.api_key import VARIABLE, accepts, is_loopback, read_key
from miles_ext.errors import CapabilityError
from rollout.config import RolloutConfig
from rollout.server.__main__ import main
from rollout.server.app import LIVENESS, make_app
from rollout.server.model import Model
from rollout.server.running import running
from rollout.sglang_engine.config import SglangConfig
from rollout.sglang_engine.engine import SglangEngine
from tests.rollout.served import TINY, load, request

KEY = "canary-5e3f0a"


@pytest.fixture(scope="module")
def guarded() -> Iterator[tuple[Any, str]]:
    engine = load()
    model = Model(TINY / "target", vocab_size=engine.vocab_size, context_length=engine.context_length, name="tiny")
    app = make_app(engine, model, api_key=KEY)
    with running(app) as url:
        yield app, url


def test_every_route_but_liveness_wants_the_key(guarded: tuple[Any, str]) -> None:
    app, url = guarded
    found = [route for route in app.routes if isinstance(route, APIRoute)]
    routes = [(route.path, method) for route in found for method in route.methods or ()]
    assert len(routes) >= 14
    client = httpx.Client(base_url=url)
    for path, method in [*routes, ("/nowhere", "GET"), ("/docs", "GET"), ("/generate/", "POST")]:
        bare = client.request(method, path)
        if path == LIVENESS:
            assert bare.status_code == 200
            continue
        assert bare.status_code == 401 and "Authorization: Bearer" in bare.json()["error"]["message"], path
        for wrong in ("Bearer", f"Bearer {KEY[:-1]}", f"Bearer {KEY}x", KEY, f"Basic {KEY}"):
            header = {"Authorization": wrong}
            assert client.request(method, path, headers=header).status_code == 401
        right = client.request(method, path, headers={"Authorization": f"Bearer {KEY}"})
        assert right.status_code not in (401, 403) and KEY not in right.text


def test_the_client_sends_the_key_and_names_a_refusal(
    guarded: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file = tmp_path / "key"

    def attach(**sglang: Any) -> SglangEngine:
        config = RolloutConfig(engine="sglang", request_timeout_s=60, sglang=SglangConfig(**sglang))
        return SglangEngine(config, "dflash2", TINY / "target", TINY / "draft", "worker-7", guarded[1])

    with pytest.raises(CapabilityError, match="refuses our API key.*MILES_EXT_API_KEY or rollout.sglang.api_key_file"):
        attach()
    monkeypatch.setenv(VARIABLE, "another")
    with pytest.raises(CapabilityError, match="refuses our API key"):
        attach()
    file.write_text(KEY + "\n")
    engine = attach(api_key_file=file)
    try:
        assert engine.healthy() and len(engine.generate([request()])) == 1
    finally:
        engine.close()
    assert KEY not in caplog.text


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(api_key.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert accepts(KEY, f"Bearer {KEY}") and not accepts(KEY, "x") and not accepts(KEY, None) and accepts("", None)
    assert len(compared) == 3


def test_a_key_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert read_key() == ""
    monkeypatch.setenv(VARIABLE, "one")
    (tmp_path / "key").write_text("two\n")
    assert (read_key(), read_key(tmp_path / "key")) == ("one", "two")
    for text, words in (("", "is empty"), ("a\nb", "no HTTP header"), ("clé", "no HTTP header")):
        (tmp_path / "key").write_text(text)
        with pytest.raises(ValueError, match=words) as caught:
            read_key(tmp_path / "key")
        assert not text or text not in str(caught.value)
    with pytest.raises(ValueError, match="no API key file"):
        read_key(tmp_path / "none")


def test_secrets_are_refused_where_they_would_be_written_down(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password"):
        with pytest.raises(ValidationError, match="look like secrets"):
            SglangConfig(environment={name: KEY})
    assert SglangConfig(environment={"TOKENIZERS_PARALLELISM": "0", "KEYRING": "1"})
    for flag in ("--api-key", f"--api-key={KEY}", "--admin-api-key"):
        with pytest.raises(ValidationError, match="process list"):
            SglangConfig(args=(flag,))
    with pytest.raises(SystemExit):
        main(["--target", "x", "--api-key", KEY])


def test_an_open_server_without_a_key_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "node-3")] == (
        [True] * 3 + [False] * 3
    )
    for host, warned in (("0.0.0.0", True), ("127.0.0.1", False)):
        assert main(["--target", str(TINY / "target"), "--arm", "dflash2", "--host", host, "--port", "0"]) == 1
        assert ("can be reached from elsewhere" in capsys.readouterr().err) == warned
