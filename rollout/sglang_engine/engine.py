"""One sglang server as an engine: it is started here and ends with this process, or is attached to by its address."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx

from miles_ext.api_key import is_loopback, read_key
from miles_ext.capability import ArmKind, EngineCapability
from miles_ext.errors import CapabilityError, EngineError, RequestError, WeightError
from miles_ext.records import Completion
from miles_ext.sglang_plugin.report import STATE_KEY, from_json
from miles_ext.weights import HandoffReport, WeightManifest
from rollout.config import RolloutConfig
from rollout.engine import Bucket, Request
from rollout.sglang_engine.answers import Served, body, completion
from rollout.sglang_engine.client import Client
from rollout.sglang_engine.drafts import draft_for
from rollout.sglang_engine.launch import HOST, command, environment, require_interpreter, reserve_port
from rollout.sglang_engine.process import ServerProcess
from rollout.sglang_engine.staging import stage
from rollout.sglang_engine.weights import apply

ONE_TOKEN = {"input_ids": [0], "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}


class SglangEngine:
    """Implements `rollout.engine.Engine` on a server of sglang 0.5.23 with this repository's plugin.

    url: a running server to attach to; empty starts one with `config.sglang.python`.
    target, draft: checkpoint folders.
    Raises CapabilityError where the interpreter or the server lacks the plugin, or the server refuses our key,
    CheckpointError where the draft does not fit, and EngineError with the last lines of its log where the server does
    not come up.
    """

    def __init__(
        self, config: RolloutConfig, arm: ArmKind, target: Path, draft: Path | None, engine_id: str, url: str = ""
    ) -> None:
        self._config, self._target, self.engine_id = config, target.absolute(), engine_id
        if config.sglang.deterministic and arm != "regular":
            raise RequestError(
                f"rollout.sglang.deterministic beside arm {arm!r}: sglang verifies drafts with coins of the device's "
                "generator, which no seed of a request settles; accepted: the regular arm, or deterministic: false"
            )
        self._folder = Path(tempfile.mkdtemp(prefix="sglang-", dir=config.sglang.folder))
        self._process: ServerProcess | None = None
        try:
            if url:
                key = read_key(config.sglang.api_key_file)
                require_guarded(url, config.sglang.transport, key)
                self._client = self._client_of(url, key)
            else:
                self._start(arm, draft)
            self._serving = self._target  # the folder of the weights that are served
            self._read_served()
            # What an attached server has been fed by others says nothing of this run's versions.
            self._newest = -1 if url else self._first.weight_version
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._client.url

    def _client_of(self, url: str, api_key: str = "") -> Client:
        config = self._config
        return Client(url, config.request_timeout_s, config.max_concurrency, api_key, config.sglang.router)

    def _start(self, arm: ArmKind, draft: Path | None) -> None:
        variables = environment(self._config, self.engine_id)
        require_interpreter(self._config.sglang.python, variables)
        drafting = draft_for(arm, self._target, draft, self._folder)
        with reserve_port(self._config.sglang.ports) as reserved:
            port = reserved.getsockname()[1]
            line = command(self._config, arm, self._target, drafting, port)
            self._client = self._client_of(f"http://{HOST}:{port}")
            self._process = ServerProcess(line, variables, self._folder)
            self._process.wait_until(self._decodes, self._config.sglang.start_timeout_s)

    def _decodes(self) -> bool:
        return self._client.reachable() and self.healthy()

    def _read_served(self) -> None:
        (self._first, *_) = self.capability()
        self._served = Served(
            engine_id=self.engine_id,
            draft_digest=self._first.draft_digest,
            vocab_size=self._first.vocab_size,
            context_length=self._config.context_length,
            eos_ids=eos_ids(self._target),
            seeded=self._config.sglang.deterministic,
            carried=bool(self._config.sglang.router),
        )

    def capability(self) -> list[EngineCapability]:
        """See `rollout.engine.Engine`: every rank's own report. CapabilityError where one is missing."""
        states = self._client.get("/server_info").get("internal_states") or [{}]
        reports = []
        for state in states:
            ranks = (state.get(STATE_KEY) or {}).get("ranks")
            if not ranks:
                raise CapabilityError(
                    f"{self.engine_id}: the server at {self._client.url} reports no capability: the plugin is not "
                    "loaded there, or did not apply; install this repository in its environment and see its log"
                )
            try:
                reports += [from_json({**rank, "engine_id": self.engine_id}) for rank in ranks]
            except (TypeError, KeyError) as error:
                raise CapabilityError(
                    f"{self.engine_id}: the server at {self._client.url} reports its capability in another form "
                    f"({error}); install the same revision of this repository on both sides"
                ) from error
        return reports

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """See `rollout.engine.Engine`. Requests are in flight together, `max_concurrency` at most."""
        for request in requests:
            self._require(request.require(self._served.vocab_size, self._served.context_length))
        answers = self._client.generate([body(request, self._served) for request in requests])
        return [completion(request, one, self._served) for request, one in zip(requests, answers, strict=True)]

    @property
    def progress(self) -> int:
        """See `rollout.engine.Engine`: answers received."""
        return self._client.answers

    def _require(self, request: Request) -> None:
        """What this server cannot honour, told before any request is sent."""
        spec, first = request.spec, self._first
        size = {"complete": spec.max_support, "head": spec.head_size, "off": 0}[spec.capture]
        if size > first.max_support:
            raise RequestError(
                f"request {request.request_id}: rows of up to {size} entries, and rollout.sglang.max_support is "
                f"{first.max_support}; raise it, or lower sampling.max_support or sampling.head_size"
            )
        if spec.is_filtered and spec.filter_order not in first.filter_orders:
            raise RequestError(
                f"request {request.request_id}: filter order {spec.filter_order!r}, and this server samples in "
                f"{', '.join(first.filter_orders)}; set rollout.sglang.filter_order to the same"
            )

    def update_weights(self, manifest: WeightManifest, buckets: Iterable[Bucket]) -> HandoffReport:
        """See `rollout.engine.Engine`. Raises EngineError where the old weights could not be brought back: the server
        is left paused then, and must be replaced."""
        if manifest.version <= self._newest:
            raise WeightError(
                f"version {manifest.version} does not rise above {self._newest}; nothing was applied, "
                "send a later version"
            )
        folder = self._folder / f"version-{manifest.version}"
        stage(manifest, buckets, self._target, folder)
        started = time.perf_counter()
        self._client.post("/pause_generation", {"mode": "retract"})
        try:
            apply(self._client, self._config.sglang, folder, manifest.version)
            self._prove(manifest)
        except WeightError:
            self._restore()
            shutil.rmtree(folder, ignore_errors=True)
            self._client.post("/continue_generation", {})
            raise
        self._client.post("/continue_generation", {})
        seconds = time.perf_counter() - started
        if self._serving != self._target:
            shutil.rmtree(self._serving, ignore_errors=True)
        self._serving, self._newest = folder, manifest.version
        self._read_served()
        return HandoffReport(
            version=manifest.version,
            received_digest=manifest.digest,
            resident_digest=self._first.resident_digest,
            draft_digest=self._first.draft_digest,
            seconds=seconds,
        )

    def _prove(self, manifest: WeightManifest) -> None:
        """Raise WeightError unless every rank loaded what was sent, and kept its draft."""
        for rank in self.capability():
            wanted = (manifest.version, manifest.digest, self._served.draft_digest)
            found = (rank.weight_version, rank.extra["received_digest"], rank.draft_digest)
            if found != wanted:
                raise WeightError(
                    f"{self.engine_id} rank {rank.rank} reports version and received and draft digests {found}; "
                    f"accepted: {wanted}, as sent and as its draft was loaded; the old weights serve on"
                )

    def _restore(self) -> None:
        """The weights that were served before, judged by what resides then and not by what the server says of it."""
        version = max(self._first.weight_version, 0)
        try:
            apply(self._client, self._config.sglang, self._serving, version)
        except WeightError as error:
            reason = str(error)  # the draft may have changed, which the target's weights do not tell
        else:
            reason = "the digests differ"
        if self.capability()[0].resident_digest != self._first.resident_digest:
            raise EngineError(f"{self.engine_id}: the old weights could not be brought back: {reason}")

    def healthy(self) -> bool:
        """See `rollout.engine.Engine`."""
        try:
            answer: dict[str, Any] = self._client.post("/generate", ONE_TOKEN)
        except (EngineError, RequestError):
            return False
        return answer["meta_info"]["finish_reason"]["type"] != "abort"

    def close(self) -> None:
        """End the server where it was started here; leaves no process and no file."""
        if self._process is not None:
            self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def require_guarded(url: str, transport: str, key: str) -> None:
    """Raise CapabilityError where pickled tensors would go to a server that anybody reaches."""
    if transport == "tensor" and not key and not is_loopback(httpx.URL(url).host):
        raise CapabilityError(
            f"rollout.sglang.transport is 'tensor' beside {url}, which is not on loopback, and there is no API key: "
            "sglang unpickles whatever reaches that route; accepted: a server with a key, or transport: disk"
        )


def eos_ids(target: Path) -> frozenset[int]:
    """Tokens at which sglang ends a response of its own accord, by the settings of the checkpoint."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = target / name
        settings = json.loads(file.read_text()) if file.is_file() else {}
        value = settings.get("text_config", settings).get("eos_token_id")
        found |= set(value) if isinstance(value, list) else {value} - {None}
    return frozenset(found)
