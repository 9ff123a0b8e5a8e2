"""What a test needs of Miles' processes: samples, their way to the trainer, and one training step without a GPU."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch

from miles_ext.miles_adapter.samples import ATTRIBUTE, append
from tests.miles.batches import Packed, arguments


class Unset(Namespace):
    """Arguments of which those that a test does not name are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


ADAPTER = {
    "custom_convert_samples_to_train_data_path": "miles_ext.miles_adapter.conversion.convert",
    "rollout_function_path": "miles_ext.miles_adapter.rollout.RolloutFn",
    "custom_megatron_init_path": "miles_ext.miles_adapter.trainer.init",
}


def full_arguments(**changes: Any) -> Unset:
    given = dict(
        **ADAPTER, train_backend="megatron", rewards_normalization=False, n_samples_per_prompt=1, rollout_batch_size=3,
        balance_data=False, delay_split_train_data_by_dp=False, object_store_backend="ray", partial_rollout=False,
        data_pad_size_multiplier=1, use_dynamic_batch_size=False, micro_batch_size=3, ci_test=False,
        enable_mtp_training=False, debug_disable_optimizer=True, enable_witness=False, use_miles_router=True,
    )  # fmt: skip
    return Unset(**vars(arguments(**{**given, **changes})))


def samples_of(found: Packed) -> list[Any]:
    from miles.utils.types import Sample

    made = []
    for index, tokens in enumerate(found.batch["unconcat_tokens"]):
        length = found.batch["response_lengths"][index]
        sample = Sample(
            index=index, group_index=index, tokens=tokens.tolist(), response="x" * length, response_length=length,
            reward=float(found.batch["advantages"][index][0]), status=Sample.Status.COMPLETED,
            rollout_log_probs=found.batch["rollout_log_probs"][index].tolist(),
            loss_mask=found.batch["loss_masks"][index].tolist(),
        )  # fmt: skip
        append(sample, found.batch[ATTRIBUTE][index])
        made.append(sample)
    return made


def manager(args: Namespace) -> Any:
    """Miles' rollout manager with nothing started: what conversion and split read of it. For miles-rl 0.0.2."""
    from miles.ray.rollout import RolloutManager

    bare = object.__new__(RolloutManager.__ray_metadata__.modified_class)
    bare.args, bare.custom_reward_post_process_func = args, None
    bare.custom_convert_samples_to_train_data_func = None
    return bare


def train_step(data: dict[str, Any], args: Namespace, logits: torch.Tensor, monkeypatch) -> dict[str, float]:
    """Miles' `train_one_step` on one micro-batch of this shard, with `logits` for a model. Its metrics."""
    from megatron.core import mpu
    from miles.backends.megatron_utils import model as module
    from miles.backends.training_utils.data import DataIterator
    from miles.utils import dumper_utils

    def forward_backward(forward_step_func, data_iterator, model, **_):
        output, loss_of = forward_step_func(data_iterator[0], model[0])
        loss, _, log = loss_of(output)
        loss.backward()
        return [log]

    class Model:
        def zero_grad_buffer(self) -> None:
            pass

        def __call__(self, **_: Any) -> torch.Tensor:
            return logits

    monkeypatch.setattr(dumper_utils, "_get_phase_override_configs", lambda *_: {})  # sglang's dumper, off
    monkeypatch.setattr(module, "get_args", lambda: args)
    monkeypatch.setattr(module, "get_forward_backward_func", lambda: forward_backward)
    monkeypatch.setattr(module, "get_packed_seq_params", lambda batch, args: None)
    monkeypatch.setattr(mpu, "is_pipeline_last_stage", lambda **_: True)
    iterator = DataIterator(data, micro_batch_size=len(data["response_lengths"]))
    extra = {} if "num_rollouts" not in _parameters(module.train_one_step) else dict(
        num_rollouts=args.global_batch_size, witness_info=None, attempt=0
    )  # fmt: skip
    result = module.train_one_step(args, 0, 0, [iterator], [Model()], None, None, 1, **extra)
    return result[0]


def _parameters(function: Any) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)
