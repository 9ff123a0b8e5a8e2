"""Training the tiny models: a few steps only, for what must hold at any length."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from experiments.models import distil, make, train_draft
from experiments.models.accept import accept_length
from experiments.models.make import TargetRecipe
from experiments.models.prompts import addition_source
from experiments.models.sample import pad, sample
from experiments.models.tokenizer import save_tokenizer
from experiments.models.train_draft import DraftRecipe
from experiments.tasks import addition
from rollout.embedded.decoder import Decoder
from rollout.embedded.draft import Draft

SHORT = DraftRecipe(rounds=2, round_steps=12, rows=16, new_tokens=60, batch_rows=8, anchors=6, warmup=5)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target() -> Decoder:
    decoder, losses = make.train_target(TargetRecipe(steps=40, single_steps=30, rows=8, warmup=10))
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    return decoder


def test_target_training_repeats_byte_for_byte(target: Decoder) -> None:
    again, _ = make.train_target(TargetRecipe(steps=40, single_steps=30, rows=8, warmup=10))
    for name, tensor in target.resident_tensors().items():
        assert torch.equal(tensor, again.resident_tensors()[name]), name


@torch.no_grad()
def test_a_saved_target_is_an_ordinary_checkpoint(target: Decoder, tmp_path: Path) -> None:
    """bfloat16 storage loses nothing, since training ends by rounding to it; transformers sees the same model."""
    make.save_target(target, tmp_path)
    loaded = Decoder.from_hf(tmp_path)
    for name, tensor in target.resident_tensors().items():
        assert torch.equal(tensor, loaded.resident_tensors()[name]), name
    tokens = make.batch(TargetRecipe(), 0)[:4]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)(tokens).logits
    hidden, _ = loaded.forward(tokens, torch.arange(tokens.shape[1]).expand(4, -1))
    assert (loaded.logits(hidden) - expected).abs().max() < 5e-5


def test_documents_of_a_batch_reach_the_lengths_that_long_responses_need() -> None:
    recipe = TargetRecipe()
    lengths = {make.batch(recipe, step).shape[1] for step in range(recipe.single_steps, recipe.single_steps + 60)}
    assert min(lengths) == 44 and max(lengths) == 9 * 44
    assert {make.batch(recipe, step).shape[1] for step in range(0, recipe.single_steps, 50)} == {44}


def test_draft_training_learns_repeats_and_survives_the_disk(target: Decoder, tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in target.resident_tensors().items()}
    source = addition_source(SHORT.rows, 8, 0)
    draft, losses = train_draft.train_draft(target, source, SHORT)
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    again, _ = train_draft.train_draft(target, source, SHORT)
    draft.save_pretrained(tmp_path, train_draft.STORED)
    loaded = Draft.from_pretrained(tmp_path, target)
    for name, tensor in draft.private_tensors().items():
        assert torch.equal(tensor, again.private_tensors()[name]), name
        assert torch.equal(tensor, loaded.private_tensors()[name]), name
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.resident_tensors().items())


def test_an_interrupted_training_goes_on_where_it_was(target: Decoder, tmp_path: Path) -> None:
    def interrupt(figures: dict[str, float]) -> None:
        raise KeyboardInterrupt

    source, recipe = addition_source(SHORT.rows, 8, 0), replace(SHORT, small_block=4, acceptance=1.0)
    whole, losses = train_draft.train_draft(target, source, recipe)
    with pytest.raises(KeyboardInterrupt):
        train_draft.train_draft(target, source, recipe, interrupt, tmp_path / "state")
    with pytest.raises(ValueError, match="another recipe"):
        train_draft.train_draft(target, source, replace(recipe, seed=1), state=tmp_path / "state")
    resumed, again = train_draft.train_draft(target, source, recipe, state=tmp_path / "state")
    assert again == losses
    for name, tensor in whole.private_tensors().items():
        assert torch.equal(tensor, resumed.private_tensors()[name]), name


@torch.no_grad()
def test_ragged_prompts_are_continued_as_each_would_be_alone(target: Decoder) -> None:
    """Final states and taps, by position, equal one uncached pass over the sampled text."""
    prompts, lengths = pad([addition.encode("123+456="), addition.encode("7+"), addition.encode("99+1=")])
    texts = sample(target, prompts, 20, torch.Generator().manual_seed(3), taps=(0, 5), lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        read = length + 19
        hidden, taps = target.forward(texts.tokens[row : row + 1, :read], torch.arange(read)[None], taps=(0, 5))
        assert taps is not None
        assert (texts.hidden[row, :read] - hidden[0]).abs().max() < 2e-5
        assert (texts.taps[row, :read] - taps[0]).abs().max() < 2e-5
        assert not texts.hidden[row, read:].any() and not texts.tokens[row, read + 1 :].any()


def test_the_expected_accept_length_is_what_decoding_measures(target: Decoder) -> None:
    """Along sampled texts and in a real verification loop, with as many candidates as the task has characters."""
    recipe = replace(SHORT, block_size=4, selector_top_k=16, round_steps=30)
    draft, _ = train_draft.train_draft(target, addition_source(16, 8, 0), recipe)
    prompts, lengths = addition_source(1, 128, 5).held_out
    measured = accept_length(draft, prompts, 31, torch.Generator().manual_seed(1), True)
    texts = sample(target, prompts, 34, torch.Generator().manual_seed(2), taps=draft.config.taps)
    ends, generator = texts.prompt_lengths + 34, torch.Generator().manual_seed(3)
    rows, where = torch.arange(128), torch.rand(128, 8, generator=generator) * 0.9
    with torch.no_grad():
        _, expected = distil.block_loss(draft, distil.lesson(draft, texts, ends, rows, where), 4.0, 0.0)
    assert expected.item() == pytest.approx(measured, rel=0.08)


@torch.no_grad()
def test_the_training_pass_is_the_engines_cached_pass(target: Decoder) -> None:
    draft = train_draft.new_draft(target, replace(SHORT, layers=2))
    tokens = make.batch(TargetRecipe(), 0)[:3]
    positions = torch.arange(40).expand(3, -1)
    _, taps = target.forward(tokens[:, :40], positions, taps=draft.config.taps)
    assert taps is not None
    anchors = torch.tensor([[8, 20, 33], [9, 15, 30], [12, 13, 14]])
    trained = distil.blocks_hidden(draft, tokens, taps, anchors)
    for column in range(3):
        cache = draft.new_cache(3, 48)
        starts = anchors[:, column]
        draft.append(taps, positions.where(positions < starts[:, None], -1), cache)
        cached = draft.block_hidden(tokens.gather(1, starts[:, None])[:, 0], starts, cache, slice(0, 3), 40)
        assert (trained[:, column] - cached).abs().max() < 2e-5


@torch.no_grad()
def test_selector_loss_scores_what_the_selector_samples_from(target: Decoder) -> None:
    """At the optimum of the loss the law is the selector's own, so its value there is that law's entropy."""
    draft = train_draft.new_draft(target, replace(SHORT, block_size=2, selector_top_k=512))
    tokens = make.batch(TargetRecipe(), 0)[:2]
    positions = torch.arange(40).expand(2, -1)
    _, taps = target.forward(tokens[:, :40], positions, taps=draft.config.taps)
    assert taps is not None
    anchors = torch.tensor([[8], [21]])
    hidden = distil.blocks_hidden(draft, tokens, taps, anchors)
    candidates, scores = draft.lattice(hidden[:, 0], tokens.gather(1, anchors)[:, 0])
    law = torch.zeros(2, 1, 512).scatter_(-1, candidates, torch.softmax(scores[:, :, 0], -1))[:, None]
    unary = torch.log_softmax(target.logits(hidden), -1)
    expected = -(law * (law.log() + unary)).sum(-1).mean()
    given = distil.Lesson(tokens, taps, anchors, law, torch.ones(2, 1, 1, dtype=torch.bool))
    loss, _ = distil.block_loss(draft, given, 4.0, 0.0)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_a_draft_can_be_trained_for_another_architecture(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tied Llama with its own vocabulary size, prompts from a file, through the command."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=520,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    save_tokenizer(tmp_path / "target")
    command = ["--target", str(tmp_path / "target"), "--out", str(tmp_path / "draft"), "--rounds", "1"]
    command += ["--round-steps", "2", "--rows", "8", "--new-tokens", "24", "--block-size", "4", "--device", device]
    with pytest.raises(ValueError, match="--chat or --prompts"):
        train_draft.main(command)
    (tmp_path / "prompts.txt").write_text("123+456=\n\n1+2=\n")
    train_draft.main([*command, "--prompts", str(tmp_path / "prompts.txt")])
    assert "held-out accept length, dflash2" in capsys.readouterr().out
    draft = Draft.from_pretrained(tmp_path / "draft", Decoder.from_hf(tmp_path / "target"))
    assert draft.config.block_size == 4 and draft.config.selector


@pytest.mark.parametrize("selector", [False, True])
def test_accept_length_is_bounded_by_the_block_and_falls_for_a_bad_draft(target: Decoder, selector: bool) -> None:
    """A draft that cannot know anything is accepted by luck only: between 1 and a little more."""
    draft = train_draft.new_draft(target, SHORT)
    prompts, _ = addition_source(1, 8, 0).held_out
    length = accept_length(draft, prompts, 40, torch.Generator().manual_seed(0), selector)
    assert 1.0 <= length < 1.6
