"""The proof table as a command, and its own parts: what they accept, and that they notice what is broken."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import validate
from experiments.validate import alignment, law, mutate, reference, verifier
from experiments.validate.embedded import EmbeddedEngines
from experiments.validate.filters import CASES
from experiments.validate.rows_of import Comparison, each
from experiments.validate.settings import SETTINGS, Context


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> Context:
    scratch = tmp_path_factory.mktemp("validate")
    return Context(EmbeddedEngines(scratch), quick=True, cases=None, scratch=scratch)


def test_the_twelve_settings(context):
    assert len({setting.name for setting in SETTINGS}) == 12
    assert len(context.settings_of(512)) == 12
    missing = {setting.name for setting in SETTINGS} - {setting.name for setting in context.settings_of(100)}
    assert missing == {"K128 T1.0", "K128 T0.7"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rows": ["filter"]}, r"rows \['filter'\] do not exist; accepted: filters"),
        ({"rows": [], "engine": "vllm"}, "engine is 'vllm'; accepted: embedded"),
        ({"rows": ["law"], "cases": CASES}, "needs one row, filters or estimator"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        validate.main(**arguments)


def test_given_cases_are_judged_and_written(tmp_path, capsys):
    cases = json.loads(CASES.read_text())
    sound, broken = tmp_path / "sound.json", tmp_path / "broken.json"
    sound.write_text(json.dumps({"cases": cases["cases"][:6], "identities": cases["identities"]}))
    cases["cases"][2]["probs"][0] += 1e-3
    broken.write_text(json.dumps({"cases": cases["cases"][:6], "identities": cases["identities"]}))
    assert validate.main(["filters"], quick=True, json=tmp_path / "rows.json", cases=sound) == 0
    assert validate.main(["filters"], quick=True, json=tmp_path / "rows.json", cases=broken) == 1
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert {name for name, row in rows.items() if not row["pass"]} == {
        "filters/law", "filters/engine_regular", "filters/engine_dflash", "filters/engine_dflash2",
    }  # fmt: skip
    assert rows["filters/law"]["value"] == 5 and "order k5 p.9" in rows["filters/law"]["detail"]
    assert "filters/control_dropped_tie" in capsys.readouterr().out


def test_cases_need_no_identities_and_no_dependence_on_the_order(tmp_path):
    given = tmp_path / "given.json"
    cases = [case for case in json.loads(CASES.read_text())["cases"] if not case["top_k"]]
    given.write_text(json.dumps({"cases": cases}))
    assert validate.main(["filters"], quick=True, cases=given) == 0


@pytest.mark.parametrize(("text", "words"), [("nonsense", "is not JSON"), ("{}", 'holds no list "cases"')])
def test_files_that_hold_no_cases(tmp_path, text, words):
    file = tmp_path / "given.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=words):
        validate.main(["filters"], quick=True, cases=file)


def test_a_row_that_raises_is_red_and_the_table_goes_on(context, monkeypatch):
    def fail(context):
        raise OSError("no such engine")

    monkeypatch.setattr("experiments.validate.verifier.rows", fail)
    monkeypatch.setattr("experiments.validate.centering.rows", lambda context: [])
    (row,) = validate.run(["verifier", "centering"], context)
    assert row.name == "verifier/error" and not row.passed and "no such engine" in row.detail


def test_the_probe_sees_what_the_engine_records(context):
    for arm in context.engines.arms:
        sample = context.sample(arm, SETTINGS[0])
        for completion, watched in zip(sample.completions, sample.watched, strict=True):
            assert alignment.matching(completion, watched) == len(completion)
            assert watched.kinds[: len(completion)] == completion.commit.tolist()


def test_alignment_notices_each_kind_of_misplacement(context):
    sample = context.sample("dflash2", SETTINGS[4])
    completion, watched = sample.completions[0], sample.watched[0]
    rows = completion.support
    assert rows is not None
    swapped = type(rows).concatenate([rows[1:2], rows[:1], rows[2:]])
    assert alignment.matching(replace(completion, support=swapped), watched) == len(completion) - 2
    commit = completion.commit.copy()
    commit[3] += 1
    assert alignment.matching(replace(completion, commit=commit), watched) == len(completion) - 1
    tokens = completion.response_ids.copy()
    tokens[5] = (tokens[5] + 1) % 512
    assert alignment.matching(replace(completion, response_ids=tokens), watched) == len(completion) - 1


def test_a_comparison_notices_other_supports_and_other_values(context):
    sample = context.sample("regular", SETTINGS[6])
    support, tokens, laws, _ = next(each(sample))
    clean = Comparison()
    clean.add(support, tokens, laws)
    assert clean.l1 < 1e-6 and clean.support == 0 and clean.sampled < 1e-5
    more = laws.copy()
    more[2, np.flatnonzero(laws[2] == 0)[0]] = 1e-4
    seen = Comparison()
    seen.add(support, tokens, more)
    assert seen.support == 1 and seen.l1 == pytest.approx(1e-4, rel=1e-2)
    fewer = laws.copy()
    fewer[2, support.token_ids[support.offsets[2]]] = 0
    seen = Comparison()
    seen.add(support, tokens, fewer)
    assert seen.support == 1


def test_truncated_rows_are_all_refused(context):
    caught, tried = verifier.truncation(context.sample("dflash2", SETTINGS[-1]), 512)
    assert caught == tried == 8


def test_the_oracle_reports_rows_near_a_cutoff():
    logits = np.log(np.array([[0.5, 0.45, 0.05], [0.6, 0.3, 0.1]], np.float32))
    _, margins = reference.recompute(logits, SETTINGS[10])
    assert margins[0] < 1e-6 < margins[1]


def test_chi_square_tells_laws_apart():
    rng = np.random.default_rng(0)
    same, again, other = (
        np.stack([rng.choice(4, 5000, p=p), rng.choice(4, 5000)], 1)
        for p in ([0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [0.4, 0.3, 0.1, 0.2])
    )
    assert law.judge("x", same, again, 1e-4).passed
    assert not law.judge("x", same, other, 1e-9).passed


def test_chi_square_sees_dependence_between_places():
    rng = np.random.default_rng(1)
    first = rng.integers(0, 4, 5000)
    independent = np.stack([first, rng.integers(0, 4, 5000)], 1)
    tied = np.stack([first, np.where(rng.random(5000) < 0.2, first, rng.integers(0, 4, 5000))], 1)
    assert not law.judge("x", tied, independent, 1e-9).passed


def test_every_mutation_names_a_row_and_fits_the_code():
    mutations = mutate.load()
    assert len(mutations) >= 20 and len({mutation.name for mutation in mutations}) == len(mutations)
    stale = [m.name for m in mutations if (mutate.ROOT / m.file).read_text().count(m.old) != 1 or m.old == m.new]
    assert not stale, "mend experiments/validate/mutations.yaml"
    assert {mutation.row for mutation in mutations} <= set(validate.ROWS)


def test_a_mutation_is_caught_and_a_harmless_change_is_not(tmp_path):
    tree = tmp_path / "tree"
    mutate.copy_tree(tree)
    (sign,) = [mutation for mutation in mutate.load() if mutation.name == "correction of the wrong sign"]
    before = (tree / sign.file).read_text()
    caught = mutate.attempt(tree, sign, "embedded")
    assert caught.passed and "centering/none_complete" in caught.detail
    assert (tree / sign.file).read_text() == before
    harmless = replace(sign, old='"""The score-centered policy gradient:', new='"""The policy gradient:')
    assert not mutate.attempt(tree, harmless, "embedded").passed
    assert not mutate.attempt(tree, replace(sign, old="not there"), "embedded").passed


def test_the_full_table_writes_its_page(tmp_path, monkeypatch):
    from experiments.evidence import at_most

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(validate, "ROWS", ("only",))
    module = SimpleNamespace(rows=lambda context: [at_most("only/x", 1.0, 2.0)])
    monkeypatch.setattr(validate.importlib, "import_module", lambda name: module)
    assert validate.main([], quick=True) == 0 and not validate.PAGE.exists()
    assert validate.main([]) == 0
    assert "| only/x | 1 | <= 2 | pass |" in validate.PAGE.read_text()
