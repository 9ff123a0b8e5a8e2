"""One file a step: every trajectory as flat arrays (safetensors), so that a run can be checked or trained on again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from miles_ext.records import Completion, FinishReason, SpecCounters, SupportRows, Trajectory

FORMAT = "1"
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


@dataclass(frozen=True, slots=True)
class Rollout:
    """What one step sampled. advantages: float64 [n], one a trajectory."""

    step: int
    trajectories: list[Trajectory]
    advantages: NDArray[np.float64]


def rollout_files(arm_dir: Path) -> list[Path]:
    """Rollout files of an arm in order of step."""
    return sorted((arm_dir / "rollouts").glob("*.safetensors"))


def rollout_file(arm_dir: Path, step: int) -> Path:
    return arm_dir / "rollouts" / f"step-{step:06d}.safetensors"


def save_rollout(path: Path, step: int, trajectories: Sequence[Trajectory], advantages: ArrayLike) -> None:
    """Write the trajectories of a step; `load_rollout` gives them back bit for bit.

    ValueError where there is none, or some have support rows of another kind than others.
    """
    completions = [trajectory.completion for trajectory in trajectories]
    kinds = {c.support.kind if c.support is not None else "off" for c in completions}
    if len(kinds) != 1:
        raise ValueError(
            f"a rollout of {len(completions)} trajectories with support kinds {sorted(kinds)}; accepted: one kind"
        )
    if np.shape(advantages) != (len(trajectories),):
        raise ValueError(f"advantages of shape {np.shape(advantages)}; accepted: one for each of {len(trajectories)}")
    texts = [completion.text.encode() for completion in completions]
    arrays: dict[str, NDArray[Any]] = {
        "prompt_ids": np.concatenate([c.prompt_ids for c in completions]),
        "prompt_offsets": _offsets([len(c.prompt_ids) for c in completions]),
        "response_ids": np.concatenate([c.response_ids for c in completions]),
        "response_offsets": _offsets([len(c) for c in completions]),
        "commit": np.concatenate([c.commit for c in completions]),
        "weight_version": np.concatenate([c.weight_version for c in completions]),
        "loss_mask": np.concatenate([t.loss_mask for t in trajectories]),
        "reward": np.array([t.reward for t in trajectories], np.float64),
        "advantage": np.array(advantages, np.float64),
        "prompt": np.array([t.prompt_id for t in trajectories], np.int64),
        "group": np.array([t.group for t in trajectories], np.int64),
        "finish": np.array([FINISH_REASONS.index(c.finish_reason) for c in completions], np.uint8),
        "spec": np.array([(c.spec.live_steps, c.spec.proposed, c.spec.accepted) for c in completions], np.int64),
        "text": np.frombuffer(b"".join(texts), np.uint8),
        "text_offsets": _offsets([len(text) for text in texts]),
    }
    if kinds != {"off"}:
        rows = SupportRows.concatenate([c.support for c in completions if c.support is not None])
        arrays |= {
            "support_ids": rows.token_ids, "support_logprobs": rows.logprobs, "support_offsets": rows.offsets,
            "sampled_logprobs": rows.sampled_logprobs, "status": rows.status,
        }  # fmt: skip
    words = {"engine_id": [c.engine_id for c in completions], "draft_digest": [c.draft_digest for c in completions]}
    metadata = {"format": FORMAT, "step": str(step), "kind": kinds.pop()}
    for name, values in words.items():
        distinct = sorted(set(values))
        metadata[name] = json.dumps(distinct)
        arrays[name] = np.array([distinct.index(value) for value in values], np.int64)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, part, metadata)
    part.replace(path)  # a crash leaves no half a rollout under the final name


def load_rollout(path: Path) -> Rollout:
    """Inverse of `save_rollout`; arrays of the trajectories are views.

    ValueError for another format, and for a file that is cut short, damaged or inconsistent.
    """
    try:
        return _load(path)
    except (SafetensorError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{path} is no sound rollout file ({type(error).__name__}: {error}); accepted: format {FORMAT!r}, whole"
        ) from error


def _load(path: Path) -> Rollout:
    with safe_open(path, "numpy") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ValueError(f"{path} has rollout format {metadata.get('format')!r}; accepted: {FORMAT!r}")
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
    _require_consistent(arrays)
    engines, drafts = json.loads(metadata["engine_id"]), json.loads(metadata["draft_digest"])
    text = arrays["text"].tobytes()
    rows = None
    if metadata["kind"] != "off":
        rows = SupportRows(
            token_ids=arrays["support_ids"], logprobs=arrays["support_logprobs"], offsets=arrays["support_offsets"],
            sampled_logprobs=arrays["sampled_logprobs"], kind=metadata["kind"], status=arrays["status"],
        )  # fmt: skip
    trajectories = []
    for i in range(len(arrays["reward"])):
        prompt, tokens, letters = (
            _span(arrays[name], i) for name in ("prompt_offsets", "response_offsets", "text_offsets")
        )
        live_steps, proposed, accepted = arrays["spec"][i].tolist()
        completion = Completion(
            prompt_ids=arrays["prompt_ids"][prompt], response_ids=arrays["response_ids"][tokens],
            support=None if rows is None else rows[tokens], commit=arrays["commit"][tokens],
            weight_version=arrays["weight_version"][tokens], finish_reason=FINISH_REASONS[arrays["finish"][i]],
            text=text[letters].decode(), engine_id=engines[arrays["engine_id"][i]],
            spec=SpecCounters(live_steps=live_steps, proposed=proposed, accepted=accepted),
            draft_digest=drafts[arrays["draft_digest"][i]],
        )  # fmt: skip
        trajectory = Trajectory(
            completion=completion, prompt_id=int(arrays["prompt"][i]), group=int(arrays["group"][i]),
            reward=float(arrays["reward"][i]), loss_mask=arrays["loss_mask"][tokens],
        )  # fmt: skip
        trajectories.append(trajectory)
    return Rollout(int(metadata["step"]), trajectories, arrays["advantage"])


def _require_consistent(arrays: dict[str, NDArray[Any]]) -> None:
    """ValueError where offsets leave their array, fall, or count other rows than there are, or arrays differ in length.

    A slice past the end of an array is silently shorter: nothing else would notice.
    """
    count, tokens = len(arrays["reward"]), len(arrays["response_ids"])
    ends = {
        "prompt_offsets": (count, len(arrays["prompt_ids"])), "response_offsets": (count, tokens),
        "text_offsets": (count, len(arrays["text"])),
    }  # fmt: skip
    if "support_ids" in arrays:
        ends["support_offsets"] = (tokens, len(arrays["support_ids"]))
    for name, (rows, end) in ends.items():
        offsets = arrays[name]
        if len(offsets) != rows + 1 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
            raise ValueError(f"{name} are no offsets of {rows} rows in {end} entries")
    per_row: tuple[str, ...] = ("advantage", "prompt", "group", "finish", "spec", "engine_id", "draft_digest")
    per_token: tuple[str, ...] = ("commit", "weight_version", "loss_mask", "sampled_logprobs", "status")
    wanted = {"support_logprobs": len(arrays.get("support_ids", ()))}
    wanted |= {name: count for name in per_row} | {name: tokens for name in per_token}
    for name, length in wanted.items():
        if name in arrays and len(arrays[name]) != length:
            raise ValueError(f"{name} has {len(arrays[name])} entries; accepted: {length}")
    for name in ("finish", "engine_id", "draft_digest"):
        if count and arrays[name].min() < 0:
            raise ValueError(f"{name} is negative; accepted: places in its list")


def _offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _span(offsets: NDArray[np.int64], i: int) -> slice:
    return slice(int(offsets[i]), int(offsets[i + 1]))
