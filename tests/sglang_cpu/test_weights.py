"""sglang's own weight manager under the plugin: every transport reaches the target only, a changed draft is seen."""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from miles_ext.sglang_plugin.weights import proof_of, refreshed
from miles_ext.tensors import entries
from miles_ext.weights import combine

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugin", "process_group")]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class Runner:
    """A model runner with sglang's real updater."""

    def __init__(self) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        self.model = Model()
        rest = {"gpu_id": 0, "model_config": None, "custom_weight_loaders": {}, "update_model_fields": None,
                "recapture_cuda_graph": None, "get_model_runner": lambda: self}  # fmt: skip
        self.weight_updater: Any = WeightUpdater(tp_rank=0, device="cpu", get_model=lambda: self.model, **rest)


class Scheduler:
    """The parts of a scheduler that updates touch, around sglang's real manager."""

    def __init__(self) -> None:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

        target, draft = Runner(), Runner()
        self.tp_worker = SimpleNamespace(
            model_runner=target, weight_update_runners=lambda: [("target", target)],
            deserialize_own_rank=lambda tensors: tensors,
        )  # fmt: skip
        self.draft_worker = SimpleNamespace(draft_model=draft.model, weight_update_runners=lambda: [("draft", draft)])
        self.versions: list[Any] = []
        self.manager: Any = Manager.__new__(Manager)
        parts = {"tp_worker": self.tp_worker, "draft_worker": self.draft_worker, "scheduler": self, "_session": None}
        parts |= {"metrics_collector": None, "flush_cache": lambda **_: True, "tp_cpu_group": dist.group.WORLD}
        for name, value in parts.items():
            setattr(self.manager, name, value)
        self.target, self.draft = target.model, draft.model
        proof_of(self)

    def record_weight_version_change(self, new_version: Any) -> None:
        self.versions.append(new_version)


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    from sglang.srt.model_executor.model_runner_components import weight_updater as module

    monkeypatch.setattr(module, "get_model", lambda: SimpleNamespace(weight_cache_mode="off"))
    monkeypatch.setattr(module, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setattr(module.DefaultModelLoader, "restore_weights_before_loading", lambda *_: None)
    monkeypatch.setattr(module.DefaultModelLoader, "postprocess_weights", lambda *_: None)
    return Scheduler()


def ask(**fields: Any) -> Any:
    return SimpleNamespace(**{"selector": "target", "flush_cache": True, "torch_empty_cache": False,
                              "weight_version": "3", "load_format": None, **fields})  # fmt: skip


def new_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"layer.weight": torch.randn(4, 4, generator=generator), "layer.bias": torch.randn(4, generator=generator)}


@pytest.mark.parametrize("selector", ["target", "all"])
def test_tensors_in_buckets(scheduler: Scheduler, selector: str) -> None:
    manager, sent = scheduler.manager, new_weights()
    private = [p.clone() for p in scheduler.draft.parameters()]
    before = refreshed(scheduler).draft
    assert manager.begin_weight_update(ask(selector=selector)).success
    for item in sent.items():
        request = ask(selector=selector, serialized_named_tensors=[item])
        assert manager.update_weights_from_tensor(request).success
    assert manager.end_weight_update(ask()).success
    proof = refreshed(scheduler)
    assert proof.ledger.digest == combine(entries(sent))
    assert torch.equal(scheduler.target.layer.weight, sent["layer.weight"])
    assert all(torch.equal(now, then) for now, then in zip(scheduler.draft.parameters(), private, strict=True))
    assert proof.draft == before
    assert scheduler.versions == ["3", "3"]


def test_a_broadcast(scheduler: Scheduler) -> None:
    manager, updater = scheduler.manager, scheduler.tp_worker.model_runner.weight_updater
    updater._model_update_group["weights"] = dist.group.WORLD
    before = refreshed(scheduler).draft
    manager.begin_weight_update(ask())
    request = ask(names=["layer.bias"], dtypes=["float32"], shapes=[[4]], group_name="weights", selector="all")
    assert manager.update_weights_from_distributed(request).success
    assert manager.end_weight_update(ask()).success
    proof = refreshed(scheduler)
    assert proof.ledger.digest == combine(entries({"layer.bias": scheduler.target.layer.bias}))
    assert proof.draft == before


def test_a_bit_flipped_in_the_draft_fails_the_next_handoff(scheduler: Scheduler) -> None:
    manager = scheduler.manager
    manager.begin_weight_update(ask())
    scheduler.draft.layer.weight.data.view(torch.int32)[0, 0] ^= 1
    manager.update_weights_from_tensor(ask(serialized_named_tensors=list(new_weights().items())))
    output = manager.end_weight_update(ask())
    assert not output.success
    assert "the draft's bytes changed" in output.message
    proof = refreshed(scheduler)
    assert proof.draft != proof.loaded_draft


def test_the_draft_cannot_be_selected(scheduler: Scheduler) -> None:
    manager = scheduler.manager
    assert not manager.begin_weight_update(ask(selector="draft")).success
    manager.begin_weight_update(ask())
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], selector="draft")
    output = manager.update_weights_from_tensor(request)
    assert not output.success and "private" in output.message


def test_updates_without_a_selector_mean_the_target(scheduler: Scheduler) -> None:
    """Disk and IPC ask for every runner; checksums still get both."""
    roles = [role for role, _ in scheduler.manager._select_runners()]
    assert roles == ["target"]


def test_nothing_is_received_before_an_update(scheduler: Scheduler) -> None:
    assert refreshed(scheduler).ledger.digest == ""
