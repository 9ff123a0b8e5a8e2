"""The shipped checkpoints: what experiments, proofs and benches rely on."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from experiments.models import make, train_draft
from experiments.models.accept import accept_length
from experiments.models.prompts import addition_source
from experiments.tasks import addition
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft

TINY = Path(make.__file__).parent / "tiny"


@pytest.fixture(scope="module")
def target() -> Decoder:
    return Decoder.from_hf(TINY / "target")


def test_the_shipped_files_are_small() -> None:
    assert sum(file.stat().st_size for file in TINY.rglob("*") if file.is_file()) < 3_000_000


@torch.no_grad()
def test_transformers_reads_the_target_and_its_tokenizer(target: Decoder) -> None:
    texts = [addition.document(addition.problem(1, 0, 0, "held_out"), make.Random(0), 9) for _ in range(2)]
    tokens = torch.tensor(AutoTokenizer.from_pretrained(TINY / "target")(texts)["input_ids"])
    assert tokens.tolist() == [addition.encode(text) for text in texts]
    expected = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)(tokens).logits
    hidden, _ = target.forward(tokens, torch.arange(tokens.shape[1]).expand(2, -1))
    assert (target.logits(hidden) - expected).abs().max() < 5e-5


def test_the_target_leaves_room_for_reinforcement_learning(target: Decoder) -> None:
    assert 0.5 < make.accuracy(target, 512, 3) < 0.7


def test_the_recipes_are_those_of_the_shipped_checkpoints(target: Decoder) -> None:
    assert target.config == make.BlockConfig.from_hf(make.ARCHITECTURE)
    shipped = Draft.from_pretrained(TINY / "draft", target)
    assert shipped.config == train_draft.new_draft(target, train_draft.DraftRecipe()).config


@pytest.mark.parametrize("selector", [False, True], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("tokens", [36, 256])
def test_the_draft_is_accepted_on_held_out_problems(target: Decoder, tokens: int, selector: bool) -> None:
    draft = Draft.from_pretrained(TINY / "draft", target)
    prompts = addition_source(1, 32, 9).held_out[0]
    generator = torch.Generator().manual_seed(5)
    assert accept_length(draft, prompts, tokens, generator, selector) > 4.3
