"""What cannot be sampled from the law is refused by the real server, and the proof is missing where the plugin is."""

from collections.abc import Iterator

import pytest
import requests

from miles_ext.capability import require
from miles_ext.errors import CapabilityError
from miles_ext.sampling import SamplingSpec
from miles_ext.sglang_plugin.report import from_json
from tests.sglang_cpu.answers import PROMPTS, params
from tests.sglang_cpu.server import Server, start
from tests.sglang_cpu.shims import PROPOSAL_VARIABLE, VERIFIER_VARIABLE

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]
FILTERED = SamplingSpec(temperature=0.7, top_k=32, top_p=0.95)
GREEDY = {"temperature": 0, "max_new_tokens": 12}
SERVERS = {
    "no_verifier": ("dflash", {VERIFIER_VARIABLE: "0"}),
    "no_proposals": ("dflash2", {VERIFIER_VARIABLE: "0", PROPOSAL_VARIABLE: "0"}),
    "no_plugin": ("regular", {"SGLANG_PLUGINS": "cpu_test"}),
}


@pytest.fixture(scope="module", params=SERVERS)
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server]]:
    arm, environment = SERVERS[request.param]
    started = start(arm, tmp_path_factory.mktemp(request.param), **environment)
    try:
        yield request.param, started
    finally:
        started.stop()


def test_sampled_requests_are_refused_and_greedy_ones_served(named: tuple[str, Server]) -> None:
    name, server = named
    body = {"input_ids": PROMPTS[0], "sampling_params": params(FILTERED, max_new_tokens=12, ignore_eos=True)}
    plain = {"input_ids": PROMPTS[0], "sampling_params": {"top_k": 8, "max_new_tokens": 12, "ignore_eos": True}}
    answers = [server.post("/generate", one) for one in (body, plain)]
    if name == "no_verifier":
        assert [answer.status_code for answer in answers] == [400, 400]
        assert all("verified greedily" in answer.text for answer in answers)
    elif name == "no_proposals":
        assert [answer.status_code for answer in answers] == [500, 500]
        assert all("not samples of the requested law" in answer.text for answer in answers)
    else:
        assert [answer.status_code for answer in answers] == [200, 200]
        assert "sc" not in answers[0].json()["meta_info"]
    greedy = server.generate({"input_ids": PROMPTS[0], "sampling_params": GREEDY})
    assert greedy["meta_info"]["finish_reason"]["type"] in ("stop", "length")


def test_the_capability_says_so(named: tuple[str, Server]) -> None:
    name, server = named
    if name == "no_plugin":
        state = requests.get(server.url + "/server_info", timeout=60).json()["internal_states"][0]
        assert "sc" not in state
        return
    found = from_json(server.ranks()[0])
    if name == "no_verifier":
        assert not found.dflash_sampling_verify_available
        with pytest.raises(CapabilityError, match="greedy fallback"):
            require(found, FILTERED, "dflash", allow_test_verifier=True)
