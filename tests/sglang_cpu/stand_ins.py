"""Requests, sampling infos and a sampler for function-level tests against the installed sglang, without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from miles_ext.sglang_plugin.plan import plan_of

CASES = json.loads((Path(__file__).parents[1] / "data" / "filters.json").read_text())["cases"]
CASE_IDS = [f"{case['filter_order']}-{i}-{case['name']}" for i, case in enumerate(CASES)]
TOP_K_OFF = 1 << 30
CAP = 4096


class Request(SimpleNamespace):
    """What the plugin asks of sglang's Req."""

    def finished(self) -> bool:
        return False


def request(capture: str = "complete", k: int = CAP, order: str = "top_k_first", **params: Any) -> Request:
    filters = {"temperature": 1.0, "top_k": TOP_K_OFF, "top_p": 1.0, "min_p": 0.0, **params}
    filters["top_k"] = filters["top_k"] or TOP_K_OFF
    asked = None if capture == "none" else {"sc": {"v": 1, "capture": capture, "k": k, "order": order, "seed": 0}}
    return Request(sampling_params=SimpleNamespace(**filters, custom_params=asked), stream=False)


def case_request(case: dict[str, Any]) -> Request:
    return request(
        order=case["filter_order"], temperature=case["temperature"], top_k=case["top_k"], top_p=case["top_p"]
    )


def sampling_info(requests: Sequence[Request], vocab_size: int, device: str = "cpu") -> Any:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    params = [req.sampling_params for req in requests]
    info: Any = SamplingBatchInfo(
        temperatures=torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=device),
        top_ps=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        top_ks=torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
        min_ps=torch.zeros(len(params), device=device),
        is_all_greedy=False,
        is_any_greedy=any(p.top_k == 1 for p in params),
        need_top_p_sampling=any(p.top_p < 1 for p in params),
        need_top_k_sampling=any(p.top_k != TOP_K_OFF for p in params),
        need_min_p_sampling=False,
        vocab_size=vocab_size,
        device=device,
    )
    info.sc_plan = plan_of(requests)
    return info


def sampler() -> Any:
    """sglang's Sampler without the process groups that its constructor asks for."""
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
    from sglang.srt.layers.sampler import Sampler

    made: Any = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(made)
    made.tp_sync_group = made.cp_sync_group = made.rl_on_policy_target = None
    made.enable_deterministic = made.use_log_softmax_logprob = made.use_ascend_backend = False
    made.sampling_mask_max_tokens = CAP
    made.output_logprob_processor = OutputLogprobProcessor()
    return made


def run_sampler(requests: Sequence[Request], logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Token ids and logits output of the hooked `Sampler.forward`."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    output = LogitsProcessorOutput(next_token_logits=logits.clone())
    info = sampling_info(requests, logits.shape[1], str(logits.device))
    positions = torch.zeros(len(requests), dtype=torch.int64, device=logits.device)
    ids = sampler()(output, info, False, [0] * len(requests), [None] * len(requests), positions)
    return ids, output


def deliver(output: Any, requests: Sequence[Request], mode: Any) -> None:
    """What sglang does with an auxiliary output: copy it, then hand it the commits."""
    host = output.copy_to_host(lambda tensor: tensor.cpu())
    batch = SimpleNamespace(reqs=list(requests), forward_mode=mode, decoding_reqs=None)
    host.consume(batch, [SimpleNamespace(token_ids=(0,))] * len(requests))
