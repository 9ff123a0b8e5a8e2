"""Stop strings, found in a decoded tail."""

from pathlib import Path

import numpy as np
import pytest

from experiments.tasks.addition import MASK_ID, encode
from rollout.embedded.text import Text

TEXT = Text(Path("experiments/models/tiny/target"))


@pytest.mark.parametrize("silent", [MASK_ID, 600], ids=["special", "beyond the tokenizer"])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_a_stop_string_is_found_across_tokens_without_text(silent, count):
    ids = np.array([*encode("11c"), *[silent] * count, *encode(";1")], np.int32)
    assert TEXT.stop_after(ids, 2, ("c;",)) == 1
    assert TEXT.stop_after(ids[:-2], count + 1, ("c;",)) is None
    assert TEXT.trimmed(ids, ("c;",)) == "11"


def test_a_tail_is_enough_for_the_longest_string():
    ids = np.array(encode("1+2+3=6c0;8"), np.int32)
    for start in range(len(ids) - 1):
        stop = TEXT.decode(ids[start:-1])
        assert TEXT.stop_after(ids[:-1], 1, (stop,)) == 1
