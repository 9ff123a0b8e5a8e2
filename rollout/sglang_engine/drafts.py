"""The draft's folder as sglang must see it, checked against its target before a server is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from miles_ext.capability import ArmKind
from miles_ext.errors import CheckpointError

PLAIN = "DFlashDraftModel"


def draft_for(arm: ArmKind, target: Path, draft: Path | None, folder: Path) -> Path | None:
    """None for regular decoding; for `dflash` and a draft with a path selector, a copy in `folder` without it.

    Raises CheckpointError where the draft is missing, lacks what the arm needs, or belongs to another target.
    """
    if arm == "regular":
        return None
    if draft is None:
        raise CheckpointError(f"arm {arm!r} needs a draft checkpoint and got none; name one, or use 'regular'")
    config = read_config(draft)
    inner = config.get("dflash_config")
    if not isinstance(inner, dict):
        raise CheckpointError(f"{draft} is no DFlash draft: its config.json has no dflash_config; name another folder")
    wrong = misfits(config, inner, read_config(target))
    if wrong:
        raise CheckpointError(f"draft {draft} is not for target {target}: {'; '.join(wrong)}; train a draft for it")
    selects = bool(inner.get("selector_rank"))
    if arm == "dflash2" and not selects:
        raise CheckpointError(f"arm 'dflash2' needs a path selector and {draft} has none; use 'dflash'")
    if arm == "dflash2" or not selects:
        return draft.absolute()
    plain = {name: value for name, value in inner.items() if not name.startswith("selector_")}
    copy = folder / "draft"
    shutil.copytree(draft, copy)
    (copy / "config.json").write_text(json.dumps({**config, "architectures": [PLAIN], "dflash_config": plain}))
    return copy


def misfits(draft: dict[str, Any], inner: dict[str, Any], target: dict[str, Any]) -> list[str]:
    """What keeps a draft from serving a target, by their configurations."""
    text = target.get("text_config", target)
    layers, vocabulary = text["num_hidden_layers"], text["vocab_size"]
    wrong = [
        f"{name} {draft[name]} differs from the target's {text[name]}"
        for name in ("hidden_size", "vocab_size")
        if draft[name] != text[name]
    ]
    trained = inner.get("num_target_layers", draft.get("num_target_layers"))
    if trained not in (None, layers):
        wrong.append(f"num_target_layers {trained} differs from the target's {layers}")
    taps = inner.get("target_layer_ids") or []
    if not all(0 <= tap < layers - 1 for tap in taps):
        wrong.append(
            f"target_layer_ids {taps} are not all below {layers - 1}: sglang shows what goes into a layer of the "
            f"target's {layers}, and nothing follows the last"
        )
    if not 0 <= inner.get("mask_token_id", 0) < vocabulary:
        wrong.append(f"mask_token_id {inner['mask_token_id']} is outside the target's vocabulary of {vocabulary}")
    return wrong


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json. CheckpointError where there is none."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; accepted: a checkpoint folder in the Hugging Face layout")
    return json.loads(file.read_text())
