"""From given logits to recorded rows through the installed sglang's own functions, without a server.

    python -m experiments.validate.on_sglang.laws FOLDER cpu|cuda rows|laws|stock

runs in sglang's interpreter on FOLDER/cases.npz and writes FOLDER/laws.npz. `rows`: with the plugin, the regular
sampler and both verifiers, each through accept, packing and encoding. `laws`: with the plugin, what is drawn from and
what the verifiers are given. `stock`: the same of sglang's own filters, without the plugin.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles_ext.records import SupportRows
from miles_ext.sampling import SamplingSpec
from miles_ext.wire import request_fields, unpack

Mode = Literal["rows", "laws", "stock"]
Logits = NDArray[np.float32]
BLOCK, TOP_K_OFF, CAP = 4, 1 << 30, 4096
_ARRAYS = ("token_ids", "logprobs", "offsets", "sampled_logprobs", "status")


# On the side of the proof table


def write_cases(file: Path, logits: Sequence[Logits], specs: Sequence[SamplingSpec]) -> None:
    arrays: dict[str, Any] = {f"logits-{i}": z for i, z in enumerate(logits)}
    filters = np.array([(s.temperature, s.top_k, s.top_p, s.filter_order == "joint") for s in specs], np.float64)
    np.savez(file, filters=filters, **arrays)


def decode(file: Path) -> dict[str, list[SupportRows]]:
    """What `rows` wrote: for each path, the rows of each case."""
    found: dict[str, list[SupportRows]] = {}
    with np.load(file) as arrays:
        for path in arrays["paths"].tolist():
            found[path] = [
                SupportRows(**{name: arrays[f"{path}-{i}-{name}"] for name in _ARRAYS}, kind="complete")
                for i in range(int(arrays["count"]))
            ]
    return found


def dense(file: Path) -> dict[str, list[Logits]]:
    """What `laws` and `stock` wrote: for each path, the law of each case."""
    with np.load(file) as arrays:
        return {p: [arrays[f"{p}-{i}"] for i in range(int(arrays["count"]))] for p in arrays["paths"].tolist()}


# On the side of sglang


@dataclass
class Case:
    """One request on `device` and the logits that every position of it sees."""

    logits: Tensor
    spec: SamplingSpec

    def request(self) -> Any:
        spec = self.spec
        params = SimpleNamespace(
            temperature=spec.temperature, top_k=spec.top_k or TOP_K_OFF, top_p=spec.top_p, min_p=0.0,
            custom_params={"sc": request_fields(spec)},
        )  # fmt: skip
        return SimpleNamespace(sampling_params=params, stream=False, finished=lambda: False)

    def info(self, requests: Sequence[Any]) -> Any:
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        device, params = self.logits.device, [request.sampling_params for request in requests]
        return SamplingBatchInfo(
            temperatures=torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=device),
            top_ps=torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            top_ks=torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
            min_ps=torch.zeros(len(params), device=device), is_all_greedy=False, is_any_greedy=False,
            need_top_p_sampling=any(p.top_p < 1 for p in params),
            need_top_k_sampling=any(p.top_k != TOP_K_OFF for p in params), need_min_p_sampling=False,
            vocab_size=len(self.logits), device=str(device),
        )  # fmt: skip


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


def recorded(case: Case, path: str) -> SupportRows:
    """One step of one request through a path: sampler or accept step, packing, hand-out, encoding."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from miles_ext.sglang_plugin.plan import plan_of
    from miles_ext.sglang_plugin.rows import encode

    os.environ["MILES_SC_FILTER_ORDER"] = case.spec.filter_order
    request = case.request()
    info = case.info([request])
    info.sc_plan = plan_of([request])
    output, tokens = sampled(case, info) if path == "regular" else accepted(case, info, path)
    host = output.copy_to_host(lambda tensor: tensor.cpu())
    batch = SimpleNamespace(reqs=[request], forward_mode=ForwardMode.DECODE, decoding_reqs=None)
    host.consume(batch, [SimpleNamespace(token_ids=tuple(tokens))])
    rows, commit = unpack(encode([request.sc_rows.take()]))
    assert len(rows) == len(commit) == len(tokens)
    return rows.check(np.array(tokens), len(case.logits))


def sampled(case: Case, info: Any) -> tuple[Any, list[int]]:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    output = LogitsProcessorOutput(next_token_logits=case.logits[None].clone())
    positions = torch.zeros(1, dtype=torch.int64, device=case.logits.device)
    ids = sampler()(output, info, False, [0], [None], positions)
    return output.auxiliary_device_output, ids.tolist()


def accepted(case: Case, info: Any, path: str) -> tuple[Any, list[int]]:
    """The plugin's accept step around sglang's accept functions, with the likeliest token drafted everywhere."""
    from sglang.srt.speculative import dflash_utils, dflash_worker_v2

    from miles_ext.sglang_plugin.verifier import around_accept_block

    likeliest = int(case.logits.argmax())
    candidates = torch.full((1, BLOCK), likeliest, dtype=torch.int64, device=case.logits.device)
    logits = case.logits.repeat(BLOCK, 1)

    def accept(_worker: Any, **_arguments: Any) -> tuple[Any, Tensor, Any, Tensor, Any]:
        if path == "dflash":
            counts, bonus = dflash_utils.compute_dflash_sampling_correct_drafts_and_bonus(
                candidates=candidates, next_token_logits=logits, sampling_info=info, threshold_single=1.0,
                threshold_acc=1.0,
            )  # fmt: skip
        else:
            proposals = torch.zeros(1, BLOCK - 1, logits.shape[1], device=logits.device)
            proposals[:, :, likeliest] = 1.0
            counts, bonus, _ = dflash_worker_v2.accept_sampling(
                candidates=candidates, target_logits=logits, draft_probs=proposals, sampling_info=info,
                draft_input=SimpleNamespace(max_top_k=None, uniform_top_k_value=None), gamma=BLOCK - 1,
                verify_num_draft_tokens=BLOCK,
            )  # fmt: skip
        tokens = torch.cat([candidates[:, 1:], candidates[:, :1]], 1)
        tokens = tokens.scatter(1, counts.long()[:, None], bonus.long()[:, None])
        return None, counts + 1, None, tokens, None

    worker = SimpleNamespace()
    step = {"sampling_info": info, "bs": 1, "next_token_logits": logits}
    _, committed, _, tokens, _ = around_accept_block(accept, worker, **step)
    return worker.sc_step.rows, tokens[0, : int(committed[0])].tolist()


def law(case: Case, path: str, mode: Mode) -> Tensor:
    """The law [v] of one position, with the plugin or sglang's own."""
    os.environ["MILES_SC_FILTER_ORDER"] = case.spec.filter_order
    request = case.request()
    info = case.info([request])
    if mode == "laws":
        from miles_ext.sglang_plugin.plan import plan_of

        info.sc_plan = plan_of([request])
    if path == "verifiers":
        from sglang.srt.speculative.dflash_utils import build_speculative_verify_target_probs

        logits = case.logits[None].clone()
        return build_speculative_verify_target_probs(
            next_token_logits=logits, sampling_info=info, draft_token_num=1, bs=1
        ).flatten()
    if mode == "laws":
        return drawn_from(case, info)
    from sglang.srt.layers import sampler as module

    backend = "flashinfer" if case.logits.is_cuda else "pytorch"
    context = SimpleNamespace(kernel=SimpleNamespace(sampling_backend=backend))
    module.get_exec = lambda: context
    info.sampling_mask_batch_indices = torch.zeros(1, dtype=torch.int64, device=case.logits.device)
    probs = torch.softmax(case.logits[None] / info.temperatures, -1)
    simple = not (info.need_top_k_sampling or info.need_top_p_sampling)
    positions = torch.zeros(1, dtype=torch.int64, device=case.logits.device)
    _, capture = sampler()._sample_from_probs(probs, info, positions, simple)
    assert capture is not None
    kept = capture.weights.double()  # stock draws in proportion to them
    if capture.token_ids is not None:
        kept = torch.zeros_like(probs, dtype=torch.float64).scatter(1, capture.token_ids.long(), kept)
    return (kept / kept.sum(-1, keepdim=True)).flatten()


def drawn_from(case: Case, info: Any) -> Tensor:
    """What the plugin's sampler draws from."""
    from miles_ext.sglang_plugin import sampler as module

    seen, draw = [], module.draw

    def watched(probs: Tensor, *rest: Any) -> Tensor:
        seen.append(probs.clone())
        return draw(probs, *rest)

    module.draw = watched
    try:
        sampled(case, info)
    finally:
        module.draw = draw
    return seen[0].flatten()


def main(folder: Path, device: str, mode: Mode) -> None:
    if mode != "stock":
        from sglang.srt.plugins import load_plugins

        load_plugins()
    torch.manual_seed(0)
    with np.load(folder / "cases.npz") as arrays:
        filters = arrays["filters"]
        cases = [
            Case(
                torch.from_numpy(arrays[f"logits-{i}"]).to(device),
                SamplingSpec(
                    temperature=t, top_k=int(k), top_p=p, filter_order="joint" if joint else "top_k_first",
                    max_support=CAP,
                ),
            )
            for i, (t, k, p, joint) in enumerate(filters.tolist())
        ]  # fmt: skip
    paths = ("regular", "dflash", "dflash2") if mode == "rows" else ("regular", "verifiers")
    found: dict[str, Any] = {"paths": np.array(paths), "count": np.array(len(cases))}
    for path in paths:
        for i, case in enumerate(cases):
            if mode != "rows":
                found[f"{path}-{i}"] = law(case, path, mode).cpu().numpy()
                continue
            rows = recorded(case, path)
            found |= {f"{path}-{i}-{name}": getattr(rows, name) for name in _ARRAYS}
    np.savez(folder / "laws.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], cast(Mode, sys.argv[3]))
