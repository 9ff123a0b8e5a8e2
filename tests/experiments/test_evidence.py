import json

from rich.console import Console

from experiments.evidence import (
    all_of,
    at_least,
    at_most,
    document,
    must_fail,
    print_rows,
    report,
    write_json,
    write_page,
)

NAN = float("nan")


def test_gates_pass_and_fail_as_they_say():
    assert at_most("a", 1.0, 1.0).passed and not at_most("a", 1.1, 1.0).passed
    assert at_least("a", 1.0, 1.0).passed and not at_least("a", 0.9, 1.0).passed
    assert all_of("a", 3, 3).passed and not all_of("a", 2, 3).passed
    assert not all_of("a", 0, 0).passed, "no case at all proves nothing"
    assert report("a", 5.0).gate is None


def test_nan_never_passes_a_gate():
    assert not at_most("a", NAN, 1.0).passed and not at_least("a", NAN, 1.0).passed


def test_control_passes_only_when_the_broken_thing_is_red():
    assert must_fail(at_most("x/control", 2.0, 1.0), "shifted").passed
    assert not must_fail(at_most("x/control", 0.5, 1.0), "shifted").passed
    assert not must_fail(report("x/control", 0.5), "shifted").passed, "a row without a gate shows nothing"
    assert not must_fail(at_most("x/control", NAN, 1.0), "shifted").passed, "nor does one that measured nothing"


def test_json_form(tmp_path):
    rows = [at_most("a", 0.5, 1.0, "s", "d"), report("n", NAN), all_of("c", 2, 2)]
    write_json(tmp_path / "sub" / "rows.json", "python -m experiments validate", rows)
    read = json.loads((tmp_path / "sub" / "rows.json").read_text(), parse_constant=lambda name: 1 / 0)
    assert set(read) == {"command", "versions", "hardware", "rows"}
    assert read["rows"][0] == {"name": "a", "value": 0.5, "unit": "s", "gate": "<= 1", "pass": True, "detail": "d"}
    assert read["rows"][1]["value"] is None and "nan" in read["rows"][1]["detail"]
    assert {"python", "torch", "numpy"} <= set(read["versions"]) and {"cpu", "cores"} <= set(read["hardware"])


def test_table_and_page_name_the_failure(tmp_path):
    rows = [at_most("good", 0.5, 1.0), at_most("bad|row", 2.0, 1.0, detail="outlier 7.5")]
    console = Console(record=True, width=100)
    print_rows(rows, console=console)
    assert "failed: bad|row" in console.export_text()
    write_page(tmp_path / "page.md", "Title", "About.", document("cmd", rows))
    page = (tmp_path / "page.md").read_text()
    assert "**FAIL**" in page and "bad\\|row" in page and "outlier 7.5" in page and "`cmd`" in page
