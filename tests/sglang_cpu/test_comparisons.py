"""How the results of a GPU are judged: supports of two arms, and losses of paired rates."""

import numpy as np
import pytest

from miles_ext.sampling import SamplingSpec
from tests.sglang_cuda.show_cost import Rates, judge, loss
from tests.sglang_cuda.show_law import avoiding, differ

pytestmark = pytest.mark.sglang
K4 = SamplingSpec(top_k=4, top_p=0.9)
NARROW = {4: 0.5512, 7: 0.1965, 8: 0.1438, 3: 0.1085}


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({}, "equal"),
        ({5: 0.1085}, "near tie"),  # ties with the last of four
        ({5: 0.1030}, "near tie"),  # a rounding of a bfloat16 logit below it
        ({5: 0.0700}, "apart"),
        ({5: 0.1085, 6: 0.02}, "apart"),
    ],
)
def test_a_support_may_differ_at_a_cutoff_only(extra: dict[int, float], kind: str) -> None:
    assert differ(K4, NARROW, NARROW | extra) == kind
    assert differ(K4, NARROW | extra, NARROW) == kind


def test_a_nucleus_may_end_one_token_later_where_the_mass_is_near_p() -> None:
    spec = SamplingSpec(top_k=32, top_p=0.95)
    assert differ(spec, {1: 0.71, 2: 0.29}, {1: 0.68, 2: 0.26, 3: 0.06}) == "near tie"
    assert differ(spec, {1: 0.7}, {1: 0.7, 2: 0.3}) == "apart"
    assert differ(spec, {1: 0.7, 2: 0.3}, {1: 0.7, 3: 0.3}) == "apart"


def test_responses_through_a_near_tie_are_left_out() -> None:
    ids = np.array([[1, 2, 3], [1, 4, 3], [2, 2, 3]])
    assert avoiding({(1,)}, ids, 1).tolist() == [[2, 2, 3]]
    assert avoiding({(1, 4)}, ids, 1).tolist() == ids.tolist()  # it decides a later token
    assert avoiding({(1, 4)}, ids, 2).tolist() == [[1, 2, 3], [2, 2, 3]]


def test_a_loss_is_of_neighbours_and_a_drift_cancels() -> None:
    drift = np.array([4000.0, 3000.0, 2000.0, 5000.0])
    row = loss("x", list(0.98 * drift), list(drift), 5.0)
    assert row.passed and row.value == pytest.approx(2.0)
    assert "interval 2.0 to 2.0" in row.detail
    assert not loss("x", list(0.93 * drift), list(drift), 5.0).passed


def test_a_case_reports_rates_loss_and_overhead() -> None:
    rates = Rates(off=[100.0, 100.0], on=[97.0, 99.0], stock=[102.0, 102.0], size=1000.0)
    rows = {row.name: row for row in judge("server", "K32", rates)}
    assert rows["loss/server K32"].value == pytest.approx(2.0)
    assert rows["overhead/server K32 off, beside stock"].value == pytest.approx(100 * 2 / 102)


def test_the_other_filter_order_is_no_near_tie() -> None:
    """The joint order keeps a token more, 0.034 below p: what it does to the tiny target at top_k 4, top_p 0.9."""
    first, joint = {4: 0.72, 7: 0.28}, {4: 0.62, 7: 0.2456, 8: 0.1344}
    assert differ(K4, first, joint) == "apart"
