"""The draft stays private: its mask embedding, its digest, and the ledger of an update. No sglang needed."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from miles_ext.sglang_plugin.digests import Ledger, draft_digest, resident_digest
from miles_ext.sglang_plugin.mask_embedding import MaskedLookup, after_resolve
from miles_ext.tensors import entries
from miles_ext.weights import combine


class Target(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class DraftModel(nn.Module):
    def __init__(self, target: Target) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.lm_head = target.head  # borrowed, as DFlash2 borrows it


def test_lookup_shows_the_vector_to_the_draft_alone() -> None:
    target = Target()
    before = resident_digest(target)
    lookup = MaskedLookup(target.embed, 7, torch.full((4,), 9.0))
    seen = lookup(torch.tensor([[1, 7], [7, 3]]))
    assert (seen[0, 1] == 9).all() and (seen[1, 0] == 9).all()
    assert torch.equal(seen[0, 0], target.embed.weight[1]) and torch.equal(seen[1, 1], target.embed.weight[3])
    assert resident_digest(target) == before
    assert lookup.weight is target.embed.weight


def test_a_draft_without_a_mask_embedding_keeps_its_module() -> None:
    target = Target()
    draft = DraftModel(target)
    assert after_resolve(target.embed, draft, target) is None
    object.__setattr__(draft, "sc_mask_embedding", (7, torch.zeros(4)))
    assert isinstance(after_resolve(target.embed, draft, target), MaskedLookup)


def test_draft_digest_covers_every_private_byte_and_nothing_borrowed() -> None:
    target = Target()
    draft = DraftModel(target)
    digests = [draft_digest(draft, target)]
    target.head.weight.data.add_(1.0)
    assert draft_digest(draft, target) == digests[0]

    def changed() -> bool:
        digests.append(draft_digest(draft, target))
        return len(set(digests)) == len(digests)

    draft.layer.weight.data.view(torch.int32)[0, 0] ^= 1  # one bit
    assert changed()
    draft.get_buffer("scale")[0] = 2.0
    assert changed()
    object.__setattr__(draft, "sc_mask_embedding", (7, torch.zeros(4)))
    assert changed()
    object.__setattr__(draft, "sc_mask_embedding", (7, torch.ones(4)))
    assert changed()


def test_ledger_notes_what_was_loaded_and_lets_go_of_the_model() -> None:
    target, ledger = Target(), Ledger()
    sent = {"embed.weight": torch.randn(10, 4), "head.weight": torch.randn(10, 4)}
    assert ledger.digest == ""
    for name, tensor in sent.items():  # two buckets of one update
        with ledger.recording(target):
            target.load_weights([(name, tensor)])
    assert ledger.digest == combine(entries(sent))
    assert torch.equal(target.head.weight, sent["head.weight"])
    target.load_weights([("head.weight", torch.zeros(10, 4))])
    assert ledger.digest == combine(entries(sent))
